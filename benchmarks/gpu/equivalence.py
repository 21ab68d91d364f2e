"""bitsandbytes on CUDA against our round trip: every element compared, every difference counted and explained.

    python benchmarks/gpu/equivalence.py --base models/gemma-3-270m --json equivalence.json

Weights: all linear layers of a real checkpoint, and adversarial ones. Recipes: NF4 and FP4, single and double quantization. For
each the number of elements whose dequantized value differs, and what is left of it when CUDA's own mean of the block maxima and
CUDA's own reciprocals are put in the place of ours: 0 means that nothing else differs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from reciprocal import cuda_reciprocal
from safetensors import safe_open

from lora_merge.merging import kernels
from lora_merge.merging.dtypes import BY_TORCH_NAME, round_through
from lora_merge.merging.quantization import DOUBLE_QUANT_BLOCK, QuantRecipe, code_table, dequantize_absmax, dynamic_map

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
        codes = kernels.quantize_dynamic_8bit(absmax - offset, DOUBLE_QUANT_BLOCK, dynamic_map(), nested)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    import bitsandbytes

    rows = []
    sources: list[tuple[str, list[torch.Tensor]]] = []
    with safe_open(options.base / "model.safetensors", "pt") as file:
        linear = [file.get_tensor(name) for name in file.keys() if "_proj.weight" in name]  # noqa: SIM118
    sources.append((f"{options.base.name}, bfloat16", linear))
    sources.append((f"{options.base.name}, first layers as float16", [weight.half() for weight in linear[:14]]))
    sources.append((f"{options.base.name}, first layers as float32", [weight.float() for weight in linear[:14]]))
    sources += [(f"adversarial, {dtype}", [adversarial(dtype)]) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    for name, weights in sources:
        for quant_type, double in _RECIPES:
            total: dict[str, int] = {}
            for weight in weights:
                for key, value in compare(weight, quant_type, double).items():
                    total[key] = total.get(key, 0) + value
            rows.append({"weights": name, "quant_type": quant_type, "double_quant": double, **total})
            print(rows[-1], flush=True)
    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "bitsandbytes": bitsandbytes.__version__,
        "reciprocals": [reciprocal_errors(bits) for bits in (7, 10, 23)],
        "round_trip": rows,
    }
    options.json.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
