"""Updates of mixture-of-experts layers, whichever way base and adapter lay their experts out.

A base stores each expert's projections by themselves (``experts.3.w1.weight``, as the hub's checkpoints and transformers 4 do)
or all experts fused into one tensor (``experts.gate_up_proj``, transformers 5). An adapter has halves for each expert's layer,
or one pair of tensors with the halves of all experts (``target_parameters``). The four combinations meet here.
Source: PEFT 0.21, ``ParamWrapper`` in ``tuners/lora/layer.py`` and ``utils/transformers_weight_conversion.py``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from lora_merge.merging.adapter import Adapter, LowRankPair, Replacement
from lora_merge.merging.architecture import Architecture
from lora_merge.merging.errors import MergeError
from lora_merge.merging.factors import ExpertA, ExpertB, Whole
from lora_merge.merging.names import NameMap
from lora_merge.merging.operations import AddLowRank, Operation
from lora_merge.merging.safetensors_file import TensorInfo
from lora_merge.merging.updates import AddLowRankParts

_EXPERT_LAYER = re.compile(r"(?P<stack>.+\.experts)\.(?P<expert>\d+)\.(?P<projection>[^.]+)")
# The projections that a fused parameter holds, one below the other, under the names of two families of models.
_FUSED = {"gate_up_proj": (("w1", "w3"), ("gate_proj", "up_proj")), "down_proj": (("w2",), ("down_proj",))}


@dataclass(frozen=True)
class FusedTensor:
    """Where a layer of one expert lies in a tensor that holds the experts of a block.

    Attributes:
        name: the base's tensor, (experts, rows, columns).
        experts, projections: how many of each it holds.
        expert, projection: which one the layer is.
    """

    name: str
    experts: int
    projections: int
    expert: int
    projection: int


def is_expert_layer(module: str) -> bool:
    """Whether ``module`` is the layer of one expert, as transformers 4 has them."""
    return _EXPERT_LAYER.fullmatch(module) is not None


def layers_in(name: str, shape: tuple[int, ...]) -> int:
    """How many experts' layers, as transformers 4 has them, the base's tensor ``name`` holds; 0 for one that holds none."""
    if name.endswith(".weight"):
        return int(len(shape) == 2 and is_expert_layer(name.removesuffix(".weight")))
    parameter = name.rpartition(".experts.")[2]
    return shape[0] * len(_FUSED[parameter][0]) if parameter in _FUSED and len(shape) == 3 else 0


def layer_names(name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    """The weights of single experts' layers, under both families' names, that the base's fused tensor ``name`` holds; else ()."""
    stack, _, parameter = name.rpartition(".")
    if not stack.endswith(".experts") or parameter not in _FUSED or not shape:
        return ()
    projections = [projection for family in _FUSED[parameter] for projection in family]
    return tuple(f"{stack}.{expert}.{projection}.weight" for expert in range(shape[0]) for projection in projections)


def fused_tensor(module: str, tensors: Mapping[str, TensorInfo], names: NameMap) -> FusedTensor | None:
    """The fused tensor that holds the layer ``module`` (``...experts.3.w1``), or None."""
    match = _EXPERT_LAYER.fullmatch(module)
    if match is None:
        return None
    for parameter, families in _FUSED.items():
        for family in families:
            if match["projection"] in family:
                name = names.find(f"{match['stack']}.{parameter}")
                if name is None:
                    return None
                shape = tensors[name].shape
                if len(shape) != 3 or int(match["expert"]) >= shape[0] or shape[1] % len(family):
                    raise MergeError(f"{tensors[name].path}: {name!r} has shape {list(shape)}, which has no place for {module}")
                return FusedTensor(name, shape[0], len(family), int(match["expert"]), family.index(match["projection"]))
    return None


