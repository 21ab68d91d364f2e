"""What nobody should overlook of a merge that can be done: the command line says it, and :func:`lora_merge.merge` warns of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lora_merge.merging.plan import ORIGINAL_WEIGHTS, MergePlan
from lora_merge.merging.recipes import known_recipe, read_recipe

_SETTINGS = ("quant_type", "double_quant", "block_size", "quant_dtype")


def cautions(plan: MergePlan, given: Mapping[str, Any]) -> Iterator[str]:
    """One line for each thing about the recipe that may not be meant. ``given``: recipe settings given explicitly, by name."""
    for adapter in plan.adapters if plan.method == ORIGINAL_WEIGHTS else ():
        known = known_recipe(adapter.folder.path, adapter.named_base)
        if known is not None:
            yield (
                f"{adapter.folder.source} was trained on a 4-bit base ({known.describe()}; {known.source}) and is merged into "
                "the original weights, with which it decides differently; add --from-4bit"
            )
    recorded = read_recipe(plan.adapter.folder.path) if given else None
    for name in _SETTINGS:
        value = given.get(name)
        if recorded is not None and value is not None and name in recorded.origins and getattr(recorded, name) != value:
            yield f"{name} is given as {value}, but the record beside the adapter says {getattr(recorded, name)}"
    if plan.recipe is not None and plan.recipe.assumed:
        yield (
            f"the quantization recipe is assumed ({plan.recipe.describe()}): nothing beside the adapter says how it was trained; "
            "give --quant-config or the quantization flags to settle it"
        )
