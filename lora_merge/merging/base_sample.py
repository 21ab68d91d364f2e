"""A sample of the 4-bit weights that an adapter was trained on, to know them again.

A base's name says little of its content: a later fine-tune lies under the same path, or the same model under another. So the
record beside an adapter holds a few quantization blocks of every 4-bit layer, evenly spread, as 32 bits of a digest of the levels
that stand for their weights. From a 16-bit base the same blocks are quantized again. Of the same base they agree but for a few in
a thousand, where devices divide differently. A change of a layer by half a percent of its norm changes about half of its blocks,
one of three percent nearly all.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lora_merge.merging.architecture import Architecture
from lora_merge.merging.checkpoint import Checkpoint
from lora_merge.merging.cuda_reciprocal import cuda_reciprocal
from lora_merge.merging.dtypes import BY_TORCH_NAME, FLOATING, round_through, widen
from lora_merge.merging.errors import MergeError
from lora_merge.merging.names import NameMap
from lora_merge.merging.quantization import BlockScales, QuantRecipe, code_table, round_trip
from lora_merge.merging.safetensors_file import TensorInfo, read_tensor

BLOCKS = 8
"""Blocks of a layer at most."""
_DIGITS = 8
"""Hexadecimal digits of one block's digest."""

BaseSample = Mapping[str, str]
"""By the name of a 4-bit layer in the bare model, the digests of its blocks one after the other."""


@dataclass(frozen=True)
class Resemblance:
    """How a base compares with the sample.

    Attributes:
        layers: how many layers could be compared; at least one.
        others: those that hold other weights, in the order of the sample.
    """

    layers: int
    others: tuple[str, ...]

    @property
    def is_same(self) -> bool:
        """Whether it is the base that was sampled, as far as a sample can tell."""
        return not self.others

    def __str__(self) -> str:
        if self.is_same:
            return f"the same 4-bit weights, by a sample of {self.layers} layers"
        return f"other 4-bit weights in {len(self.others)} of {self.layers} layers by a sample, {self.others[0]} first"


def sample_live(layers: Mapping[str, Any]) -> BaseSample | None:
    """Sample bitsandbytes' live ``Linear4bit`` layers, by name; None where one of them has no readable codes (any more)."""
    found = {}
    for name, layer in layers.items():
        digests = _live_digests(layer)
        if digests is None:
            return None
        found[name] = digests
    return found


def parse_sample(value: Any, where: str) -> BaseSample:
    """A sample as a record holds it; :class:`MergeError` for anything else."""
    if not isinstance(value, dict) or not all(_is_layer(digests) for digests in value.values()):
        raise MergeError(f"{where}: base_sample is no object of {_DIGITS} to {BLOCKS * _DIGITS} hexadecimal digits a layer")
    return value


def compare(sample: BaseSample, base: Checkpoint, recipe: QuantRecipe) -> Resemblance | None:
    """Hold a 16-bit or float32 base against the sample that was taken under ``recipe``.

    Returns:
        None where no layer can be compared: the base is stored quantized, or lays its layers out otherwise than they were live.
    """
    counts = differing_blocks(sample, base, recipe)
    others = tuple(module for module, (differ, blocks) in counts.items() if 2 * differ >= blocks)
    return Resemblance(len(counts), others) if counts else None


def differing_blocks(sample: BaseSample, base: Checkpoint, recipe: QuantRecipe) -> dict[str, tuple[int, int]]:
    """By the name of each layer that can be compared, how many of its blocks differ, and how many there are."""
    if base.config.get("quantization_config") or Architecture(base).has_transposed_layers:
        return {}
    names, found = NameMap.of(base.tensors), {}
    for module, digests in sample.items():
        name = names.find(f"{module}.weight")
        if name is not None and base.tensors[name].dtype.name in FLOATING:
            ours, theirs = _split(_stored_digests(base.tensors[name], recipe)), _split(digests)
            alike = sum(one == other for one, other in zip(ours, theirs, strict=False))
            blocks = max(len(ours), len(theirs))
            found[module] = (blocks - alike, blocks)
    return found


def _split(digests: str) -> list[str]:
    return [digests[start : start + _DIGITS] for start in range(0, len(digests), _DIGITS)]


def _is_layer(digests: Any) -> bool:
    if not isinstance(digests, str) or not 0 < len(digests) <= BLOCKS * _DIGITS or len(digests) % _DIGITS:
        return False
    return not set(digests) - set("0123456789abcdef")


def _places(elements: int, block_size: int) -> list[int]:
    """The numbers of the sampled blocks among the whole ones of a layer."""
    blocks = elements // block_size
    count = min(BLOCKS, blocks)
    return [(2 * place + 1) * blocks // (2 * count) for place in range(count)]


def _digests(levels: NDArray[np.float32]) -> str:
    """Of blocks (n, block_size) of the levels that codes stand for, -1 to 1; FP4 has two codes for 0."""
    unsigned_zero = levels + np.float32(0)
    return "".join(hashlib.sha256(block.tobytes()).hexdigest()[:_DIGITS] for block in unsigned_zero)


def _live_digests(layer: Any) -> str | None:
    import torch

    weight, state = layer.weight, getattr(layer.weight, "quant_state", None)
    if state is None or getattr(state, "packing_format_for_cpu", False):
        return None
    if weight.device.type == "meta" or hasattr(weight, "device_mesh"):  # offloaded, or shared out among processes
        return None
    elements = math.prod(state.shape)
    packed = weight.data.reshape(-1).view(torch.uint8)
    places = _places(elements, state.blocksize)
    if 2 * packed.numel() != elements or not places:
        return None
    half = state.blocksize // 2
    codes = np.stack([packed[place * half : (place + 1) * half].cpu().numpy() for place in places])
    both = np.stack([codes >> 4, codes & 15], axis=-1).reshape(len(places), -1)  # the first of two is in the upper half
    return _digests(code_table(state.quant_type)[both])


def _stored_digests(tensor: TensorInfo, recipe: QuantRecipe) -> str:
    size, places = recipe.block_size, _places(math.prod(tensor.shape), recipe.block_size)
    values = np.stack([_read(tensor, place * size, size) for place in places]) if places else np.empty((0, size), np.float32)
    round_through(values, BY_TORCH_NAME[recipe.quant_dtype])
    inverses = cuda_reciprocal(np.abs(values).max(axis=1))
    round_trip(values.reshape(-1), BlockScales(inverses, np.ones_like(inverses)), slice(0, len(places)), recipe)
    return _digests(values)


def _read(tensor: TensorInfo, start: int, elements: int) -> NDArray[np.float32]:
    """``elements`` of the flattened tensor from ``start`` on."""
    size = tensor.dtype.itemsize
    part = replace(tensor, shape=(elements,), start=tensor.start + start * size, nbytes=elements * size)
    return widen(read_tensor(part), tensor.dtype)
