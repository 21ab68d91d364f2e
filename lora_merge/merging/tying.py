"""Tied weights: tensors that the model's class keeps as one, until an adapter changes only some of them.

Most often these are the input embedding and the output head. PEFT trains each by itself (a LoRA on the embedding leaves the head
as it was), unless it says that it keeps them tied. Its own merge adds the update to the shared tensor, and so to all of them.
Here they become tensors of their own as soon as they stop being equal.

Which weights are tied only the class knows. It is asked where the answer can matter, so that an adapter on the layers of a usual
model builds nothing: no class ties weights inside its numbered layers but those of :data:`SHARED_LAYERS`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from lora_merge.merging.architecture import Architecture
from lora_merge.merging.checkpoint import Checkpoint
from lora_merge.merging.dtypes import FLOATING, widen
from lora_merge.merging.errors import MergeError
from lora_merge.merging.factors import Factor
from lora_merge.merging.names import NameMap
from lora_merge.merging.operations import AddLowRank, Operation
from lora_merge.merging.renames import ClassNames
from lora_merge.merging.safetensors_file import TensorInfo, read_tensor
from lora_merge.merging.updates import ReplaceRows

if TYPE_CHECKING:
    from lora_merge.merging.placement import Change

SHARED_LAYERS = tuple(
    "d_fine dab_detr deformable_detr deimv2 diffusion_gemma grounding_dino mm_grounding_dino pe_audio_video pp_doclayout_v3 "
    "qwen3_omni_moe rt_detr_v2 sam sam_hq t5gemma2 udop zamba zamba2".split()
)
"""Beginnings of the model types whose class ties more than named tensors outside of its numbered layers: whole blocks..."""

_NUMBERED = re.compile(r"\.\d+\.")


@dataclass(frozen=True)
class TieGroup:
    """Tensors that the class keeps as one.

    Attributes:
        source: the one that the class ties the others to.
        names: all of them as the base calls them, or would if it stored them; the source first.
        stored: those that the base stores, in that order; at least one.
    """

    source: str
    names: tuple[str, ...]
    stored: tuple[str, ...]


@dataclass(frozen=True)
class Settlement:
    """What becomes of tied tensors.

    Attributes:
        untied: whether some stopped being equal, so that nothing may be tied any more.
        copies: tensors that the output needs and the base does not store -> the base's tensor that each was one with.
    """

    untied: bool = False
    copies: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ties:
    """What the base's class ties, in the base's names. The class is built on the first question that needs it.

    Attributes:
        tensors: the base's tensors that hold weights, by name.
    """

    base: Checkpoint
    tensors: Mapping[str, TensorInfo]
    architecture: Architecture

    def concern(self, names: Iterable[str]) -> bool:
        """Whether a tensor of these names could be tied, as far as names tell."""
        return self._shares_layers or not all(_NUMBERED.search(name) for name in names)

    def find(self, wanted: str) -> str | None:
        """The base's name of the tied tensor called ``wanted`` elsewhere, stored or not; None where there is none."""
        if not self.concern([wanted]):
            return None
        try:
            names, aliases = self._tied_names
        except MergeError:
            # A class that cannot be built explains no name, and the name is the error to be told.
            return None
        found = names.find(wanted)
        return aliases[found] if found is not None else None

    def group_of(self, name: str) -> TieGroup | None:
        """The group of the tensor that the base calls ``name``, or would."""
        return next((group for group in self.groups if name in group.names), None)

    def is_vocabulary(self, name: str) -> bool:
        """Whether the tensor is the input embedding, the output head or tied to one of them: what a resize changes."""
        group = self.group_of(name)
        return any(other in self._vocabulary for other in (group.names if group else (name,)))

    @cached_property
    def groups(self) -> tuple[TieGroup, ...]:
        """Every group that the class ties.

        Raises:
            MergeError: the class cannot be built; the base stores members with different values, or none.
        """
        members: dict[str, list[str]] = {}
        for target, source in self.architecture.ties.items():
            members.setdefault(source, []).append(target)
        groups = (self._group(source, [source, *targets]) for source, targets in members.items())
        return tuple(group for group in groups if len(group.names) > 1)

    @property
    def rows_are_shared(self) -> bool:
        """Whether PEFT gives trained token rows of the input embedding to what is tied to it: it looks at the top."""
        return bool(getattr(self.architecture.model.config, "tie_word_embeddings", False))

    def share_rows(self, name: str, module: str) -> bool:
        """Whether PEFT gives token rows trained of the tensor ``name`` to ``module``, the end of a path, as well."""
        group = self.group_of(name)
        if group is None or not self.rows_are_shared or not name == group.source == self.embedding:
            return False
        aliases = (alias for other in group.names[1:] for alias in self._aliases[other])
        return any(f".{alias}".endswith(f".{module}.weight") for alias in aliases)

    @cached_property
    def embedding(self) -> str | None:
        """The base's name of the input embedding."""
        name = self.architecture.embedding
        return None if name is None else self.name(name)

    @cached_property
    def _vocabulary(self) -> frozenset[str]:
        return frozenset(self.name(name) for name in (self.architecture.embedding, self.architecture.head) if name is not None)

    @cached_property
    def _shares_layers(self) -> bool:
        return any(kind.replace("-", "_").startswith(SHARED_LAYERS) for kind in self.architecture.model_types)

    @cached_property
    def _stored_names(self) -> NameMap:
        return NameMap.of(self.tensors, ClassNames(self.architecture))

    @cached_property
    def _tied_names(self) -> tuple[NameMap, Mapping[str, str]]:
        """What tied tensors are called by the base and by the class -> the base's name."""
        aliases = {alias: name for group in self.groups for name in group.names for alias in self._aliases[name]}
        return NameMap.of(aliases), aliases

    @cached_property
    def _aliases(self) -> dict[str, tuple[str, ...]]:
        """By the base's name of a tied tensor, what else it is called: by the class."""
        pairs = self.architecture.ties
        return {self.name(name): (self.name(name), name) for name in (*pairs.keys(), *pairs.values())}

    def name(self, name: str) -> str:
        """The base's name of what the class calls ``name``; of a tensor that it does not store, the one by which it would be
        found there: the hub's where the base has the hub's names, else the class's."""
        in_files = self.architecture.file_name(name)
        stored = self._stored_names.find(in_files) or self._stored_names.find(name)
        if stored is not None:
            return stored
        source = self.architecture.ties.get(name, name)
        return in_files if self.architecture.file_name(source) in self.tensors else name

    def _group(self, source: str, members: list[str]) -> TieGroup:
        names = [self.name(name) for name in members]
        if len(set(names)) < len(names):
            raise MergeError(
                f"base {self.base.folder.source}: its class ties {', '.join(members)}, which have no names of their own in it"
            )
        stored = [name for name in names if name in self.tensors]
        if not stored:
            raise MergeError(
                f"base {self.base.folder.source}: has no tensor {source}, nor another that its class ties to it; it is incomplete"
            )
        for name in stored[1:]:
            if same_values(self.tensors[stored[0]], self.tensors[name]):
                continue
            if self.base.config.get("tie_word_embeddings") is not False:
                raise MergeError(
                    f"base {self.base.folder.source}: config.json ties {name} to {stored[0]}, but their values differ; engines "
                    "disagree about which counts; set tie_word_embeddings to what it was trained with"
                )
            # A class that always ties (T5's) leaves apart what a checkpoint stores with values of its own.
            names.remove(name)
        return TieGroup(names[0], tuple(names), tuple(name for name in stored if name in names))


