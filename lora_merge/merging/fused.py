"""A block of a merge in one pass over its rows: widen, round trip, low-rank product, sum, one correct rounding to bfloat16.

**One correct rounding.** A merged weight is defined as ``round(w + s * sum_k b[k] a[k])`` with the arithmetic in float64 and a
single rounding to the output type. Doing all of it in float64 would cost twice the memory traffic, so the low-rank product is
taken in float32 together with a bound of its error, and only the few elements whose rounding the bound leaves open (a few in ten
thousand) are computed again in float64. The result is therefore the same on every machine, whatever its block size or number of
threads. The bound is the usual one for sums of products (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section
3.1): after n roundings of a term ``|error| <= n u / (1 - n u) * sum_k |b[k]| |a[k]|`` with ``u = 2**-24``, and the sum is at most
``|b| |a|`` by Cauchy and Schwarz.

A row's intermediate values stay in the first-level cache: that, and not arithmetic, is what one pass saves.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from lora_merge.merging.kernels import NF4_TRIP, NO_TRIP, NOT_FINITE
from lora_merge.merging.loops import (
    bf16_of_float64,
    compiled,
    contracted,
    largest_magnitude,
    round_to_bf16,
    round_trip_fp4,
    round_trip_nf4,
)

_INFINITY = 0x7F80  # the pattern of a bfloat16


@intrinsic
def _pattern(typingctx: Any, value: Any) -> Any:
    """The bits of a float32 as uint32."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), code


@contracted
def _product_of_two_rows(b: NDArray[np.float32], a: NDArray[np.float32], delta: NDArray[np.float32]) -> None:
    """``delta`` (2, columns) = ``b`` (2, rank) @ ``a`` (rank, columns).

    Two rows at a time, so that a loaded piece of ``a`` serves both; four ranks at a time, so that ``delta`` is touched less.
    """
    rank = a.shape[0]
    delta[:, :] = np.float32(0.0)
    d0, d1 = delta[0], delta[1]
    whole = rank // 4 * 4
    for k in range(0, whole, 4):
        p0, p1, p2, p3 = b[0, k], b[0, k + 1], b[0, k + 2], b[0, k + 3]
        q0, q1, q2, q3 = b[1, k], b[1, k + 1], b[1, k + 2], b[1, k + 3]
        a0, a1, a2, a3 = a[k], a[k + 1], a[k + 2], a[k + 3]
        for j in range(d0.shape[0]):
            x0, x1, x2, x3 = a0[j], a1[j], a2[j], a3[j]
            d0[j] += (p0 * x0 + p1 * x1) + (p2 * x2 + p3 * x3)
            d1[j] += (q0 * x0 + q1 * x1) + (q2 * x2 + q3 * x3)
    for k in range(whole, rank):
        p0, q0 = b[0, k], b[1, k]
        a0 = a[k]
        for j in range(d0.shape[0]):
            d0[j] += p0 * a0[j]
            d1[j] += q0 * a0[j]


@contracted
def _round_between(
    weight: NDArray[np.float32],
    delta: NDArray[np.float32],
    coefficient: np.float32,
    a_norms: NDArray[np.float32],
    out: NDArray[np.uint16],
    open_: NDArray[np.uint16],
) -> Any:
    """Round ``weight + delta`` (columns,) to bfloat16 and mark in ``open_`` what that leaves open.

    ``delta`` is off by ``coefficient * a_norms`` at most; the sum and the two ends of the bracket are themselves rounded, each by
    at most ``2**-24`` of the value: 2.5 of these cover all, and the least normal number covers what underflows. (A subnormal one
    would do, but where a fused multiply-add meets a subnormal operand Intel's processors take a hundred cycles more.) Both ends
    are rounded to nearest with ties away from zero, which needs no look at the last bit: the exact value lies strictly between
    them, so where both give the same number that is its rounding, and a tie at one end falls to the other side of it. Returns
    whether any element is open.
    """
    relative = np.float32(2.5 * 2.0**-24)
    underflow = np.float32(2.0**-126)
    half = np.uint32(0x8000)
    sixteen = np.uint32(16)
    any_open = np.uint32(0)
    for j in range(out.shape[0]):
        value = weight[j] + delta[j]
        margin = coefficient * a_norms[j] + (relative * abs(value) + underflow)
        low = (_pattern(value - margin) + half) >> sixteen
        high = (_pattern(value + margin) + half) >> sixteen
        out[j] = np.uint16(low)
        open_[j] = np.uint16(low ^ high)
        any_open |= low ^ high
    return any_open != np.uint32(0)


@compiled
def _settle(
    weight: NDArray[np.float32],
    b: NDArray[np.float64],
    a: NDArray[np.float64],
    scaling: float,
    open_: NDArray[np.uint16],
    out: NDArray[np.uint16],
    scratch: NDArray[np.float32],
) -> int:
    """Compute the elements that are marked in ``open_`` in float64; returns how many.

    ``open_`` is a multiple of 128 long, so that most of it is passed over 128 marks at a time.
    """
    scratch_bits = scratch.view(np.uint32)
    words = open_.view(np.uint64)
    settled = 0
    for first in range(0, words.shape[0], 32):
        any_open = np.uint64(0)
        for word in range(first, first + 32):
            any_open |= words[word]
        if any_open != np.uint64(0):
            for j in range(4 * first, min(4 * first + 128, out.shape[0])):
                if open_[j] != np.uint16(0):
                    total = 0.0
                    for k in range(b.shape[0]):
                        total += b[k] * a[k, j]
                    out[j] = bf16_of_float64(np.float64(weight[j]) + scaling * total, scratch, scratch_bits)
                    settled += 1
    return settled


