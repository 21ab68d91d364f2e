"""Reads a planned tensor and the one that a checkpoint has in its place, block by block, under any list of operations."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lora_merge.merging.binding import BoundTensor, bind
from lora_merge.merging.dtypes import BY_NAME, DType, round_float64, round_through, widen
from lora_merge.merging.errors import MergeError
from lora_merge.merging.operations import BLOCK_ELEMENTS, Operation, matrix_shape
from lora_merge.merging.plan import TensorPlan
from lora_merge.merging.safetensors_file import TensorInfo, bytes_of, read_exactly

_BLOCKS_TO_EXPLAIN = 4
_FLOAT32 = BY_NAME["F32"]
_NARROWER = {"F32": ("BF16", "F16"), "F16": ("BF16",)}
"""The 16-bit types with fewer digits: what a checkpoint can have been before it was saved in the type on the left."""
Values = NDArray[np.float64]


_EPSILON = {"F32": 2.0**-23, "F16": 2.0**-10, "BF16": 2.0**-7}
_SMALLEST = {"F32": 2.0**-126, "F16": 2.0**-14, "BF16": 2.0**-126}
_CODE_STEP = 0.35
"""No two neighbouring codes of NF4 or FP4 lie farther apart, in units of the block's largest value."""


@dataclass(frozen=True)
class Tolerance:
    """How far rounding may carry an element from the plan.

    Attributes:
        quantized: whether the base goes through 4 bit. Machines disagree about a few codes and scales there.
    """

    quantized: bool

    def near(self, expected: Values, update: Values, *dtypes: DType) -> Values:
        """What rounding to each of ``dtypes`` explains: of the sum, and of an update that was computed in as few digits."""
        size = np.abs(expected)
        spacing = np.maximum.reduce([np.maximum(size, _SMALLEST[dtype.name]) * _EPSILON[dtype.name] for dtype in dtypes])
        near: Values = 1.5 * spacing + np.abs(update) / 64
        return near

    def far(self, near: Values, base: Values) -> Values:
        """What not even an element here and there may exceed. ``base``: (rows, columns), what the update was added to."""
        if not self.quantized:
            return 4 * near
        largest: Values = np.abs(base).max(axis=1).repeat(base.shape[1])
        return 4 * near + _CODE_STEP * largest


