"""The arithmetic of a merge: what is done to a base tensor, one small class a kind.

An operation in a plan is a frozen description. :func:`bind` reads what it needs once (adapter halves, block scales) and gives
a :class:`BoundTensor`, which then computes any block of rows, from any thread, in constant memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lora_merge.merging import kernels
from lora_merge.merging.dtypes import BY_TORCH_NAME, DType, round_float64, round_through, widen
from lora_merge.merging.errors import MergeError
from lora_merge.merging.quantization import BlockScales, QuantRecipe, block_scales, round_trip
from lora_merge.merging.safetensors_file import TensorInfo, read_tensor

BLOCK_ELEMENTS = 1 << 18
"""Elements a block aims at: its float32 copy (1 MiB) stays in a core's cache between the steps."""

ReadRows = Callable[[int, int], NDArray[Any]]
"""Gives rows ``[start, stop)`` of the base tensor in its carrier type, shape (stop - start, columns)."""


@dataclass(frozen=True)
class RoundTrip:
    """Replace the weight by its quantized-and-dequantized value, as the 4-bit layer held it in training."""

    recipe: QuantRecipe

    def to_json(self) -> dict[str, Any]:
        return {"operation": "round trip", "recipe": self.recipe.describe()}


@dataclass(frozen=True)
class AddLowRank:
    """Add ``scaling * B @ A``.

    Attributes:
        a: (rank, in_features).
        b: (out_features, rank).
        scaling: the factor of the product.
    """

    a: TensorInfo
    b: TensorInfo
    scaling: float

    def to_json(self) -> dict[str, Any]:
        return {"operation": "add low rank", "rank": self.a.shape[0], "scaling": self.scaling, "a": self.a.name, "b": self.b.name}


Operation = RoundTrip | AddLowRank


@dataclass(frozen=True)
class _LowRank:
    """:class:`AddLowRank` with its tensors read: float64 as they are, float32 as the fast kernel wants them."""

    b: NDArray[np.float64]
    a: NDArray[np.float64]
    b32: NDArray[np.float32]
    a32: NDArray[np.float32]
    a_norms: NDArray[np.float32]
    scaling: float

    @classmethod
    def read(cls, operation: AddLowRank) -> _LowRank:
        b = widen(read_tensor(operation.b), operation.b.dtype).astype(np.float64)
        a = widen(read_tensor(operation.a), operation.a.dtype).astype(np.float64)
        norms = np.sqrt((a * a).sum(axis=0))
        return cls(
            b, a, (operation.scaling * b).astype(np.float32), a.astype(np.float32), norms.astype(np.float32), operation.scaling
        )

    def add_rounded_to_bf16(self, values: NDArray[np.float32], start: int, stop: int) -> NDArray[np.uint16]:
        out = np.empty(values.shape, np.uint16)
        rows = slice(start, stop)
        kernels.add_low_rank_to_bf16(values, self.b[rows], self.a, self.b32[rows], self.a32, self.scaling, self.a_norms, out)
        return out

    def add(self, values: NDArray[np.float64], start: int, stop: int) -> NDArray[np.float64]:
        return values + self.scaling * (self.b[start:stop] @ self.a)


