"""Two arms compared, in numbers that people read: percentiles, flips, label mass, drift by probability and by slice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verification import statistics
from verification.mean_bound import guaranteed_bound, judged_bound
from verification.measurement import DECISIONS, ArmArrays, Measurement, Measurements

BUCKETS = 10
_MOST_SLICE_VALUES = 20
_SMALLEST_SLICE = 10
_SLICES_SHOWN = 5


@dataclass(frozen=True)
class Comparison:
    """How ``second`` decides against ``first`` on the same n prompts.

    Attributes:
        first, second: the arms.
        threshold: the skip threshold of the flips there.
        different: (n,) False for a prompt that repeats an earlier one, token for token.
    """

    first: ArmArrays
    second: ArmArrays
    threshold: float
    different: NDArray[np.bool_]

    @classmethod
    def of(cls, measurements: Measurements, first: str, second: str, threshold: float) -> Comparison:
        """Of two arms, over the prompts that both of them scored."""
        return cls(*measurements.paired(first, second), threshold, measurements.different(first, second))

    @property
    def size(self) -> int:
        return int(self.first.skip_probability.size)

    @property
    def delta(self) -> NDArray[np.float64]:
        """(n,) skip probability of the second minus that of the first."""
        return self.second.skip_probability - self.first.skip_probability

    @property
    def abs_delta(self) -> NDArray[np.float64]:
        """(n,)"""
        return np.abs(self.delta)

    @property
    def mass_loss(self) -> NDArray[np.float64]:
        """(n,) label mass of the first minus that of the second."""
        return self.first.label_mass - self.second.label_mass

    @property
    def argmax_flipped(self) -> NDArray[np.bool_]:
        """(n,) whether the decision by arg-max changed; leaving or reaching ``other`` counts."""
        return np.not_equal(self.first.decision, self.second.decision)

    @property
    def threshold_flipped(self) -> NDArray[np.bool_]:
        """(n,) whether the text would be kept on one side only."""
        return np.not_equal(self.first.kept(self.threshold), self.second.kept(self.threshold))

    def flips_each_way(self) -> dict[str, int]:
        """``{"skip->write": count, ...}`` of the decisions by arg-max that changed."""
        return {
            f"{DECISIONS[before]}->{DECISIONS[after]}": int(
                ((self.first.decision == before) & (self.second.decision == after)).sum()
            )
            for before in range(len(DECISIONS))
            for after in range(len(DECISIONS))
            if before != after
        }

    def kept_each_way(self) -> dict[str, int]:
        """``{"kept->dropped": count, "dropped->kept": count}`` at the threshold."""
        before, after = self.first.kept(self.threshold), self.second.kept(self.threshold)
        return {"kept->dropped": int((before & ~after).sum()), "dropped->kept": int((~before & after).sum())}

    def to_json(self) -> dict[str, Any]:
        """All numbers of the comparison (docs/drift-format.md)."""
        absolute = self.abs_delta
        tail = statistics.percentiles(absolute, (95.0, 99.0))
        return {
            "prompts": self.size,
            "different_prompts": int(self.different.sum()),
            "mean_abs_delta": float(absolute.mean()),
            "mean_abs_delta_upper": judged_bound(absolute, self.different),
            "mean_abs_delta_guaranteed": guaranteed_bound(absolute, self.different),
            "p95_abs_delta": tail[95.0],
            "p99_abs_delta": tail[99.0],
            "max_abs_delta": float(absolute.max()),
            "rms_delta": statistics.root_mean_square(self.delta),
            "bias": float(self.delta.mean()),
            "signed_percentiles": {f"{at:g}": value for at, value in statistics.percentiles(self.delta).items()},
            "argmax_flips": int(self.argmax_flipped.sum()),
            "argmax_flips_each_way": self.flips_each_way(),
            "threshold_flips": int(self.threshold_flipped.sum()),
            "threshold_flips_each_way": self.kept_each_way(),
            "mean_mass_loss": float(self.mass_loss.mean()),
        }


def label_mass(arm: ArmArrays) -> dict[str, float]:
    """Smallest, first percentile and mean of the label mass of one arm."""
    return {
        "min": float(arm.label_mass.min()),
        "p1": statistics.percentiles(arm.label_mass, (1.0,))[1.0],
        "mean": float(arm.label_mass.mean()),
    }


def probability_buckets(comparison: Comparison) -> list[dict[str, Any]]:
    """Drift by the reference's skip probability, in ten buckets of width 0.1; empty ones are left out."""
    place = np.minimum((comparison.first.skip_probability * BUCKETS).astype(int), BUCKETS - 1)
    buckets = []
    for bucket in range(BUCKETS):
        inside = place == bucket
        if inside.any():
            flips = comparison.first.decision[inside] != comparison.second.decision[inside]
            buckets.append(
                {
                    "from": bucket / BUCKETS,
                    "to": (bucket + 1) / BUCKETS,
                    "prompts": int(inside.sum()),
                    "mean_abs_delta": float(comparison.abs_delta[inside].mean()),
                    "bias": float(comparison.delta[inside].mean()),
                    "argmax_flips": int(flips.sum()),
                }
            )
    return buckets


