"""The arithmetic of a merge: what is done to a tensor, one small class a kind.

An :class:`Operation` in a plan is a frozen description. Binding it reads once what it needs (adapter halves, block scales,
column norms) and gives a :class:`Step`, which then works on any block of rows, from any thread, in constant memory. An operation
is handed the rows as the operations before it leave them, for what needs a look at the whole tensor first.
:mod:`~lora_merge.merging.binding` does so for a tensor with all its operations.

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
from lora_merge.merging.dtypes import BY_TORCH_NAME, DType, round_float64, round_through
from lora_merge.merging.errors import MergeError
from lora_merge.merging.factors import Factor
from lora_merge.merging.quantization import BlockScales, QuantRecipe, block_scales, level_tables, round_trip
from lora_merge.merging.safetensors_file import TensorInfo

BLOCK_ELEMENTS = 1 << 20
"""Elements a block aims at: 2 MiB of bfloat16, so that what Python does for each block does not show."""

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
        stored: the same rows as they lie in the file, while nothing has been done to them; else None.
    """

    source: TensorInfo
    rows: int
    columns: int
    block_rows: int
    compute: Callable[[int, int], Values]
    stored: ReadRows | None = None

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
            part = absmax[self._blocks(rows.columns, start, stop)].view(np.uint32)
            if rows.stored is not None and rows.source.dtype.name == "BF16" and _holds_exactly(self.recipe, rows.source):
                finite = kernels.block_absmax_bf16(rows.stored(start, stop).reshape(-1), self.recipe.block_size, part)
            else:
                values = quantizable(rows, start, stop, self.recipe).reshape(-1).view(np.uint32)
                finite = kernels.block_absmax(values, self.recipe.block_size, part)
            if not finite:
                raise not_quantizable(rows.source, self.recipe, start, stop)
        return BoundRoundTrip(self, rows.columns, self._scales(absmax, rows), exact=_holds_exactly(self.recipe, rows.source))

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
class BoundRoundTrip(Step):
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

    @property
    def fits_one_pass(self) -> bool:
        """Whether the fused kernel does the same: bfloat16 all the way, rows of whole blocks."""
        recipe = self.operation.recipe
        return self.exact and recipe.quant_dtype == "bfloat16" and self.columns % recipe.block_size == 0

    def kernel_arguments(self, start: int, stop: int) -> kernels.TripArguments:
        """What the fused kernel takes of the round trip, for rows ``[start, stop)``."""
        recipe, blocks = self.operation.recipe, self.operation._blocks(self.columns, start, stop)
        kind = kernels.NF4_TRIP if recipe.quant_type == "nf4" else kernels.FP4_TRIP
        levels, bounds = level_tables(recipe.quant_type)
        return kind, recipe.block_size, self.scales.inverses[blocks], self.scales.scales[blocks], levels, bounds


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
        return BoundLowRank.of(self.read())

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
class BoundLowRank(Step):
    """:class:`AddLowRank` with its tensors read: float64 as they are, float32 as the fast kernel wants them."""

    update: LowRank
    left32: NDArray[np.float32]
    right32: NDArray[np.float32]
    right_norms: NDArray[np.float32]

    @classmethod
    def of(cls, update: LowRank) -> BoundLowRank:
        norms = np.sqrt((update.right * update.right).sum(axis=0)).astype(np.float32)
        return cls(update, (update.scaling * update.left).astype(np.float32), update.right.astype(np.float32), norms)

    def apply(self, values: Values, start: int, stop: int) -> Values:
        return values + self.update.rows(start, stop)

    def rounded(self, values: Values, start: int, stop: int, dtype: DType) -> NDArray[Any]:
        if dtype.name == "BF16" and values.dtype == np.float32:
            merged = in_one_pass(values.view(np.uint32), start, stop, None, self)
            if merged is not None:
                return merged
        return super().rounded(values, start, stop, dtype)

    def kernel_arguments(self, start: int, stop: int) -> kernels.UpdateArguments:
        """What the fused kernel takes of the update, for rows ``[start, stop)``."""
        left, right = self.update.left[start:stop], self.update.right
        return left, right, self.left32[start:stop], self.right32, self.update.scaling, self.right_norms


def in_one_pass(
    source: NDArray[Any], start: int, stop: int, trip: BoundRoundTrip | None, update: BoundLowRank | None
) -> NDArray[np.uint16] | None:
    """Patterns (bfloat16 or float32) of rows ``[start, stop)`` through ``trip`` and ``update``, as bfloat16 patterns.

    None where a value is not finite; which one it is, the way step by step tells.
    """
    out = np.empty(source.shape, np.uint16)
    through = trip.kernel_arguments(start, stop) if trip else _NO_TRIP
    added = update.kernel_arguments(start, stop) if update else _no_update(*source.shape)
    settled = kernels.merge_to_bf16(source, *through, *added, out)
    return out if settled != kernels.NOT_FINITE else None


_NOTHING = np.empty(0, np.float32)
_NO_TRIP: kernels.TripArguments = (kernels.NO_TRIP, 1, _NOTHING, _NOTHING, _NOTHING, _NOTHING)


def _no_update(rows: int, columns: int) -> kernels.UpdateArguments:
    """The arguments of an update of rank 0."""
    b, a = np.empty((rows, 0)), np.empty((0, columns))
    return b, a, b.astype(np.float32), a.astype(np.float32), 0.0, np.zeros(columns, np.float32)


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
    return as_matrix(source.shape, operations)


def as_matrix(shape: tuple[int, ...], operations: tuple[Operation, ...]) -> tuple[int, int]:
    if len(shape) < 2:
        return 1, math.prod(shape)
    if any(operation.whole_filters for operation in operations):
        return shape[0], math.prod(shape[1:])
    return math.prod(shape[:-1]), shape[-1]
