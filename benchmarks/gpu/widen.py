"""The example's Gemma 3 270M at the size of a larger Gemma 3: the same decisions and texts, the larger model's work.

    python benchmarks/gpu/widen.py --model merged --shape 4b --out merged-4b

Engines are compared on real decisions and texts, and no larger model that has learned the task comes with this project. So the
small model is put into the corner of larger weights whose rest is zero, and further layers add nothing to the residual stream:

- A hidden vector keeps its values and gets zeros behind them. Its root mean square falls by the root of the ratio of the widths
  (a power of two here, so that nothing is rounded by it), which the scales of the norms, ``1 + weight``, take back.
- Gemma multiplies embeddings by the root of the width, so they are divided by that ratio; they are the output weights as well,
  for which the last norm makes up.
- Query heads share key-value heads in smaller groups, so a key-value head is repeated; further heads are zero.

What an engine computes is the larger model's, element for element; only zeros may cost a card less electrical power than others.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.merge import SHAPES

HIDDEN_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
BESIDE = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True)
class Shape:
    """Sizes of a Gemma 3 text model, but for the vocabulary."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        names = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
        return cls(*(config[name] for name in names.split()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a Gemma 3 text checkpoint in one safetensors file")
    parser.add_argument("--shape", choices=SHAPES, default="4b")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    widen(options.model, options.out, Shape(*SHAPES[options.shape][:6]))


def widen(model: Path, out: Path, new: Shape) -> None:
    """Write ``model`` at the sizes of ``new`` into the folder ``out``, with its tokenizer; ``ValueError`` where it cannot be."""
    from safetensors.torch import load_file, save_file

    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    tensors = load_file(model / "model.safetensors")
    wide = dict(widened(tensors, Shape.of(config), new))
    out.mkdir(parents=True, exist_ok=True)
    save_file(wide, out / "model.safetensors", metadata={"format": "pt"})
    for name in BESIDE:
        if (model / name).is_file():
            shutil.copy(model / name, out / name)
    # Last, so that a folder with it is whole.
    (out / "config.json").write_text(json.dumps(wide_config(config, new), indent=2) + "\n", encoding="utf-8")


def wide_config(config: dict[str, Any], new: Shape) -> dict[str, Any]:
    """The configuration of the wide model: attention per layer goes on in its pattern, positions and window stay."""
    kinds = config["layer_types"]
    return config | {
        "hidden_size": new.hidden,
        "intermediate_size": new.intermediate,
        "num_hidden_layers": new.layers,
        "num_attention_heads": new.heads,
        "num_key_value_heads": new.kv_heads,
        "layer_types": [kinds[layer % len(kinds)] for layer in range(new.layers)],
        # Added to the mean square, which is smaller by the square of the factor.
        "rms_norm_eps": config["rms_norm_eps"] / factor(Shape.of(config), new) ** 2,
    }


def factor(old: Shape, new: Shape) -> float:
    """By how much the root mean square of a hidden vector falls; ``ValueError`` where ``new`` cannot hold ``old`` exactly."""
    ratio = (new.hidden / old.hidden) ** 0.5
    group, wide_group = old.heads // old.kv_heads, new.heads // new.kv_heads
    larger = all(getattr(new, name) >= getattr(old, name) for name in ("intermediate", "layers", "heads", "kv_heads"))
    if not larger or new.head_dim != old.head_dim or group % wide_group or ratio not in (1, 2, 4, 8):
        raise ValueError(
            f"{new} cannot hold {old}: expected a width of 1, 4, 16 or 64 times the old one, nothing smaller, heads of the "
            "same size, and key-value heads that serve a divisor of the query heads they served"
        )
    return ratio


def widened(tensors: dict[str, Tensor], old: Shape, new: Shape) -> Iterator[tuple[str, Tensor]]:
    """The wide model's tensors by name, from those of the small one; dtypes stay."""
    ratio = factor(old, new)
    embedding = tensors["model.embed_tokens.weight"]
    yield "model.embed_tokens.weight", corner(embedding / ratio, embedding.shape[0], new.hidden)
    last = tensors["model.norm.weight"]  # Divided by the ratio for the width, times the ratio for the output weights.
    yield "model.norm.weight", corner(last, new.hidden)
    repeats = (old.heads // old.kv_heads) // (new.heads // new.kv_heads)
    queries, keys = new.heads * new.head_dim, new.kv_heads * new.head_dim
    for layer in range(new.layers):
        prefix = f"model.layers.{layer}."
        # A further layer has the first one's head norms, and zeros in all that follows; what it adds is zero then.
        own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)} or {
            name.removeprefix("model.layers.0."): tensor if "_norm" in name else torch.zeros_like(tensor)
            for name, tensor in tensors.items()
            if name.startswith("model.layers.0.")
        }
        for name in HIDDEN_NORMS:
            scale = own[f"{name}.weight"].float()
            yield f"{prefix}{name}.weight", corner(((1 + scale) / ratio - 1).to(embedding.dtype), new.hidden)
        for name in ("q_norm", "k_norm"):
            yield f"{prefix}self_attn.{name}.weight", own[f"self_attn.{name}.weight"].clone()
        for name in ("k_proj", "v_proj"):
            per_head = own[f"self_attn.{name}.weight"].view(old.kv_heads, old.head_dim, old.hidden)
            repeated = per_head.repeat_interleave(repeats, dim=0).reshape(-1, old.hidden)
            yield f"{prefix}self_attn.{name}.weight", corner(repeated, keys, new.hidden)
        yield f"{prefix}self_attn.q_proj.weight", corner(own["self_attn.q_proj.weight"], queries, new.hidden)
        yield f"{prefix}self_attn.o_proj.weight", corner(own["self_attn.o_proj.weight"], new.hidden, queries)
        for name in ("gate_proj", "up_proj"):
            yield f"{prefix}mlp.{name}.weight", corner(own[f"mlp.{name}.weight"], new.intermediate, new.hidden)
        yield f"{prefix}mlp.down_proj.weight", corner(own["mlp.down_proj.weight"], new.hidden, new.intermediate)


def corner(tensor: Tensor, *sizes: int) -> Tensor:
    """Zeros of ``sizes`` with ``tensor`` at their beginning."""
    wide = tensor.new_zeros(sizes)
    wide[tuple(slice(size) for size in tensor.shape)] = tensor
    return wide


if __name__ == "__main__":
    main()
