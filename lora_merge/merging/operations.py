"""The arithmetic of a merge: what is done to a tensor, one small class a kind.

An :class:`Operation` in a plan is a frozen description. :func:`bind` reads what a tensor's operations need once (adapter
halves, block scales, column norms) and gives a :class:`BoundTensor`, which then computes any block of rows, from any thread,
in constant memory. Every operation carries its own bound form, a :class:`Step`. Binding one hands it the rows as the
operations before it leave them, for what needs a look at the whole tensor first.

Values travel between steps as float32 as long as they are exactly float32 (the base, quantized or not) and as float64 from the
first sum on; the last step rounds to the output type, once.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from lora_merge.merging import kernels
from lora_merge.merging.dtypes import BY_TORCH_NAME, DType, round_float64, round_through, widen
from lora_merge.merging.errors import MergeError
from lora_merge.merging.factors import Factor
from lora_merge.merging.quantization import BlockScales, QuantRecipe, block_scales, round_trip
from lora_merge.merging.safetensors_file import TensorInfo

BLOCK_ELEMENTS = 1 << 18
"""Elements a block aims at: its float32 copy (1 MiB) stays in a core's cache between the steps."""

ReadRows = Callable[[int, int], NDArray[Any]]
"""Gives rows ``[start, stop)`` of the source tensor in its carrier type, shaped by :func:`matrix_shape`."""


class ReadInto(Protocol):
    """A :data:`ReadRows` that can fill memory it is given: ``out``, contiguous, of the block's shape and carrier type."""

    def __call__(self, start: int, stop: int, out: NDArray[Any] | None = None) -> NDArray[Any]: ...


Values = NDArray[Any]
"""A block of rows, float32 or float64, holding exact intermediate results."""


class Operation(ABC):
    """What is done to a tensor, as a plan describes it."""

    whole_filters: ClassVar[bool] = False
    """Whether a tensor of three or more dimensions has to be seen as (first dimension, all others): a convolution's filters."""

    @abstractmethod
    def bind(self, rows: Rows) -> Step:
        """Read what the operation needs. ``rows`` is the tensor as the operations before this one leave it."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """The operation for people and programs: ``operation`` names it."""

    def row_multiple(self, columns: int) -> int:
        """Blocks have to start at rows that are a multiple of this."""
        return 1

    def bound_bytes(self, elements: int) -> int:
        """Memory that the bound form holds, for a tensor of ``elements``."""
        return 0


class Step(ABC):
    """An operation with everything it needs at hand. Used from several threads at once."""

    @abstractmethod
    def apply(self, values: Values, start: int, stop: int) -> Values:
        """Rows ``[start, stop)`` after the operation. May change ``values`` in place."""

    def rounded(self, values: Values, start: int, stop: int, dtype: DType) -> NDArray[Any]:
        """The same, rounded once to ``dtype``, in its carrier type: for the last step."""
        return round_float64(self.apply(values, start, stop).astype(np.float64, copy=False), dtype)


class Decoder(Operation):
    """How the values of a source that does not hold them one by one are read. Always the first operation.

    Attributes:
        shape: of the tensor that comes out.
        dtype: the type that comes out, before any other operation.
    """

    shape: tuple[int, ...]
    dtype: DType

    @abstractmethod
    def source_shape(self, source: TensorInfo) -> tuple[int, int]:
        """The source as the (rows, columns) that :data:`ReadRows` is asked in."""

    @abstractmethod
    def bind_decoder(self, columns: int) -> Callable[[ReadRows, int, int], NDArray[np.float32]]:
        """Read what decoding needs; the result gives rows ``[start, stop)`` of the tensor (``columns`` wide) as float32."""

    def bind(self, rows: Rows) -> Step:
        raise MergeError("a decoder is the first operation on a tensor or none; this plan is not one of ours")


@dataclass(frozen=True)
class Rows:
    """A tensor, as far as it is bound, to be looked through block by block.

    Attributes:
        source: the tensor in its file.
        rows, columns: its matrix.
        block_rows: rows a block.
        compute: values of rows ``[start, stop)``.
    """

    source: TensorInfo
    rows: int
    columns: int
    block_rows: int
    compute: Callable[[int, int], Values]

    @property
    def blocks(self) -> list[tuple[int, int]]:
        return block_ranges(self.rows, self.block_rows)


def block_ranges(rows: int, block_rows: int) -> list[tuple[int, int]]:
    """``(start, stop)`` of every block of ``block_rows``, in order; the last one may be smaller."""
    return [(start, min(start + block_rows, rows)) for start in range(0, rows, block_rows)]


@dataclass(frozen=True)
class RoundTrip(Operation):
    """Replace the weight by its quantized-and-dequantized value, as the 4-bit layer held it in training.

    Attributes:
        parts: how many 4-bit layers of equal size the tensor's rows belong to, one after the other: more than one where training
            had a layer for each expert and the base stores them fused. Double quantization sees each layer by itself.
    """

    recipe: QuantRecipe
    parts: int = 1

    def bind(self, rows: Rows) -> Step:
        absmax = np.empty(-(-rows.rows * rows.columns // self.recipe.block_size), np.float32)
        for start, stop in rows.blocks:
            values = quantizable(rows, start, stop, self.recipe)
            part = absmax[self._blocks(rows.columns, start, stop)]
            if not kernels.block_absmax(values.reshape(-1).view(np.uint32), self.recipe.block_size, part.view(np.uint32)):
                raise not_quantizable(rows.source, self.recipe, start, stop)
        return _BoundRoundTrip(self, rows.columns, self._scales(absmax, rows), exact=_holds_exactly(self.recipe, rows.source))

    def check_parts(self, source: TensorInfo, elements: int) -> None:
        """Raise :class:`MergeError` unless the parts of ``source`` end where quantization blocks do."""
        if elements % (self.parts * self.recipe.block_size) and self.parts > 1:
            raise MergeError(
                f"{source.name}: its {self.parts} parts do not end where a quantization block of {self.recipe.block_size} does; "
                "unfuse the base before merging"
            )

    def _scales(self, absmax: NDArray[np.float32], rows: Rows) -> BlockScales:
        self.check_parts(rows.source, rows.rows * rows.columns)
        each = [block_scales(part, self.recipe) for part in np.split(absmax, self.parts)]
        return BlockScales(np.concatenate([part.inverses for part in each]), np.concatenate([part.scales for part in each]))

    def _blocks(self, columns: int, start: int, stop: int) -> slice:
        return slice(start * columns // self.recipe.block_size, -(-stop * columns // self.recipe.block_size))

    def row_multiple(self, columns: int) -> int:
        return self.recipe.block_size // math.gcd(self.recipe.block_size, max(columns, 1))

    def bound_bytes(self, elements: int) -> int:
        return 8 * elements // self.recipe.block_size

    def to_json(self) -> dict[str, Any]:
        parts = f" in {self.parts} parts" if self.parts > 1 else ""
        return {"operation": "round trip", "recipe": self.recipe.describe() + parts}


@dataclass(frozen=True)
class _BoundRoundTrip(Step):
    """Attributes: ``exact``: whether the tensor's own type is the one it was quantized in: then it need not be rounded first."""

    operation: RoundTrip
    columns: int
    scales: BlockScales
    exact: bool

    def apply(self, values: Values, start: int, stop: int) -> Values:
        recipe = self.operation.recipe
        quant_dtype = BY_TORCH_NAME[recipe.quant_dtype]
        if not self.exact:
            round_through(values, quant_dtype)
        round_trip(values.reshape(-1), self.scales, self.operation._blocks(self.columns, start, stop), recipe)
        return round_through(values, quant_dtype)


