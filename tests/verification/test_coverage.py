"""How often a checkpoint that is no better than the limit would pass: the coverage of the bounds, by simulation.

The populations are real \\|drift\\| and three nastier ones. Samples are drawn from them with replacement, so the true mean is
known.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from verification import statistics

REAL = np.loadtxt(Path(__file__).parent / "data" / "abs_drift_gemma3_270m.txt")
LIMIT = 0.02
RUNS = 3000


def _population(name: str) -> NDArray[np.float64]:
    """About 100,000 values in [0, 1] with the stated shape."""
    rng = np.random.default_rng(17)
    if name == "real":
        return REAL
    if name == "heavy-tailed":  # logits moved by noise of three degrees of freedom
        logits = rng.normal(0, 3, 100_000)
        moved = logits + 0.08 * rng.standard_t(3, logits.size)
        return np.abs(1 / (1 + np.exp(-moved)) - 1 / (1 + np.exp(-logits)))
    if name == "lognormal":
        return np.minimum(np.exp(rng.normal(-5, 1, 100_000)), 1)
    assert name == "damaged"  # one prompt in a hundred is far off
    return np.where(rng.random(100_000) < 0.01, 0.3, rng.choice(REAL, 100_000))


POPULATIONS = ("real", "heavy-tailed", "lognormal", "damaged")


def pass_rate(population: NDArray[np.float64], true_mean: float, size: int, runs: int = RUNS) -> float:
    """How often samples of a population, scaled to ``true_mean``, have their bound at or below the limit."""
    rng = np.random.default_rng(size)
    scaled = population * (true_mean / population.mean())
    samples = (scaled[rng.integers(0, scaled.size, size)].clip(max=1) for _ in range(runs))
    return sum(statistics.smaller_upper_bound(sample) <= LIMIT for sample in samples) / runs


@pytest.mark.parametrize("size", [300, 600, 1000, 3000])
def test_real_drift_at_the_limit_passes_at_most_5_percent(size: int) -> None:
    assert pass_rate(REAL, LIMIT, size) <= 0.05


@pytest.mark.parametrize("name", POPULATIONS[1:])
@pytest.mark.parametrize("size", [300, 1000])
def test_nastier_drift_at_the_limit_passes_at_most_5_percent(name: str, size: int) -> None:
    # Three standard errors of the simulation on top.
    assert pass_rate(_population(name), LIMIT, size) <= 0.05 + 3 * (0.05 * 0.95 / RUNS) ** 0.5


@pytest.mark.parametrize("size", [300, 3000])
def test_drift_above_the_limit_hardly_ever_passes(size: int) -> None:
    assert pass_rate(REAL, 1.15 * LIMIT, size, runs=1000) <= 0.01


@pytest.mark.parametrize(("size", "share"), [(300, 0.7), (1000, 0.6), (3000, 0.8)])
def test_drift_well_below_the_limit_passes(size: int, share: float) -> None:
    """The bound is no excuse to refuse everything: a true mean of ``share`` of the limit is enough at ``size`` prompts."""
    assert pass_rate(REAL, share * LIMIT, size, runs=500) >= 0.9


@pytest.mark.parametrize("size", [300, 1000])
def test_a_t_bound_would_pass_too_often(size: int) -> None:
    """Why there is a correction at all."""
    population = _population("heavy-tailed")
    rng = np.random.default_rng(size)
    samples = population[rng.integers(0, population.size, (RUNS, size))]
    bounds = samples.mean(axis=1) + stats.t.ppf(0.95, size - 1) * samples.std(axis=1, ddof=1) / np.sqrt(size)
    assert (bounds < population.mean()).mean() > 0.06


@pytest.mark.parametrize("name", POPULATIONS)
def test_the_guaranteed_bound_covers_everything(name: str) -> None:
    population = _population(name)
    rng = np.random.default_rng(3)
    samples = (population[rng.integers(0, population.size, 200)] for _ in range(300))
    misses = sum(statistics.guaranteed_upper_bound(sample) < population.mean() for sample in samples)
    assert misses <= 0.05 * 300
