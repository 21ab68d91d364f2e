"""Joins base, adapter and recipe into a :class:`MergePlan`: for every output tensor, where it comes from and what is done to it.

Planning touches headers only (and, for ``--from-4bit``, the architecture on the meta device). Every adapter tensor is consumed
exactly once, or planning fails and names what is left.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lora_merge.merging.adapter import Adapter, LowRankPair
from lora_merge.merging.checkpoint import Checkpoint
from lora_merge.merging.dtypes import BY_TORCH_NAME, FLOATING, DType
from lora_merge.merging.errors import MergeError
from lora_merge.merging.modules import quantized_tensors
from lora_merge.merging.operations import BLOCK_ELEMENTS, AddLowRank, Operation, RoundTrip
from lora_merge.merging.quantization import QuantRecipe
from lora_merge.merging.safetensors_file import TensorInfo, encode_header
from lora_merge.merging.side_files import SideFile, plan_side_files

FROM_4BIT = "from-4bit"
ORIGINAL_WEIGHTS = "original-weights"


@dataclass(frozen=True)
class TensorPlan:
    """One output tensor: the base tensor it comes from, its type, and the operations in order (none: its bytes are copied)."""

    source: TensorInfo
    dtype: DType
    operations: tuple[Operation, ...]

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def nbytes(self) -> int:
        return math.prod(self.source.shape) * self.dtype.itemsize

    @property
    def copied(self) -> bool:
        """Whether the output holds the base's bytes unchanged."""
        return not self.operations and self.dtype == self.source.dtype


@dataclass(frozen=True)
class ShardPlan:
    """One output file, named like the base's, its tensors in the order of the base's bytes."""

    file: str
    tensors: tuple[TensorPlan, ...]
    metadata: Mapping[str, str]

    @property
    def header(self) -> bytes:
        return encode_header({tensor.name: (tensor.dtype, tensor.source.shape) for tensor in self.tensors}, self.metadata)


