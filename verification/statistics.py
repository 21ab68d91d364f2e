"""Confidence bounds and percentiles: pure functions of arrays, no randomness, so that a verdict reproduces to the last digit.

Two bounds of a mean. :func:`mean_upper_bound` corrects for skewness and holds for the drift of real engines from some 300
prompts on. :func:`guaranteed_upper_bound` assumes nothing but values in [0, 1], holds at any number of prompts, and pays for it
with about 3 / n of width. :func:`smaller_upper_bound` is the smaller one of the two, at the price of a part of the error each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

CONFIDENCE = 0.95
PERCENTILES = (99.9, 99.0, 95.0, 90.0, 75.0, 50.0, 25.0, 10.0, 5.0, 1.0, 0.1)
"""The percentiles that llama.cpp's comparison prints, in its order."""

SHARE_OF_SKEW_CORRECTED = 0.6
"""Of the error that :func:`smaller_upper_bound` may make: 3 of 5 %. It costs ordinary drift of 300 prompts 2.5 % of its bound,
and of 3,000 prompts 0.8 %; with one prompt of 300 off by 1 the bound is half of what it would be."""

_MOST_BET = 0.95
"""Largest stake of the betting bound; below 1, so that one prompt of value 1 cannot ruin it for good."""
MOST_PROMPTS = 10_000_000
"""Nobody is told to measure more."""


@dataclass(frozen=True)
class Moments:
    """What a bound of the mean needs to know of a sample: size, mean, central second and third moments, and the largest value."""

    size: int
    mean: float
    variance: float
    third: float
    largest: float

    @classmethod
    def of(cls, values: ArrayLike) -> Moments:
        """The moments of ``values`` (n,), n at least 1; variance and third moment over n."""
        data = _checked(values)
        centered = data - data.mean()
        return cls(data.size, float(data.mean()), float((centered**2).mean()), float((centered**3).mean()), float(data.max()))

    def with_largest_twice(self, size: int) -> Moments:
        """The moments of a sample of ``size`` values like this one and of its largest value once more."""
        raw2 = self.variance + self.mean**2
        raw3 = self.third + 3 * self.mean * self.variance + self.mean**3
        share = size / (size + 1)
        mean, raw2, raw3 = (
            share * raw + (1 - share) * self.largest**power for power, raw in ((1, self.mean), (2, raw2), (3, raw3))
        )
        variance = max(raw2 - mean**2, 0.0)
        return Moments(size + 1, mean, variance, raw3 - 3 * mean * variance - mean**3, self.largest)


def mean_upper_bound(values: ArrayLike, confidence: float = CONFIDENCE) -> float:
    """One-sided upper confidence bound of the mean of the distribution that ``values`` (n,) were drawn from.

    A t-bound is too low for skewed values such as \\|drift\\|. This one takes the sample with its largest value counted once
    more, as though one more prompt had come out as bad as the worst seen, and inverts Hall's cubic transformation of the
    t-statistic, which removes the skewness. False passes measured at 95 %, 300 to 3,000 values: 3.2-3.8 % on real drift
    (skewness 1.8), 2.7-3.0 % on heavy tails (skewness 6), 1.9-4.8 % with 1 % of damaged prompts, where a t-bound has 5.1-6.2,
    6.3-8.9 and 6.9-13.4 % (docs/verification.md). Damage on fewer than 3 / n of the prompts can stay unseen:
    :func:`guaranteed_upper_bound`.

    Source: P. Hall, "On the removal of skewness by transformation", J. R. Statist. Soc. B 54 (1992) 221-228.
    """
    moments = Moments.of(values)
    return _hall_bound(moments.with_largest_twice(moments.size), confidence)


