"""The upper bound of a mean that is held against a limit, and that reports show: the same one everywhere.

Prompts that occur more than once, token for token, are no more evidence than one, and weigh as often as they occur: a bound is
the larger one of two, over all prompts and over the different ones, and only different ones count as prompts.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from verification import statistics

MIN_PROMPTS = 300
"""From here on the skew-corrected bound of a mean holds; with fewer prompts the guaranteed one is used."""

Values = NDArray[np.float64]
Mask = NDArray[np.bool_]


def are_few(different: Mask) -> bool:
    """Whether there are too few ``different`` prompts for any bound but the one that assumes nothing."""
    return int(different.sum()) < MIN_PROMPTS


def judged_bound(values: Values, different: Mask) -> float:
    """The 95 % upper bound of the mean of ``values`` (n,), which lie in [-1, 1]; ``different``: (n,) False for repetitions."""
    return larger(guaranteed if are_few(different) else statistics.smaller_upper_bound, values, different)


def guaranteed_bound(values: Values, different: Mask) -> float:
    """The same that assumes nothing, whatever the number of prompts."""
    return larger(guaranteed, values, different)


def larger(bound: Callable[[Values], float], values: Values, different: Mask) -> float:
    """The larger one of the bound over all ``values`` (n,) and over the ``different`` ones."""
    return bound(values) if different.all() else max(bound(values), bound(values[different]))


def guaranteed(values: Values) -> float:
    """For values with negative ones among them: without these the mean is no smaller, and the bound for [0, 1] applies."""
    return statistics.guaranteed_upper_bound(np.clip(values, 0, 1))
