"""The recipe of the reference: who tells it, and what speaks against it or against a merge by another.

The merge manifest is the last to be asked. It says what the merge did, which is what a setting that nobody recorded has to be
compared with; it is no witness of how the adapter was trained.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lora_merge.merging.errors import MergeError
from lora_merge.merging.manifest import MergeManifest
from lora_merge.merging.modules import has_patterns
from lora_merge.merging.names import neutral
from lora_merge.merging.plan import ORIGINAL_WEIGHTS
from lora_merge.merging.quantization import ASSUMED, RECIPE_FIELDS, WEIGHT_SETTINGS, QuantRecipe
from lora_merge.merging.recipes import find_recipe, read_recipe, recipe_in_file, recipe_of_config
from verification.checks import IF_TRAINED_IN_4BIT, MERGE_AGAIN, Check, Outcome
from verification.gate import RECIPE_CHECK

_MODULES, _SKIPPED = "quantized_modules", "skip_modules"
WARNED, INCONCLUSIVE = Outcome.WARNED, Outcome.INCONCLUSIVE


def recorded_recipe(
    adapter: Path, named_base: str | None, base_config: Mapping[str, Any], *, settled: bool
) -> QuantRecipe | None:
    """What was recorded beside the adapter, on purpose or in passing; settings that nothing tells have their origin assumed.

    Args:
        base_config: of a base that is stored quantized only a record is asked: what trainers leave says less than the base.
        settled: whether somebody who knows better, or the user, has settled the recipe; then leftovers that contradict each
            other tell nothing (None), instead of being an error.
    """
    if base_config.get("quantization_config"):
        return read_recipe(adapter)
    try:
        return find_recipe({}, None, {}, adapter, named_base)
    except MergeError:
        if settled:
            return None
        raise


def live_recipe(
    given: Mapping[str, Any],
    quant_config: str | os.PathLike[str] | None,
    base_config: Mapping[str, Any],
    adapter: Path,
    named_base: str | None,
    manifest: MergeManifest | None,
) -> tuple[QuantRecipe | None, str]:
    """The recipe of a live reference, and who vouches for it.

    What nobody tells is taken from the merge: a guess of its own would blame the merge for not having made the same one.
    """
    if base_config.get("quantization_config"):
        return recipe_of_config(base_config), "base"
    found = find_recipe(given, quant_config, base_config, adapter, named_base)
    if found.assumed:
        found = found if manifest is None or manifest.recipe is None else _completed(found, manifest.recipe)
        return found, "assumed" if found.assumed else "manifest"
    recorded = recorded_recipe(adapter, named_base, base_config, settled=True)
    vouched = recorded is not None and not recorded.assumed and contradiction(recorded, found) is None
    return found, "adapter" if vouched else "flags"


def _completed(found: QuantRecipe, merged: QuantRecipe) -> QuantRecipe:
    """``found`` with the settings that it only assumes as the merge had them; those stay assumed that the merge assumed too."""
    taken = [name for name in RECIPE_FIELDS if found.origins.get(name, ASSUMED) == ASSUMED]
    origins = {name: merged.origins.get(name, ASSUMED) for name in taken}
    return replace(found, **{name: getattr(merged, name) for name in taken}, origins={**found.origins, **origins})


def recipe_findings(
    recipe: QuantRecipe | None, origin: str, recorded: QuantRecipe | None, manifest: MergeManifest | None
) -> Iterator[Check]:
    """Who vouches for the reference's recipe, and whether the record beside the adapter and the merge agree with it."""
    yield _provenance(recipe, origin, recorded)
    if origin == "base":
        yield from _stored_findings(recipe, recorded)
        return
    if recipe is None:
        yield from _unquantized_findings(recorded, manifest)
        return
    described = recipe.describe()
    if recorded is not None and (wrong := contradiction(recorded, recipe)):
        says = "the recorded reference says" if origin == "reference" else "at verification it is"
        here, there = _shown(wrong, recorded, recipe)
        reason = f"{recorded.origins[wrong]} says {wrong} {here}, {says} {there}: one is wrong"
        yield Check("recipe-agreement", INCONCLUSIVE, reason)
    elif manifest is not None and manifest.method == ORIGINAL_WEIGHTS:
        into = "merged into the original weights"
        if origin == "assumed" and not _known(recipe):
            reason = f"{into}, and nothing says how the adapter was trained: {IF_TRAINED_IN_4BIT}"
        else:
            reason = f"{into}, but the adapter was trained through {described}: {MERGE_AGAIN}"
        yield Check("recipe-agreement", WARNED, reason)
    elif (
        manifest is not None
        and manifest.recipe is not None
        and any(_differs(name, manifest.recipe, recipe) for name in WEIGHT_SETTINGS)
    ):
        reason = (
            f"merged through {manifest.recipe.describe()}, but the reference is {described}; only the drift shows what it does"
        )
        yield Check("recipe-agreement", WARNED, reason)


def given_finding(
    given: Mapping[str, Any], quant_config: str | os.PathLike[str] | None, reference: QuantRecipe | None
) -> Iterator[Check]:
    """A recipe given by hand beside a recorded reference, which has its own: it is asked for nothing, so it must say the same."""
    told = dict(given)
    if quant_config is not None:
        file = recipe_in_file(Path(quant_config))
        told = {**{name: getattr(file, name) for name in _known(file)}, **told}
    for name, value in told.items():
        recorded = None if reference is None else getattr(reference, name)
        if name in WEIGHT_SETTINGS and recorded != value:
            has = "no 4-bit layers" if reference is None else f"{name} {recorded}"
            yield Check(
                "recipe-agreement", INCONCLUSIVE, f"{name} {value} was given, the recorded reference has {has}: one is wrong"
            )
            return