def guaranteed_upper_bound(values: ArrayLike, confidence: float = CONFIDENCE) -> float:
    """One-sided upper bound of the mean of independent ``values`` (n,) in [0, 1], whatever their distribution, at any n.

    The largest mean against which a gambler, who starts with 1 and stakes on each value coming out below it, has not yet won
    ``1 / (1 - confidence)``. The stakes are fixed by the values before, so by Ville's inequality the true mean lets the gambler
    win that much with probability ``1 - confidence`` at most. The values are read in one fixed shuffled order, because a prompt
    file may be sorted. Source: Waudby-Smith & Ramdas, "Estimating means of bounded random variables by betting", JRSS B 86
    (2024) 1-27.
    """
    data = _shuffled(_checked_unit(values))
    stakes = np.minimum(_stakes(data, confidence), _MOST_BET)
    target = math.log(1 / (1 - confidence))

    def fortune(mean: float) -> float:
        return float(np.cumsum(np.log1p(stakes * (mean - data))).max())

    low, high = 0.0, 1.0
    if fortune(high) < target:
        return 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if fortune(middle) >= target else (middle, high)
    return high


def smaller_upper_bound(values: ArrayLike, confidence: float = CONFIDENCE) -> float:
    """The smaller one of :func:`mean_upper_bound` and :func:`guaranteed_upper_bound`, for ``values`` (n,) up to 1.

    A few prompts that are off by much make the first one far larger than the second, which needs no skewness. Each of the two
    misses with a part of the error only, so that both together miss no more than ``1 - confidence``, as either one may
    (Bonferroni). Values below 0 count as 0 in the second one, which only raises it, and rounding above 1 is cut off.
    """
    data, error = _checked(values), 1 - confidence
    skew_corrected = mean_upper_bound(data, 1 - SHARE_OF_SKEW_CORRECTED * error)
    return min(skew_corrected, guaranteed_upper_bound(data.clip(0, 1), 1 - (1 - SHARE_OF_SKEW_CORRECTED) * error))


def is_surely_above(values: ArrayLike, limit: float, confidence: float = CONFIDENCE) -> bool:
    """Whether independent ``values`` (n,) in [0, 1] show a mean above ``limit`` (in (0, 1)), at any n and for any distribution.

    The betting test of :func:`guaranteed_upper_bound`, for one limit and the other direction.
    """
    if limit <= 0:
        return bool(_checked_unit(values).max() > 0)
    data = _shuffled(_checked_unit(values))
    stakes = np.minimum(_stakes(data, confidence), _MOST_BET / limit)
    return float(np.cumsum(np.log1p(stakes * (data - limit))).max()) >= math.log(1 / (1 - confidence))


