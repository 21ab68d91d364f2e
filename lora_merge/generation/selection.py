"""Which prompts get a text: the rule, and nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lora_merge.engines.scores import DecisionScore
from lora_merge.generation.errors import GenerationError


@dataclass(frozen=True)
class Selection:
    """The rule of one run.

    A prompt is *kept* when the likeliest token of the whole vocabulary is the write token *and* the skip probability is at most
    ``skip_threshold``. A text is *written* for kept prompts only, so that nothing is written to be dropped; with ``write_all``
    for every prompt whose decision is ``write``, as a process does that filters afterwards.
    """

    skip_threshold: float
    write_all: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.skip_threshold) and 0 <= self.skip_threshold <= 1):
            raise GenerationError(f"skip threshold {self.skip_threshold}: expected a probability from 0 to 1")

    def keeps(self, score: DecisionScore) -> bool:
        """Whether the prompt of ``score`` is kept; a skip probability of exactly the threshold is."""
        return score.decision == "write" and score.skip_probability <= self.skip_threshold

    def writes(self, score: DecisionScore) -> bool:
        """Whether a text is written for it."""
        return score.decision == "write" if self.write_all else self.keeps(score)
