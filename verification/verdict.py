"""The verdict: every check with its outcome, and the worst of them. Pure functions of measurements and limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verification import summary
from verification.checks import Check, Outcome, worst
from verification.judgement import judgements
from verification.limits import Limits
from verification.measurement import Measurements
from verification.preconditions import non_finite, preconditions
from verification.summary import Comparison


@dataclass(frozen=True)
class Verdict:
    """What came out, in one object: it drives the terminal, ``drift.json``, the certificate and the exit code.

    Attributes:
        outcome: the worst of the checks.
        checks: in the order they are shown.
        limits: what was judged by.
        numbers: everything measured, JSON-ready; empty where nothing could be measured.
    """

    outcome: Outcome
    checks: tuple[Check, ...]
    limits: Limits
    numbers: Mapping[str, Any]

    @property
    def reasons(self) -> tuple[str, ...]:
        """What speaks against a pass, the weightiest first; empty when nothing does."""
        order = (Outcome.INCONCLUSIVE, Outcome.FAILED, Outcome.WARNED)
        return tuple(f"{check.name}: {check.detail}" for outcome in order for check in self.checks if check.outcome is outcome)

    @property
    def exit_code(self) -> int:
        """0 passed or warned, 1 failed, 3 inconclusive."""
        return {Outcome.PASSED: 0, Outcome.WARNED: 0, Outcome.FAILED: 1, Outcome.INCONCLUSIVE: 3}[self.outcome]

    def to_json(self) -> dict[str, Any]:
        """The verdict as ``drift.json`` and ``--format json`` show it (docs/drift-format.md)."""
        return {
            "format": "lora-merge/verdict",
            "version": 1,
            "outcome": self.outcome.value,
            "reasons": list(self.reasons),
            "limits": self.limits.to_json(),
            "checks": [check.to_json() for check in self.checks],
            "numbers": dict(self.numbers),
        }


def judge(measurements: Measurements, limits: Limits) -> Verdict:
    """Hold ``measurements`` against ``limits``. The same arguments give the same verdict, to the last digit."""
    broken = non_finite(measurements)
    if broken is not None:
        return Verdict(Outcome.INCONCLUSIVE, (*measurements.conditions.findings, broken), limits, {})
    comparison = Comparison.of(measurements, "reference", "merged", limits.skip_threshold)
    checks = (
        *measurements.conditions.findings,
        *preconditions(measurements, limits),
        *judgements(comparison, limits, measurements.conditions.noise_floors),
    )
    return Verdict(worst(checks), checks, limits, _numbers(measurements, comparison))


def could_not_measure(name: str, reason: str, limits: Limits) -> Verdict:
    """The verdict of a run that never came to a measurement: inconclusive, for this one reason."""
    return Verdict(Outcome.INCONCLUSIVE, (Check(name, Outcome.INCONCLUSIVE, reason),), limits, {})


def _numbers(measurements: Measurements, comparison: Comparison) -> dict[str, Any]:
    conditions = measurements.conditions
    numbers: dict[str, Any] = {
        "drift": comparison.to_json(),
        "label_mass": {arm: summary.label_mass(measurements.arrays(arm)) for arm in ("reference", "merged")},
        "buckets": summary.probability_buckets(comparison),
        "slices": summary.worst_slices(measurements.rows, comparison.abs_delta),
        "noise_floors": [floor.to_json() for floor in conditions.noise_floors],
        "accuracy": summary.accuracies(measurements),
        "control": _compared(measurements, "reference", "base", comparison.threshold),
        "merged_against_base": _compared(measurements, "merged", "base", comparison.threshold),
        "split": None,
        "prompts": dict(conditions.prompts),
        "recipe": conditions.recipe,
        "recipe_origin": conditions.recipe_origin,
        "arms": {arm: dict(facts) for arm, facts in conditions.arms.items()},
    }
    if measurements.has("reference_float32") and measurements.has("merged_float32"):
        pairs = {
            "merge_drift": ("reference_float32", "merged_float32"),
            "engine_drift": ("merged_float32", "merged"),
            "reference_arithmetic": ("reference_float32", "reference"),
        }
        numbers["split"] = {
            name: _compared(measurements, first, second, comparison.threshold) for name, (first, second) in pairs.items()
        }
    return numbers


def _compared(measurements: Measurements, first: str, second: str, threshold: float) -> dict[str, Any] | None:
    comparison = Comparison.of(measurements, first, second, threshold)
    return comparison.to_json() if comparison.size else None