def worst_slices(rows: Sequence[Measurement], abs_delta: NDArray[np.float64]) -> list[dict[str, Any]]:
    """The values of pass-through fields whose prompts drift most beyond the rest, by their distance in standard errors.

    ``abs_delta``: (n,) of ``rows``. Only fields of 2 to 20 different values, only values of at least 10 prompts, only more
    drift than on average.
    """
    names = sorted({name for row in rows for name in row.fields})
    slices: list[dict[str, Any]] = []
    for name in names:
        values = np.array([repr(row.fields.get(name)) for row in rows])
        kinds = np.unique(values)
        if not 2 <= kinds.size <= _MOST_SLICE_VALUES:
            continue
        for kind in kinds:
            inside = values == kind
            if inside.sum() < _SMALLEST_SLICE or inside.all():
                continue
            excess = float(abs_delta[inside].mean() - abs_delta.mean())
            error = float(abs_delta.std(ddof=1) / np.sqrt(inside.sum()))
            if excess > 0 and error > 0:
                value = rows[int(np.flatnonzero(inside)[0])].fields.get(name)
                mean = float(abs_delta[inside].mean())
                slices.append(
                    {
                        "field": name,
                        "value": value,
                        "prompts": int(inside.sum()),
                        "mean_abs_delta": mean,
                        "errors": excess / error,
                    }
                )
    return sorted(slices, key=lambda entry: -entry["errors"])[:_SLICES_SHOWN]


def accuracies(measurements: Measurements) -> dict[str, Any] | None:
    """Accuracy of each arm against the field ``expected``, over the prompts that all of reference, merged and base scored.

    Without a base, over all prompts. None unless every one of these prompts has an ``expected`` that is one of the label texts.
    """
    arms = [arm for arm in ("reference", "merged", "base") if measurements.has(arm)]
    rows = measurements.rows_with(*arms)
    labels = (measurements.conditions.labels.skip.text, measurements.conditions.labels.write.text)
    if not rows or any(row.fields.get("expected") not in labels for row in rows):
        return None
    return {"prompts": len(rows), **{arm: float(right_answers(measurements, rows, arm).mean()) for arm in arms}}


def right_answers(measurements: Measurements, rows: Sequence[Measurement], arm: str) -> NDArray[np.bool_]:
    """(n,) whether the decision of ``arm`` is the one whose label stands in the field ``expected`` of each of ``rows``."""
    labels = measurements.conditions.labels
    meaning = {"skip": labels.skip.text, "write": labels.write.text}
    return np.array([meaning.get(row.scores[arm].decision) == row.fields["expected"] for row in rows], dtype=np.bool_)
