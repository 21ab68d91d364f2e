"""The operations beyond a plain low-rank update: DoRA, biases, token rows, stacked experts, transposed quantization."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lora_merge.merging import kernels
from lora_merge.merging.dtypes import BY_TORCH_NAME, round_through, widen
from lora_merge.merging.operations import AddLowRank, LowRank, Operation, Rows, Step, Values, not_quantizable, quantizable
from lora_merge.merging.quantization import QuantRecipe, block_scales, round_trip
from lora_merge.merging.safetensors_file import TensorInfo, read_tensor


def _vector(tensor: TensorInfo) -> NDArray[np.float64]:
    """The tensor's values in float64, flattened."""
    return widen(read_tensor(tensor), tensor.dtype).astype(np.float64).reshape(-1)


@dataclass(frozen=True)
class RescaleRows(Operation):
    """Give every row the Euclidean norm that DoRA learned: ``m / norm(row) * row``, for linear layers and convolutions.

    Attributes:
        magnitude: (out_features,), or (1, out_channels, 1...) for a convolution.
        filters: whether the tensor is a convolution's (out, in, kernel...): its norm is over a whole filter.

    Source: Liu et al., "DoRA" (arXiv:2402.09353), equation 5; PEFT's ``DoraLinearLayer`` and ``_DoraConvNdLayer``.
    """

    magnitude: TensorInfo
    filters: bool = False

    @property
    def whole_filters(self) -> bool:  # type: ignore[override]
        return self.filters

    def bind(self, rows: Rows) -> Step:
        return _BoundRescaleRows(_vector(self.magnitude))

    def bound_bytes(self, elements: int) -> int:
        return 8 * math.prod(self.magnitude.shape)

    def to_json(self) -> dict[str, Any]:
        return {"operation": "rescale rows", "magnitude": self.magnitude.name}


@dataclass(frozen=True)
class _BoundRescaleRows(Step):
    magnitude: NDArray[np.float64]

    def apply(self, values: Values, start: int, stop: int) -> Values:
        exact = values.astype(np.float64, copy=False)
        norms = np.sqrt((exact * exact).sum(axis=1))
        # A row of zeros has no direction: 0 / 0 is NaN, in PEFT as here, and the caller refuses what is not finite.
        with np.errstate(divide="ignore", invalid="ignore"):
            scaled: Values = (self.magnitude[start:stop] / norms)[:, None] * exact
        return scaled