@dataclass(frozen=True)
class BoundTensor:
    """A base tensor with its operations, ready to be computed block by block.

    Attributes:
        source: the base tensor.
        dtype: type of the result.
        rows, columns: the tensor as a matrix, see :func:`matrix_shape`.
        block_rows: rows a block; every block but the last starts and ends where a quantization block does.
    """

    source: TensorInfo
    dtype: DType
    rows: int
    columns: int
    block_rows: int
    round_trip: tuple[QuantRecipe, BlockScales] | None
    low_rank: tuple[_LowRank, ...]

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """The row ranges ``(start, stop)`` to compute, in order."""
        return [(start, min(start + self.block_rows, self.rows)) for start in range(0, self.rows, self.block_rows)]

    def compute(self, read_rows: ReadRows, start: int, stop: int) -> NDArray[Any]:
        """Rows ``[start, stop)`` of the result in its carrier type, shape (stop - start, columns).

        Raises:
            MergeError: a result is NaN or infinite.
        """
        raw = read_rows(start, stop)
        if self.round_trip is None and not self.low_rank and self.dtype == self.source.dtype:
            return raw
        values = widen(raw, self.source.dtype)
        self._check_finite(values, start, "the base's value", self.source.dtype)
        if self.round_trip is not None:
            recipe, scales = self.round_trip
            quant_dtype = BY_TORCH_NAME[recipe.quant_dtype]
            if quant_dtype != self.source.dtype:
                round_through(values, quant_dtype)
            first = start * self.columns // recipe.block_size
            last = -(-stop * self.columns // recipe.block_size)
            round_trip(values.reshape(-1), scales, slice(first, last), recipe)
            round_through(values, quant_dtype)
        if len(self.low_rank) == 1 and self.dtype.name == "BF16":
            result: NDArray[Any] = self.low_rank[0].add_rounded_to_bf16(values, start, stop)
        else:
            exact = values.astype(np.float64)
            for update in self.low_rank:
                exact = update.add(exact, start, stop)
            result = round_float64(exact, self.dtype)
        self._check_finite(result, start, "the merged value", self.dtype)
        return result

    def _check_finite(self, values: NDArray[Any], start: int, what: str, dtype: DType) -> None:
        """Raise where a value is NaN or infinite. Integer rounding would carry some NaN patterns over to zero."""
        bits: NDArray[Any] = values.view(np.uint32 if values.itemsize == 4 else np.uint16)
        infinity = 0x7F800000 if values.itemsize == 4 else {"BF16": 0x7F80, "F16": 0x7C00}[dtype.name]
        if kernels.largest_magnitude(bits.reshape(-1)) >= infinity:
            magnitude = bits & (0x7FFFFFFF if values.itemsize == 4 else 0x7FFF)
            row, column = np.argwhere(magnitude >= infinity)[0]
            raise MergeError(
                f"{self.source.name}: {what} at [{start + int(row)}, {int(column)}] is not finite in {dtype.torch_name}; "
                "the base is damaged, or the type is too narrow: try --dtype bfloat16 or float32"
            )


def matrix_shape(tensor: TensorInfo) -> tuple[int, int]:
    """The tensor as (rows, columns): the first dimension against all others; fewer than two dimensions are a single row."""
    if len(tensor.shape) < 2:
        return 1, math.prod(tensor.shape)
    return tensor.shape[0], math.prod(tensor.shape[1:])


def bind(source: TensorInfo, dtype: DType, operations: tuple[Operation, ...], read_rows: ReadRows) -> BoundTensor:
    """Read once what ``operations`` on ``source`` need. With a round trip that is one pass over the whole tensor."""
    rows, columns = matrix_shape(source)
    trips = [operation.recipe for operation in operations if isinstance(operation, RoundTrip)]
    updates = tuple(_LowRank.read(operation) for operation in operations if isinstance(operation, AddLowRank))
    step = trips[0].block_size // math.gcd(trips[0].block_size, max(columns, 1)) if trips else 1
    block_rows = max(1, BLOCK_ELEMENTS // max(columns, 1) // step) * step
    trip = (trips[0], _survey(source, trips[0], rows, columns, block_rows, read_rows)) if trips else None
    return BoundTensor(source, dtype, rows, columns, block_rows, trip, updates)


def _survey(
    source: TensorInfo, recipe: QuantRecipe, rows: int, columns: int, block_rows: int, read_rows: ReadRows
) -> BlockScales:
    """The block scales of a whole tensor, one block of rows in memory at a time."""
    absmax = np.empty(-(-rows * columns // recipe.block_size), np.float32)
    quant_dtype = BY_TORCH_NAME[recipe.quant_dtype]
    for start in range(0, rows, block_rows):
        stop = min(start + block_rows, rows)
        values = widen(read_rows(start, stop), source.dtype)
        if quant_dtype != source.dtype:
            round_through(values, quant_dtype)
        part = absmax[start * columns // recipe.block_size : -(-stop * columns // recipe.block_size)]
        if not kernels.block_absmax(values.reshape(-1).view(np.uint32), recipe.block_size, part.view(np.uint32)):
            raise MergeError(
                f"{source.path}: {source.name!r} holds NaN or infinite values in rows {start} to {stop - 1} "
                f"as {recipe.quant_dtype}; the base is damaged, or the recipe's quant_dtype is too narrow for it"
            )
    return block_scales(absmax, recipe)