def quantizable(rows: Rows, start: int, stop: int, recipe: QuantRecipe) -> NDArray[np.float32]:
    """Rows ``[start, stop)`` in the type that bitsandbytes saw, as float32."""
    values: NDArray[np.float32] = rows.compute(start, stop)
    return values if _holds_exactly(recipe, rows.source) else round_through(values, BY_TORCH_NAME[recipe.quant_dtype])


def _holds_exactly(recipe: QuantRecipe, source: TensorInfo) -> bool:
    """Whether the source's type is the one the recipe quantizes from. A round trip comes first: its values are the source's."""
    return BY_TORCH_NAME[recipe.quant_dtype] == source.dtype


def not_quantizable(source: TensorInfo, recipe: QuantRecipe, start: int, stop: int) -> MergeError:
    return MergeError(
        f"{source.path}: {source.name!r} holds NaN or infinite values in rows {start} to {stop - 1} as {recipe.quant_dtype}; "
        "the base is damaged, or the recipe's quant_dtype is too narrow for it"
    )


@dataclass(frozen=True)
class AddLowRank(Operation):
    """Add ``scaling * B @ A``, or its transpose.

    Attributes:
        a: (rank, in_features); of a convolution with the kernel flattened into in_features.
        b: (out_features, rank).
        scaling: the factor of the product.
        transposed: whether the tensor is stored (in_features, out_features): an embedding, a transformers ``Conv1D``.
        filters: whether the tensor is a convolution's (out, in, kernel...).
    """

    a: Factor
    b: Factor
    scaling: float
    transposed: bool = False
    filters: bool = False

    @property
    def whole_filters(self) -> bool:  # type: ignore[override]
        return self.filters

    @property
    def update_shape(self) -> tuple[int, int]:
        """The update as a matrix, in the orientation of the stored tensor."""
        out_features, in_features = self.b.shape[0], self.a.shape[1]
        return (in_features, out_features) if self.transposed else (out_features, in_features)

    def read(self) -> LowRank:
        b, a = self.b.read(), self.a.read()
        if self.transposed:
            b, a = np.ascontiguousarray(a.T), np.ascontiguousarray(b.T)
        return LowRank(np.ascontiguousarray(b), np.ascontiguousarray(a), self.scaling)

    def bind(self, rows: Rows) -> Step:
        return _BoundLowRank.of(self.read())

    def bound_bytes(self, elements: int) -> int:
        return 12 * (math.prod(self.a.shape) + math.prod(self.b.shape))

    def to_json(self) -> dict[str, Any]:
        return {"operation": "add low rank", "rank": self.a.shape[0], "scaling": self.scaling, "a": self.a.name, "b": self.b.name}