class TensorReader:
    """Reads one planned tensor and the one that was found, block by block.

    ``dtype``: what the plan is rounded to before it is held against the checkpoint: the type of the tensor found, unless a
    narrower one is given.
    """

    def __init__(self, tensor: TensorPlan, found: TensorInfo, dtype: DType | None = None) -> None:
        self.tensor = tensor
        self.found = found
        self.dtype = dtype or found.dtype
        self.elements = math.prod(tensor.shape)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> TensorReader:
        self._found = self._stack.enter_context(opened(self.found.path))
        self._source = self._stack.enter_context(opened(self.tensor.source.path))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def compare(self, operations: tuple[Operation, ...]) -> tuple[float, float]:
        """Over all blocks: the share of elements with other bits than planned, and the sum of their squared differences."""
        bound = self._bind(operations, self.dtype)
        differing, error = 0, 0.0
        for start, stop in bound.blocks:
            expected = self._stored(self._compute(bound, start, stop))
            weight = self._read_found(start * bound.columns, (stop - start) * bound.columns).reshape(expected.shape)
            bits = np.dtype(f"u{weight.itemsize}")
            other = weight.view(bits) != expected.view(bits)  # a zero of the other sign is other bits at no distance
            if not other.any():
                continue
            first, second = (widen(values[other], self.found.dtype).astype(np.float64) for values in (weight, expected))
            with np.errstate(invalid="ignore"):  # infinity less infinity is NaN, and NaN is what makes the error tell
                gap = first - second
            differing += gap.size
            error += float((gap * gap).sum())
        return differing / max(self.elements, 1), error

    def narrower(self) -> list[DType]:
        """The 16-bit types with fewer digits than the tensor's own that hold every one of its values."""
        candidates = [BY_NAME[name] for name in _NARROWER.get(self.found.dtype.name, ())]
        for start in range(0, self.elements if candidates else 0, BLOCK_ELEMENTS):
            values = widen(self._read_found(start, min(BLOCK_ELEMENTS, self.elements - start)), self.found.dtype)
            if not np.isfinite(values).all():
                return []
            candidates = [dtype for dtype in candidates if np.array_equal(round_through(values.copy(), dtype), values)]
            if not candidates:
                break
        return candidates

    def beyond(
        self, operations: tuple[Operation, ...], base: tuple[Operation, ...], tolerance: Tolerance
    ) -> Iterator[tuple[int, float, int]]:
        """Block by block: how many elements lie beyond ``tolerance.near`` of the plan, the sum of their squared differences, and
        how many lie beyond ``tolerance.far``.

        ``base``: the first of ``operations``, which make what the update is added to.
        """
        bound = self._bind(operations, _FLOAT32)
        for start, stop in bound.blocks:
            place = [(start * bound.columns, stop * bound.columns)]
            weight, expected, before = self.found_values(place), self.values(operations, place), self.values(base, place)
            gap = np.abs(weight - expected)
            near = tolerance.near(expected, expected - before, self.dtype, self.found.dtype)
            far = tolerance.far(near, before.reshape(-1, bound.columns))
            outside = gap > near
            yield int(outside.sum()), float((gap[outside] ** 2).sum()), int((gap > far).sum())

    def sample(self) -> list[tuple[int, int]]:
        """Element ranges of up to 4 blocks, evenly spread; blocks of the plan, so that every history has them at row ends."""
        bound = self._bind(self.tensor.operations, _FLOAT32)
        blocks = bound.blocks
        step = max(1, len(blocks) // _BLOCKS_TO_EXPLAIN)
        return [(start * bound.columns, stop * bound.columns) for start, stop in blocks[::step][:_BLOCKS_TO_EXPLAIN]]

    def values(self, operations: tuple[Operation, ...], ranges: list[tuple[int, int]]) -> NDArray[np.float64]:
        """The sampled elements after ``operations``, in float64 from float32, flattened."""
        bound = self._bind(operations, _FLOAT32)
        parts = []
        for start, stop in ranges:
            first, last = start // bound.columns, -(-stop // bound.columns)
            first -= first % self._multiple(operations, bound.columns)
            rows = self._compute(bound, first, min(last, bound.rows)).reshape(-1)
            parts.append(rows[start - first * bound.columns : stop - first * bound.columns].astype(np.float64))
        return np.concatenate(parts)

    def found_values(self, ranges: list[tuple[int, int]]) -> NDArray[np.float64]:
        """The sampled elements of the checkpoint, in float64, flattened."""
        parts = [widen(self._read_found(start, stop - start), self.found.dtype).astype(np.float64) for start, stop in ranges]
        return np.concatenate(parts)

    def _bind(self, operations: tuple[Operation, ...], dtype: DType) -> BoundTensor:
        columns = matrix_shape(self.tensor.source, operations)[1]
        return bind(self.tensor.source, dtype, operations, lambda start, stop: self._read_source(columns, start, stop))

    def _compute(self, bound: BoundTensor, start: int, stop: int) -> NDArray[Any]:
        return bound.compute(lambda first, last: self._read_source(bound.source_columns, first, last), start, stop)

    def _stored(self, expected: NDArray[Any]) -> NDArray[Any]:
        """What a computed block, in the carrier of :attr:`dtype`, becomes in the type that the checkpoint has it in."""
        if self.dtype == self.found.dtype:
            return expected
        return round_float64(widen(expected, self.dtype).astype(np.float64), self.found.dtype)

    @staticmethod
    def _multiple(operations: tuple[Operation, ...], columns: int) -> int:
        return math.lcm(*(operation.row_multiple(columns) for operation in operations)) if operations else 1

    def _read_source(self, columns: int, start: int, stop: int) -> NDArray[Any]:
        source = self.tensor.source
        values = np.empty((stop - start, columns), source.dtype.carrier)
        if values.size:
            read_exactly(self._source, source.start + start * columns * source.dtype.itemsize, bytes_of(values), source.path)
        return values

    def _read_found(self, start: int, count: int) -> NDArray[Any]:
        values = np.empty(count, self.found.dtype.carrier)
        if count:
            read_exactly(self._found, self.found.start + start * self.found.dtype.itemsize, bytes_of(values), self.found.path)
        return values


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """A file descriptor for reading."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise MergeError(f"{path}: cannot be read: {error.strerror or error}") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_bytes(tensor: TensorInfo) -> bytes:
    """All bytes of a tensor."""
    buffer = bytearray(tensor.nbytes)
    with opened(tensor.path) as descriptor:
        read_exactly(descriptor, tensor.start, memoryview(buffer), tensor.path)
    return bytes(buffer)


def rounded(values: NDArray[np.float64], dtype: DType) -> NDArray[np.float64]:
    """``values`` rounded to what ``dtype`` can hold."""
    return widen(round_float64(values, dtype), dtype).astype(np.float64)


def norm(values: NDArray[np.float64]) -> float:
    """The Euclidean norm."""
    return float(np.sqrt((values * values).sum()))
