"""The 4-bit round trip against what bitsandbytes computed on a CUDA device, and against the library on this machine.

``bnb_cuda_nf4.safetensors`` holds results of bitsandbytes 0.50.2 on an H200 with torch 2.11 for one 256 x 512 weight a type,
with an all-zero block, a sweep from -1 to 1, tiny values, an outlier of 60000 and a constant row. ``bnb_cuda_shapes.safetensors``
holds its results for one 33 x 300 weight a type, whose last block is partial, in block sizes from 64 to 4096
(benchmarks/gpu/equivalence.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from safetensors.torch import load_file

from lora_merge.merging import kernels, quantization
from lora_merge.merging.cuda_reciprocal import cuda_reciprocal
from lora_merge.merging.dtypes import BY_TORCH_NAME, round_through
from lora_merge.merging.errors import MergeError
from lora_merge.merging.quantization import (
    QuantRecipe,
    block_scales,
    code_table,
    dequantize_absmax,
    dynamic_map,
    quantize_absmax,
    round_trip,
)

RECORDED = load_file(Path(__file__).with_name("bnb_cuda_nf4.safetensors"))
SHAPES = load_file(Path(__file__).with_name("bnb_cuda_shapes.safetensors"))
TORCH_NAME = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def our_round_trip(weight: torch.Tensor, recipe: QuantRecipe) -> torch.Tensor:
    """``weight`` through our kernels, back in its own type."""
    values = weight.float().numpy().reshape(-1).copy()
    round_trip(values, block_scales(block_maxima(values, recipe), recipe), slice(None), recipe)
    round_through(values, BY_TORCH_NAME[recipe.quant_dtype])
    return torch.from_numpy(values).reshape(weight.shape).to(weight.dtype)


def block_maxima(values: np.ndarray, recipe: QuantRecipe) -> np.ndarray:
    absmax = np.empty(-(-values.size // recipe.block_size), np.float32)
    assert kernels.block_absmax(values.view(np.uint32), recipe.block_size, absmax.view(np.uint32))
    return absmax


def cases_of(recorded: dict[str, torch.Tensor]) -> list[str]:
    return sorted(name.removesuffix(".dequant") for name in recorded if name.endswith(".dequant"))


def recorded_cases(end: str = "") -> list[object]:
    """(the recorded tensors, the name of a case among them) of both files."""
    found = (("256x512", RECORDED), ("33x300", SHAPES))
    return [
        pytest.param(recorded, case, id=f"{shape}-{case}")
        for shape, recorded in found
        for case in cases_of(recorded)
        if case.endswith(end)
    ]


def recipe_of_case(case: str) -> QuantRecipe:
    dtype, quant_type, block, mode = case.split(".")
    return QuantRecipe(quant_type, mode == "dq", int(block[1:]), TORCH_NAME[dtype])


@pytest.mark.parametrize(("recorded", "case"), recorded_cases())
def test_round_trip_is_bit_equal_to_cuda(recorded, case):
    """NF4 and FP4, single and double quantization, block sizes 64 to 4096, from bfloat16, float16 and float32: every element."""
    weight = recorded[f"{case.split('.')[0]}.weight"]
    assert torch.equal(our_round_trip(weight, recipe_of_case(case)), recorded[f"{case}.dequant"])


def test_recorded_shapes_hold_every_block_size_and_recipe():
    """The cases above are those that were recorded, so a file that lost some must not go unnoticed."""
    recipes = [recipe_of_case(case) for case in cases_of(SHAPES)]
    wanted = {
        ("bfloat16", kind, double, 64 << power) for kind in ("nf4", "fp4") for double in (False, True) for power in range(7)
    }
    wanted |= {
        (dtype, kind, double, block)
        for dtype in ("float16", "float32")
        for kind in ("nf4", "fp4")
        for double in (False, True)
        for block in (64, 512)
    }
    assert {(recipe.quant_dtype, recipe.quant_type, recipe.double_quant, recipe.block_size) for recipe in recipes} == wanted
    assert len(recipes) == 44
    assert all(SHAPES["bf16.weight"].numel() % recipe.block_size for recipe in recipes)


def test_the_approximate_reciprocal_is_what_fp4_needs():
    """With the exact reciprocal, 28 of the recorded FP4 elements would take another level: the ones that sit on a threshold."""
    case = "bf16.fp4.b64.dq"
    values = RECORDED["bf16.weight"].float().numpy().reshape(-1).copy()
    absmax = np.abs(values.reshape(-1, 64)).max(1)
    scales = block_scales(absmax, recipe_of_case(case))
    with np.errstate(divide="ignore"):
        exact = replace(scales, inverses=np.float32(1) / absmax)
    round_trip(values, exact, slice(None), recipe_of_case(case))
    found = torch.from_numpy(values).reshape(256, 512).to(torch.bfloat16)
    assert (found != RECORDED[f"{case}.dequant"]).sum() == 28


def test_reciprocals_are_exact_or_one_unit_off():
    """Oracle: float64 division. The listed exceptions are exceptions for bfloat16's and float16's mantissas, at any exponent."""
    mantissas = (np.arange(1024, dtype=np.uint32) << 13) | np.uint32(127 << 23)
    values = mantissas.view(np.float32)
    units = cuda_reciprocal(values).view(np.int32) - (1 / values.astype(np.float64)).astype(np.float32).view(np.int32)
    assert {int(unit): int((units == unit).sum()) for unit in (-1, 0, 1)} == {-1: 40, 0: 894, 1: 90}
    assert np.array_equal(cuda_reciprocal(values * np.float32(2**-20)), cuda_reciprocal(values) * np.float32(2**20))
    between = values + np.float32(2**-23)
    assert np.array_equal(cuda_reciprocal(between), (1 / between.astype(np.float64)).astype(np.float32))
    assert np.isinf(cuda_reciprocal(np.zeros(1, np.float32)))


def test_the_table_of_8_bit_codes_is_the_search():
    """Every cell's ends and thresholds, each level and midpoint with its neighbours, and random values. Oracle: the search that
    CUDA's kernel performs, step by step."""
    near, far, bounds = quantization._dynamic_cells()
    levels = dynamic_map()
    middles = (levels[1:] + levels[:-1]) * np.float32(0.5)
    marks = np.concatenate([levels, middles]).view(np.uint32)
    cells = np.arange(65536, dtype=np.uint32) << 16
    thresholds = bounds[near != far]
    random = np.random.default_rng(0).uniform(-1.01, 1.01, 300_000).astype(np.float32)
    small = random[:100_000] * np.float32(10) ** -np.random.default_rng(1).integers(0, 8, 100_000).astype(np.float32)
    patterns = np.concatenate([
        cells, cells | 0xFFFF, cells | 0x8000, thresholds, thresholds - 1, thresholds + 1, marks, marks - 1, marks + 1,
        random.view(np.uint32), small.view(np.uint32),
    ])  # fmt: skip
    values = patterns.view(np.float32)
    expected = np.array([kernels.dynamic_code(value, levels) for value in values], np.uint8)
    found = np.where(patterns >= bounds[patterns >> 16], far[patterns >> 16], near[patterns >> 16])
    finite = (patterns & 0x7FFF0000) != 0x7F800000
    assert np.array_equal(found[finite], expected[finite])
    # A block of a single value is itself the largest: 1 or -1 after scaling, NaN where it is zero.
    nested = np.empty(3, np.float32)
    found = kernels.quantize_dynamic_8bit(np.float32([5, -3, 0]), 1, levels, near, far, bounds, nested)
    assert found.tolist() == [kernels.dynamic_code(np.float32(x), levels) for x in (1, -1, np.nan)]


