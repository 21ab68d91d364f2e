"""The checks that can refuse a merged checkpoint: drift, label mass, flips and the optional limits.

The rule of every limit: it must lie above an upper confidence bound. That no difference was found significant is not agreement.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from verification import statistics
from verification.checks import Check, Outcome
from verification.limits import Limits
from verification.measurement import NoiseFloor
from verification.summary import Comparison

MIN_PROMPTS = 300
"""From here on the skew-corrected bound of a mean holds; with fewer prompts the guaranteed one is used."""

PASSED, WARNED, FAILED, INCONCLUSIVE = Outcome.PASSED, Outcome.WARNED, Outcome.FAILED, Outcome.INCONCLUSIVE


def judgements(comparison: Comparison, limits: Limits, floors: Sequence[NoiseFloor]) -> Iterator[Check]:
    """The checks of merged (second) against reference (first)."""
    yield _mean_delta(comparison.abs_delta, limits.max_delta)
    yield _mass_loss(comparison.mass_loss, limits.max_delta)
    yield _flips_against_floor(comparison, floors)
    if limits.max_p99_delta is not None:
        yield _p99_delta(comparison.abs_delta, limits.max_p99_delta)
    if limits.max_abs_delta is not None:
        yield _abs_delta(comparison.abs_delta, limits.max_abs_delta)
    if limits.max_bias is not None:
        yield _bias(comparison.delta, limits.max_bias)
    if limits.max_flip_rate is not None:
        yield _flip_rate("flip-rate-argmax", comparison.argmax_flips, comparison.size, limits.max_flip_rate)
        yield _flip_rate("flip-rate-threshold", comparison.threshold_flips, comparison.size, limits.max_flip_rate)


def _mean_delta(values: NDArray[np.float64], limit: float) -> Check:
    return _bounded_mean("mean-delta", "mean |delta|", values, 0.0, limit)


def _mass_loss(loss: NDArray[np.float64], limit: float) -> Check:
    return _bounded_mean("label-mass-loss", "mean loss of label mass", loss, -1.0, limit)


def _bounded_mean(name: str, what: str, values: NDArray[np.float64], lowest: float, limit: float) -> Check:
    """Hold the mean of ``values`` (n,), which lie in [``lowest``, 1], against ``limit``.

    With few prompts the verdict has three ways out: surely below, surely above, or too few prompts to say.
    """
    mean, size, few = float(values.mean()), values.size, values.size < MIN_PROMPTS
    # Without its negative values the mean is no smaller, and the bound for values in [0, 1] applies.
    bound = statistics.guaranteed_upper_bound(np.clip(values, 0, 1)) if few else statistics.mean_upper_bound(values)
    found = f"{what} is {mean:.4f}, at most {bound:.4f} (95 % bound{' without assumptions' if few else ''}, {size} prompts)"
    if bound <= limit:
        return Check(name, PASSED, f"{found}; the limit is {limit:g}", mean, bound, limit)
    if few and not statistics.is_surely_above(_unit(values, lowest), float(_unit(np.array(limit), lowest))):
        return Check(
            name, INCONCLUSIVE, f"{found}: too few for the limit {limit:g}; {_how_many(values, limit)}", mean, bound, limit
        )
    if mean > limit:
        return Check(name, FAILED, f"{found}; the mean itself is above the limit {limit:g}", mean, bound, limit)
    return Check(name, FAILED, f"{found}; the bound is above the limit {limit:g}: {_how_many(values, limit)}", mean, bound, limit)


def _unit(values: NDArray[np.float64], lowest: float) -> NDArray[np.float64]:
    """[``lowest``, 1] mapped onto [0, 1]; rounding beyond the ends is cut off."""
    return np.clip((values - lowest) / (1 - lowest), 0, 1)


def _how_many(values: NDArray[np.float64], limit: float) -> str:
    needed = statistics.prompts_needed(values, limit)
    if needed is None:
        return "no number of prompts like these would pass"
    return f"about {max(needed, MIN_PROMPTS):,} prompts like these would settle it"


def _flips_against_floor(comparison: Comparison, floors: Sequence[NoiseFloor]) -> Check:
    """Warn when decisions surely flip more than twice as often as arithmetic alone may flip them."""
    name, flips, size = "flips-against-floor", comparison.argmax_flips, comparison.size
    if not floors:
        return Check(
            name, WARNED, f"{flips} of {size} decisions flip, and no noise floor was measured to compare with", flips / size
        )
    floor = max(floors, key=lambda entry: (entry.flips / entry.prompts, entry.prompts))
    lower, _ = statistics.rate_bounds(flips, size)
    _, upper = statistics.rate_bounds(floor.flips, floor.prompts)
    found = f"{flips} of {size} decisions flip; noise alone flips {floor.flips} of {floor.prompts} ({floor.source})"
    return Check(name, WARNED if lower > 2 * upper else PASSED, found, flips / size, lower, 2 * upper)


def _p99_delta(values: NDArray[np.float64], limit: float) -> Check:
    p99 = statistics.percentiles(values, (99.0,))[99.0]
    bound = statistics.quantile_upper_bound(values, 0.99)
    if bound is None:
        return Check(
            "p99-delta",
            INCONCLUSIVE,
            f"{values.size} prompts give no bound of the 99th percentile; at least 299 do",
            p99,
            None,
            limit,
        )
    found = f"99th percentile of |delta| is {p99:.4f}, at most {bound:.4f} (95 % bound); the limit is {limit:g}"
    return Check("p99-delta", PASSED if bound <= limit else FAILED, found, p99, bound, limit)


def _abs_delta(values: NDArray[np.float64], limit: float) -> Check:
    largest = float(values.max())
    found = f"largest |delta| of these {values.size} prompts is {largest:.4f}; the limit is {limit:g}"
    return Check("abs-delta", PASSED if largest <= limit else FAILED, found, largest, None, limit)


def _bias(values: NDArray[np.float64], limit: float) -> Check:
    bias = float(values.mean())
    if values.size < MIN_PROMPTS:
        return Check(
            "bias", INCONCLUSIVE, f"{values.size} prompts give no bound of the bias; at least {MIN_PROMPTS} do", bias, None, limit
        )
    bound = max(statistics.mean_upper_bound(values), -statistics.mean_lower_bound(values))
    found = f"bias is {bias:+.4f}, of size at most {bound:.4f} (95 % bound); the limit is {limit:g}"
    return Check("bias", PASSED if bound <= limit else FAILED, found, bias, bound, limit)


def _flip_rate(name: str, flips: int, size: int, limit: float) -> Check:
    _, bound = statistics.rate_bounds(flips, size)
    found = f"{flips} of {size} decisions flip, {flips / size:.2%}, at most {bound:.2%} (95 % bound); the limit is {limit:.2%}"
    if bound <= limit:
        return Check(name, PASSED, found, flips / size, bound, limit)
    if flips / size <= limit < statistics.rate_bounds(0, size)[1]:
        return Check(name, INCONCLUSIVE, f"{found}: with so few prompts not even 0 flips would pass", flips / size, bound, limit)
    return Check(name, FAILED, found, flips / size, bound, limit)
