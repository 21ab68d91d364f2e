"""Which modules of the base were quantized: transformers' own rule, replayed on a model without data, or what the user says."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lora_merge.merging.architecture import Architecture
from lora_merge.merging.checkpoint import Checkpoint
from lora_merge.merging.errors import MergeError
from lora_merge.merging.experts import fused_tensor, is_expert_layer, layers_in
from lora_merge.merging.names import NameMap
from lora_merge.merging.quantization import QuantRecipe
from lora_merge.merging.renames import ClassNames

RULE = "default"
"""The word for transformers' rule in a list of quantized modules."""


_PARAMETER_ROUTERS = frozenset("deepseek_v2 deepseek_v3 dots1 glm4_moe glm4v_moe glm4v_moe_text".split())
"""Model types with experts as layers whose router was a parameter in transformers 4 already, and so never quantized."""
_LAYER_ROUTERS = {
    **dict.fromkeys(("granitemoe", "granitemoeshared", "granitemoehybrid"), "*.router.layer"),
    **dict.fromkeys(("aria", "aria_text"), "*.mlp.router"),
    **dict.fromkeys(("llama4", "llama4_text"), "*.feed_forward.router"),
}
"""Model types whose router transformers 4 quantized and transformers 5 does not, though their experts are no question."""


@dataclass(frozen=True)
class QuantizedTensor:
    """A base tensor that 4-bit layers held in training.

    Attributes:
        parts: how many layers of equal size its rows were; more than one for a stack of experts.
        transposed: whether it is stored transposed against what was quantized.
    """

    parts: int = 1
    transposed: bool = False


def quantized_tensors(
    base: Checkpoint,
    recipe: QuantRecipe,
    architecture: Architecture,
    experts_as_layers: bool | None = None,
    tower: str | None = None,
) -> Mapping[str, QuantizedTensor]:
    """The base's weight tensors that bitsandbytes quantized when the adapter was trained, by name.

    Args:
        experts_as_layers: whether each expert was a linear layer of its own, as in transformers 4, which quantized them; False
            for version 5, where they are fused parameters and stay as they are; None where the adapter does not tell.
        tower: where the base keeps the tower that was trained, if that was a model of its own in training.

    Raises:
        MergeError: the architecture cannot be built, a quantized module has no tensor in the base, or nothing tells whether
            experts were quantized.
    """
    names = NameMap.of(base.tensors, ClassNames(architecture))
    wanted = recipe.quantized_modules
    modules: list[str] = []
    found: dict[str, QuantizedTensor] = {}
    if wanted is None or RULE in wanted:
        modules += quantized_modules(architecture, recipe.skip_modules)
        if wanted is None:
            found = _expert_layers(base, architecture, experts_as_layers)
            if experts_as_layers is None:
                _check_routers(base, architecture)
    for entry in wanted or ():
        if entry != RULE:
            modules += _selected(entry, base)
    if not modules and not found:
        raise MergeError(
            f"base {base.folder.source}: no module of it would have been quantized under the recipe; "
            "a 4-bit base has at least one quantized linear layer"
        )
    missing: list[str] = []
    for module in modules:
        name = names.find(f"{module}.weight", tower)
        fused = fused_tensor(module, base.tensors, names) if name is None else None
        if name is not None:
            found[name] = QuantizedTensor(1, architecture.has_transposed_layers and architecture.is_transposed_layer(module))
        elif fused is not None:
            found[fused.name] = QuantizedTensor(fused.experts * fused.projections)
        else:
            missing.append(module)
    if missing:
        raise MergeError(
            f"base {base.folder.source}: module {missing[0]!r} was quantized in training but the base has no {missing[0]}.weight "
            f"({len(missing)} of {len(modules)} modules); the base and the recipe do not belong together"
        )
    return found