@pytest.mark.parametrize(("recorded", "case"), recorded_cases(".dq"))
def test_second_quantization_is_cudas(recorded, case):
    """The 8-bit codes and absmax of the absmax, given CUDA's mean; and that mean is ours to two units in the last place."""
    recipe = recipe_of_case(case)
    absmax = block_maxima(recorded[f"{case.split('.')[0]}.weight"].float().numpy().reshape(-1), recipe)
    offset = recorded[f"{case}.offset"].numpy()[0]
    nested = np.empty(-(-absmax.size // 256), np.float32)
    codes = quantize_absmax(absmax - offset, nested)
    assert np.array_equal(codes, recorded[f"{case}.absmax"].numpy())
    assert np.array_equal(nested, recorded[f"{case}.nested_absmax"].numpy())
    assert np.array_equal(dynamic_map(), recorded[f"{case}.nested_code"].numpy())
    ours = np.float32(absmax.mean(dtype=np.float64))
    assert abs(ours - offset) <= 2 * np.spacing(offset)
    expected = dynamic_map()[codes] * np.repeat(nested, 256)[: codes.size] + offset
    assert np.array_equal(dequantize_absmax(codes, nested, offset), expected)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("block_size", [32, 64, 128, 256, 1024])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_single_quantization_against_the_library_here(quant_type, block_size, dtype):
    """Oracle: bitsandbytes on this machine. NF4 bit-equal; FP4 but for elements that sit on a threshold (see above)."""
    torch.manual_seed(block_size)
    weight = (torch.randn(128, 1024) * torch.rand(128, 1)).to(dtype)
    packed, state = quantize_4bit(weight, quant_type=quant_type, blocksize=block_size)
    expected = dequantize_4bit(packed, state)
    found = our_round_trip(weight, QuantRecipe(quant_type, False, block_size, str(dtype).removeprefix("torch.")))
    differ = (found != expected).float().mean().item()
    assert differ <= (0 if quant_type == "nf4" else 0.01)


def test_a_partial_last_block():
    """Oracle: the 16 levels and the definition of a block, written out in float64."""
    weight = torch.linspace(-3, 2, 3 * 50).reshape(3, 50)
    found = our_round_trip(weight, QuantRecipe("nf4", False, 64, "float32")).reshape(-1)
    levels = torch.from_numpy(code_table("nf4").astype(np.float64))
    flat = weight.reshape(-1).double()
    for start in (0, 64, 128):
        block = flat[start : start + 64]
        scaled = block / block.abs().max()
        nearest = levels[(scaled[:, None] - levels).abs().argmin(1)] * block.abs().max()
        assert torch.allclose(found[start : start + 64].double(), nearest, rtol=1e-6, atol=0)


def test_a_second_round_trip_moves_weights():
    """Why a base that is already quantized is never quantized again: about one in a hundred under double quantization."""
    torch.manual_seed(0)
    weight = (torch.randn(512, 512) * 0.02).to(torch.bfloat16)
    recipe = QuantRecipe()
    once = our_round_trip(weight, recipe)
    assert 0 < (our_round_trip(once, recipe) != once).float().mean() < 0.05


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"quant_type": "int4"}, "quant_type"),
        ({"double_quant": "yes"}, "double_quant"),
        ({"block_size": 100}, "block_size"),
        ({"quant_dtype": "float64"}, "quant_dtype"),
        ({"skip_modules": (1,)}, "skip_modules"),
    ],
)
def test_recipes_outside_their_range_are_refused(settings, named):
    with pytest.raises(MergeError, match=named):
        QuantRecipe(**settings)


