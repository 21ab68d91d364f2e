"""Joins base, adapters and recipe into a :class:`MergePlan`: for every output tensor, where it comes from and what is done to it.

Planning touches headers only (and, where a question needs it, the architecture on the meta device). Every adapter tensor is
consumed exactly once, or planning fails and names what is left.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lora_merge.merging.adapter import Adapter
from lora_merge.merging.architecture import Architecture
from lora_merge.merging.checkpoint import Checkpoint
from lora_merge.merging.completeness import check_complete
from lora_merge.merging.dtypes import BY_TORCH_NAME, FLOATING, DType
from lora_merge.merging.errors import MergeError
from lora_merge.merging.expected import check_expected, check_head, new_vocabulary
from lora_merge.merging.experts import is_expert_layer
from lora_merge.merging.factors import PEFT_PACKING
from lora_merge.merging.modules import QuantizedTensor, quantized_tensors
from lora_merge.merging.operations import BLOCK_ELEMENTS, Operation, RoundTrip, matrix_shape, result_shape
from lora_merge.merging.placement import Change, Placement
from lora_merge.merging.quantization import QuantRecipe
from lora_merge.merging.safetensors_file import SafetensorsHeader, TensorInfo, encode_header
from lora_merge.merging.side_files import CONFIG_FILE, ConfigChanges, SideFile, plan_side_files
from lora_merge.merging.stored_state import StoredState, read_stored_state, stored_recipe
from lora_merge.merging.tying import Settlement, Ties, settle
from lora_merge.merging.updates import TransposedRoundTrip

FROM_4BIT = "from-4bit"
FROM_8BIT = "from-8bit"
ORIGINAL_WEIGHTS = "original-weights"
METHODS = (FROM_4BIT, FROM_8BIT, ORIGINAL_WEIGHTS)


@dataclass(frozen=True)
class TensorPlan:
    """One output tensor: the tensor it comes from, its type, and the operations in order (none: its bytes are copied).

    Attributes:
        source: a tensor of the base, or one of an adapter that takes its place.
        target: the output's name for it, where that is not the source's.
    """

    source: TensorInfo
    dtype: DType
    operations: tuple[Operation, ...]
    target: str | None = None

    @property
    def name(self) -> str:
        return self.target or self.source.name

    @property
    def shape(self) -> tuple[int, ...]:
        return result_shape(self.source, self.operations)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def copied(self) -> bool:
        """Whether the output holds the source's bytes unchanged."""
        return not self.operations and self.dtype == self.source.dtype


