"""bitsandbytes on CUDA against our round trip: every element compared, every difference counted and explained.

    python benchmarks/gpu/equivalence.py --base models/gemma-3-270m --work equivalence --json equivalence.json \\
        --data bnb_cuda_shapes.safetensors

Weights: all linear layers of a real checkpoint, and adversarial ones. Recipes: NF4 and FP4, single and double quantization. For
each the number of elements whose dequantized value differs, and what is left of it when CUDA's own mean of the block maxima and
CUDA's own reciprocals are put in the place of ours: 0 means that nothing else differs.

Then whole merges of the example's adapter: the files of ``--device cpu`` against those of ``--device cuda``, element by element.
``--data`` writes CUDA's results on small weights of awkward shapes, in every block size, as test data.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from reciprocal import cuda_reciprocal
from safetensors import safe_open
from safetensors.torch import save_file
from store import Results

from lora_merge.merging import kernels
from lora_merge.merging.dtypes import BY_TORCH_NAME, round_through
from lora_merge.merging.quantization import DOUBLE_QUANT_BLOCK, QuantRecipe, code_table, dequantize_absmax, quantize_absmax

ADAPTER = Path(__file__).resolve().parents[2] / "examples" / "grocery" / "adapter"
BLOCK_SIZES = (64, 128, 256, 512, 1024, 2048, 4096)
MERGES = {
    "NF4, double quantization": [],
    "NF4": ["--no-double-quant"],
    "FP4, double quantization": ["--quant-type", "fp4"],
    "FP4": ["--quant-type", "fp4", "--no-double-quant"],
    "NF4, double quantization, to float32": ["--dtype", "float32"],
}
_RECIPES = [(kind, double) for kind in ("nf4", "fp4") for double in (False, True)]


def reciprocal_errors(bits: int) -> dict[str, Any]:
    """By how many units in the last place CUDA's approximate reciprocal is off, for every mantissa of ``bits`` bits."""
    mantissas = torch.arange(1 << bits, dtype=torch.int32) << (23 - bits)
    found = {}
    for exponent in (100, 127, 140):
        values = (mantissas | (exponent << 23)).view(torch.float32)
        exact = (1.0 / values.double()).float()
        approximate = cuda_reciprocal(values.cuda()).cpu()
        off = approximate.view(torch.int32) - exact.view(torch.int32)
        found[exponent] = off
    same = all(torch.equal(found[127], off) for off in found.values())
    off = found[127]
    places = off.nonzero().flatten()
    counts = {str(int(value)): int((off == value).sum()) for value in off.unique()}
    listed = [[int(place), int(off[place])] for place in places] if bits <= 10 else None
    return {"mantissa_bits": bits, "same_at_every_exponent": same, "counts": counts, "off": listed}