def test_recipe_json_round_trip():
    recipe = QuantRecipe("fp4", False, 128, "float16", ("lm_head",), None, {"quant_type": "somewhere"})
    assert QuantRecipe.from_json(recipe.to_json()) == recipe
    assert recipe.assumed, "settings without an origin are assumed"
    with pytest.raises(MergeError, match="zeropoint"):
        QuantRecipe.from_json({"zeropoint": 1})


def test_tables_are_bitsandbytes_own():
    from bitsandbytes.functional import create_dynamic_map, get_4bit_type

    assert np.array_equal(dynamic_map(), create_dynamic_map().numpy())
    for quant_type in ("nf4", "fp4"):
        assert np.array_equal(code_table(quant_type), get_4bit_type(quant_type, device="cpu").numpy())


def test_a_recorded_recipe_merges_without_torch(bases, adapters, tmp_path):
    """A record names the quantized modules, so that nothing has to be built to find them: a merge starts in a second."""
    modules = [f"model.layers.{layer}.mlp.{name}_proj" for layer in (0, 1) for name in ("gate", "up", "down")]
    recipe = QuantRecipe(quantized_modules=tuple(modules)).to_json()
    record = {"format": "lora-merge/quantization-recipe", "version": 1, "recipe": recipe}
    (tmp_path / "recipe.json").write_text(json.dumps(record))
    arguments = ["--base", str(bases("llama")), "--adapter", str(adapters("llama")), "--out", str(tmp_path / "out")]
    arguments += ["--from-4bit", "--quant-config", str(tmp_path / "recipe.json")]
    code = "import sys; from lora_merge.merging.cli import main\n"
    code += f"try: main({arguments!r})\nexcept SystemExit as done: assert not done.code\n"
    code += "sys.exit(' '.join(sorted({'torch', 'transformers', 'bitsandbytes'} & set(sys.modules))) or None)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "merge_manifest.json").is_file()