@dataclass(frozen=True)
class MergePlan:
    """Everything a merge will do, settled before the first byte is written.

    Attributes:
        base, adapter: what is merged.
        method: ``"from-4bit"`` or ``"original-weights"``.
        recipe: the quantization recipe of ``"from-4bit"``, else None.
        shards: the weight files.
        side_files: configuration, tokenizer and the rest.
    """

    base: Checkpoint
    adapter: Adapter
    method: str
    recipe: QuantRecipe | None
    shards: tuple[ShardPlan, ...]
    side_files: tuple[SideFile, ...]

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
        return self.weight_bytes + sum(len(shard.header) for shard in self.shards) + sum(file.nbytes for file in self.side_files)

    def memory_bytes(self, jobs: int) -> int:
        """An upper estimate of the working memory of the writer beside the interpreter and its libraries.

        Blocks in flight (a float32 and two float64 copies at worst) and, for two tensors at a time, the adapter's halves
        (float64 and float32) and the block scales.
        """
        block = max((max(BLOCK_ELEMENTS, _row_elements(tensor)) for tensor in self.tensors), default=0)
        bound = max((_bound_bytes(tensor) for tensor in self.tensors), default=0)
        return (2 * jobs + 4) * block * 24 + 2 * bound

    def to_json(self, jobs: int = 1) -> dict[str, Any]:
        """The plan as ``--dry-run --format json`` prints it."""
        return {
            "method": self.method,
            "base": {"source": self.base.folder.source, "commit": self.base.folder.commit},
            "adapter": {"source": self.adapter.folder.source, "commit": self.adapter.folder.commit},
            "recipe": self.recipe.to_json() if self.recipe else None,
            "tensors": [
                {
                    "name": tensor.name,
                    "file": shard.file,
                    "shape": list(tensor.source.shape),
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
            "memory_bytes": self.memory_bytes(jobs),
        }


def _row_elements(tensor: TensorPlan) -> int:
    return math.prod(tensor.source.shape[1:]) if len(tensor.source.shape) > 1 else 0


def _bound_bytes(tensor: TensorPlan) -> int:
    total = 0
    for operation in tensor.operations:
        if isinstance(operation, AddLowRank):
            total += 12 * (math.prod(operation.a.shape) + math.prod(operation.b.shape))
        else:
            total += 8 * math.prod(tensor.source.shape) // operation.recipe.block_size
    return total


def make_plan(
    base: Checkpoint,
    adapter: Adapter,
    recipe: QuantRecipe | None,
    dtype: str | None = None,
    trust_remote_code: bool = False,
) -> MergePlan:
    """Plan the merge of ``adapter`` into ``base``, through the 4-bit base where a ``recipe`` is given.

    Args:
        dtype: type of the output's floating tensors (``"bfloat16"``...); None keeps each tensor's own.

    Raises:
        MergeError: an adapter tensor fits nothing, a shape does not match, a type cannot be merged, and so on.
    """
    _refuse_quantized(base)
    updates = _place_updates(base, adapter)
    quantized = quantized_tensors(base, recipe, trust_remote_code) if recipe else frozenset()
    target = _output_dtype(dtype)
    shards = tuple(
        ShardPlan(
            shard.path.name,
            tuple(
                _plan_tensor(tensor, target, recipe if tensor.name in quantized else None, updates) for tensor in shard.tensors
            ),
            shard.metadata,
        )
        for shard in base.shards
    )
    method = FROM_4BIT if recipe else ORIGINAL_WEIGHTS
    weight_bytes = sum(tensor.nbytes for shard in shards for tensor in shard.tensors)
    side_files = plan_side_files(base, adapter, dtype, weight_bytes, method, recipe)
    return MergePlan(base, adapter, method, recipe, shards, side_files)


def _refuse_quantized(base: Checkpoint) -> None:
    quantization = base.config.get("quantization_config")
    if quantization:
        kind = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise MergeError(
            f"base {base.folder.source}: is already quantized ({kind}, quantization_config in config.json); "
            "give the 16-bit checkpoint it was made from"
        )


def _output_dtype(dtype: str | None) -> DType | None:
    if dtype is None:
        return None
    found = BY_TORCH_NAME.get(dtype)
    if found is None or found.name not in FLOATING:
        raise MergeError(
            f"dtype {dtype!r}: expected one of {', '.join(name for name, known in BY_TORCH_NAME.items() if known.name in FLOATING)}"
        )
    return found


def _place_updates(base: Checkpoint, adapter: Adapter) -> dict[str, LowRankPair]:
    """Base tensor name -> the adapter's update of it; every update finds exactly one tensor."""
    tensors = base.tensors
    placed: dict[str, LowRankPair] = {}
    for pair in adapter.pairs:
        name = f"{pair.module}.weight"
        if name not in tensors:
            raise MergeError(_no_counterpart(pair, base, name))
        weight = tensors[name]
        expected = (pair.b.shape[0], pair.a.shape[1])
        if weight.shape != expected:
            raise MergeError(
                f"{pair.a.path}: the update of {pair.module} has shape {list(expected)}, the base's {name} has "
                f"{list(weight.shape)}; is {base.folder.source} the base it was trained on ({adapter.named_base or 'not recorded'})?"
            )
        if weight.dtype.name not in FLOATING:
            raise MergeError(
                f"{weight.path}: {name} is of type {weight.dtype.name}, expected one of {', '.join(FLOATING)}; "
                "merge into the 16-bit checkpoint that this one was made from"
            )
        placed[name] = pair
    return placed


def _no_counterpart(pair: LowRankPair, base: Checkpoint, name: str) -> str:
    if base.config.get("tie_word_embeddings", True) and pair.module.rpartition(".")[2] == "lm_head":
        hint = "the head shares the embedding's tensor in this base, and this version does not untie them"
    else:
        near = difflib.get_close_matches(name, list(base.tensors), n=1)
        hint = f"the nearest name is {near[0]}" if near else "no name of the base resembles it"
    return f"{pair.a.path}: module {pair.module!r} has no tensor {name} in base {base.folder.source}; {hint}"


def _plan_tensor(
    tensor: TensorInfo, target: DType | None, recipe: QuantRecipe | None, updates: Mapping[str, LowRankPair]
) -> TensorPlan:
    dtype = target if target is not None and tensor.dtype.name in FLOATING else tensor.dtype
    operations: list[Operation] = []
    if recipe is not None:
        if tensor.dtype.name not in FLOATING:
            raise MergeError(
                f"{tensor.path}: {tensor.name} is of type {tensor.dtype.name}, expected one of {', '.join(FLOATING)} to quantize"
            )
        operations.append(RoundTrip(recipe))
    if tensor.name in updates:
        pair = updates[tensor.name]
        operations.append(AddLowRank(pair.a, pair.b, pair.scaling))
    return TensorPlan(tensor, dtype, tuple(operations))