def by_expert(piece: Replacement, names: NameMap) -> tuple[Replacement, ...]:
    """A trained tensor of fused experts as the layers of a base that stores each expert by itself; any other piece as it is.

    The classes of such bases hold their experts as (experts, projections * rows, columns), of which each layer is one stretch.

    Raises:
        MergeError: the base has another number of experts.
    """
    fused, shape = f"{piece.module}.{piece.parameter}", piece.tensor.shape
    if piece.parameter not in _FUSED or len(shape) != 3 or names.find_alone(fused) is not None:
        return (piece,)
    families = (family for family in _FUSED[piece.parameter] if names.find_alone(f"{piece.module}.0.{family[0]}.weight"))
    family = next(families, None)
    if family is None:
        return (piece,)
    experts = next(n for n in itertools.count() if names.find_alone(f"{piece.module}.{n}.{family[0]}.weight") is None)
    if shape[0] != experts or shape[1] % len(family):
        raise MergeError(
            f"{piece.tensor.path}: {piece.tensor.name!r} has shape {list(shape)}, the base has {experts} experts with "
            f"{len(family)} such layers each"
        )
    size = piece.tensor.nbytes // (experts * len(family))
    layers = []
    for place, (expert, projection) in enumerate(itertools.product(range(experts), family)):
        name = f"{piece.tensor.name}[{expert}, {projection}]"
        rows = (shape[1] // len(family), shape[2])
        tensor = replace(piece.tensor, name=name, shape=rows, start=piece.tensor.start + place * size, nbytes=size)
        layers.append(replace(piece, module=f"{piece.module}.{expert}.{projection}", parameter="weight", tensor=tensor))
    return tuple(layers)


def place_expert_layers(
    pairs: list[tuple[LowRankPair, float]], tensors: Mapping[str, TensorInfo], names: NameMap
) -> dict[str, Operation]:
    """Updates of single experts' layers (with their scalings) as operations on the base's fused tensors."""
    parts: dict[str, list[tuple[int, AddLowRank]]] = {}
    for pair, scaling in pairs:
        place = fused_tensor(pair.module, tensors, names)
        if place is None:
            raise MergeError(f"{pair.a.path}: {pair.module!r} is an expert's layer without a place in the base")
        if pair.bias is not None or pair.magnitude is not None:
            raise MergeError(f"{pair.a.path}: {pair.module!r} has DoRA or a bias; that is not merged into fused experts")
        shape = tensors[place.name].shape
        rows = shape[1] // place.projections
        update = AddLowRank(Whole(pair.a), Whole(pair.b), scaling)
        if update.update_shape != (rows, shape[2]):
            raise MergeError(
                f"{pair.a.path}: the update of {pair.module} has shape {list(update.update_shape)}, its place in the base's "
                f"{place.name} has {[rows, shape[2]]}"
            )
        parts.setdefault(place.name, []).append((place.expert * shape[1] + place.projection * rows, update))
    return {
        name: AddLowRankParts(tuple(sorted(found, key=lambda part: part[0])), "experts' layers") for name, found in parts.items()
    }


def targeted_parameters(adapter: Adapter, architecture: Architecture) -> dict[str, tuple[str, str]]:
    """For an adapter with ``target_parameters``: module of a pair, as its key has it -> (module, parameter) that it is an
    update of.

    PEFT nests one wrapper a parameter, in the order in which the module defines them: the first parameter's is the innermost
    and its key has the most ``base_layer``. The order is taken from the architecture.
    """
    targets = adapter.settings.names("target_parameters")
    if not targets:
        return {}
    levels: dict[str, list[str]] = {}
    for pair in adapter.pairs:
        bare = re.sub(r"(\.base_layer)+$", "", pair.module)
        levels.setdefault(bare, []).append(pair.module)
    found: dict[str, tuple[str, str]] = {}
    matched: set[str] = set()
    for bare, nested in levels.items():
        module = architecture.module(bare)
        parameters = [name for name, _ in module.named_parameters(recurse=False)] if module is not None else []
        chosen = []
        for name in parameters:
            hits = [target for target in targets if f"{bare}.{name}" == target or f"{bare}.{name}".endswith(f".{target}")]
            matched.update(hits)
            chosen += [name] if hits else []
        if not chosen:
            continue
        if len(chosen) != len(nested):
            raise MergeError(
                f"{adapter.settings.where}: target_parameters name {len(chosen)} parameters of {bare} ({', '.join(chosen)}), "
                f"the adapter holds {len(nested)} updates of it; it is incomplete"
            )
        for name, key in zip(chosen, sorted(nested, key=len, reverse=True), strict=True):
            found[key] = (bare, name)
    parameters = [name for name, _ in architecture.model.named_parameters(remove_duplicate=False)]
    for target in targets:
        # PEFT passes over a target that no parameter of the class has, and writes such ones itself.
        if target not in matched and any(f".{name}".endswith(f".{target}") for name in parameters):
            raise MergeError(
                f"{adapter.settings.where}: target_parameters names {target!r}, but the adapter holds no update of it"
            )
    return found


def place_parameter(
    pair: LowRankPair,
    module: str,
    parameter: str,
    scaling: float,
    packing: str,
    tensors: Mapping[str, TensorInfo],
    names: NameMap,
    architecture: Architecture,
) -> dict[str, Operation]:
    """The update of a parameter of experts as operations on the base's tensors, by name: a fused tensor, or each expert's own."""
    name = names.find(f"{module}.{parameter}")
    if name is not None:
        return {name: _on_fused(pair, name, tensors[name], scaling, packing, architecture.module(module))}
    return _on_single_experts(pair, module, parameter, scaling, packing, tensors, names)


def _on_fused(pair: LowRankPair, name: str, stack: TensorInfo, scaling: float, packing: str, module: object) -> Operation:
    experts, rows, columns = stack.shape if len(stack.shape) == 3 else (0, 0, 0)
    out_features, in_features = pair.b.shape[0], pair.a.shape[1]
    straight, turned = (rows, columns) == (out_features, in_features), (rows, columns) == (in_features, out_features)
    if not experts or not (straight or turned) or pair.a.shape[0] % experts or pair.b.shape[1] % experts:
        raise MergeError(
            f"{pair.a.path}: {pair.a.name!r} {list(pair.a.shape)} and {pair.b.name!r} {list(pair.b.shape)} do not fit the base's "
            f"{name} {list(stack.shape)}"
        )
    transposed = bool(getattr(module, "is_transposed", False)) if straight and turned else turned
    parts = tuple(
        (
            expert * rows,
            AddLowRank(
                ExpertA(pair.a, expert, experts), ExpertB(pair.b, expert, experts, packing, 0, out_features), scaling, transposed
            ),
        )
        for expert in range(experts)
    )
    return AddLowRankParts(parts, "experts")


def _on_single_experts(
    pair: LowRankPair,
    module: str,
    parameter: str,
    scaling: float,
    packing: str,
    tensors: Mapping[str, TensorInfo],
    names: NameMap,
) -> dict[str, Operation]:
    for family in _FUSED.get(parameter, ()):
        if names.find(f"{module}.0.{family[0]}.weight") is None:
            continue
        experts = 0
        while names.find(f"{module}.{experts}.{family[0]}.weight") is not None:
            experts += 1
        rows = pair.b.shape[0] // len(family)
        placed: dict[str, Operation] = {}
        for expert in range(experts):
            for position, projection in enumerate(family):
                name = names.find(f"{module}.{expert}.{projection}.weight")
                if name is None:
                    raise MergeError(
                        f"base: {module}.{expert}.{projection}.weight is missing; its block of experts is incomplete"
                    )
                b = ExpertB(pair.b, expert, experts, packing, position * rows, (position + 1) * rows)
                update = AddLowRank(ExpertA(pair.a, expert, experts), b, scaling)
                _check_shape(update.update_shape, tensors[name].shape, pair, name)
                placed[name] = update
        if pair.a.shape[0] % experts or pair.b.shape[1] % experts:
            raise MergeError(f"{pair.a.path}: {pair.a.name!r} has {pair.a.shape[0]} rows, which {experts} experts cannot share")
        return placed
    raise MergeError(
        f"{pair.a.path}: parameter {module}.{parameter} has no tensor in the base; {names.nearest(f'{module}.{parameter}')}"
    )


def _check_shape(found: tuple[int, ...], expected: tuple[int, ...], pair: LowRankPair, name: str) -> None:
    if found != expected:
        raise MergeError(
            f"{pair.a.path}: the update of {pair.module} has shape {list(found)}, the base's {name} has {list(expected)}"
        )
