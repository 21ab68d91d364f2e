"""The QLoRA reference without its 4-bit kernels: dequantized base weights in plain matrix products, the adapter unmerged.

In exact arithmetic it is the same function as the reference, and what a merge through the 4-bit base starts from. What lies
between the two is the arithmetic of bitsandbytes' kernels alone, so no merge can be asked to come closer: a noise floor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lora_merge.console import Progress, no_progress
from lora_merge.engines.labels import DecisionLabels
from lora_merge.engines.prompts import Prompt
from lora_merge.engines.scores import DecisionScore
from verification.measurement import DEQUANTIZED, NoiseFloor

if TYPE_CHECKING:
    from torch import Tensor, nn


def score_dequantized(
    model: nn.Module,
    prompts: Sequence[Prompt],
    labels: DecisionLabels,
    batch_size: int,
    progress: Progress = no_progress,
) -> list[DecisionScore] | None:
    """Scores of ``prompts`` with dequantized 4-bit layers, from the live model that the reference is.

    Call it before the model's first forward in evaluation mode, after which bitsandbytes keeps its weights repacked on some
    CPUs. One layer's weights at a time are held dequantized, so it needs little memory and some time for each batch.

    Returns:
        One score a prompt, or None where it cannot be measured: the model has no 4-bit layers, their weights are repacked, or
        its forward does not call them (Unsloth's kernels read the weights themselves).
    """
    from lora_merge.engines.transformers_engine import TransformersEngine

    layers = _quantized_layers(model)
    if not layers or not all(_is_readable(layer) for layer in layers):
        return None
    # A plain product gives the same in any shape but for rounding, so the shared beginning need not be computed anew.
    engine = TransformersEngine.from_model(model, batch_size=batch_size, share_prefix=True)
    with _dequantized(layers) as called:
        scores = engine.score(prompts, labels, progress=progress)
    return scores if called else None


def dequantized_floor(reference: Sequence[DecisionScore], dequantized: Sequence[DecisionScore] | None) -> NoiseFloor | None:
    """The floor between :func:`score_dequantized` and the same prompts among the ``reference``'s scores; None without one."""
    if not dequantized:
        return None
    known = {score.id: score for score in reference}
    return NoiseFloor.between(DEQUANTIZED, [known[score.id] for score in dequantized], dequantized)


def _quantized_layers(model: nn.Module) -> list[Any]:
    """The bitsandbytes layers of the model; none where the library is missing, because then it cannot have any."""
    try:
        from bitsandbytes.nn import Linear4bit
    except ImportError:
        return []
    return [module for module in model.modules() if isinstance(module, Linear4bit)]


def _is_readable(layer: Any) -> bool:
    state = getattr(layer.weight, "quant_state", None)
    return state is not None and not getattr(state, "packing_format_for_cpu", False)


@contextlib.contextmanager
def _dequantized(layers: Sequence[Any]) -> Iterator[set[int]]:
    """Let ``layers`` calculate without their kernels for as long as it lasts; gives the places of those that were called."""
    called: set[int] = set()
    before = [layer.__dict__.get("forward") for layer in layers]
    try:
        for place, layer in enumerate(layers):
            layer.forward = _plain_forward(layer, place, called)
        yield called
    finally:
        for layer, forward in zip(layers, before, strict=True):
            del layer.forward
            if forward is not None:
                layer.forward = forward


def _plain_forward(layer: Any, place: int, called: set[int]) -> Any:
    from bitsandbytes.functional import dequantize_4bit
    from torch.nn.functional import linear

    def forward(values: Tensor) -> Tensor:
        called.add(place)
        # A layer that has not calculated yet takes its type from what it is given; so does bitsandbytes.
        dtype = layer.compute_dtype if layer.compute_type_is_set and layer.compute_dtype is not None else values.dtype
        weight = dequantize_4bit(layer.weight.data.view(-1, 1), layer.weight.quant_state).to(dtype)
        bias = None if layer.bias is None else layer.bias.to(dtype)
        return linear(values.to(dtype), weight, bias).to(values.dtype)

    return forward
