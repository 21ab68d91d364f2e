"""The errors of this room."""

from __future__ import annotations

from lora_merge.errors import UserError


class EngineError(UserError):
    """A prompt, label, tokenizer or engine that cannot be used correctly: says which, what was found and what was expected."""


class NonFiniteScore(EngineError):
    """A log-probability came out NaN or infinite, so there is no number to judge: inconclusive, never a small drift."""
