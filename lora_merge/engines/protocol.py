"""What every engine offers, and the limits and results of writing.

An engine takes :class:`~lora_merge.engines.prompts.Prompt` objects, that is token ids, never text: the tokenizer ran once, before
any engine, so two engines cannot disagree about what they were asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from lora_merge.console import Progress, no_progress
from lora_merge.engines.errors import EngineError
from lora_merge.engines.labels import DecisionLabels
from lora_merge.engines.prompts import Prompt
from lora_merge.engines.scores import DecisionScore

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class GenerationLimits:
    """When a text ends. Decoding is always greedy with every other sampling field off, so nothing else can differ.

    ``max_new_tokens``: most tokens written per prompt, the stop token included; at least 1.
    ``stop_token_ids``: ids that end a text *besides* the model's own end-of-sequence ids.
    """

    max_new_tokens: int = 64
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise EngineError(f"max_new_tokens is {self.max_new_tokens}; expected at least 1")


@dataclass(frozen=True)
class Completion:
    """What an engine wrote after one prompt.

    ``token_ids`` are the new tokens only; when ``finish_reason`` is ``"stop"`` the last one is the stop token. ``text`` is their
    decoding in the context of the prompt, special tokens left out.
    """

    id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason


@runtime_checkable
class Engine(Protocol):
    """One model, loaded and ready."""

    name: str

    def score(
        self,
        prompts: Sequence[Prompt],
        labels: DecisionLabels,
        *,
        progress: Progress = no_progress,
    ) -> list[DecisionScore]:
        """The exact log-probabilities of both labels as the next token, one score a prompt, in the order of ``prompts``.

        Raises :class:`~lora_merge.engines.errors.NonFiniteScore` when one is NaN or infinite.
        """
        ...

    def generate(
        self,
        prompts: Sequence[Prompt],
        limits: GenerationLimits,
        *,
        progress: Progress = no_progress,
    ) -> list[Completion]:
        """The greedy continuation of each prompt, in the order of ``prompts``."""
        ...

    def describe(self) -> dict[str, Any]:
        """Kind, library versions, dtype, device and every setting that can move a number; JSON-ready, for certificates."""
        ...

    def close(self) -> None:
        """Free the model's memory; the engine cannot be used afterwards. Closing twice is harmless."""
        ...
