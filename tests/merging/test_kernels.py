"""The compiled loops against float64 arithmetic and integer rounding written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lora_merge.merging import fused, kernels
from lora_merge.merging.dtypes import BY_NAME, round_float64, widen
from lora_merge.merging.operations import BoundLowRank, BoundRoundTrip, LowRank, RoundTrip, in_one_pass
from lora_merge.merging.quantization import QuantRecipe, block_scales
from tests.merging.oracle import rounded

NO_TRIP = (fused.NO_TRIP, 1, *4 * (np.empty(0, np.float32),))


def merged(weight: np.ndarray, b: np.ndarray, a: np.ndarray, scaling: float) -> tuple[torch.Tensor, int]:
    """float32 ``weight`` plus the update, and how many elements were settled in float64."""
    out = np.empty(weight.shape, np.uint16)
    update = BoundLowRank.of(LowRank(b, a, scaling))
    settled = fused.merge_to_bf16(weight.view(np.uint32), *NO_TRIP, *update.kernel_arguments(0, len(weight)), out)
    return torch.from_numpy(out.view(np.int16)).view(torch.bfloat16), settled


@pytest.mark.parametrize("rank", [1, 3, 4, 16, 37, 128])
@pytest.mark.parametrize("scale", [1e-6, 1e-2, 1.0, 30.0])
def test_low_rank_sum_is_correctly_rounded(rank, scale):
    """Oracle: numpy's float64 product and sum, rounded by comparing the two neighbours."""
    rng = np.random.default_rng(rank)
    weight = widen((rng.standard_normal((33, 257)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16), BY_NAME["BF16"])
    b, a = rng.standard_normal((33, rank)) * scale, rng.standard_normal((rank, 257))
    found, reworked = merged(weight, b, a, 1.7)
    assert torch.equal(found, rounded(weight.astype(np.float64) + 1.7 * (b @ a), torch.bfloat16))
    assert reworked < 0.05 * weight.size, "float64 should be the exception"


def test_sums_next_to_a_tie_are_decided_by_float64():
    """A delta just above, at and just below half a unit in the last place: float32 arithmetic cannot tell them apart."""
    weight = np.ones((3, 64), np.float32)
    half = 2.0**-8
    b = np.array([[half * (1 + 2.0**-40)], [half], [half * (1 - 2.0**-40)]])
    found, reworked = merged(weight, b, np.ones((1, 64)), 1.0)
    up = 1 + 2.0**-7
    assert found[:, 0].tolist() == [up, 1.0, 1.0], "above the tie: up; the tie: to the even neighbour; below: down"
    assert reworked == weight.size


def test_cancellation_is_covered_by_the_error_bound():
    """Weights that the update almost cancels: the float32 product's error is large against the result."""
    rng = np.random.default_rng(0)
    b, a = rng.standard_normal((16, 64)), rng.standard_normal((64, 256))
    weight = -(b @ a).astype(np.float32)
    found, reworked = merged(weight, b, a, 1.0)
    expected = rounded(weight.astype(np.float64) + b @ a, torch.bfloat16)
    relative = (found.double() - expected.double()).abs() / expected.double().abs()
    # What is left of a cancelled sum depends on the order of the float64 sum itself; ours and numpy's agree to bfloat16's
    # precision.
    assert relative.max() <= 2.0**-8 and (found != expected).double().mean() < 0.01
    assert reworked > 0.9 * weight.size


def random_patterns(rows: int, columns: int, scale: float) -> np.ndarray:
    rng = np.random.default_rng(rows)
    return ((rng.standard_normal((rows, columns)) * scale).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize(("block_size", "columns"), [(64, 192), (32, 96), (4096, 4096)])
@pytest.mark.parametrize("rank", [0, 1, 16, 19])
def test_one_pass_is_the_steps_one_after_the_other(quant_type, double_quant, block_size, columns, rank):
    """Oracle: the separate round trip (equal to CUDA's in test_quantization), then float64 arithmetic rounded once."""
    patterns = random_patterns(37, columns, 0.02)
    patterns[3, :64] = 0  # an all-zero block
    patterns[4, 5] = 0x8000  # -0.0
    values = widen(patterns, BY_NAME["BF16"])
    recipe = QuantRecipe(quant_type, double_quant, block_size)
    absmax = np.empty(values.size // block_size, np.float32)
    assert kernels.block_absmax(values.reshape(-1).view(np.uint32), block_size, absmax.view(np.uint32))
    trip = BoundRoundTrip(RoundTrip(recipe), columns, block_scales(absmax, recipe), exact=True)
    assert trip.fits_one_pass
    rng = np.random.default_rng(7)
    b, a = rng.standard_normal((37, rank)) * 0.02, rng.standard_normal((rank, columns)) * 0.02
    exact = trip.apply(values.copy(), 0, 37).astype(np.float64)
    if rank:
        exact += 1.5 * (b @ a)
    update = BoundLowRank.of(LowRank(b, a, 1.5)) if rank else None
    for start, stop in [(0, 37), (5, 18)]:
        found = in_one_pass(patterns[start:stop], start, stop, trip, update)
        expected = rounded(exact[start:stop], torch.bfloat16)
        assert torch.equal(torch.from_numpy(found.view(np.int16)).view(torch.bfloat16), expected)
        if not rank:  # to the bit, negative zeros included
            assert np.array_equal(found, expected.view(torch.int16).numpy().view(np.uint16))


@pytest.mark.parametrize("bad", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF])
@pytest.mark.parametrize("place", [(0, 0), (4, 63), (6, 64)])
def test_one_pass_gives_up_on_what_is_not_finite(bad, place):
    """Infinities and NaN of the base, and sums beyond bfloat16's largest number."""
    patterns = random_patterns(7, 65, 1.0)
    nothing = BoundLowRank.of(LowRank(np.zeros((7, 2)), np.zeros((2, 65)), 1.0))
    assert in_one_pass(patterns, 0, 7, None, nothing) is not None
    patterns[place] = bad
    assert in_one_pass(patterns, 0, 7, None, nothing) is None
    patterns[place] = 0x7F7F
    b, a = np.zeros((7, 1)), np.zeros((1, 65))
    b[place[0]], a[0, place[1]] = 1.0, 1e37
    assert in_one_pass(patterns, 0, 7, None, BoundLowRank.of(LowRank(b, a, 1.0))) is None


def test_float64_to_bfloat16_rounds_once():
    """Values that a float32 in between would round to a tie, and then to the wrong side."""
    tie = 1 + 2.0**-8
    values = np.array([tie + 2.0**-40, tie - 2.0**-40, tie, -(tie + 2.0**-40), 0.0, -0.0, 1e-45, 3.4e38, 1e300, -1e300, 5e-324])
    found = torch.from_numpy(round_float64(values, BY_NAME["BF16"]).view(np.int16)).view(torch.bfloat16)
    finite = found[:7].double().tolist()
    assert finite == [1 + 2.0**-7, 1.0, 1.0, -(1 + 2.0**-7), 0.0, 0.0, 0.0]
    assert torch.isinf(found[7:10]).all(), "beyond bfloat16's largest finite value"
    rng = np.random.default_rng(1)
    many = rng.standard_normal(100_000) * 10.0 ** rng.integers(-30, 30, 100_000)
    found = torch.from_numpy(round_float64(many, BY_NAME["BF16"]).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(found, rounded(many, torch.bfloat16))


def test_bfloat16_patterns_against_torch():
    """Every one of the 65,536 patterns widened, and a million float32 rounded. Oracle: torch."""
    patterns = np.arange(65536, dtype=np.uint16)
    expected = torch.from_numpy(patterns.view(np.int16)).view(torch.bfloat16).float()
    assert torch.equal(torch.from_numpy(widen(patterns, BY_NAME["BF16"])).view(torch.int32), expected.view(torch.int32))
    values = np.random.default_rng(2).standard_normal(1_000_000).astype(np.float32)
    found = values.copy()
    kernels.round_to_bf16(found.view(np.uint32))
    assert torch.equal(torch.from_numpy(found), torch.from_numpy(values).to(torch.bfloat16).float())


@pytest.mark.parametrize("bad", [0x7F80, 0xFF80, 0x7FC1, 0xFFFF])
@pytest.mark.parametrize("block_size", [32, 64, 4096])
def test_absmax_of_bfloat16_is_that_of_its_values(bad, block_size):
    """Oracle: numpy's maximum of the widened values, a partial last block included."""
    patterns = random_patterns(1, 10_001, 3.0).reshape(-1)
    absmax = np.empty(-(-patterns.size // block_size), np.float32)
    assert kernels.block_absmax_bf16(patterns, block_size, absmax.view(np.uint32))
    values = np.abs(widen(patterns, BY_NAME["BF16"]))
    expected = [values[start : start + block_size].max() for start in range(0, values.size, block_size)]
    assert np.array_equal(absmax, np.array(expected, np.float32))
    patterns[9_999] = bad
    assert not kernels.block_absmax_bf16(patterns, block_size, absmax.view(np.uint32))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_absmax_tells_of_what_is_not_finite(bad):
    values = np.random.default_rng(3).standard_normal(1000).astype(np.float32)
    absmax = np.empty(16, np.float32)
    assert kernels.block_absmax(values.view(np.uint32), 64, absmax.view(np.uint32))
    assert np.array_equal(absmax[:15], np.abs(values[:960]).reshape(15, 64).max(1)) and absmax[15] == np.abs(values[960:]).max()
    values[777] = bad
    assert not kernels.block_absmax(values.view(np.uint32), 64, absmax.view(np.uint32))
