"""A tensor with all its operations, bound and ready to be computed block by block on the processor."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lora_merge.merging import kernels
from lora_merge.merging.dtypes import DType, round_float64, widen
from lora_merge.merging.errors import MergeError
from lora_merge.merging.operations import (
    BLOCK_ELEMENTS,
    BoundLowRank,
    BoundRoundTrip,
    Decoder,
    Operation,
    ReadRows,
    Rows,
    Step,
    Values,
    as_matrix,
    block_ranges,
    in_one_pass,
    matrix_shape,
    result_shape,
)
from lora_merge.merging.safetensors_file import TensorInfo


class Bound(Protocol):
    """A tensor with its operations, ready to be computed block by block from any thread, wherever the arithmetic runs."""

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """The row ranges ``(start, stop)`` to compute, in order."""
        ...

    def compute(self, read_rows: ReadRows, start: int, stop: int) -> NDArray[Any]:
        """Rows ``[start, stop)``, one of :attr:`blocks`, in the carrier type of the result; raises :class:`MergeError`."""
        ...


@dataclass(frozen=True)
class BoundTensor:
    """A :class:`Bound` tensor that the processor computes, in constant memory.

    Attributes:
        source: the tensor in its file.
        dtype: type of the result.
        rows, columns: the result as a matrix.
        block_rows: rows a block.
        source_columns: columns of the matrix that ``read_rows`` is asked in; see :func:`matrix_shape`.
    """

    source: TensorInfo
    dtype: DType
    rows: int
    columns: int
    block_rows: int
    source_columns: int
    decode: Callable[[ReadRows, int, int], NDArray[np.float32]] | None
    steps: tuple[Step, ...]

    @property
    def copied(self) -> bool:
        """Whether the result holds the source's bytes unchanged."""
        return self.decode is None and not self.steps and self.dtype == self.source.dtype

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """The row ranges ``(start, stop)`` to compute, in order."""
        return block_ranges(self.rows, self.block_rows)

    def compute(self, read_rows: ReadRows, start: int, stop: int) -> NDArray[Any]:
        """Rows ``[start, stop)`` (one of :attr:`blocks`) of the result in its carrier type, shape (stop - start, columns).

        Raises:
            MergeError: a result is NaN or infinite.
        """
        if self.decode:
            values: Values = self.decode(read_rows, start, stop)
        else:
            stored = read_rows(start, stop)
            if self.copied:
                return stored
            merged = self._in_one_pass(stored, start, stop)
            if merged is not None:
                return merged
            values = widen(stored, self.source.dtype)
        self._check_finite(values, start, "the base's value", self.source.dtype)
        for step in self.steps[:-1]:
            values = step.apply(values, start, stop)
        if self.steps:
            result = self.steps[-1].rounded(values, start, stop, self.dtype)
        else:
            result = round_float64(values.astype(np.float64), self.dtype)
        self._check_finite(result, start, "the merged value", self.dtype)
        return result

    def _in_one_pass(self, stored: NDArray[Any], start: int, stop: int) -> NDArray[Any] | None:
        """The result of the usual case, a bfloat16 weight with a round trip, one update or both; None for any other."""
        trip = self.steps[0] if self.steps and isinstance(self.steps[0], BoundRoundTrip) else None
        rest = self.steps[1:] if trip else self.steps
        update = rest[0] if rest and isinstance(rest[0], BoundLowRank) else None
        if len(self.steps) != (trip is not None) + (update is not None) or (trip and not trip.fits_one_pass):
            return None
        if not self.steps or self.source.dtype.name != "BF16" or self.dtype.name != "BF16":
            return None
        return in_one_pass(stored, start, stop, trip, update)

    def _check_finite(self, values: NDArray[Any], start: int, what: str, dtype: DType) -> None:
        """Raise where a value is NaN or infinite. Integer rounding would carry some NaN patterns over to zero."""
        bits: NDArray[Any] = values.view(np.uint32 if values.itemsize == 4 else np.uint16)
        infinity = 0x7F800000 if values.itemsize == 4 else {"BF16": 0x7F80, "F16": 0x7C00}[dtype.name]
        if kernels.largest_magnitude(bits.reshape(-1)) >= infinity:
            magnitude = bits & (0x7FFFFFFF if values.itemsize == 4 else 0x7FFF)
            row, column = np.argwhere(magnitude >= infinity)[0]
            raise not_finite(self.source, what, start + int(row), int(column), dtype)


def not_finite(source: TensorInfo, what: str, row: int, column: int, dtype: DType) -> MergeError:
    return MergeError(
        f"{source.name}: {what} at [{row}, {column}] is not finite in {dtype.torch_name}; "
        "the base is damaged, or the type is too narrow: try --dtype bfloat16 or float32"
    )


def bind(source: TensorInfo, dtype: DType, operations: tuple[Operation, ...], read_rows: ReadRows) -> BoundTensor:
    """Read once what ``operations`` on ``source`` need.

    Operations that must see the whole tensor first (a round trip, norms over columns) read it here, each in one pass in order.
    ``read_rows`` speaks in rows of :func:`matrix_shape` and is used during this call only.
    """
    rows, columns = as_matrix(result_shape(source, operations), operations)
    decoder = operations[0] if operations and isinstance(operations[0], Decoder) else None
    decode = decoder.bind_decoder(columns) if decoder else None
    multiple = math.lcm(*(operation.row_multiple(columns) for operation in operations)) if operations else 1
    block_rows = max(1, BLOCK_ELEMENTS // max(columns, 1) // multiple) * multiple
    steps: list[Step] = []

    def compute(start: int, stop: int) -> Values:
        values: Values = decode(read_rows, start, stop) if decode else widen(read_rows(start, stop), source.dtype)
        for step in steps:
            values = step.apply(values, start, stop)
        return values

    for operation in operations[1 if decoder else 0 :]:
        stored = read_rows if decode is None and not steps else None
        steps.append(operation.bind(Rows(source, rows, columns, block_rows, compute, stored)))
    return BoundTensor(source, dtype, rows, columns, block_rows, matrix_shape(source, operations)[1], decode, tuple(steps))
