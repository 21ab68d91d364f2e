"""Brings every piece of an adapter to the base tensor that it changes; a piece without exactly one place is an error."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lora_merge.merging.adapter import Adapter, LowRankPair, Replacement, TokenRows
from lora_merge.merging.checkpoint import Checkpoint
from lora_merge.merging.dtypes import FLOATING
from lora_merge.merging.errors import MergeError
from lora_merge.merging.experts import by_expert, fused_tensor, place_expert_layers, place_parameter, targeted_parameters
from lora_merge.merging.factors import Whole
from lora_merge.merging.names import NameMap
from lora_merge.merging.operations import AddLowRank, Operation, result_shape
from lora_merge.merging.renames import ClassNames
from lora_merge.merging.safetensors_file import TensorInfo
from lora_merge.merging.stored_state import StoredState
from lora_merge.merging.tying import Ties, same_values
from lora_merge.merging.updates import AddLowRankParts, AddVector, ReplaceRows, RescaleColumns, RescaleRows

_ATTENTION_OUTPUT = re.compile(r"(?P<attention>.+)\.base_layer\.out_proj")


@dataclass
class Change:
    """What happens to one tensor: new values in its place, then operations in order."""

    replacement: Replacement | None = None
    operations: list[Operation] = field(default_factory=list)


class Placement:
    """The changes of one or more adapters, by the name of the tensor in the output.

    Attributes:
        changes: filled by :meth:`place`.
        resized: tensors of the vocabulary that got another number of rows -> that number.
    """

    def __init__(self, base: Checkpoint, stored: StoredState, ties: Ties, packing: str) -> None:
        self.base = base
        self.changes: dict[str, Change] = {}
        self.resized: dict[str, int] = {}
        self._tensors = ties.tensors
        self._stored = stored
        self._names = NameMap.of(self._tensors, ClassNames(ties.architecture))
        self._tower: str | None = None
        self._architecture = ties.architecture
        self._ties = ties
        self._packing = packing

    def place(self, adapter: Adapter, weight: float, *, alone: bool) -> None:
        """Add the pieces of ``adapter``, its deltas times ``weight``. ``alone``: whether no other adapter is merged."""
        if not alone:
            _check_combinable(adapter)
        self._tower = adapter.tower
        for replacement in adapter.replacements:
            for piece in by_expert(replacement, self._names):
                self._place_replacement(piece, adapter)
        parameters = targeted_parameters(adapter, self._architecture)
        expert_layers: list[tuple[LowRankPair, float]] = []
        paths = []
        for pair in adapter.pairs:
            module, parameter = parameters.get(pair.module, (pair.module, ""))
            path = f"{module}.{parameter}" if parameter else module
            paths.append(path)
            rank = _rank(pair, path, adapter, experts=bool(parameter))
            scaling = adapter.settings.scaling(path, rank) * weight
            if parameter:
                for name, operation in self._parameter(pair, module, parameter, scaling, adapter).items():
                    self._check_float(name, pair.a)
                    _check_expert_rank(operation, rank, pair, path)
                    self._add(name, operation)
            elif self._names.find_alone(f"{module}.weight") is None and fused_tensor(module, self._tensors, self._names):
                expert_layers.append((pair, scaling))
            else:
                self._place_pair(pair, scaling, adapter)
        for name, operation in place_expert_layers(expert_layers, self._tensors, self._names).items():
            self._check_float(name, expert_layers[0][0].a)
            self._add(name, operation)
        adapter.settings.check_patterns(tuple(paths))
        for rows in adapter.token_rows:
            self._place_rows(rows, adapter)
        if len(adapter.token_rows) < len(adapter.settings.trainable_tokens):
            self._check_rows_shared(adapter)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor ``name`` of the output, before anything but replacement."""
        change = self.changes.get(name)
        if change is not None and change.replacement is not None:
            return change.replacement.tensor.shape
        if name in self._stored.decoders:
            return self._stored.decoders[name].shape
        if name not in self._tensors and (group := self._ties.group_of(name)):
            return self.shape(group.stored[0])
        return result_shape(self._tensors[name], ())

    def _parameter(
        self, pair: LowRankPair, module: str, parameter: str, scaling: float, adapter: Adapter
    ) -> Mapping[str, Operation]:
        """The update of a parameter, by the names of the tensors that it changes: a matrix, or the experts of a block."""
        name = self._lookup(f"{module}.{parameter}")
        if name is None or len(self.shape(name)) != 2:
            return place_parameter(
                pair, module, parameter, scaling, self._packing, self._tensors, self._names, self._architecture
            )
        update = AddLowRank(Whole(pair.a), Whole(pair.b), scaling)
        self._check_shape(name, update, pair, adapter)
        return {name: update}

    def _place_pair(self, pair: LowRankPair, scaling: float, adapter: Adapter) -> None:
        module, parameter = pair.module, "weight"
        if match := _ATTENTION_OUTPUT.fullmatch(module):
            # PEFT adds this layer's update twice in every forward pass of nn.MultiheadAttention: once itself and once by the
            # wrapper of the layer, so that twice the update is what was trained (tuners/lora/layer.py, MultiheadAttention.merge).
            module, scaling = f"{match['attention']}.out_proj", 2 * scaling
        elif self._names.find(f"{module}.weight") is None and self._names.find(f"{module}.in_proj_weight") is not None:
            parameter = "in_proj_weight"
        name = self._find(f"{module}.{parameter}", pair.a)
        shape = self.shape(name)
        update = self._update(pair, module, scaling, shape)
        if not update.filters:
            self._check_shape(name, update, pair, adapter)
        self._check_float(name, pair.a)
        self._add(name, update)
        if pair.magnitude is not None:
            self._add(name, self._rescale(pair, pair.magnitude, update, shape))
        if pair.bias is not None:
            self._place_bias(pair, pair.bias, module, scaling, adapter)

    def _update(self, pair: LowRankPair, module: str, scaling: float, shape: tuple[int, ...]) -> AddLowRank:
        update = AddLowRank(Whole(pair.a), Whole(pair.b), scaling, transposed=pair.embedding)
        if len(pair.a.shape) > 2 or len(shape) > 2:
            if shape != (pair.b.shape[0], *pair.a.shape[1:]) or any(size != 1 for size in pair.b.shape[2:]):
                raise MergeError(
                    f"{pair.a.path}: {pair.a.name!r} {list(pair.a.shape)} and {pair.b.name!r} {list(pair.b.shape)} do not make "
                    f"a kernel of the base's shape {list(shape)}"
                )
            self._architecture.check_convolution(module, str(pair.a.path))
            return replace(update, filters=True)
        turned = shape == update.update_shape[::-1]
        if not pair.embedding and (turned if shape != update.update_shape else self._architecture.has_transposed_layers):
            # A square matrix fits both ways round, so the class decides; elsewhere it confirms what the shapes say.
            return replace(update, transposed=self._architecture.is_transposed_layer(module))
        return update

    def _rescale(self, pair: LowRankPair, magnitude: TensorInfo, update: AddLowRank, shape: tuple[int, ...]) -> Operation:
        outputs = pair.b.shape[0]
        expected = (1, outputs, *(1,) * (len(shape) - 2)) if update.filters else (outputs,)
        if magnitude.shape != expected:
            raise MergeError(f"{magnitude.path}: {magnitude.name!r} has shape {list(magnitude.shape)}, expected {list(expected)}")
        return RescaleColumns(magnitude) if update.transposed else RescaleRows(magnitude, update.filters)

    def _place_bias(self, pair: LowRankPair, bias: TensorInfo, module: str, scaling: float, adapter: Adapter) -> None:
        name = self._lookup(f"{module}.bias")
        if name is None:
            raise MergeError(
                f"{bias.path}: {bias.name!r} adds a bias to {module}, which has none in base {self.base.folder.source}; a "
                "checkpoint of this architecture has no place for it"
            )
        if bias.shape != self.shape(name):
            raise MergeError(
                f"{bias.path}: {bias.name!r} has shape {list(bias.shape)}, the base's {name} {list(self.shape(name))}"
            )
        self._check_float(name, bias)
        self._add(name, AddVector(bias, scaling))

    def _place_replacement(self, piece: Replacement, adapter: Adapter) -> None:
        name = self._find(f"{piece.module}.{piece.parameter}", piece.tensor, _head_of_training(adapter) if piece.trained else "")
        expected = self.shape(name)
        # Only a vocabulary can have been resized.
        resized = piece.tensor.shape[1:] == expected[1:] and bool(expected)
        if piece.tensor.shape != expected and not (resized and self._ties.is_vocabulary(name)):
            raise MergeError(
                f"{piece.tensor.path}: {piece.tensor.name!r} has shape {list(piece.tensor.shape)}, the base's {name} has "
                f"{list(expected)}"
            )
        if piece.tensor.shape != expected:
            self.resized[name] = piece.tensor.shape[0]
        change = self.changes.setdefault(name, Change())
        if change.replacement is not None or change.operations:
            present = change.replacement.tensor if change.replacement is not None else self._tensors.get(name)
            if not piece.trained and present is not None and same_values(present, piece.tensor):
                # The layer under an update, as another adapter stored it or as the base has it.
                return
            raise MergeError(f"{piece.tensor.path}: {piece.tensor.name!r} replaces {name}, which another tensor changes already")
        if piece.tensor.dtype.name in FLOATING:
            self._check_float(name, piece.tensor)
        elif name not in self._tensors or self._tensors[name].dtype != piece.tensor.dtype:
            raise MergeError(
                f"{piece.tensor.path}: {piece.tensor.name!r} is of type {piece.tensor.dtype.name}, the base's {name} is not"
            )
        change.replacement = piece

    def _place_rows(self, piece: TokenRows, adapter: Adapter) -> None:
        name = self._find(f"{piece.module}.weight", piece.values)
        shape = self.shape(name)
        if len(shape) != 2 or piece.values.shape[1] != shape[1] or max(piece.indices) >= shape[0]:
            raise MergeError(
                f"{piece.values.path}: {piece.values.name!r} {list(piece.values.shape)} replaces rows up to "
                f"{max(piece.indices)} of the base's {name} {list(shape)}, which do not fit"
            )
        if any(isinstance(operation, ReplaceRows) for operation in self.changes.get(name, Change()).operations):
            raise MergeError(
                f"{piece.values.path}: {piece.values.name!r} replaces rows of {name}, as another adapter does already"
            )
        self._check_float(name, piece.values)
        self._add(name, ReplaceRows(piece.values, piece.indices))

    def _check_rows_shared(self, adapter: Adapter) -> None:
        """Raise unless rows that are named and not stored are those of another module: PEFT stores what tied ones share once."""
        for module, indices in adapter.settings.trainable_tokens.items():
            held = any(f".{piece.module}".endswith(f".{module}") for piece in adapter.token_rows)
            shared = (piece for piece in adapter.token_rows if piece.indices == indices)
            if not held and not any(
                self._ties.share_rows(self._find(f"{piece.module}.weight", piece.values), module) for piece in shared
            ):
                raise MergeError(
                    f"{adapter.settings.where}: trainable_token_indices names rows of {module!r}, but the adapter holds no "
                    "trainable_tokens_delta of it; it is incomplete"
                )

    def _add(self, name: str, operation: Operation) -> None:
        self.changes.setdefault(name, Change()).operations.append(operation)

    def _lookup(self, wanted: str) -> str | None:
        """The base's name of the tensor; of one that it does not store, since it is tied, the name that it would have."""
        return self._names.find(wanted, self._tower) or self._ties.find(wanted)

    def _find(self, wanted: str, tensor: TensorInfo, hint: str = "") -> str:
        name = self._lookup(wanted)
        if name is None:
            raise MergeError(
                f"{tensor.path}: module {wanted.rpartition('.')[0]!r} has no tensor {wanted} in base {self.base.folder.source}, "
                f"which {tensor.name!r} needs; {hint or self._names.nearest(wanted)}"
            )
        return name

    def _check_shape(self, name: str, update: AddLowRank, pair: LowRankPair, adapter: Adapter) -> None:
        if update.update_shape != self.shape(name):
            raise MergeError(
                f"{pair.a.path}: the update of {pair.module} has shape {list(update.update_shape)}, the base's {name} has "
                f"{list(self.shape(name))}; is {self.base.folder.source} the base it was trained on "
                f"({adapter.named_base or 'not recorded'})?"
            )

    def _check_float(self, name: str, tensor: TensorInfo) -> None:
        weight = self._tensors.get(name)
        if weight is not None and name not in self._stored.decoders and weight.dtype.name not in FLOATING:
            raise MergeError(
                f"{weight.path}: {name} is of type {weight.dtype.name}, expected one of {', '.join(FLOATING)}; "
                "merge into the 16-bit checkpoint that this one was made from"
            )


