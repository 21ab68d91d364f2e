"""How surely a base is known again by the sample of its 4-bit weights, and another one is not.

    python benchmarks/base_sample.py --base models/gemma-3-270m

Oracle: bitsandbytes, which quantizes the base live. Then every layer is moved by a low-rank update of a share of its norm, as a
merge of an adapter moves it, quantized again, and its blocks are compared with those of before.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from lora_merge.merging.base_sample import compare, differing_blocks, sample_live
from lora_merge.merging.checkpoint import read_checkpoint
from lora_merge.merging.folders import ModelFolder
from lora_merge.merging.recipes import recipe_of

SHARES = (0.002, 0.005, 0.01, 0.03)
RANK = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="a checkpoint in bfloat16")
    base = parser.parse_args().base
    checkpoint = read_checkpoint(ModelFolder(base, str(base)))
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    for quant_type in ("nf4", "fp4"):
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=quant_type, bnb_4bit_use_double_quant=True)
        live = AutoModelForCausalLM.from_pretrained(
            base, quantization_config=config, dtype=torch.bfloat16, device_map={"": "cpu"}
        )
        layers = {name: module for name, module in live.named_modules() if isinstance(module, Linear4bit)}
        sample, recipe = sample_live(layers), recipe_of(live)
        assert sample is not None and recipe is not None
        counts = differing_blocks(sample, checkpoint, recipe)
        differing, total = (sum(numbers) for numbers in zip(*counts.values(), strict=True))
        most = max(differ for differ, _ in counts.values())
        found = f"{differing} of {total:,} blocks differ, at most {most} of one layer"
        print(f"{quant_type}: {compare(sample, checkpoint, recipe)}: {found}")
        for share in SHARES:
            changed = sample_live({name: moved(plain.get_submodule(name).weight, share, quant_type) for name in layers})
            assert changed is not None
            pairs = [
                (old[i : i + 8], new[i : i + 8])
                for old, new in zip(sample.values(), changed.values(), strict=True)
                for i in range(0, len(old), 8)
            ]
            print(f"  moved by {share:.1%} of its norm: {sum(old != new for old, new in pairs) / len(pairs):.1%} of the blocks")


@torch.no_grad()
def moved(weight: torch.Tensor, share: float, quant_type: str) -> Any:
    """A 4-bit layer of ``weight`` (rows, columns) and a random update of rank 8 with ``share`` of its norm."""
    torch.manual_seed(0)
    update = torch.randn(weight.shape[0], RANK) @ torch.randn(RANK, weight.shape[1])
    values = (weight.float() + share * weight.float().norm() / update.norm() * update).to(weight.dtype)
    layer = Linear4bit(weight.shape[1], weight.shape[0], bias=False, quant_type=quant_type, compress_statistics=True)
    layer.weight = Params4bit(values, requires_grad=False, quant_type=quant_type, compress_statistics=True)._quantize("cpu")
    return layer


if __name__ == "__main__":
    main()
