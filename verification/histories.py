"""What can have happened to a merged weight besides the right thing: each mistake that merge scripts make, as operations.

A :class:`History` is another list of operations for the same base tensor. The one whose result lies closest to the weight found
explains it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from lora_merge.merging.dtypes import BY_TORCH_NAME, round_through
from lora_merge.merging.operations import AddLowRank, Decoder, Operation, RoundTrip, Rows, Step, Values
from lora_merge.merging.plan import TensorPlan
from lora_merge.merging.quantization import QuantRecipe
from lora_merge.merging.updates import AddLowRankParts, AddVector, TransposedRoundTrip

EXPECTED = "as planned"
ROUNDED_TWICE = "as planned, rounded twice"
OMITTED = "adapter omitted"
DOUBLED = "adapter doubled"
NAIVE = "merged into the original weights"
THROUGH_4BIT = "merged through a 4-bit base"
UNTOUCHED = "the base's original weights"
QUANTIZED_AGAIN = "quantized again after the merge"
OTHER_SCALE = "another scale of the adapter"
EDITED = "as planned, but some values are others"
UNEXPLAINED = "none of the known mistakes"
ROUNDED_BEFORE = {"BF16": "as planned, rounded to bfloat16 before", "F16": "as planned, rounded to float16 before"}
"""By safetensors name of the narrower type that a right merge had before it was saved in the type found."""
AS_PLANNED = (EXPECTED, ROUNDED_TWICE, *ROUNDED_BEFORE.values())

_ROUND_TRIPS = (RoundTrip, TransposedRoundTrip)


@dataclass(frozen=True)
class History:
    """A name for people, and the operations that would have led there."""

    name: str
    operations: tuple[Operation, ...]


@dataclass(frozen=True)
class QuantizeAgain(Operation):
    """A round trip after the sum instead of before it: what a merge into a 4-bit layer leaves."""

    trip: RoundTrip | TransposedRoundTrip

    def bind(self, rows: Rows) -> Step:
        summed = dataclasses.replace(rows, compute=lambda start, stop: self.narrowed(rows.compute(start, stop)))
        return _BoundQuantizeAgain(self, self.trip.bind(summed))

    def narrowed(self, values: Values) -> Values:
        """The sum as the 4-bit layer was given it: in the type that it quantizes from."""
        return round_through(np.ascontiguousarray(values, np.float32), BY_TORCH_NAME[self.trip.recipe.quant_dtype])

    def row_multiple(self, columns: int) -> int:
        return self.trip.row_multiple(columns)

    def to_json(self) -> dict[str, Any]:
        return self.trip.to_json()


@dataclass(frozen=True)
class _BoundQuantizeAgain(Step):
    operation: QuantizeAgain
    trip: Step

    def apply(self, values: Values, start: int, stop: int) -> Values:
        return self.trip.apply(self.operation.narrowed(values), start, stop)


def base_operations(tensor: TensorPlan) -> tuple[Operation, ...]:
    """The leading operations that make the base as the adapter saw it: dequantization or a round trip."""
    return tuple(itertools.takewhile(lambda operation: isinstance(operation, (Decoder, *_ROUND_TRIPS)), tensor.operations))


def other_histories(tensor: TensorPlan) -> Iterator[History]:
    """Every mistake that makes sense for this tensor."""
    base = base_operations(tensor)
    update = tensor.operations[len(base) :]
    trip = next((operation for operation in base if isinstance(operation, _ROUND_TRIPS)), None)
    if update:
        yield History(OMITTED, base)
    if trip is None and not base and len(tensor.shape) == 2:
        for recipe in (QuantRecipe(), *_other_recipes(QuantRecipe())):
            yield History(f"{THROUGH_4BIT}: {recipe.describe()}", (RoundTrip(recipe), *update))
    if trip is not None:
        yield History(NAIVE if update else UNTOUCHED, update)
        if update:
            yield History(UNTOUCHED, ())
        for recipe in _other_recipes(trip.recipe):
            replaced = tuple(dataclasses.replace(op, recipe=recipe) if isinstance(op, _ROUND_TRIPS) else op for op in base)
            yield History(f"another recipe: {recipe.describe()}", replaced + update)
        if update:
            yield History(QUANTIZED_AGAIN, (*base, *update, QuantizeAgain(trip)))
    doubled = tuple(scaled(operation, 2.0) for operation in update)
    if update and doubled != update:
        yield History(DOUBLED, base + doubled)


def scaled(operation: Operation, factor: float) -> Operation:
    """The same update ``factor`` times as strong; other operations as they are."""
    if isinstance(operation, (AddLowRank, AddVector)):
        return dataclasses.replace(operation, scaling=factor * operation.scaling)
    if isinstance(operation, AddLowRankParts):
        parts = tuple((first, dataclasses.replace(part, scaling=factor * part.scaling)) for first, part in operation.parts)
        return dataclasses.replace(operation, parts=parts)
    return operation


def _other_recipes(recipe: QuantRecipe) -> Iterator[QuantRecipe]:
    for quant_type, double_quant in itertools.product(("nf4", "fp4"), (True, False)):
        if (quant_type, double_quant) != (recipe.quant_type, recipe.double_quant):
            yield dataclasses.replace(recipe, quant_type=quant_type, double_quant=double_quant)
    for quant_dtype in ("bfloat16", "float16", "float32"):
        if quant_dtype != recipe.quant_dtype:
            yield dataclasses.replace(recipe, quant_dtype=quant_dtype)