def settle(ties: Ties, changes: dict[str, Change], make: type[Change]) -> Settlement:
    """Complete the changes of tied tensors, and tell what has to be written for them.

    Args:
        changes: by name; gets or loses those of tied tensors.
        make: the class of a change.

    Raises:
        MergeError: token rows were trained where it is not known what they are tied to; see also :attr:`Ties.groups`.
    """
    if not ties.concern(changes):
        return Settlement()
    # Every group is settled before one is written apart: the configuration unties all of them or none.
    apart = [_settle_group(group, ties, changes, make) for group in ties.groups]
    _check_rows(ties, changes)
    if not any(apart):
        return Settlement()
    copies: dict[str, str] = {}
    for group in ties.groups:
        for name in group.names:
            if name not in group.stored:
                copies[name] = group.stored[0]
                if group.stored[0] in changes:
                    changes.setdefault(name, changes[group.stored[0]])
    return Settlement(True, copies)


def _settle_group(group: TieGroup, ties: Ties, changes: dict[str, Change], make: type[Change]) -> bool:
    """Complete the changes of a group's tensors. Whether they stop being equal."""
    if not any(name in changes for name in group.names):
        return False
    members = {name: changes.get(name) or make() for name in group.names}
    _share_replacement(list(members.values()))
    _share_rows(group, members, ties)
    _check_rows(ties, members)
    first, *others = members.values()
    apart = not all(_equal(first, other) for other in others)
    for name, member in members.items():
        if apart:
            changes[name] = member
        elif name in group.stored:
            changes[name] = first
        else:
            changes.pop(name, None)
    return apart


