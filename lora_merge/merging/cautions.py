"""What nobody should overlook of a merge that can be done: the command line says it, and :func:`lora_merge.merge` warns of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lora_merge.merging.adapter import Adapter
from lora_merge.merging.architecture import model_types
from lora_merge.merging.lineage import lineage_cautions
from lora_merge.merging.module_folders import folders_left_behind
from lora_merge.merging.plan import FROM_8BIT, ORIGINAL_WEIGHTS, MergePlan
from lora_merge.merging.quantization import GIVEN, WEIGHT_SETTINGS, QuantRecipe
from lora_merge.merging.recipes import known_recipe, read_recipe
from lora_merge.merging.safetensors_file import read_tensor
from lora_merge.merging.token_ids import tokens_without_row
from lora_merge.merging.tokenizer_files import cautions_on_sets, notes_on_sets
from lora_merge.merging.trainers import eight_bit_training, named_in_4bit

if TYPE_CHECKING:
    from lora_merge.merging.api import MergeOptions

TIED_IN_VLLM = frozenset("bloom cohere cohere2 cohere2_moe gemma2 gemma3n gemma3n_text whisper zamba2".split())
"""Model types that vLLM gives no head of its own, whatever ``tie_word_embeddings`` says; source: vLLM 0.32."""

_ABBREVIATED_COMMIT = re.compile(r"[0-9a-f]{7,40}")


def cautions(plan: MergePlan, options: MergeOptions) -> Iterator[str]:
    """One line for each thing that may not be meant: about the recipe, the base, the tokenizer."""
    for adapter in plan.adapters if plan.method == ORIGINAL_WEIGHTS else ():
        yield from _quantized_training(adapter)
    yield from _recipe(plan)
    yield from lineage_cautions(plan.base, plan.adapters)
    for adapter in plan.adapters:
        yield from _revision(adapter, plan, options.revision)
        yield from _untrained(adapter)
    yield from cautions_on_sets(plan.base.folder, [adapter.folder for adapter in plan.adapters])
    if plan.untied and (kinds := TIED_IN_VLLM & set(model_types(plan.base.config))):
        yield (
            f"head and embedding are no longer equal, and vLLM keeps them one for {min(kinds)}: it refuses the merged checkpoint "
            "or decides otherwise; run it in Transformers, or train without embedding and head"
        )
    found = tokens_without_row(plan)
    if found is not None:
        yield found.message


def notes(plan: MergePlan) -> Iterator[str]:
    """One line for each thing about the files beside the weights that is worth a look and right as it is."""
    yield from notes_on_sets(plan.base.folder, [adapter.folder for adapter in plan.adapters])
    left = folders_left_behind(plan.base.folder.path)
    if left:
        yield f"folders of the base that are left behind: {', '.join(left)}"


def _untrained(adapter: Adapter) -> Iterator[str]:
    """One half of a product is zero before training, lora_B, or lora_embedding_A; the first that is not answers."""
    zero = all(not read_tensor(pair.a if pair.embedding else pair.b).any() for pair in adapter.pairs)
    others = any(pair.bias or pair.magnitude for pair in adapter.pairs) or bool(adapter.replacements)
    if adapter.pairs and zero and not others:
        yield f"{adapter.folder.source}: every update is zero, as before training, so that the merge changes no weight by it"


def _quantized_training(adapter: Adapter) -> Iterator[str]:
    """The adapter goes into the original weights, although it was trained on others."""
    source, named = adapter.folder.source, adapter.named_base
    known = known_recipe(adapter.folder.path, named)
    eight_bit = eight_bit_training(adapter.folder.path)
    if known is not None:
        yield (
            f"{source} was trained on a 4-bit base ({known.describe()}; {known.source}) and is merged into "
            "the original weights, with which it decides differently; add --from-4bit"
        )
    elif named_in_4bit(named):
        yield (
            f"{source} was trained on {named}, a 4-bit base by its name, and is merged into the original weights, with which it "
            "decides differently; give that base as --base, with --from-4bit, where bitsandbytes quantized it"
        )
    elif eight_bit is not None:
        yield (
            f"{source} was trained on a base in 8 bit ({eight_bit}) and is merged into the original weights, with which it "
            "decides differently; give the base as bitsandbytes stored it in 8 bit, with --from-4bit"
        )


def _recipe(plan: MergePlan) -> Iterator[str]:
    """About the 4-bit base that the merge goes through; of a merge into the original weights there is none."""
    if plan.method == FROM_8BIT:
        for adapter in plan.adapters:
            if (known := known_recipe(adapter.folder.path, adapter.named_base)) is not None:
                yield (
                    f"{adapter.folder.source} was trained on a 4-bit base ({known.describe()}; {known.source}), and base "
                    f"{plan.base.folder.source} is stored in 8 bit, with which it decides differently"
                )
    if plan.recipe is None:
        return
    for adapter in plan.adapters:
        beside = "the adapter" if len(plan.adapters) == 1 else adapter.folder.source
        yield from _against_record(plan.recipe, read_recipe(adapter.folder.path), beside)
    if plan.recipe.assumed:
        yield (
            f"the quantization recipe is assumed ({plan.recipe.describe()}): nothing beside the adapter says how it was trained; "
            "give --quant-config or the quantization flags to settle it"
        )
        return
    told = [(adapter, known_recipe(adapter.folder.path, adapter.named_base)) for adapter in plan.adapters]
    used = set(plan.recipe.origins.values())
    if any(known is not None and used & set(known.origins.values()) for _, known in told):
        for adapter, known in told:
            if known is None:
                yield (
                    f"nothing beside {adapter.folder.source} says how it was trained; the recipe beside another adapter "
                    f"({plan.recipe.describe()}) is taken for it too"
                )


def _against_record(used: QuantRecipe, recorded: QuantRecipe | None, beside: str) -> Iterator[str]:
    """Settings that training recorded and the merge takes otherwise, wherever from."""
    if recorded is None:
        return
    for name in (*WEIGHT_SETTINGS, "quantized_modules"):
        value, told, origin = getattr(used, name), getattr(recorded, name), used.origins.get(name)
        if name in recorded.origins and origin is not None and value != told:
            how = f"given as {_shown(value)}" if origin == GIVEN else f"{_shown(value)} by {origin}"
            yield f"{name} is {how}, but the record beside {beside} says {_shown(told)}"


def _shown(value: Any) -> str:
    if not isinstance(value, tuple):
        return str(value)
    return ", ".join(value) if len(value) <= 3 else f"{', '.join(value[:2])} and {len(value) - 2} more"


def _revision(adapter: Adapter, plan: MergePlan, given: str | None) -> Iterator[str]:
    """The base at another revision than the one that the adapter names.

    PEFT writes one only where training asked for it. A folder on disk has no revision to compare with, and ``main`` moves.
    """
    base, named = plan.base.folder, adapter.config.get("revision")
    if base.commit is None or base.source != adapter.named_base or not isinstance(named, str) or named in ("", "main", given):
        return
    if not (_ABBREVIATED_COMMIT.fullmatch(named) and base.commit.startswith(named)):
        yield (
            f"{adapter.folder.source} was trained on revision {named} of {base.source}, and what is merged is {given or 'main'} "
            f"({base.commit[:12]}); add --revision {named}, unless that is the same"
        )