def compare(weight: torch.Tensor, quant_type: str, double: bool) -> dict[str, int]:
    """One weight, one recipe: elements, differing ones, and differing ones with CUDA's mean and reciprocals put in."""
    recipe = QuantRecipe(quant_type, double, 64, str(weight.dtype).removeprefix("torch."))
    packed, state = quantize_4bit(weight.cuda().contiguous(), quant_type=quant_type, blocksize=64, compress_statistics=double)
    expected = dequantize_4bit(packed, state).float().cpu().numpy().reshape(-1)
    values = weight.float().numpy().reshape(-1)
    absmax = np.empty(-(-values.size // 64), np.float32)
    assert kernels.block_absmax(values.view(np.uint32), 64, absmax.view(np.uint32))

    from lora_merge.merging.quantization import block_scales, round_trip

    ours = values.copy()
    round_trip(ours, block_scales(absmax, recipe), slice(None), recipe)
    round_through(ours, BY_TORCH_NAME[recipe.quant_dtype])

    # The same once more with CUDA's own mean and reciprocals, in plain numpy.
    scales = absmax
    if double:
        offset = np.float32(state.offset.item())
        nested = np.empty(-(-absmax.size // DOUBLE_QUANT_BLOCK), np.float32)
        codes = quantize_absmax(absmax - offset, nested)
        scales = dequantize_absmax(codes, nested, offset)
    inverse = cuda_reciprocal(torch.from_numpy(absmax).cuda()).cpu().numpy()
    with np.errstate(invalid="ignore"):
        scaled = values * np.repeat(inverse, 64)[: values.size]
    table = code_table(quant_type)
    with_cudas = table[_codes(scaled, quant_type)] * np.repeat(scales, 64)[: values.size]
    round_through(with_cudas, BY_TORCH_NAME[recipe.quant_dtype])
    return {
        "elements": values.size,
        "differ": int((ours != expected).sum()),
        "differ_with_cudas_mean_and_reciprocals": int((with_cudas != expected).sum()),
    }


def _codes(scaled: np.ndarray, quant_type: str) -> np.ndarray:
    from lora_merge.merging.quantization import _FP4_MAGNITUDE_BOUNDS, _NF4_BOUNDS

    if quant_type == "nf4":
        codes = np.zeros(scaled.size, np.int8)
        for bound in np.array(_NF4_BOUNDS, np.float32):
            codes += scaled > bound
        return codes
    level = np.zeros(scaled.size, np.int8)
    for bound in np.array(_FP4_MAGNITUDE_BOUNDS, np.float32):
        level += np.abs(scaled) > bound
    return np.argsort(code_table("fp4")[:8])[level] + 8 * (scaled < 0)


def adversarial(dtype: torch.dtype) -> torch.Tensor:
    """Zero blocks, a sweep, tiny values, an outlier, constant rows, values on thresholds: (64, 4096)."""
    torch.manual_seed(0)
    weight = torch.randn(64, 4096) * 0.02
    weight[0, :64] = 0
    weight[1] = torch.linspace(-1, 1, 4096)
    weight[2] *= 1e-6
    weight[3, 7] = 60000
    weight[4] = 0.5
    weight[5] = torch.randint(-255, 256, (4096,)) / 256
    return weight.to(dtype)


def compare_all(weights: list[torch.Tensor], quant_type: str, double: bool) -> dict[str, int]:
    """:func:`compare` of every weight, added up. numpy leaves the interpreter to the other threads."""
    total: dict[str, int] = {}
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda weight: compare(weight, quant_type, double), weights):
            for key, value in found.items():
                total[key] = total.get(key, 0) + value
    return total


def compare_merges(base: Path, work: Path, settings: list[str]) -> dict[str, Any]:
    """The same merge on the processor and on the card: elements that differ, and by how much at most."""
    seconds = {}
    for device in ("cpu", "cuda"):
        command = [sys.executable, "-m", "lora_merge.merging", "--base", str(base), "--adapter", str(ADAPTER), "--from-4bit"]
        command += [*settings, "--out", str(work / device), "--device", device, "--overwrite", "--quiet"]
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        seconds[device] = time.perf_counter() - start
        if done.returncode != 0:
            raise RuntimeError(f"--device {device}: {done.stderr.strip().splitlines()[-1]}")
    elements, differ, tensors, largest = 0, 0, 0, 0.0
    for file in sorted((work / "cpu").glob("*.safetensors")):
        with safe_open(file, "pt") as ours, safe_open(work / "cuda" / file.name, "pt") as theirs:
            assert set(ours.keys()) == set(theirs.keys())
            for name in ours.keys():  # noqa: SIM118
                first, second = ours.get_tensor(name), theirs.get_tensor(name)
                assert first.dtype == second.dtype
                off = first != second
                elements += first.numel()
                differ += int(off.sum())
                tensors += bool(off.any())
                if off.any():
                    first, second = first[off].double(), second[off].double()
                    largest = max(largest, float(((first - second).abs() / first.abs().clamp_min(1e-30)).max()))
    return {
        "elements": elements,
        "differ": differ,
        "tensors_that_differ": tensors,
        "largest_relative_difference": largest,
        "seconds": seconds,
    }


def test_data(target: Path) -> dict[str, Any]:
    """CUDA's results on weights whose last block is partial, in every block size, named as in tests/merging; and how many of
    their elements our round trip makes differently."""
    import bitsandbytes

    torch.manual_seed(1)
    # 9,900 elements a weight: no block size divides them. On a CPU bitsandbytes gets such widths wrong.
    weight = torch.randn(33, 300) * torch.rand(33, 1) * 0.1
    weight[3, :130] = 0
    weight[5] = torch.randint(-255, 256, (300,)) / 256
    tensors, differing = {}, {}
    for short, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        tensors[f"{short}.weight"] = weight.to(dtype).contiguous()
        for block in BLOCK_SIZES if short == "bf16" else (64, 512):
            for quant_type, double in _RECIPES:
                case = f"{short}.{quant_type}.b{block}.{'dq' if double else 'sq'}"
                packed, state = quantize_4bit(
                    tensors[f"{short}.weight"].cuda(), quant_type=quant_type, blocksize=block, compress_statistics=double
                )
                found = dequantize_4bit(packed, state).cpu()
                tensors[f"{case}.dequant"] = found
                tensors[f"{case}.absmax"] = state.absmax.cpu()
                if double:
                    tensors[f"{case}.offset"] = state.offset.reshape(1).cpu()
                    tensors[f"{case}.nested_absmax"] = state.state2.absmax.cpu()
                    tensors[f"{case}.nested_code"] = state.state2.code.cpu()
                differing[case] = int((our_round_trip(tensors[f"{short}.weight"], quant_type, double, block) != found).sum())
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "bitsandbytes": bitsandbytes.__version__}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target, metadata={"format": "pt", **about})
    return {"elements_each": weight.numel(), "differ": differing}


def our_round_trip(weight: torch.Tensor, quant_type: str, double: bool, block: int) -> torch.Tensor:
    from lora_merge.merging.quantization import block_scales, round_trip

    recipe = QuantRecipe(quant_type, double, block, str(weight.dtype).removeprefix("torch."))
    values = weight.float().numpy().reshape(-1).copy()
    absmax = np.empty(-(-values.size // block), np.float32)
    assert kernels.block_absmax(values.view(np.uint32), block, absmax.view(np.uint32))
    round_trip(values, block_scales(absmax, recipe), slice(None), recipe)
    round_through(values, BY_TORCH_NAME[recipe.quant_dtype])
    return torch.from_numpy(values).reshape(weight.shape).to(weight.dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--layers", type=int, help="only so many linear layers")
    options = parser.parse_args()

    results = Results(options.json, {"layers": options.layers})
    with safe_open(options.base / "model.safetensors", "pt") as file:
        names = [name for name in file.keys() if "_proj.weight" in name]  # noqa: SIM118
        linear = [file.get_tensor(name) for name in names[: options.layers]]
    sources = {"gemma-3-270m, bfloat16": linear}
    sources["gemma-3-270m, first layers as float16"] = [weight.half() for weight in linear[:14]]
    sources["gemma-3-270m, first layers as float32"] = [weight.float() for weight in linear[:14]]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        sources[f"adversarial, {str(dtype).removeprefix('torch.')}"] = [adversarial(dtype)]
    for bits in (7, 10, 23):
        results.measure(f"reciprocals of {bits} bits", lambda bits=bits: reciprocal_errors(bits))
    if options.data is not None:
        results.measure("test data", lambda: test_data(options.data))
    for name, settings in MERGES.items():
        results.measure(f"merge: {name}", lambda settings=settings: compare_merges(options.base, options.work, settings))
    for source, weights in sources.items():
        for quant_type, double in _RECIPES:
            name = f"{source} | {quant_type.upper()}{', double quantization' if double else ''}"
            results.measure(name, lambda weights=weights, kind=quant_type, double=double: compare_all(weights, kind, double))
    results.finish()


if __name__ == "__main__":
    main()
