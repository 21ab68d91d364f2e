"""The checks that can refuse a merged checkpoint: drift, label mass, flips and the optional limits.

The rule of every limit: it must lie above an upper confidence bound. That no difference was found significant is not agreement.
Repeated prompts are no more evidence than one (:mod:`verification.mean_bound`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from verification import statistics
from verification.checks import Check, Outcome
from verification.limits import Limits
from verification.mean_bound import MIN_PROMPTS, Mask, Values, are_few, judged_bound, larger
from verification.measurement import NoiseFloor
from verification.summary import Comparison

_MOST_TIMES_THE_FLOOR = 2.0
"""Flips against those of noise: a merge adds rounding of its own to either arm's arithmetic."""

PASSED, WARNED, FAILED, INCONCLUSIVE = Outcome.PASSED, Outcome.WARNED, Outcome.FAILED, Outcome.INCONCLUSIVE


def judgements(comparison: Comparison, limits: Limits, floors: Sequence[NoiseFloor]) -> Iterator[Check]:
    """The checks of merged (second) against reference (first)."""
    different = comparison.different
    yield _bounded_mean("mean-delta", "mean |delta|", comparison.abs_delta, 0.0, limits.max_delta, different)
    yield _bounded_mean("label-mass-loss", "mean loss of label mass", comparison.mass_loss, -1.0, limits.max_delta, different)
    by_argmax = [(floor, floor.flips) for floor in floors]
    yield _flips_against_floor("flips-against-floor", "decisions flip by arg-max", comparison.argmax_flipped, by_argmax)
    threshold = limits.skip_threshold
    kept = [(floor, floor.flips_at(threshold)) for floor in floors]
    at = f"texts would be kept on one side only at threshold {threshold:g}"
    yield _flips_against_floor("kept-against-floor", at, comparison.threshold_flipped, kept)
    if limits.max_p99_delta is not None:
        yield _p99_delta(comparison.abs_delta, limits.max_p99_delta, different)
    if limits.max_abs_delta is not None:
        yield _abs_delta(comparison.abs_delta, limits.max_abs_delta)
    if limits.max_bias is not None:
        yield _bias(comparison.delta, limits.max_bias, different)
    if limits.max_flip_rate is not None:
        yield _flip_rate("flip-rate-argmax", comparison.argmax_flipped, limits.max_flip_rate, different)
        yield _flip_rate("flip-rate-threshold", comparison.threshold_flipped, limits.max_flip_rate, different)


def _bounded_mean(name: str, what: str, values: Values, lowest: float, limit: float, different: Mask) -> Check:
    """Hold the mean of ``values`` (n,), which lie in [``lowest``, 1], against ``limit``.

    With few prompts the verdict has three ways out: surely below, surely above, or too few prompts to say.
    """
    mean, size = float(values.mean()), int(different.sum())
    few, bound = are_few(different), judged_bound(values, different)
    counted = f"{values.size} prompts" if size == values.size else f"{values.size} prompts, {size} different"
    found = f"{what} is {_four(mean)}, at most {_four(bound)} (95 % bound{' without assumptions' if few else ''}, {counted})"
    if bound <= limit:
        return Check(name, PASSED, f"{found}; the limit is {limit:g}", mean, bound, limit)
    settled = _how_many(values, limit, different)
    if few and not statistics.is_surely_above(_unit(values[different], lowest), float(_unit(np.array(limit), lowest))):
        reason = f"{found}: too few for the limit {limit:g}; {settled}"
        return Check(name, INCONCLUSIVE, reason, mean, bound, limit)
    if mean > limit:
        return Check(name, FAILED, f"{found}; the mean itself is above the limit {limit:g}", mean, bound, limit)
    return Check(name, FAILED, f"{found}; the bound is above the limit {limit:g}: {settled}", mean, bound, limit)


def _four(value: float) -> str:
    """Four digits, and no minus before zeros."""
    return f"{round(value, 4) + 0.0:.4f}"


def _unit(values: Values, lowest: float) -> Values:
    """[``lowest``, 1] mapped onto [0, 1]; rounding beyond the ends is cut off."""
    return np.clip((values - lowest) / (1 - lowest), 0, 1)