def prompts_needed(values: ArrayLike, limit: float, confidence: float = CONFIDENCE) -> int | None:
    """How many values distributed like ``values`` (n,) bring :func:`smaller_upper_bound` to ``limit`` or below, by its
    skew-corrected part, which is the smaller one once there are many.

    None when the mean itself is not below the limit, so that no number does, or when it would be more than ten million.
    """
    moments = Moments.of(values)
    if moments.mean >= limit:
        return None
    part = 1 - SHARE_OF_SKEW_CORRECTED * (1 - confidence)

    def holds(size: int) -> bool:
        return _hall_bound(moments.with_largest_twice(size), part) <= limit

    low, high = 1, 2
    while not holds(high):
        low, high = high, 2 * high
        if high > MOST_PROMPTS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def rate_bounds(hits: int, size: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Clopper-Pearson bounds of the rate behind ``hits`` of ``size``: (lower, upper), each one-sided at ``confidence``."""
    from scipy.stats import beta

    if not 0 <= hits <= size or size < 1:
        raise ValueError(f"{hits} of {size} is no rate")
    lower = 0.0 if hits == 0 else float(beta.ppf(1 - confidence, hits, size - hits + 1))
    upper = 1.0 if hits == size else float(beta.ppf(confidence, hits + 1, size - hits))
    return lower, upper


def rate_ratio_lower_bound(hits: int, size: int, other_hits: int, other_size: int, confidence: float = CONFIDENCE) -> float:
    """One-sided lower bound of how many times as large the rate behind ``hits`` of ``size`` is as that behind ``other_hits`` of
    ``other_size``; 0 where there is no hit at all.

    Given all hits together, those of the first sample are binomial, with a share that the ratio of the two rates fixes; so the
    uncertainty of both rates is in it, and it needs no estimate of either. Exact for rare hits, and for frequent ones on the safe
    side: the true bound is higher. Source: J. Przyborowski, H. Wilenski, "Homogeneity of results in testing samples from Poisson
    series", Biometrika 31 (1940) 313-323.
    """
    if hits == 0:
        return 0.0
    share, _ = rate_bounds(hits, hits + other_hits, confidence)
    return share / (1 - share) * other_size / size


def prompts_without_a_hit(rate: float, confidence: float = CONFIDENCE) -> int | None:
    """How many prompts without any hit bound their rate by ``rate`` (in (0, 1)): 299 for 1 %, 2,995 for 0.1 %; None when it would
    be more than ten million.
    """
    size = math.log(1 - confidence) / math.log1p(-rate)
    return math.ceil(size) if size <= MOST_PROMPTS else None


def quantile_upper_bound(values: ArrayLike, quantile: float, confidence: float = CONFIDENCE) -> float | None:
    """Upper confidence bound of a quantile, for any distribution: the order statistic that lies above it with ``confidence``.

    None when there are too few values for one: fewer than 299 for the 99th percentile at 95 %.
    """
    from scipy.stats import binom

    data = np.sort(_checked(values))
    rank = int(binom.ppf(confidence, data.size, quantile)) + 1
    return float(data[rank - 1]) if rank <= data.size else None


def percentiles(values: ArrayLike, of: Sequence[float] = PERCENTILES) -> dict[float, float]:
    """``{percentile: value}`` of ``values`` (n,), linearly interpolated between order statistics."""
    data = _checked(values)
    return dict(zip(of, map(float, np.percentile(data, of)), strict=True))


def root_mean_square(values: ArrayLike) -> float:
    """The square root of the mean square of ``values`` (n,)."""
    return float(np.sqrt(np.mean(_checked(values) ** 2)))


def _hall_bound(moments: Moments, confidence: float) -> float:
    from scipy.stats import t as student

    if moments.size < 2 or moments.variance <= 0:
        return moments.mean
    error = math.sqrt(moments.variance / (moments.size - 1))
    wanted = -float(student.ppf(confidence, moments.size - 1))
    slant = moments.third / moments.variance**1.5 / math.sqrt(moments.size)
    if abs(slant) < 1e-8:
        return moments.mean - wanted * error
    # The inverse of g(T) = T + slant T^2 / 3 + slant^2 T^3 / 27 + slant / 6 at the lower quantile.
    statistic = 3 / slant * (float(np.cbrt(1 + slant * (wanted - slant / 6))) - 1)
    return float(moments.mean - statistic * error)


def _stakes(data: Floats, confidence: float) -> Floats:
    """The predictable plug-in stakes: each from the mean and the variance of the values before it, with a prior of 1/2 and
    1/4.
    """
    count = np.arange(1, data.size + 1)
    running_mean = (0.5 + np.cumsum(data)) / (count + 1)
    running_variance = (0.25 + np.cumsum((data - running_mean) ** 2)) / (count + 1)
    before = np.concatenate([[0.25], running_variance[:-1]])
    return np.sqrt(2 * math.log(1 / (1 - confidence)) / (data.size * before))


def _shuffled(data: Floats) -> Floats:
    return np.random.default_rng(0).permutation(data)


def _checked(values: ArrayLike) -> Floats:
    data = np.asarray(values, dtype=np.float64)
    if data.ndim != 1 or data.size == 0:
        raise ValueError(f"expected a non-empty list of numbers, found shape {data.shape}")
    if not np.isfinite(data).all():
        raise ValueError("a value is NaN or infinite")
    return data


def _checked_unit(values: ArrayLike) -> Floats:
    data = _checked(values)
    if data.min() < 0 or data.max() > 1:
        raise ValueError(f"values from {data.min()} to {data.max()}; expected [0, 1]")
    return data