def _share_replacement(members: list[Change]) -> None:
    """What is stored for safety is the shared tensor, and so belongs to all: a resized embedding under an adapter."""
    shared = next((one.replacement for one in members if one.replacement and not one.replacement.trained), None)
    for member in members:
        if member.replacement is None:
            member.replacement = shared


def _share_rows(group: TieGroup, members: dict[str, Change], ties: Ties) -> None:
    """PEFT gives the trained rows of the input embedding to what is tied to it, unless that has rows of its own.

    Source: PEFT 0.21, ``set_additional_trainable_modules`` in ``utils/other.py``.
    """
    trained = {name: rows for name, member in members.items() if (rows := _rows(member))}
    if not trained or not ties.rows_are_shared:
        return
    if ties.embedding != group.source:
        raise MergeError(
            f"{next(iter(trained.values()))[0].values.path}: token rows were trained of {next(iter(trained))}, which the class "
            f"ties to {group.source}, while its input embedding is {ties.embedding}; it is not known which tensors PEFT gave them"
        )
    if list(trained) != [group.source]:
        return
    for name, member in members.items():
        if name != group.source:
            # The layer of rows lies inside a LoRA's: rows are replaced first, and updates come on top.
            member.operations[:0] = trained[group.source]


def _check_rows(ties: Ties, changes: Mapping[str, Change]) -> None:
    """Refuse trained rows of a head with a bias, which PEFT leaves out in training and not in what it merges.

    Source: PEFT 0.21, ``TrainableTokensLayer.forward`` in ``tuners/trainable_tokens/layer.py``.
    """
    for name, change in changes.items():
        bias = f"{name.removesuffix('weight')}bias"
        if (rows := _rows(change)) and (bias in ties.tensors or ties.find(bias) is not None):
            raise MergeError(
                f"{rows[0].values.path}: {rows[0].values.name!r} replaces rows of {name}, whose layer has a bias; PEFT's token "
                "rows leave the bias out in training, so that no checkpoint of this class computes what was trained"
            )


def _rows(change: Change) -> list[ReplaceRows]:
    return [operation for operation in change.operations if isinstance(operation, ReplaceRows)]


def _equal(one: Change, other: Change) -> bool:
    first, second = one.replacement, other.replacement
    if (first is None) != (second is None):
        return False
    if first is not None and second is not None and not same_values(first.tensor, second.tensor):
        return False
    return len(one.operations) == len(other.operations) and all(
        _same_operation(left, right) for left, right in zip(one.operations, other.operations, strict=True)
    )


def _same_operation(one: Operation, other: Operation) -> bool:
    if isinstance(one, AddLowRank) and isinstance(other, AddLowRank):
        left = _oriented(one)
        right = _oriented(other)
        return one.scaling == other.scaling and all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))
    return one == other


def _oriented(update: AddLowRank) -> tuple[Any, Any]:
    """The update's halves as they multiply into a stored (rows, columns) tensor."""
    a: Factor = update.a
    return (a.read().T, update.b.read().T) if update.transposed else (update.b.read(), a.read())


def same_values(one: TensorInfo, other: TensorInfo) -> bool:
    """Whether two tensors hold the same numbers, whatever their types."""
    if one == other:
        return True
    if one.shape != other.shape or (one.dtype != other.dtype and not {one.dtype.name, other.dtype.name} <= set(FLOATING)):
        return False
    first, second = read_tensor(one), read_tensor(other)
    if one.dtype != other.dtype:
        first, second = widen(first, one.dtype), widen(second, other.dtype)
    return bool(np.array_equal(first, second))