@dataclass(frozen=True)
class RescaleColumns(Operation):
    """The counterpart of :class:`RescaleRows` for tensors stored (in_features, out_features).

    For an embedding that means a norm over the vocabulary for each hidden dimension, and so one look at the whole tensor first.

    Attributes:
        magnitude: (columns,).
    """

    magnitude: TensorInfo

    def bind(self, rows: Rows) -> Step:
        squares = np.zeros(rows.columns, np.float64)
        for start, stop in rows.blocks:
            exact = rows.compute(start, stop).astype(np.float64, copy=False)
            squares += (exact * exact).sum(axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            return _BoundRescaleColumns(_vector(self.magnitude) / np.sqrt(squares))

    def bound_bytes(self, elements: int) -> int:
        return 16 * math.prod(self.magnitude.shape)

    def to_json(self) -> dict[str, Any]:
        return {"operation": "rescale columns", "magnitude": self.magnitude.name}


@dataclass(frozen=True)
class _BoundRescaleColumns(Step):
    factors: NDArray[np.float64]

    def apply(self, values: Values, start: int, stop: int) -> Values:
        with np.errstate(invalid="ignore"):
            return values.astype(np.float64, copy=False) * self.factors


@dataclass(frozen=True)
class AddVector(Operation):
    """Add ``scaling * vector`` to a bias: the bias of lora_B.

    Attributes:
        vector: (features,).
        scaling: that of the low-rank update beside it.
    """

    vector: TensorInfo
    scaling: float

    def bind(self, rows: Rows) -> Step:
        return _BoundAddVector(self.scaling * _vector(self.vector))

    def bound_bytes(self, elements: int) -> int:
        return 8 * elements

    def to_json(self) -> dict[str, Any]:
        return {"operation": "add vector", "scaling": self.scaling, "vector": self.vector.name}


@dataclass(frozen=True)
class _BoundAddVector(Step):
    vector: NDArray[np.float64]

    def apply(self, values: Values, start: int, stop: int) -> Values:
        return values + self.vector


@dataclass(frozen=True)
class ReplaceRows(Operation):
    """Put trained rows in place of the base's: ``trainable_token_indices``. The stored tensor holds values, not differences.

    Attributes:
        values: (tokens, hidden).
        indices: the row that each of them replaces.
    """

    values: TensorInfo
    indices: tuple[int, ...]

    def bind(self, rows: Rows) -> Step:
        return _BoundReplaceRows(widen(read_tensor(self.values), self.values.dtype), np.array(self.indices))

    def bound_bytes(self, elements: int) -> int:
        return 4 * math.prod(self.values.shape)

    def to_json(self) -> dict[str, Any]:
        return {"operation": "replace rows", "rows": len(self.indices), "values": self.values.name}


@dataclass(frozen=True)
class _BoundReplaceRows(Step):
    values: NDArray[np.float32]
    indices: NDArray[np.int64]

    def apply(self, values: Values, start: int, stop: int) -> Values:
        inside = (self.indices >= start) & (self.indices < stop)
        values[self.indices[inside] - start] = self.values[inside]
        return values


@dataclass(frozen=True)
class AddLowRankParts(Operation):
    """Low-rank updates of parts of a tensor: one for each expert of a stack, or for each projection fused into it.

    Attributes:
        parts: ``(first row, update)``, where rows are those of the stack seen as (experts * rows, columns). Parts do not overlap.
        what: what the parts are, for people.
    """

    parts: tuple[tuple[int, AddLowRank], ...]
    what: str

    def bind(self, rows: Rows) -> Step:
        return _BoundParts(tuple((first, update.read()) for first, update in self.parts))

    def bound_bytes(self, elements: int) -> int:
        return sum(8 * (math.prod(update.a.shape) + math.prod(update.b.shape)) for _, update in self.parts)

    def to_json(self) -> dict[str, Any]:
        names = dict.fromkeys(name for _, update in self.parts for name in (update.a.name, update.b.name))
        first = self.parts[0][1]
        return {
            "operation": "add low rank parts",
            "parts": len(self.parts),
            "what": self.what,
            "rank": first.a.shape[0],
            "scaling": first.scaling,
            "tensors": list(names),
        }


@dataclass(frozen=True)
class _BoundParts(Step):
    parts: tuple[tuple[int, LowRank], ...]

    def apply(self, values: Values, start: int, stop: int) -> Values:
        exact = values.astype(np.float64, copy=False)
        for first, update in self.parts:
            low, high = max(start, first), min(stop, first + len(update.left))
            if low < high:
                exact[low - start : high - start] += update.rows(low - first, high - first)
        return exact


@dataclass(frozen=True)
class TransposedRoundTrip(Operation):
    """:class:`RoundTrip` of a tensor that is stored transposed against what was quantized: a transformers ``Conv1D``.

    Quantization blocks run across the stored rows, so the bound form holds the whole tensor as float32. Only models of GPT-2's
    generation have such layers; their largest matrix takes 40 MB.
    """

    recipe: QuantRecipe

    def bind(self, rows: Rows) -> Step:
        turned = np.empty((rows.columns, rows.rows), np.float32)
        for start, stop in rows.blocks:
            turned[:, start:stop] = quantizable(rows, start, stop, self.recipe).T
        absmax = np.empty(-(-turned.size // self.recipe.block_size), np.float32)
        if not kernels.block_absmax(turned.reshape(-1).view(np.uint32), self.recipe.block_size, absmax.view(np.uint32)):
            raise not_quantizable(rows.source, self.recipe, 0, rows.rows)
        round_trip(turned.reshape(-1), block_scales(absmax, self.recipe), slice(None), self.recipe)
        return _BoundTransposedRoundTrip(round_through(turned, BY_TORCH_NAME[self.recipe.quant_dtype]))

    def bound_bytes(self, elements: int) -> int:
        return 4 * elements + 8 * elements // self.recipe.block_size

    def to_json(self) -> dict[str, Any]:
        return {"operation": "round trip", "recipe": f"{self.recipe.describe()}, transposed"}


@dataclass(frozen=True)
class _BoundTransposedRoundTrip(Step):
    turned: NDArray[np.float32]

    def apply(self, values: Values, start: int, stop: int) -> Values:
        return np.ascontiguousarray(self.turned[:, start:stop].T)
