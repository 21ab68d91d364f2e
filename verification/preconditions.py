"""The checks that decide whether the measurement says anything at all. Each that does not hold makes the verdict inconclusive."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np

from verification import statistics, summary
from verification.checks import Check, Outcome
from verification.limits import Limits
from verification.measurement import ARMS, DEQUANTIZED, Measurements
from verification.summary import Comparison

LEAST_LABEL_MASS = 0.5
USUAL_LABEL_MASS = 0.95
_SAME = 1e-6
"""Skip probabilities this close together are the same answer."""

PASSED, WARNED, INCONCLUSIVE = Outcome.PASSED, Outcome.WARNED, Outcome.INCONCLUSIVE


def preconditions(measurements: Measurements, limits: Limits) -> Iterator[Check]:
    """Those that follow from the scores; the others were settled before scoring and are among the findings."""
    yield _label_mass(measurements)
    yield _spread(measurements, limits.max_delta)
    yield _noise_floor(measurements, limits.max_delta)
    control = _control(measurements, limits)
    yield control
    yield from _accuracy(measurements, moved=control.outcome is PASSED)


def non_finite(measurements: Measurements) -> Check | None:
    """The check that fails when a score is NaN or infinite; None when all are finite. Nothing else may be computed then."""
    for arm in ARMS:
        scores = [row.scores[arm] for row in measurements.rows if arm in row.scores]
        finite = np.isfinite([(score.log_p_skip, score.log_p_write) for score in scores]) if scores else np.ones((0, 2), bool)
        broken = int((~finite.all(axis=1)).sum())
        if broken:
            found = f"arm {arm} has NaN or infinite scores for {broken} of {len(scores)} prompts"
            reason = f"{found}: it overflowed, or its weights are broken"
            return Check("finite", INCONCLUSIVE, reason, float(broken), None, 0.0)
    return None


def _label_mass(measurements: Measurements) -> Check:
    mean = float(measurements.arrays("reference").label_mass.mean())
    found = f"the reference puts {mean:.4f} of its probability on the two labels"
    if mean < LEAST_LABEL_MASS:
        reason = (
            f"{found}, expected at least {LEAST_LABEL_MASS:g}: it does not answer the question; check prompts, prefill and labels"
        )
        return Check("label-mass", INCONCLUSIVE, reason, mean, None, LEAST_LABEL_MASS)
    if mean < USUAL_LABEL_MASS:
        return Check(
            "label-mass", WARNED, f"{found}; a trained adapter usually reaches {USUAL_LABEL_MASS:g}", mean, None, USUAL_LABEL_MASS
        )
    return Check("label-mass", PASSED, found, mean, None, USUAL_LABEL_MASS)


def _spread(measurements: Measurements, limit: float) -> Check:
    """A reference that says the same of every prompt cannot tell a merge that reads its prompts from one that does not."""
    name, probability = "reference-spread", measurements.arrays("reference").skip_probability
    apart = np.abs(probability - np.median(probability))
    spread, floors = float(apart.mean()), measurements.conditions.noise_floors
    noise = max((floor.mean_abs_delta for floor in floors), default=0.0)
    found = f"the reference's skip probabilities lie {spread:.4f} from their median on average"
    if spread <= max(noise, _SAME):
        reason = f"{found}, no farther than arithmetic moves them: it says the same of every prompt; check prompts and reference"
        return Check(name, INCONCLUSIVE, reason, spread, None, noise)
    if statistics.is_surely_above(apart, limit):
        return Check(name, PASSED, found, spread, None, limit)
    reason = f"{found}, not surely above the limit {limit:g}: a merge that says the same of every prompt could pass"
    return Check(name, WARNED, f"{reason}; give prompts that it decides both ways, or lower --max-delta", spread, None, limit)


def _noise_floor(measurements: Measurements, limit: float) -> Check:
    floors = measurements.conditions.noise_floors
    if not floors:
        return Check(
            "noise-floor", INCONCLUSIVE, "no noise floor was measured, so nobody knows what the limit means", None, None, limit
        )
    floor = max(floors, key=lambda entry: entry.mean_abs_delta)
    found = f"arithmetic alone moves the mean |delta| by {floor.mean_abs_delta:.4f} ({floor.source}, {floor.prompts} prompts)"
    quantized = measurements.conditions.recipe is not None or measurements.conditions.recipe_origin == "base"
    lacking = f" (not measured: {DEQUANTIZED})" if quantized and all(entry.source != DEQUANTIZED for entry in floors) else ""
    if floor.mean_abs_delta >= limit:
        reason = (
            f"{found}; the limit {limit:g} is not above it, so no verdict is possible: raise --max-delta, or measure in float32"
            + lacking
        )
        return Check("noise-floor", INCONCLUSIVE, reason, floor.mean_abs_delta, None, limit)
    return Check("noise-floor", PASSED, found + lacking, floor.mean_abs_delta, None, limit)


def _control(measurements: Measurements, limits: Limits) -> Check:
    """The adapter must move the base by more than the limit; else a merge that lost the adapter would pass as well."""
    limit = limits.max_delta
    if not measurements.has("base"):
        reason = "the bare base was not scored, so it is not shown that a merge without the adapter would be refused"
        return Check("control", WARNED, reason, None, None, limit)
    comparison = Comparison.of(measurements, "reference", "base", limits.skip_threshold)
    moved = float(comparison.abs_delta.mean())
    found = f"the adapter moves the skip probability by {moved:.4f} on average ({comparison.size} prompts)"
    if statistics.is_surely_above(comparison.abs_delta, limit):
        return Check("control", PASSED, found, moved, None, limit)
    reason = (
        f"{found}, not surely above the limit {limit:g}: a merge without it could pass; "
        "lower --max-delta, or give prompts that it was trained for"
    )
    return Check("control", INCONCLUSIVE, reason, moved, None, limit)


def _accuracy(measurements: Measurements, *, moved: bool) -> Iterator[Check]:
    """Where the right answers are known, the reference should know more of them than the bare base.

    ``moved``: whether the adapter is shown to move the base. Then it is there, and a reference that is not surely worse than the
    base may be of an adapter that was trained for something else than these answers, which the base has right already.
    """
    found = summary.accuracies(measurements)
    if found is None:
        yield from _unusable_answers(measurements)
        return
    if "base" not in found:
        return
    reference, base = found["reference"], found["base"]
    detail = (
        f"accuracy on {found['prompts']} prompts: reference {reference:.3f}, merged {found['merged']:.3f}, bare base {base:.3f}"
    )
    if reference > base:
        yield Check("accuracy", PASSED, detail, reference, None, base)
    elif moved and not _surely_worse(measurements):
        reason = f"{detail}; the reference knows no more than the bare base, so this does not show that it is the right one"
        yield Check("accuracy", WARNED, reason, reference, None, base)
    else:
        reason = f"{detail}; the reference is no better than the bare base: wrong adapter, base, tokenizer or prompts?"
        yield Check("accuracy", INCONCLUSIVE, reason, reference, None, base)


def _surely_worse(measurements: Measurements) -> bool:
    """Whether, of the prompts that just one of the two has right, the bare base surely has more (sign test, 95 %)."""
    rows = measurements.rows_with("reference", "merged", "base")
    right = {arm: summary.right_answers(measurements, rows, arm) for arm in ("reference", "base")}
    lost = int((right["base"] & ~right["reference"]).sum())
    gained = int((right["reference"] & ~right["base"]).sum())
    return lost + gained > 0 and statistics.rate_bounds(lost, lost + gained)[0] > 0.5


def _unusable_answers(measurements: Measurements) -> Iterator[Check]:
    """Somebody wrote down answers, and the check that they are for cannot be made of them."""
    labels = measurements.conditions.labels
    answers = [row.fields.get("expected") for row in measurements.rows]
    if all(answer is None for answer in answers):
        return
    unusable = [answer for answer in answers if answer not in (labels.skip.text, labels.write.text)]
    shown = json.dumps(next((answer for answer in unusable if answer is not None), None))
    yield Check(
        "accuracy",
        WARNED,
        f"{len(unusable)} of {len(answers)} prompts have no `expected` that is {labels.skip.text!r} or {labels.write.text!r} "
        f"({shown} first), so accuracy was not checked; give each of them the right label, or the field another name",
    )