def quantized_modules(architecture: Architecture, skip_modules: tuple[str, ...] | None) -> tuple[str, ...]:
    """Names of the modules that transformers replaces by 4-bit ones when it loads the base.

    By default it leaves out tied weights' modules, the last module, the output embedding and what the architecture keeps in
    float32; a given ``skip_modules`` *replaces* the first three. Source: ``transformers/quantizers/base.py`` (the functions are
    called, not copied) and ``integrations/bitsandbytes.py``, ``replace_with_bnb_linear``, whose type test is repeated here.
    """
    from torch import nn
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    model = architecture.model
    skipped = HfQuantizer.get_modules_to_not_convert(
        model, list(skip_modules) if skip_modules is not None else None, model._keep_in_fp32_modules
    )
    return tuple(
        name
        for name, module in model.named_modules()
        if (type(module) is nn.Linear or isinstance(module, Conv1D)) and should_convert_module(name, skipped)
    )


def _expert_layers(base: Checkpoint, architecture: Architecture, experts_as_layers: bool | None) -> dict[str, QuantizedTensor]:
    """The experts' tensors and their routers, if training had them as layers."""
    experts = {
        name: QuantizedTensor(layers_in(name, tensor.shape))
        for name, tensor in base.tensors.items()
        if layers_in(name, tensor.shape)
    }
    if not experts or experts_as_layers is False:
        return {}
    fused = not any(is_expert_layer(name.removesuffix(".weight")) for name in experts)
    if experts_as_layers is None and fused and not architecture.joins_experts:
        return {}  # of a family whose experts never were layers, such as gpt-oss and Llama 4
    if experts_as_layers is None:
        raise MergeError(
            f"base {base.folder.source}: it has experts, such as {next(iter(experts))}, which transformers 4 quantized as "
            "layers of their own and transformers 5 leaves as they are; the adapter does not tell which trained it: give "
            f"--quantized-modules {RULE} for version 5, or --quantized-modules '{RULE},*.experts.*,*.gate' for version 4"
        )
    routers: set[str] = set()
    if _PARAMETER_ROUTERS.isdisjoint(architecture.model_types):
        blocks = {name.partition(".experts.")[0] for name in experts}
        # The class of PhiMoE calls the same layer otherwise than its files do.
        routers = {f"{block}.{router}.weight" for block in blocks for router in ("gate", "router")} & set(base.tensors)
    return {**experts, **{name: QuantizedTensor() for name in sorted(routers)}}


def _check_routers(base: Checkpoint, architecture: Architecture) -> None:
    """Refuse to guess where the generation of transformers that trained the adapter decides about the routers alone."""
    for kind, pattern in _LAYER_ROUTERS.items():
        if kind in architecture.model_types and _matching(pattern, base):
            raise MergeError(
                f"base {base.folder.source}: its routers, such as {_matching(pattern, base)[0]}, were quantized by transformers "
                f"4 and are not by transformers 5; nothing tells which trained the adapter: give --quantized-modules {RULE} for "
                f"version 5, or --quantized-modules '{RULE},{pattern}' for version 4"
            )


def has_patterns(modules: Iterable[str]) -> bool:
    """Whether a list of quantized modules names some of them by what they have in common."""
    return any(set(entry) & set("*?[") or entry == RULE for entry in modules)


def _selected(entry: str, base: Checkpoint) -> list[str]:
    """The modules that one entry of a list of quantized modules stands for: a name, or a pattern with ``*``."""
    if "*" not in entry and "?" not in entry:
        return [entry]
    chosen = _matching(entry, base)
    if not chosen:
        raise MergeError(f"quantized modules: pattern {entry!r} matches no linear layer of the base")
    return chosen


def _matching(pattern: str, base: Checkpoint) -> list[str]:
    # Norms have weights too, but only matrices were ever quantized.
    matrices = [name.removesuffix(".weight") for name, tensor in sorted(base.tensors.items()) if len(tensor.shape) == 2]
    return [module for module in matrices if fnmatch.fnmatchcase(module, pattern)]