@dataclass(frozen=True)
class ShardPlan:
    """One output file, named like the base's, its tensors in the order of the base's bytes; a tensor that the base lacks comes
    last."""

    file: str
    tensors: tuple[TensorPlan, ...]
    metadata: Mapping[str, str]

    @property
    def header(self) -> bytes:
        return encode_header({tensor.name: (tensor.dtype, tensor.shape) for tensor in self.tensors}, self.metadata)

    @property
    def nbytes(self) -> int:
        """The size of the file."""
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True)
class MergePlan:
    """Everything a merge will do, settled before the first byte is written.

    Attributes:
        base, adapters: what is merged.
        weights: the factor of each adapter's deltas.
        method: ``"from-4bit"``, ``"from-8bit"`` (a base that bitsandbytes stored in 8 bit) or ``"original-weights"``.
        recipe: the quantization recipe of ``"from-4bit"``, else None.
        packing: how lora_B of fused experts was read; see :data:`~lora_merge.merging.factors.PACKINGS`.
        untied: whether tied weights stopped being equal, so that nothing is tied any more.
        shards: the weight files.
        side_files: configuration, tokenizer and the rest.
    """

    base: Checkpoint
    adapters: tuple[Adapter, ...]
    weights: tuple[float, ...]
    method: str
    recipe: QuantRecipe | None
    packing: str
    untied: bool
    shards: tuple[ShardPlan, ...]
    side_files: tuple[SideFile, ...]

    @property
    def adapter(self) -> Adapter:
        """The first adapter, and the only one unless :attr:`adapters` has more."""
        return self.adapters[0]

    @property
    def tensors(self) -> tuple[TensorPlan, ...]:
        return tuple(tensor for shard in self.shards for tensor in shard.tensors)

    @property
    def weight_bytes(self) -> int:
        """Bytes of tensor data in the output."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def output_bytes(self) -> int:
        """Bytes of all planned files; manifest and rounding to disk blocks not counted."""
        return sum(shard.nbytes for shard in self.shards) + sum(file.nbytes for file in self.side_files)

    @property
    def disk_bytes(self) -> int:
        """The room that a merge asks for: the output, and a megabyte for manifest, folder and rounding to blocks."""
        return self.output_bytes + (1 << 20)

    def memory_bytes(self, jobs: int) -> int:
        """An upper estimate of the working memory of the writer beside the interpreter and its libraries.

        Blocks in flight (a float32 and two float64 copies at worst) and, for a few tensors of each file in work, the adapter's
        halves (float64 and float32) and the block scales.
        """
        block = max((max(BLOCK_ELEMENTS, _row_elements(tensor)) for tensor in self.tensors), default=0)
        bound = max((_bound_bytes(tensor) for tensor in self.tensors), default=0)
        return (2 * jobs + 4) * block * 24 + 2 * bound

    def to_json(self, jobs: int = 1) -> dict[str, Any]:
        """The plan as ``--dry-run --format json`` prints it."""
        return {
            "method": self.method,
            "base": {"source": self.base.folder.source, "commit": self.base.folder.commit},
            "adapters": [
                {"source": adapter.folder.source, "commit": adapter.folder.commit, "weight": weight}
                for adapter, weight in zip(self.adapters, self.weights, strict=True)
            ],
            "untied": self.untied,
            "recipe": self.recipe.to_json() if self.recipe else None,
            "tensors": [
                {
                    "name": tensor.name,
                    "file": shard.file,
                    "shape": list(tensor.shape),
                    "source": tensor.source.name,
                    "source_dtype": tensor.source.dtype.torch_name,
                    "dtype": tensor.dtype.torch_name,
                    "bytes": tensor.nbytes,
                    "operations": [operation.to_json() for operation in tensor.operations],
                }
                for shard in self.shards
                for tensor in shard.tensors
            ],
            "files": [file.to_json() for file in self.side_files],
            "output_bytes": self.output_bytes,
            "disk_bytes": self.disk_bytes,
            "memory_bytes": self.memory_bytes(jobs),
        }


def _row_elements(tensor: TensorPlan) -> int:
    rows = matrix_shape(tensor.source, tensor.operations)[0]
    return math.prod(tensor.shape) // max(rows, 1) if len(tensor.shape) > 1 else 0


def _bound_bytes(tensor: TensorPlan) -> int:
    return sum(operation.bound_bytes(math.prod(tensor.shape)) for operation in tensor.operations)


def make_plan(
    base: Checkpoint,
    adapters: tuple[Adapter, ...],
    weights: tuple[float, ...],
    recipe: QuantRecipe | None,
    *,
    dtype: str | None = None,
    packing: str = PEFT_PACKING,
    trust_remote_code: bool = False,
) -> MergePlan:
    """Plan the merge of ``adapters`` into ``base``, through the quantized base where a ``recipe`` is given.

    Args:
        weights: the factor of each adapter's deltas.
        recipe: how the base was quantized; for a base that is stored quantized it only says that its stored state is meant.
        dtype: type of the output's floating tensors (``"bfloat16"``...); None keeps each tensor's own.
        packing: how lora_B of fused experts is laid out.

    Raises:
        MergeError: an adapter tensor fits nothing, a shape does not match, a type cannot be merged, and so on.
    """
    architecture = Architecture(base, trust_remote_code)
    stored = _stored_state(base, architecture, through_it=recipe is not None)
    ties = Ties(base, {name: tensor for name, tensor in base.tensors.items() if name not in stored.parts}, architecture)
    placement = Placement(base, stored, ties, packing)
    for adapter, weight in zip(adapters, weights, strict=True):
        placement.place(adapter, weight, alone=len(adapters) == 1)
        check_complete(adapter, base.tensors, architecture)
    changes = placement.changes
    settled = settle(ties, changes, Change)
    check_head(ties, adapters, changes)
    vocabulary = new_vocabulary(placement.resized)
    quantized: Mapping[str, QuantizedTensor] = {}
    if recipe is not None and stored.decoders:
        recipe = stored_recipe(stored, recipe)
    elif recipe is not None:
        quantized = quantized_tensors(base, recipe, architecture, _experts_as_layers(adapters), adapters[0].tower)
    planner = _TensorPlanner(changes, stored, quantized, recipe, _output_dtype(dtype))
    shards = tuple(
        ShardPlan(shard.path.name, planner.plan(shard) + planner.copies(shard, settled), shard.metadata) for shard in base.shards
    )
    method = _method(stored, recipe)
    changed = ConfigChanges(dtype, settled.untied, vocabulary)
    side_files = plan_side_files(
        base, adapters, changed, {s.file: [(t.name, t.nbytes) for t in s.tensors] for s in shards}, method, recipe
    )
    if settled.untied or vocabulary is not None:
        written = next(file.content for file in side_files if file.name == CONFIG_FILE)
        config = json.loads(written) if written is not None else base.config
        shapes = {tensor.name: tensor.shape for shard in shards for tensor in shard.tensors}
        check_expected(ties, config, shapes, placement.resized, untied=settled.untied)
    return MergePlan(base, adapters, weights, method, recipe, packing, settled.untied, shards, side_files)


def _stored_state(base: Checkpoint, architecture: Architecture, *, through_it: bool) -> StoredState:
    quantization = base.config.get("quantization_config")
    if not quantization:
        return StoredState({}, frozenset())
    kind = quantization.get("quant_method", "bitsandbytes") if isinstance(quantization, dict) else quantization
    if kind != "bitsandbytes":
        raise MergeError(
            f"base {base.folder.source}: is quantized by {kind} (quantization_config in config.json), which is not read; "
            "give the 16-bit checkpoint it was made from"
        )
    stored = read_stored_state(base.tensors, str(base.config.get("dtype") or base.config.get("torch_dtype")))
    if stored.decoders and not through_it:
        raise MergeError(
            f"base {base.folder.source}: is already quantized (bitsandbytes, quantization_config in config.json); add "
            "--from-4bit to merge through its stored state, or give the 16-bit checkpoint it was made from"
        )
    if architecture.has_transposed_layers:
        for name in stored.decoders:
            if architecture.is_transposed_layer(name.removesuffix(".weight")):
                raise MergeError(
                    f"base {base.folder.source}: {name} is stored quantized, the other way round than its class stores it "
                    "(Conv1D), which is not read; give the 16-bit checkpoint it was made from"
                )
    return stored


def _method(stored: StoredState, recipe: QuantRecipe | None) -> str:
    if stored.decoders and recipe is None:
        return FROM_8BIT
    return ORIGINAL_WEIGHTS if recipe is None else FROM_4BIT


def _output_dtype(dtype: str | None) -> DType | None:
    if dtype is None:
        return None
    found = BY_TORCH_NAME.get(dtype)
    if found is None or found.name not in FLOATING:
        raise MergeError(
            f"dtype {dtype!r}: expected one of "
            f"{', '.join(name for name, known in BY_TORCH_NAME.items() if known.name in FLOATING)}"
        )
    return found


def _experts_as_layers(adapters: tuple[Adapter, ...]) -> bool | None:
    """Whether training had a layer for each expert: what the adapters' own names tell."""
    if any(is_expert_layer(pair.module) for adapter in adapters for pair in adapter.pairs):
        return True
    return False if any(adapter.settings.names("target_parameters") for adapter in adapters) else None


