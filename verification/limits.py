"""What a merged checkpoint may at most do differently."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from verification.checks import is_number
from verification.errors import VerificationError

DEFAULT_MAX_DELTA = 0.02
DEFAULT_SKIP_THRESHOLD = 0.5


@dataclass(frozen=True)
class Limits:
    """The limits of a verdict; each optional one is judged only when it is given.

    Attributes:
        max_delta: of the *mean* \\|drift\\| of the skip probability, and of the mean loss of label mass; in (0, 1).
        skip_threshold: the skip probability up to which a text is kept, for the flips at the threshold; in [0, 1].
        max_p99_delta: of the 99th percentile of \\|drift\\|.
        max_abs_delta: of the largest \\|drift\\| among the prompts measured. It grows with their number.
        max_bias: of \\|mean drift\\|.
        max_flip_rate: of the share of prompts whose decision changes, at the arg-max and at the threshold.
    """

    max_delta: float = DEFAULT_MAX_DELTA
    skip_threshold: float = DEFAULT_SKIP_THRESHOLD
    max_p99_delta: float | None = None
    max_abs_delta: float | None = None
    max_bias: float | None = None
    max_flip_rate: float | None = None

    def __post_init__(self) -> None:
        for name in LIMIT_NAMES:
            value = getattr(self, name)
            if value is None and name not in ("max_delta", "skip_threshold"):
                continue
            closed = name == "skip_threshold"
            if not is_number(value) or not (0 <= value <= 1 if closed else 0 < value < 1):
                raise VerificationError(
                    f"{name} is {value!r}; expected a number {'from 0 to 1' if closed else 'between 0 and 1'}"
                )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Limits:
        """Limits by name. A name that is no limit raises :class:`VerificationError`: it would silently judge nothing."""
        unknown = sorted(set(values) - set(LIMIT_NAMES))
        if unknown:
            raise VerificationError(f"{unknown[0]!r} is no limit; expected {', '.join(LIMIT_NAMES)}")
        return cls(**values)

    def to_json(self) -> dict[str, float | None]:
        """Every limit by name, null where it was not given."""
        return {name: getattr(self, name) for name in LIMIT_NAMES}


LIMIT_NAMES = tuple(entry.name for entry in fields(Limits))
