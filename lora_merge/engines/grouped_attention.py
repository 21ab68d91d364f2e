"""Attention of one new token a row behind a mask, without copying keys and values.

Rows of unequal length need a mask, and with one Transformers copies the keys and values that query heads share once for every
query head (``use_gqa_in_sdpa``, transformers/integrations/sdpa_attention.py), and torch's plain kernel copies those to float32.
Writing a large batch then waits for a card's memory. Here the query heads that share keys and values are the rows of one matrix,
which is multiplied with the cache as it lies there. Everything but such steps is left to Transformers' ``sdpa``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def grouped_steps() -> Iterator[None]:
    """Meanwhile Transformers' ``sdpa`` takes such steps through :func:`masked_step`. One that somebody replaced stays as it is.

    The model's configuration keeps its name: some models choose their mask, or their arithmetic, by it.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions

    if functions["sdpa"] is not sdpa_attention_forward:
        yield
        return
    functions["sdpa"] = _attention
    try:
        yield
    finally:
        del functions["sdpa"]  # which uncovers what is registered for all


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """Transformers' interface: query ``(rows, heads, tokens, size)``; returns ``(rows, tokens, heads, size)`` and no weights."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if attention_mask is None or query.shape[2] != 1 or _does_more(settings):
        usual: Callable[..., tuple[Tensor, None]] = sdpa_attention_forward
        return usual(module, query, key, value, attention_mask, **settings)
    scaling = settings.get("scaling")
    attended = masked_step(query, key, value, attention_mask, query.shape[-1] ** -0.5 if scaling is None else scaling)
    return attended.transpose(1, 2).contiguous(), None


def _does_more(settings: dict[str, Any]) -> bool:
    """Whether ``sdpa`` would do anything with these beside scaled attention behind the mask."""
    paged = type(settings.get("cache")).__name__ == "PagedAttentionCache"
    return bool(settings.get("dropout")) or settings.get("position_bias") is not None or paged


def masked_step(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """``softmax(scaling * query @ key.T, where mask) @ value``, scores and softmax in float32.

    Args:
        query: ``(rows, heads, 1, size)``; head ``h`` belongs to key-value head ``h // (heads / kv_heads)``.
        key, value: ``(rows, kv_heads, tokens, size)``, of the query's dtype.
        mask: ``(rows, 1, 1, tokens)`` or a head each; of bool, True where to look, or what to add to the scores.

    Returns:
        ``(rows, heads, 1, size)`` in the query's dtype.
    """
    rows, heads, _, size = query.shape
    kv_heads, tokens = key.shape[1:3]
    grouped = query.reshape(rows * kv_heads, heads // kv_heads, size)
    scores = _product(grouped, key.reshape(rows * kv_heads, tokens, size).transpose(1, 2)).view(rows, heads, 1, tokens)
    scores = scores * scaling
    scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(dim=-1).view(rows * kv_heads, heads // kv_heads, tokens)
    values = value.reshape(rows * kv_heads, tokens, value.shape[-1])
    return _product(weights, values).view(rows, heads, 1, value.shape[-1]).to(query.dtype)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right`` for each of a batch, summed and returned in float32.

    A card multiplies 16-bit numbers exactly and sums them in float32; ``left`` is rounded to them there, as flash attention
    rounds its weights. Elsewhere both become float32 before.
    """
    if right.is_cuda and right.dtype in (torch.bfloat16, torch.float16):
        return torch.bmm(left.to(right.dtype), right, out_dtype=torch.float32)
    return torch.bmm(left.float(), right.float())