def _rank(pair: LowRankPair, path: str, adapter: Adapter, *, experts: bool) -> int:
    """The rank of an update, by configuration and tensors; for fused experts the tensors hold a multiple of it."""
    ranks = adapter.settings.ranks(path)
    found = (pair.a.shape[0], pair.b.shape[1])
    fitting = [rank for rank in ranks if found[0] == found[1] and (found[0] % rank == 0 if experts else found[0] == rank)]
    if len(fitting) != 1:
        raise MergeError(
            f"{pair.a.path}: {pair.module}: lora_A {list(pair.a.shape)} and lora_B {list(pair.b.shape)} are of rank {found[0]} "
            f"and {found[1]}, the configuration says {' or '.join(map(str, ranks))}"
        )
    return fitting[0]


def _check_expert_rank(operation: Operation, rank: int, pair: LowRankPair, path: str) -> None:
    """Each expert's share of the tensors is of the rank that the configuration says, and so the scaling is right."""
    updates = [part for _, part in operation.parts] if isinstance(operation, AddLowRankParts) else [operation]
    for update in updates:
        if isinstance(update, AddLowRank) and update.a.shape[0] != rank:
            raise MergeError(
                f"{pair.a.path}: {pair.a.name!r} {list(pair.a.shape)} gives {path} updates of rank {update.a.shape[0]}, the "
                f"configuration says {rank}"
            )


def _head_of_training(adapter: Adapter) -> str:
    """What to do about a classifier's head that the base does not have; empty for an adapter of a language model."""
    if adapter.task_class is None:
        return ""
    return (
        f"a head that training put on a base without one: load the base with AutoModel{adapter.task_class} (num_labels as in "
        "training), save it with save_pretrained and merge into that"
    )


def _check_combinable(adapter: Adapter) -> None:
    """Several adapters add up only where each of them is a sum itself."""
    for pair in adapter.pairs:
        if pair.magnitude is not None:
            raise MergeError(
                f"{adapter.settings.where}: use_dora is set; DoRA rescales the weight that it was trained on, so that it cannot "
                "be added to other adapters"
            )
    pieces: Mapping[str, tuple[TensorInfo, ...]] = {
        "replaces a whole tensor": tuple(piece.tensor for piece in adapter.replacements if piece.trained),
        "replaces rows": tuple(piece.values for piece in adapter.token_rows),
    }
    for what, tensors in pieces.items():
        for tensor in tensors:
            raise MergeError(
                f"{tensor.path}: {tensor.name!r} {what} of the base, which has no weighted sum with other adapters; merge it "
                "alone"
            )
