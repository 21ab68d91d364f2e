"""Whether two arms did the same work: without that, a ratio of their times says nothing."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lora_merge.generation.bench.arms import ArmResult, WriteList

MIN_AGREEMENT = 0.98
MAX_TOKEN_DIFFERENCE = 0.02
_NEAR = 0.1


@dataclass(frozen=True)
class Limits:
    """What still counts as the same work.

    Attributes:
        min_agreement: smallest share of prompts with the same decision.
        max_token_difference: largest difference of the tokens written for the list, relative to the reference arm.
    """

    min_agreement: float = MIN_AGREEMENT
    max_token_difference: float = MAX_TOKEN_DIFFERENCE


@dataclass(frozen=True)
class SameWork:
    """How one arm's work compares with the reference arm's.

    Attributes:
        agreement: share of prompts with the same decision.
        disagreements: prompts with another decision.
        near_ties: those of them whose skip probability in the reference arm is within 0.1 of one half.
        tokens: written by this arm for the prompts on the list.
        token_difference: relative to the reference arm.
        compared: prompts on the list that both arms wrote.
        differing: share of these whose texts differ.
        first_difference: median position (in tokens) of the first difference; None when no text differs.
        reasons: why it is not the same work; empty when it is.
    """

    agreement: float
    disagreements: int
    near_ties: int | None
    tokens: int
    token_difference: float
    compared: int
    differing: float
    first_difference: float | None
    reasons: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether ratios may be taken."""
        return not self.reasons

    def to_json(self) -> dict[str, Any]:
        """Every attribute by name, and whether it holds."""
        return {**asdict(self), "reasons": list(self.reasons), "holds": self.holds}


def compare(reference: ArmResult, other: ArmResult, listed: WriteList, limits: Limits) -> SameWork:
    """Hold ``other`` against ``reference``: both were given the same token ids."""
    size = len(reference.decisions)
    changed = [index for index in range(size) if reference.decisions[index] != other.decisions[index]]
    probabilities = reference.skip_probabilities
    near = None if probabilities is None else sum(abs(probabilities[index] - 0.5) <= _NEAR for index in changed)
    wanted, written = _tokens(reference, listed), _tokens(other, listed)
    both = [index for index in listed.indices if index in reference.texts and index in other.texts]
    places = [place for index in both if (place := first_difference(reference.texts[index], other.texts[index])) is not None]
    agreement = 1 - len(changed) / size if size else 0.0
    difference = abs(written - wanted) / wanted if wanted else float(written > 0)
    return SameWork(
        agreement=agreement,
        disagreements=len(changed),
        near_ties=near,
        tokens=written,
        token_difference=difference,
        compared=len(both),
        differing=len(places) / len(both) if both else 0.0,
        first_difference=statistics.median(places) if places else None,
        reasons=tuple(_reasons(len(other.decisions) == size and size > 0, agreement, difference, limits)),
    )


def _reasons(complete: bool, agreement: float, difference: float, limits: Limits) -> Sequence[str]:
    reasons = []
    if not complete:
        reasons.append("the arms did not decide the same prompts")
    if agreement < limits.min_agreement:
        reasons.append(f"decisions agree on {agreement:.2%} of the prompts, expected at least {limits.min_agreement:.2%}")
    if difference > limits.max_token_difference:
        reasons.append(f"tokens written differ by {difference:.2%}, expected at most {limits.max_token_difference:.2%}")
    return reasons


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The position at which two texts part; the length of the shorter one when it begins the longer; None for equal ones."""
    if tuple(one) == tuple(other):
        return None
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return min(len(one), len(other))


def _tokens(arm: ArmResult, listed: WriteList) -> int:
    return sum(len(arm.texts.get(index, ())) for index in listed.indices)


def within_engines(arms: Mapping[str, ArmResult], listed: WriteList, limits: Limits) -> dict[str, SameWork]:
    """One-shot against two-phase of the same engine, by the name of the one-shot arm."""
    pairs = [(f"{engine}-two-phase", f"{engine}-one-shot") for engine in ("hf", "vllm")]
    return {one: compare(arms[two], arms[one], listed, limits) for two, one in pairs if two in arms and one in arms}


def proofs(reference: str, arms: Mapping[str, ArmResult], listed: WriteList, limits: Limits) -> dict[str, SameWork]:
    """Every other arm against ``arms[reference]``."""
    return {name: compare(arms[reference], arm, listed, limits) for name, arm in arms.items() if name != reference}
