"""Compiled loops over blocks of rows: widen, absmax, 4-bit round trip, rounding.

Every kernel works on arrays that fit a core's cache and releases the interpreter lock, so that a pool of threads keeps all
cores busy while another thread reads and a third one writes. Nothing here contracts a multiplication and an addition into one
instruction, so results do not depend on the processor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numba import njit
from numpy.typing import NDArray

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def compiled(function: Kernel) -> Kernel:
    """Compile ``function`` without the interpreter lock, cached on disk where a cache can be written."""
    try:
        return njit(nogil=True, cache=True, error_model="numpy")(function)  # type: ignore[no-any-return]
    except RuntimeError:
        # A read-only installation without a writable home has no place for a cache; compiling costs a few seconds a run.
        return njit(nogil=True, error_model="numpy")(function)  # type: ignore[no-any-return]


def contracted(function: Kernel) -> Kernel:
    """Like :func:`compiled`, and free to fuse a multiplication and an addition, where only an error bound counts."""
    try:
        return njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})(function)  # type: ignore[no-any-return]
    except RuntimeError:
        return njit(nogil=True, error_model="numpy", fastmath={"contract"})(function)  # type: ignore[no-any-return]


@compiled
def widen_bf16(source: NDArray[np.uint16], target: NDArray[np.uint32]) -> None:
    """Write the float32 bit patterns of bfloat16 ``source`` (n,) to ``target`` (n,)."""
    for i in range(source.shape[0]):
        target[i] = np.uint32(source[i]) << np.uint32(16)


@compiled
def round_to_bf16(bits: NDArray[np.uint32]) -> None:
    """Round float32 bit patterns (n,) to bfloat16 in place, to nearest, ties to even; the low halves become zero."""
    for i in range(bits.shape[0]):
        value = bits[i]
        bits[i] = (value + np.uint32(0x7FFF) + ((value >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)


@compiled
def block_absmax(bits: NDArray[np.uint32], block_size: int, absmax_bits: NDArray[np.uint32]) -> bool:
    """Write the largest magnitude of every block of float32 patterns (n,) to ``absmax_bits`` (ceil(n / block_size),).

    Without their sign bit, float32 patterns order like the numbers they stand for, and integers have a vector maximum that
    needs no care for NaN. Returns False when a value is NaN or infinite.
    """
    finite = True
    for block in range(absmax_bits.shape[0]):
        part = bits[block * block_size : (block + 1) * block_size]
        largest = np.uint32(0)
        for i in range(part.shape[0]):
            largest = max(largest, part[i] & np.uint32(0x7FFFFFFF))
        absmax_bits[block] = largest
        if largest >= np.uint32(0x7F800000):
            finite = False
    return finite


@compiled
def block_absmax_bf16(patterns: NDArray[np.uint16], block_size: int, absmax_bits: NDArray[np.uint32]) -> bool:
    """:func:`block_absmax` of bfloat16 patterns (n,); the maxima are float32 patterns all the same."""
    finite = True
    for block in range(absmax_bits.shape[0]):
        part = patterns[block * block_size : (block + 1) * block_size]
        largest = np.uint32(0)
        for i in range(part.shape[0]):
            largest = max(largest, np.uint32(part[i] & np.uint16(0x7FFF)))
        absmax_bits[block] = largest << np.uint32(16)
        if largest >= np.uint32(0x7F80):
            finite = False
    return finite


@compiled
def round_trip_nf4(
    values: NDArray[np.float32],
    block_size: int,
    inverses: NDArray[np.float32],
    scales: NDArray[np.float32],
    levels: NDArray[np.float32],
    bounds: NDArray[np.float32],
) -> None:
    """Replace ``values`` (n,) by what NF4 makes of them, block by block, in float32.

    ``inverses`` (blocks,) are the reciprocals of the exact absmax, which codes are taken with; ``scales`` (blocks,) are the
    stored absmax, which multiply the ``levels`` (16,) again: under double quantization the two differ. ``bounds`` (15,) are the
    thresholds between levels; a value equal to a threshold takes the lower level, as on CUDA. An all-zero block has no
    reciprocal: its products are NaN, every comparison fails and it takes level 0, again as on CUDA.
    """
    # Local names, because the compiler must assume that writing `values` changes an array but knows that it changes no local.
    l0, l1, l2, l3, l4, l5, l6, l7 = levels[0], levels[1], levels[2], levels[3], levels[4], levels[5], levels[6], levels[7]
    l8, l9, l10, l11 = levels[8], levels[9], levels[10], levels[11]
    l12, l13, l14, l15 = levels[12], levels[13], levels[14], levels[15]
    t1, t2, t3, t4, t5, t6, t7, t8 = bounds[0], bounds[1], bounds[2], bounds[3], bounds[4], bounds[5], bounds[6], bounds[7]
    t9, t10, t11, t12, t13, t14, t15 = bounds[8], bounds[9], bounds[10], bounds[11], bounds[12], bounds[13], bounds[14]
    for block in range(inverses.shape[0]):
        start = block * block_size
        inverse = inverses[block]
        scale = scales[block]
        part = values[start : start + block_size]
        for i in range(part.shape[0]):
            x = part[i] * inverse
            # A chain of selections instead of a table look-up: it vectorizes, a gather from memory does not.
            level = l1 if x > t1 else l0
            level = l2 if x > t2 else level
            level = l3 if x > t3 else level
            level = l4 if x > t4 else level
            level = l5 if x > t5 else level
            level = l6 if x > t6 else level
            level = l7 if x > t7 else level
            level = l8 if x > t8 else level
            level = l9 if x > t9 else level
            level = l10 if x > t10 else level
            level = l11 if x > t11 else level
            level = l12 if x > t12 else level
            level = l13 if x > t13 else level
            level = l14 if x > t14 else level
            level = l15 if x > t15 else level
            part[i] = level * scale


@compiled
def round_trip_fp4(
    values: NDArray[np.float32],
    block_size: int,
    inverses: NDArray[np.float32],
    scales: NDArray[np.float32],
    levels: NDArray[np.float32],
    bounds: NDArray[np.float32],
) -> None:
    """The FP4 counterpart of :func:`round_trip_nf4`: ``levels`` (8,) and ``bounds`` (7,) are those of the magnitude."""
    l0, l1, l2, l3, l4, l5, l6, l7 = levels[0], levels[1], levels[2], levels[3], levels[4], levels[5], levels[6], levels[7]
    t1, t2, t3, t4, t5, t6, t7 = bounds[0], bounds[1], bounds[2], bounds[3], bounds[4], bounds[5], bounds[6]
    for block in range(inverses.shape[0]):
        start = block * block_size
        inverse = inverses[block]
        scale = scales[block]
        part = values[start : start + block_size]
        for i in range(part.shape[0]):
            x = part[i] * inverse
            magnitude = abs(x)
            level = l1 if magnitude > t1 else l0
            level = l2 if magnitude > t2 else level
            level = l3 if magnitude > t3 else level
            level = l4 if magnitude > t4 else level
            level = l5 if magnitude > t5 else level
            level = l6 if magnitude > t6 else level
            level = l7 if magnitude > t7 else level
            level = -level if x < np.float32(0.0) else level
            part[i] = level * scale


@compiled
def dynamic_code(x: np.float32, code: NDArray[np.float32]) -> int:
    """The index in ``code`` (256, ascending) that CUDA's kernel finds for ``x``, step by step.

    It halves its step from 64 to 1 around index 127 and then settles by one midpoint; at equal distances and at the ends of the
    table that differs from a nearest-neighbour search. Source: ``dQuantize`` in bitsandbytes' CUDA kernels, which the recorded
    CUDA results in the tests confirm.
    """
    pivot, upper_pivot, lower_pivot = 127, 255, 0
    lower, upper = np.float32(-1.0), np.float32(1.0)
    value = code[pivot]
    step = 64
    while step > 0:
        if x > value:
            lower_pivot, lower = pivot, value
            pivot += step
        else:
            upper_pivot, upper = pivot, value
            pivot -= step
        value = code[pivot]
        step >>= 1
    if upper_pivot == 255:
        upper = code[upper_pivot]
    if lower_pivot == 0:
        lower = code[lower_pivot]
    if x > value:
        return upper_pivot if x > (upper + value) * np.float32(0.5) else pivot
    return lower_pivot if x < (lower + value) * np.float32(0.5) else pivot


@compiled
def dynamic_cells(code: NDArray[np.float32], near: NDArray[np.uint8], far: NDArray[np.uint8], bounds: NDArray[np.uint32]) -> None:
    """Tabulate :func:`dynamic_code` by the upper half of a float32's pattern, (65536,) each.

    A cell of that grid spans a 256th of its magnitude, less than the levels of ``code`` are apart: so it holds at most one
    threshold. A pattern from ``bounds`` on has the index ``far``, one below it ``near``.
    """
    scratch = np.empty(1, np.uint32)
    value = scratch.view(np.float32)
    for cell in range(65536):
        low, high = cell << 16, (cell << 16) | 0xFFFF
        scratch[0] = np.uint32(low)
        near[cell] = dynamic_code(value[0], code)
        scratch[0] = np.uint32(high)
        far[cell] = dynamic_code(value[0], code)
        if (cell & 0x7FFF) == 0x7F80:
            continue  # infinity is alone in its cell with NaN, and is looked for step by step
        while high - low > 1 and near[cell] != far[cell]:
            middle = (low + high) // 2
            scratch[0] = np.uint32(middle)
            if dynamic_code(value[0], code) == near[cell]:
                low = middle
            else:
                high = middle
        bounds[cell] = np.uint32(high)


@compiled
def quantize_dynamic_8bit(
    values: NDArray[np.float32],
    block_size: int,
    code: NDArray[np.float32],
    near: NDArray[np.uint8],
    far: NDArray[np.uint8],
    bounds: NDArray[np.uint32],
    absmax: NDArray[np.float32],
) -> NDArray[np.uint8]:
    """Quantize ``values`` (n,) to indices of ``code`` (256, ascending) in blocks, as CUDA's kernel does.

    ``near``, ``far`` and ``bounds`` are :func:`dynamic_cells` of ``code``, ``absmax`` (blocks,) is an output.
    """
    out = np.empty(values.shape[0], np.uint8)
    scratch = np.empty(1, np.float32)
    pattern = scratch.view(np.uint32)
    for block in range(absmax.shape[0]):
        start = block * block_size
        stop = min(start + block_size, values.shape[0])
        largest = np.float32(0.0)
        for i in range(start, stop):
            magnitude = abs(values[i])
            largest = max(largest, magnitude)
        absmax[block] = largest
        inverse = np.float32(1.0) / largest
        for i in range(start, stop):
            scratch[0] = values[i] * inverse
            bits = pattern[0]
            if (bits & np.uint32(0x7FFF0000)) == np.uint32(0x7F800000):
                out[i] = dynamic_code(scratch[0], code)
            else:
                cell = bits >> np.uint32(16)
                out[i] = far[cell] if bits >= bounds[cell] else near[cell]
    return out


@compiled
def bf16_of_float64(value: np.float64, scratch: NDArray[np.float32], scratch_bits: NDArray[np.uint32]) -> Any:
    """Round float64 to bfloat16 once: a float32 in between is rounded to odd, which keeps the second rounding right.

    Boldo and Melquiond, "Emulation of a FMA and Correctly Rounded Sums", IEEE Transactions on Computers 57(4), 2008.
    """
    near = np.float32(value)
    scratch[0] = near
    bits = scratch_bits[0]
    if np.float64(near) != value and (bits & np.uint32(1)) == np.uint32(0):
        # Step to the odd neighbour on the side of the exact value.
        away = abs(np.float64(near)) < abs(value)
        bits = bits + np.uint32(1) if away else bits - np.uint32(1)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@compiled
def largest_magnitude(bits: NDArray[Any]) -> int:
    """The largest pattern in ``bits`` (n,) of a float type (uint16 or uint32) without its sign bit; 0 when empty.

    Patterns without their sign order like magnitudes, with infinities and NaN above all finite numbers.
    """
    mask = bits.dtype.type(0x7FFFFFFF if bits.itemsize == 4 else 0x7FFF)
    largest = np.uint32(0)  # 32 bits wide for either type: the compiler makes vector instructions of that
    for i in range(bits.shape[0]):
        largest = max(largest, np.uint32(bits[i] & mask))
    return int(largest)


@compiled
def float64_to_bf16(values: NDArray[np.float64], out: NDArray[np.uint16]) -> None:
    """Round float64 ``values`` (n,) to bfloat16 bit patterns ``out`` (n,), once, to nearest, ties to even."""
    scratch = np.empty(1, np.float32)
    scratch_bits = scratch.view(np.uint32)
    for i in range(values.shape[0]):
        out[i] = bf16_of_float64(values[i], scratch, scratch_bits)