def _how_many(values: Values, limit: float, different: Mask) -> str:
    """As many as bring both bounds to ``limit``, the one over all ``values`` and the one over the ``different`` ones."""
    needed = [statistics.prompts_needed(sample, limit) for sample in (values, values[different])]
    known = [size for size in needed if size is not None]
    if len(known) < len(needed):
        return "no number of prompts like these would pass"
    return f"about {max(*known, MIN_PROMPTS):,} different prompts like these would settle it"


def _flips_against_floor(name: str, what: str, flipped: Mask, counted: Sequence[tuple[NoiseFloor, int]]) -> Check:
    """Warn when ``flipped`` (n,) is surely more than twice as frequent as under arithmetic alone.

    ``counted``: every noise floor with the flips in it. Both rates are uncertain, and the bound is of their ratio.
    """
    flips, size = int(flipped.sum()), flipped.size
    found = f"{flips} of {size} {what}"
    if not counted:
        return Check(name, WARNED, f"{found}, and no noise floor was measured to compare with", flips / size)
    floor, noise = max(counted, key=lambda entry: (entry[1] / entry[0].prompts, entry[0].prompts))
    lower = statistics.rate_ratio_lower_bound(flips, size, noise, floor.prompts)
    found = f"{found}; noise alone flips {noise} of {floor.prompts} ({floor.source})"
    ratio = flips / size * floor.prompts / noise if noise else None
    if lower <= _MOST_TIMES_THE_FLOOR:
        return Check(name, PASSED, found, ratio, lower, _MOST_TIMES_THE_FLOOR)
    reason = f"{found}: surely more than {_MOST_TIMES_THE_FLOOR:g} times as often, at least {lower:.1f} times (95 % bound)"
    return Check(name, WARNED, reason, ratio, lower, _MOST_TIMES_THE_FLOOR)


def _p99_delta(values: Values, limit: float, different: Mask) -> Check:
    p99 = statistics.percentiles(values, (99.0,))[99.0]
    bounds = [statistics.quantile_upper_bound(sample, 0.99) for sample in (values, values[different])]
    known = [bound for bound in bounds if bound is not None]
    if len(known) < len(bounds):
        reason = f"{int(different.sum())} different prompts give no bound of the 99th percentile; at least 299 do"
        return Check("p99-delta", INCONCLUSIVE, reason, p99, None, limit)
    bound = max(known)
    found = f"99th percentile of |delta| is {p99:.4f}, at most {bound:.4f} (95 % bound); the limit is {limit:g}"
    return Check("p99-delta", PASSED if bound <= limit else FAILED, found, p99, bound, limit)


def _abs_delta(values: Values, limit: float) -> Check:
    largest = float(values.max())
    found = f"largest |delta| of these {values.size} prompts is {largest:.4f}; the limit is {limit:g}"
    return Check("abs-delta", PASSED if largest <= limit else FAILED, found, largest, None, limit)


def _bias(values: Values, limit: float, different: Mask) -> Check:
    bias, size = float(values.mean()), int(different.sum())
    if size < MIN_PROMPTS:
        reason = f"{size} different prompts give no bound of the bias; at least {MIN_PROMPTS} do"
        return Check("bias", INCONCLUSIVE, reason, bias, None, limit)
    bound = max(larger(statistics.mean_upper_bound, signed, different) for signed in (values, -values))
    found = f"bias is {bias:+.4f}, of size at most {bound:.4f} (95 % bound); the limit is {limit:g}"
    return Check("bias", PASSED if bound <= limit else FAILED, found, bias, bound, limit)


def _flip_rate(name: str, flipped: Mask, limit: float, different: Mask) -> Check:
    flips, size = int(flipped.sum()), flipped.size
    bound = larger(
        lambda sample: statistics.rate_bounds(int(sample.sum()), sample.size)[1], flipped.astype(np.float64), different
    )
    found = f"{flips} of {size} decisions flip, {flips / size:.2%}, at most {bound:.2%} (95 % bound); the limit is {limit:.2%}"
    if bound <= limit:
        return Check(name, PASSED, found, flips / size, bound, limit)
    if flips / size <= limit < statistics.rate_bounds(0, int(different.sum()))[1]:
        needed = statistics.prompts_without_a_hit(limit)
        least = f"more than {statistics.MOST_PROMPTS:,}" if needed is None else f"at least {needed:,}"
        reason = f"{found}: with so few prompts not even 0 flips would pass; {least} are needed"
        return Check(name, INCONCLUSIVE, reason, flips / size, bound, limit)
    return Check(name, FAILED, found, flips / size, bound, limit)
