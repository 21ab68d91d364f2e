"""Which models may have their cache shared, padded and cut, read off their configuration: unknown ones may not.

Without, rows share a batch only with rows of their own length, and keep their place in it to the end: slower, and right for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_LAYERS = {"full_attention", "sliding_attention"}
_WINDOWS = {"sliding_window", "use_sliding_window", "max_window_layers", "sliding_window_pattern", "_sliding_window_pattern"}
"""What says where a sliding window is, as ``LiveModel.sliding_window`` reads it. Others count places too, and are not read."""
_OTHERWISE = {
    "attention_chunk_size",  # attention within chunks, which are counted in places (Llama 4)
    "attention_layers",  # local layers by another name (GPT-Neo)
    "local_attention",  # (ModernBERT)
    "type_vocab_size",  # BERT's relatives, of which RoBERTa's count positions from the padding id
}


def has_plain_cache(config: Any, parameters: Mapping[str, Any]) -> bool:
    """Whether the cache is of keys and values only, one a place, each of them the same whatever else is computed beside it.

    So it is for longrope as well, as long as no text grows to :func:`turning_length`.

    Args:
        config: of the text model.
        parameters: of its forward, by name: it has to take positions, and the cache.
    """
    if "position_ids" not in parameters or not {"cache", "past_key_values"} & set(parameters):
        return False
    layers = getattr(config, "layer_types", None) or ["full_attention"]
    if not set(layers) <= _LAYERS or any("dynamic" in kind for kind, _ in _ropes(config)):
        return False
    said = {name for name, value in vars(config).items() if value is not None}
    return not said & _OTHERWISE and all(name in _WINDOWS for name in said if "window" in name)


def turning_length(config: Any) -> int | None:
    """Tokens from which on a text has all its keys rotated by other frequencies, those before included; None where never.

    longrope (Ding et al., "LongRoPE", 2024; Phi-3 and Phi-4-mini): a text of more than ``original_max_position_embeddings``
    tokens has the long factors throughout. Transformers chooses them for each forward by its last position, and lets go of the
    cache there (``prepare_inputs_for_generation`` of Phi-3).
    """
    for kind, rope in _ropes(config):
        if kind == "longrope":
            original = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
            return None if original is None else int(original) + 1
    return None


def _ropes(config: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Kind and settings of each rotary embedding; models with several kinds of layers may have one for each."""
    for name in ("rope_parameters", "rope_scaling"):
        settings = getattr(config, name, None)
        if isinstance(settings, Mapping):
            for rope in (settings, *(value for value in settings.values() if isinstance(value, Mapping))):
                yield str(rope.get("rope_type") or rope.get("type") or "default"), rope