@dataclass(frozen=True)
class LowRank:
    """An update with its halves read: ``scaling * left @ right``, both float64."""

    left: NDArray[np.float64]
    right: NDArray[np.float64]
    scaling: float

    def rows(self, start: int, stop: int) -> NDArray[np.float64]:
        """Rows ``[start, stop)`` of the product."""
        product: NDArray[np.float64] = self.left[start:stop] @ self.right
        return self.scaling * product


@dataclass(frozen=True)
class _BoundLowRank(Step):
    """:class:`AddLowRank` with its tensors read: float64 as they are, float32 as the fast kernel wants them."""

    update: LowRank
    left32: NDArray[np.float32]
    right32: NDArray[np.float32]
    right_norms: NDArray[np.float32]

    @classmethod
    def of(cls, update: LowRank) -> _BoundLowRank:
        norms = np.sqrt((update.right * update.right).sum(axis=0)).astype(np.float32)
        return cls(update, (update.scaling * update.left).astype(np.float32), update.right.astype(np.float32), norms)

    def apply(self, values: Values, start: int, stop: int) -> Values:
        return values + self.update.rows(start, stop)

    def rounded(self, values: Values, start: int, stop: int, dtype: DType) -> NDArray[Any]:
        if dtype.name != "BF16" or values.dtype != np.float32:
            return super().rounded(values, start, stop, dtype)
        out = np.empty(values.shape, np.uint16)
        rows = slice(start, stop)
        left, right = self.update.left, self.update.right
        kernels.add_low_rank_to_bf16(
            values, left[rows], right, self.left32[rows], self.right32, self.update.scaling, self.right_norms, out
        )
        return out


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
        if self.copied:
            return read_rows(start, stop)
        values: Values = self.decode(read_rows, start, stop) if self.decode else widen(read_rows(start, stop), self.source.dtype)
        self._check_finite(values, start, "the base's value", self.source.dtype)
        for step in self.steps[:-1]:
            values = step.apply(values, start, stop)
        if self.steps:
            result = self.steps[-1].rounded(values, start, stop, self.dtype)
        else:
            result = round_float64(values.astype(np.float64), self.dtype)
        self._check_finite(result, start, "the merged value", self.dtype)
        return result

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


def result_shape(source: TensorInfo, operations: tuple[Operation, ...]) -> tuple[int, ...]:
    """Shape of the tensor that comes out of ``operations``."""
    return operations[0].shape if operations and isinstance(operations[0], Decoder) else source.shape


def matrix_shape(source: TensorInfo, operations: tuple[Operation, ...] = ()) -> tuple[int, int]:
    """The source as the (rows, columns) in which ``read_rows`` is asked for it under ``operations``.

    That is the last dimension against all others, so that a stack of experts comes in small rows; a convolution that is
    changed is seen as its filters; a tensor with fewer than two dimensions is a single row; a quantized source is what its
    decoder reads.
    """
    if operations and isinstance(operations[0], Decoder):
        return operations[0].source_shape(source)
    return _as_matrix(source.shape, operations)


def _as_matrix(shape: tuple[int, ...], operations: tuple[Operation, ...]) -> tuple[int, int]:
    if len(shape) < 2:
        return 1, math.prod(shape)
    if any(operation.whole_filters for operation in operations):
        return shape[0], math.prod(shape[1:])
    return math.prod(shape[:-1]), shape[-1]


def bind(source: TensorInfo, dtype: DType, operations: tuple[Operation, ...], read_rows: ReadRows) -> BoundTensor:
    """Read once what ``operations`` on ``source`` need.

    Operations that must see the whole tensor first (a round trip, norms over columns) read it here, each in one pass in order.
    ``read_rows`` speaks in rows of :func:`matrix_shape` and is used during this call only.
    """
    rows, columns = _as_matrix(result_shape(source, operations), operations)
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

    so_far = Rows(source, rows, columns, block_rows, compute)
    for operation in operations[1 if decoder else 0 :]:
        steps.append(operation.bind(so_far))
    return BoundTensor(source, dtype, rows, columns, block_rows, matrix_shape(source, operations)[1], decode, tuple(steps))