@compiled
def _error_coefficient(b: NDArray[np.float64], scaling: float) -> Any:
    """What the norms of ``a``'s columns are multiplied with to bound the error of one row ``b`` (rank,) of the product.

    One term goes through float32(scaling * b), float32(a), their product, two sums inside its group of four and one sum a group
    (or a leftover rank); the last 1 covers the rounding of the norms.
    """
    rank = b.shape[0]
    roundings = 5 + rank // 4 + rank % 4 + 1
    square = 0.0
    for k in range(rank):
        square += b[k] * b[k]
    return np.float32(roundings * 2.0**-24 * 1.01 * abs(scaling) * np.sqrt(square))


@compiled
def _take_row(source: NDArray[Any], shift: np.uint32, weight_bits: NDArray[np.uint32]) -> Any:
    """Write the float32 patterns of a row of ``source`` to ``weight_bits``; returns whether all of them are finite."""
    largest = np.uint32(0)
    for j in range(weight_bits.shape[0]):
        bits = np.uint32(source[j]) << shift
        weight_bits[j] = bits
        largest = max(largest, bits & np.uint32(0x7FFFFFFF))
    return largest < np.uint32(0x7F800000)


@compiled
def _narrow_row(weight_bits: NDArray[np.uint32], out: NDArray[np.uint16]) -> None:
    """What a round trip to bfloat16 left, as bfloat16, negative zeros included."""
    for j in range(out.shape[0]):
        out[j] = np.uint16(weight_bits[j] >> np.uint32(16))


@compiled
def merge_to_bf16(
    source: NDArray[Any],
    trip: int,
    block_size: int,
    inverses: NDArray[np.float32],
    scales: NDArray[np.float32],
    levels: NDArray[np.float32],
    bounds: NDArray[np.float32],
    b: NDArray[np.float64],
    a: NDArray[np.float64],
    b32: NDArray[np.float32],
    a32: NDArray[np.float32],
    scaling: float,
    a_norms: NDArray[np.float32],
    out: NDArray[np.uint16],
) -> int:
    """Write ``round(trip(source) + scaling * b @ a)`` to ``out``, correctly rounded to bfloat16.

    Args:
        source: (rows, in_features): the patterns of bfloat16 (uint16) or of float32 (uint32). A round trip needs rows that are a
            whole number of its blocks long, and rounds its result to bfloat16, as training from bfloat16 did.
        trip: ``NO_TRIP``, ``NF4_TRIP`` or ``FP4_TRIP``; then ``block_size`` and (blocks of these rows,) ``inverses`` and
            ``scales``, and ``levels`` and ``bounds`` as for :func:`~lora_merge.merging.loops.round_trip_nf4`.
        b, a: (rows, rank) and (rank, in_features), the adapter's halves in float64; rank 0 adds nothing.
        b32, a32: ``float32(scaling * b)`` and ``float32(a)``.
        a_norms: (in_features,), the Euclidean norms of the columns of ``a``.
        out: (rows, in_features), receives bfloat16 patterns.

    Returns how many elements needed float64, or ``NOT_FINITE`` where a value of ``source`` or ``out`` is not finite; then what
    was written means nothing.
    """
    rows, columns = source.shape
    shift = np.uint32(16 if source.itemsize == 2 else 0)
    delta = np.empty((2, columns), np.float32)
    pair = np.zeros((2, a.shape[0]), np.float32)
    weight = np.empty(columns, np.float32)
    weight_bits = weight.view(np.uint32)
    open_ = np.zeros((columns + 127) // 128 * 128, np.uint16)
    scratch = np.empty(1, np.float32)
    settled = 0
    for row in range(rows):
        if row % 2 == 0 and a.shape[0] > 0:
            pair[0] = b32[row]
            pair[1] = b32[min(row + 1, rows - 1)]
            _product_of_two_rows(pair, a32, delta)
        if not _take_row(source[row], shift, weight_bits):
            return NOT_FINITE
        if trip != NO_TRIP:
            first, last = row * (columns // block_size), (row + 1) * (columns // block_size)
            if trip == NF4_TRIP:
                round_trip_nf4(weight, block_size, inverses[first:last], scales[first:last], levels, bounds)
            else:
                round_trip_fp4(weight, block_size, inverses[first:last], scales[first:last], levels, bounds)
            round_to_bf16(weight_bits)
        if a.shape[0] == 0:
            _narrow_row(weight_bits, out[row])
            continue
        coefficient = _error_coefficient(b[row], scaling)
        if _round_between(weight, delta[row % 2], coefficient, a_norms, out[row], open_):
            settled += _settle(weight, b[row], a, scaling, open_, out[row], scratch)
        if largest_magnitude(out[row]) >= _INFINITY:
            return NOT_FINITE
    return settled
