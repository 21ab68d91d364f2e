"""One thing that was checked, and how it came out."""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from verification.errors import VerificationError

MERGE_AGAIN = "merge again with --from-4bit"
"""How the detail of a check ends that knows a way out, which the report repeats as its last line."""
IF_TRAINED_IN_4BIT = f"right only for an adapter that was not trained on a 4-bit base; if it was, {MERGE_AGAIN}"
"""How it ends where nobody knows whether that is the way out."""
_FIELDS = ("name", "outcome", "detail", "value", "bound", "limit")


class Outcome(str, enum.Enum):
    """How a check, and with the worst of its checks a verdict, came out."""

    PASSED = "PASSED"
    WARNED = "WARNED"
    FAILED = "FAILED"
    INCONCLUSIVE = "INCONCLUSIVE"

    def __str__(self) -> str:
        return self.value


_SEVERITY = {Outcome.PASSED: 0, Outcome.WARNED: 1, Outcome.FAILED: 2, Outcome.INCONCLUSIVE: 3}


@dataclass(frozen=True)
class Check:
    """The outcome of one check.

    Attributes:
        name: such as ``mean-delta``; stands in the certificate as the name of the test.
        outcome: of this check alone.
        detail: one sentence that says what was found and what was expected.
        value: what was measured, where it is a number.
        bound: the confidence bound of ``value`` that was held against ``limit``.
        limit: what the bound (or the value, where there is no bound) must not exceed, or for a floor must reach.
    """

    name: str
    outcome: Outcome
    detail: str
    value: float | None = None
    bound: float | None = None
    limit: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Every attribute by name."""
        return {**{name: getattr(self, name) for name in _FIELDS}, "outcome": self.outcome.value}

    @classmethod
    def from_json(cls, value: Any) -> Check:
        """The inverse of :meth:`to_json`; raises :class:`VerificationError` for anything else."""
        if not isinstance(value, Mapping) or set(value) != set(_FIELDS):
            raise VerificationError(f"check {value!r}: expected an object with exactly {', '.join(_FIELDS)}")
        if value["outcome"] not in list(Outcome):
            raise VerificationError(
                f"check {value['name']!r}: outcome is {value['outcome']!r}, expected one of {', '.join(Outcome)}"
            )
        if not isinstance(value["name"], str) or not isinstance(value["detail"], str):
            raise VerificationError(f"check {value!r}: name and detail must be strings")
        for name in ("value", "bound", "limit"):
            if value[name] is not None and not is_number(value[name]):
                raise VerificationError(f"check {value['name']!r}: {name} is {value[name]!r}, expected a finite number or null")
        return cls(**{**value, "outcome": Outcome(value["outcome"])})


def worst(checks: Iterable[Check]) -> Outcome:
    """The outcome of all ``checks`` together: inconclusive before failed before warned before passed.

    Inconclusive comes first: where a measurement cannot be trusted, its failure cannot be either. None at all is inconclusive.
    """
    return max((check.outcome for check in checks), key=_SEVERITY.__getitem__, default=Outcome.INCONCLUSIVE)


def is_number(value: Any) -> bool:
    """Whether ``value`` is a finite float, or an int that is one, and no bool."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max
