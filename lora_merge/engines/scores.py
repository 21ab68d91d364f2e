"""The decision of one prompt as numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lora_merge.engines.errors import NonFiniteScore
from lora_merge.engines.labels import DecisionLabels

Decision = Literal["skip", "write", "other"]


@dataclass(frozen=True)
class DecisionScore:
    """What a model says at the decision token of one prompt; natural logarithms over the *whole* vocabulary, in float64.

    ``argmax`` is the id of the likeliest token of the whole vocabulary (the lower id on a tie) and ``decision`` its meaning:
    ``skip``, ``write``, or ``other`` when it is neither label. Make one with :meth:`from_log_probabilities`.
    """

    id: str
    log_p_skip: float
    log_p_write: float
    argmax: int
    decision: Decision

    @classmethod
    def from_log_probabilities(
        cls,
        id: str,
        log_p_skip: float,
        log_p_write: float,
        argmax: int,
        labels: DecisionLabels,
    ) -> DecisionScore:
        """A score that is known to be finite.

        Raises :class:`NonFiniteScore` naming the prompt: an overflow (float16 on Gemma 3 is the usual one) must not become a
        number.
        """
        if not (math.isfinite(log_p_skip) and math.isfinite(log_p_write)):
            raise NonFiniteScore(
                f"prompt {id!r}: log P(skip) = {log_p_skip}, log P(write) = {log_p_write}; expected finite numbers. "
                "A weight is NaN or infinite (verify-merge tells which), or the model overflowed (load it in bfloat16 or float32)"
            )
        return cls(
            id,
            float(log_p_skip),
            float(log_p_write),
            int(argmax),
            labels.decision_of(argmax),
        )

    @property
    def skip_probability(self) -> float:
        """P(skip) / (P(skip) + P(write)), in [0, 1]: what the skip threshold acts on.

        Written as a logistic function of the difference, so it neither overflows nor loses digits when both labels are unlikely.
        """
        difference = self.log_p_skip - self.log_p_write
        if difference >= 0:
            return 1.0 / (1.0 + math.exp(-difference))
        odds = math.exp(difference)
        return odds / (1.0 + odds)

    @property
    def label_mass(self) -> float:
        """P(skip) + P(write) over the whole vocabulary, in [0, 1]: near 0 the model does not answer the question at all."""
        return math.exp(self.log_p_skip) + math.exp(self.log_p_write)