@dataclass(frozen=True)
class _TensorPlanner:
    changes: Mapping[str, Change]
    stored: StoredState
    quantized: Mapping[str, QuantizedTensor]
    recipe: QuantRecipe | None
    target: DType | None

    def plan(self, shard: SafetensorsHeader) -> tuple[TensorPlan, ...]:
        """The output tensors of a base file."""
        return tuple(self._plan(tensor, tensor.name) for tensor in shard.tensors if tensor.name not in self.stored.parts)

    def copies(self, shard: SafetensorsHeader, settled: Settlement) -> tuple[TensorPlan, ...]:
        """What was tied to a tensor of the base's file and gets one of its own, beside it."""
        return tuple(
            self._plan(tensor, name)
            for tensor in shard.tensors
            for name, source in settled.copies.items()
            if source == tensor.name
        )

    def _plan(self, tensor: TensorInfo, name: str) -> TensorPlan:
        change = self.changes.get(name)
        decoder = self.stored.decoders.get(tensor.name)
        own = decoder.dtype if decoder is not None else tensor.dtype
        dtype = self.target if self.target is not None and own.name in FLOATING else own
        operations = tuple(change.operations) if change else ()
        if change is not None and change.replacement is not None:
            if not change.replacement.trained and (name in self.quantized or decoder is not None):
                raise MergeError(
                    f"{change.replacement.tensor.path}: {change.replacement.tensor.name!r} replaces {name}, a 4-bit layer in "
                    "training"
                )
            return TensorPlan(change.replacement.tensor, dtype, operations, name)
        if decoder is not None:
            operations = (decoder, *operations)
        elif name in self.quantized:
            operations = (self._round_trip(tensor, self.quantized[name]), *operations)
        return TensorPlan(tensor, dtype, operations, name if name != tensor.name else None)

    def _round_trip(self, tensor: TensorInfo, how: QuantizedTensor) -> Operation:
        if tensor.dtype.name not in FLOATING:
            raise MergeError(
                f"{tensor.path}: {tensor.name} is of type {tensor.dtype.name}, expected one of {', '.join(FLOATING)} to quantize"
            )
        assert self.recipe is not None, "tensors are quantized under a recipe only"
        return TransposedRoundTrip(self.recipe) if how.transposed else RoundTrip(self.recipe, how.parts)
