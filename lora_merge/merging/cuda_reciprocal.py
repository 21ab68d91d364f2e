"""The reciprocal that CUDA's quantization kernels multiply with.

bitsandbytes is compiled with fast arithmetic, so that ``1 / absmax`` is the instruction ``rcp.approx.ftz.f32``: exact for most
arguments and one unit in the last place off for the others. Which ones depends on the argument's mantissa only. For the mantissas
that bfloat16 and float16 weights can have, those of ten bits or fewer, the exceptions are listed here, as measured on an H200
(benchmarks/gpu/equivalence.py, docs/results/gpu-equivalence.json); bfloat16's are those divisible by eight. Float32 weights have
eight million mantissas, an eighth of them exceptions; they get the exact reciprocal, and docs/adapters.md says what that changes.

It matters for FP4, whose thresholds are ratios that weights hit exactly: one unit then decides about the code.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MANTISSA_BITS = 10
# fmt: off
_ONE_TOO_SMALL = (
    6, 14, 32, 46, 62, 70, 77, 86, 87, 88, 126, 127, 135, 160, 176, 179, 214, 219, 221, 274, 287, 325, 349, 401, 415, 443, 445,
    473, 474, 558, 614, 751, 783, 950, 954, 956, 957, 965, 1010, 1016,
)
_ONE_TOO_LARGE = (
    11, 17, 18, 20, 48, 91, 97, 98, 104, 105, 113, 138, 147, 148, 153, 203, 204, 209, 225, 226, 252, 260, 296, 298, 304, 305,
    346, 371, 386, 395, 396, 403, 408, 409, 417, 425, 439, 449, 453, 454, 458, 467, 481, 488, 498, 505, 507, 519, 520, 521,
    528, 531, 543, 547, 563, 564, 627, 647, 648, 650, 651, 667, 675, 676, 687, 700, 701, 724, 728, 785, 786, 787, 789, 805,
    807, 813, 823, 872, 874, 876, 878, 893, 920, 923, 928, 944, 968, 987, 988, 997,
)
# fmt: on

_UNITS_OFF = np.zeros(1 << _MANTISSA_BITS, np.int32)
_UNITS_OFF[list(_ONE_TOO_SMALL)] = -1
_UNITS_OFF[list(_ONE_TOO_LARGE)] = 1


def cuda_reciprocal(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """``1 / values`` (n,), all at least zero, as CUDA computes it where the mantissa has ten bits or fewer, else exactly.

    Zero gives infinity.
    """
    with np.errstate(divide="ignore"):
        exact = np.float32(1) / values
    bits = values.view(np.int32)
    low = 23 - _MANTISSA_BITS
    mantissa = (bits & 0x7FFFFF) >> low
    listed = ((bits & ((1 << low) - 1)) == 0) & (bits >= 0x800000)
    adjusted: NDArray[np.int32] = exact.view(np.int32) + np.where(listed, _UNITS_OFF[mantissa], 0)
    return adjusted.view(np.float32)