def _provenance(recipe: QuantRecipe | None, origin: str, recorded: QuantRecipe | None) -> Check:
    described = "no 4-bit quantization" if recipe is None else recipe.describe()
    reasons = {
        "flags": "was given by hand at verification; nothing recorded at training confirms it",
        "manifest": "is told, where nothing else tells it, by the merge's manifest: a mistake would be the same on both sides",
        "assumed": f"is assumed{_in_part(recipe)}; nothing recorded at training confirms it",
    }
    if origin in reasons:
        return Check(RECIPE_CHECK, WARNED, f"the reference's recipe ({described}) {reasons[origin]}")
    told = {"reference": "the live layers at recording", "base": "the base itself"}
    told["adapter"] = recorded.source if recorded is not None else "the record beside the adapter"
    return Check(RECIPE_CHECK, Outcome.PASSED, f"the reference's recipe ({described}) comes from {told[origin]}")


def _stored_findings(recipe: QuantRecipe | None, recorded: QuantRecipe | None) -> Iterator[Check]:
    """A base that is stored quantized in another way than the record of the training says."""
    if recipe is None and recorded is not None:
        reason = f"{recorded.source} says that the adapter was trained through {recorded.describe()}; the base is stored in 8 bit"
        yield Check("recipe-agreement", INCONCLUSIVE, reason)
    if recipe is None or recorded is None:
        return
    told = (name for name in _known(recorded) if name in _known(recipe) and _differs(name, recorded, recipe))
    if wrong := next(told, None):
        here, there = _shown(wrong, recorded, recipe)
        reason = f"{recorded.origins[wrong]} says {wrong} {here}, the base is stored with {there}: one is wrong"
        yield Check("recipe-agreement", INCONCLUSIVE, reason)


def _in_part(recipe: QuantRecipe | None) -> str:
    """Which settings are the usual QLoRA ones for want of anybody who tells them."""
    known = _known(recipe)
    return f" in part ({', '.join(name for name in WEIGHT_SETTINGS if name not in known)})" if known else ", the usual QLoRA one"


def _unquantized_findings(recorded: QuantRecipe | None, manifest: MergeManifest | None) -> Iterator[Check]:
    """A reference that was recorded without 4-bit layers: it is not the function of an adapter that was trained on them."""
    known = _known(recorded)
    if recorded is not None and known:
        reason = (
            f"{recorded.origins[known[0]]} says that the adapter was trained through {recorded.describe()}, but the reference "
            "was recorded without 4-bit layers: one is wrong"
        )
        yield Check("recipe-agreement", INCONCLUSIVE, reason)
    elif manifest is not None and manifest.recipe is not None:
        reason = f"merged through {manifest.recipe.describe()}, but the reference was recorded without 4-bit layers"
        yield Check("recipe-agreement", WARNED, reason)


def _known(recipe: QuantRecipe | None) -> list[str]:
    """The settings that somebody tells."""
    return [] if recipe is None else [name for name in WEIGHT_SETTINGS if recipe.origins.get(name, ASSUMED) != ASSUMED]


def contradiction(recorded: QuantRecipe, other: QuantRecipe) -> str | None:
    """The first setting that was recorded and is another in ``other``: which layers were quantized is one as well."""
    wrong = next((name for name in _known(recorded) if _differs(name, recorded, other)), None)
    if wrong is None and _other_modules(recorded, other):
        return _MODULES
    return _SKIPPED if wrong is None and _other_skipped(recorded, other) else wrong


def other_setting(recipe: QuantRecipe, live: QuantRecipe) -> str | None:
    """The first setting that somebody told and live layers have otherwise."""
    return next((name for name in _known(recipe) if _differs(name, recipe, live)), None)


def _differs(name: str, first: QuantRecipe, second: QuantRecipe) -> bool:
    return bool(getattr(first, name) != getattr(second, name))


def _other_modules(recorded: QuantRecipe, other: QuantRecipe) -> bool:
    """Whether ``other`` names other layers than the record, which must name them one by one to be compared."""
    told = recorded.quantized_modules
    if recorded.origins.get(_MODULES, ASSUMED) == ASSUMED or told is None or has_patterns(told):
        return False
    return {neutral(name) for name in told} != {neutral(name) for name in other.quantized_modules or ()}


def _other_skipped(recorded: QuantRecipe, other: QuantRecipe) -> bool:
    """Whether ``other`` leaves out other modules than the record says, where neither names the ones that were quantized."""
    if recorded.origins.get(_SKIPPED, ASSUMED) == ASSUMED or recorded.quantized_modules or other.quantized_modules:
        return False
    return set(recorded.skip_modules or ()) != set(other.skip_modules or ())


def _shown(name: str, recorded: QuantRecipe, other: QuantRecipe) -> tuple[str, str]:
    """A setting in both, in words; of long lists how many there are and what only one of them has."""
    if name not in (_MODULES, _SKIPPED):
        return str(getattr(recorded, name)), str(getattr(other, name))
    first, second = (set(getattr(recipe, name) or ()) for recipe in (recorded, other))

    def only(names: set[str], others: set[str]) -> str:
        rest = sorted(names - others)
        return f"({len(names)} names{f', {rest[0]} among them' if rest else ''})"

    return only(first, second), only(second, first)
