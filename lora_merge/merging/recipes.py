"""Finds the quantization recipe an adapter was trained with, and records it at the end of training.

The record is ``quantization_recipe.json`` beside the adapter (docs/recipe-format.md).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_merge.merging.base_sample import BaseSample, Resemblance, compare, parse_sample, sample_live
from lora_merge.merging.checkpoint import Checkpoint
from lora_merge.merging.errors import MergeError
from lora_merge.merging.folders import adapters_within, read_json
from lora_merge.merging.quantization import ASSUMED, GIVEN, RECIPE_FIELDS, WEIGHT_SETTINGS, QuantRecipe
from lora_merge.merging.trainers import eight_bit_training, leftover_recipe

if TYPE_CHECKING:
    from lora_merge.merging.adapter import Adapter

RECIPE_FILE = "quantization_recipe.json"
_FORMAT = "lora-merge/quantization-recipe"
_VERSION = 1


def find_recipe(
    given: Mapping[str, Any],
    quant_config: str | os.PathLike[str] | None,
    base_config: Mapping[str, Any],
    adapter_folder: Path,
    named_base: str | None = None,
) -> QuantRecipe:
    """Settle every setting of the recipe by the first source that knows it.

    The order is: settings ``given`` one by one; the file ``quant_config``; the base's own bitsandbytes configuration; the record
    beside the adapter; what its trainer left there; the usual QLoRA recipe, marked as assumed.

    Args:
        named_base: the base that the adapter's configuration names.
    """
    unknown = set(given) - set(RECIPE_FIELDS)
    if unknown:
        raise MergeError(f"recipe setting {min(unknown)!r}: expected one of {', '.join(RECIPE_FIELDS)}")
    settings: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    origins = dict.fromkeys(given, GIVEN)
    own, recorded = recipe_of_config(base_config), read_recipe(adapter_folder)
    sources = (recipe_in_file(Path(quant_config)) if quant_config is not None else None, own, recorded)
    # Leftovers are hints; where something was meant as a record, they are not asked. A base's name tells nothing more than its
    # modules, once those are given.
    named_base = None if "quantized_modules" in given else named_base
    # A base that is stored quantized tells of itself, and leftovers of 8 bit would only contradict a question about 4.
    asked = all(source is None for source in sources) and not base_config.get("quantization_config")
    asked = asked and not set(WEIGHT_SETTINGS) <= set(given)
    hints = leftover_recipe(adapter_folder, named_base) if asked else None
    for found in (*sources, hints):
        if found is not None:
            for name, origin in found.origins.items():
                if name in RECIPE_FIELDS and name not in settings:
                    settings[name], origins[name] = getattr(found, name), origin
    for name in RECIPE_FIELDS:
        origins.setdefault(name, ASSUMED)
    return QuantRecipe(**settings, origins=origins)


def shared_recipe(
    given: Mapping[str, Any],
    quant_config: str | os.PathLike[str] | None,
    base_config: Mapping[str, Any],
    adapters: Sequence[Adapter],
) -> QuantRecipe:
    """The recipe that adapters to be added up were all trained with; a setting that only one of them tells is taken from it.

    Raises:
        MergeError: two of them tell different settings, so that no one base fits both; or one was trained in 8 bit.
    """
    if quant_config is None and "quant_type" not in given and not base_config.get("quantization_config"):
        for adapter in adapters:
            _refuse_8bit(adapter)
    found = [
        (adapter, find_recipe(given, quant_config, base_config, adapter.folder.path, adapter.named_base)) for adapter in adapters
    ]
    settled: dict[str, tuple[Adapter, QuantRecipe]] = {}
    for adapter, recipe in found:
        for name in (name for name in RECIPE_FIELDS if recipe.origins[name] != ASSUMED):
            first, known = settled.setdefault(name, (adapter, recipe))
            if getattr(known, name) != getattr(recipe, name):
                raise MergeError(
                    f"{first.folder.source} and {adapter.folder.source} were trained on bases quantized differently: {name} is "
                    f"{_short(getattr(known, name))} by {known.origins[name]} of the first, {_short(getattr(recipe, name))} by "
                    f"{recipe.origins[name]} of the other; merge them apart, or settle {name} as a flag or with --quant-config"
                )
    return replace(
        found[0][1],
        **{name: getattr(recipe, name) for name, (_, recipe) in settled.items()},
        origins={name: settled[name][1].origins[name] if name in settled else ASSUMED for name in RECIPE_FIELDS},
    )


def _refuse_8bit(adapter: Adapter) -> None:
    said = eight_bit_training(adapter.folder.path)
    if said is not None and read_recipe(adapter.folder.path) is None:
        raise MergeError(
            f"{adapter.folder.source}: was trained on a base in 8 bit ({said}), which is not the 4-bit base that --from-4bit "
            "merges through; give the base as bitsandbytes stored it in 8 bit, or the right recipe with --quant-config"
        )


def _short(value: Any) -> str:
    """A setting in a message; lists of modules are long."""
    return f"{len(value)} modules" if isinstance(value, tuple) else str(value)


def known_recipe(adapter_folder: Path, named_base: str | None = None) -> QuantRecipe | None:
    """What the record beside an adapter or its trainer's leftovers say of 4-bit training; None where they say nothing certain."""
    recorded = read_recipe(adapter_folder)
    if recorded is not None:
        return recorded
    try:
        return leftover_recipe(adapter_folder, named_base)
    except MergeError:  # they contradict each other, or say that it was not in 4 bit
        return None


def recipe_in_file(path: Path) -> QuantRecipe:
    """The recipe in a JSON file: a record of :func:`record_recipe`, or a BitsAndBytesConfig as transformers writes it."""
    value = read_json(path, "a quantization recipe")
    if value.get("format") == _FORMAT:
        return _recipe_of_record(value, path, origin=path.name)
    found = recipe_of_config({"quantization_config": value}, origin=path.name)
    if found is None:
        raise MergeError(f"{path}: neither a {_FORMAT} record nor a BitsAndBytesConfig with load_in_4bit")
    return found


def recipe_of_config(config: Mapping[str, Any], origin: str = "the base's quantization_config") -> QuantRecipe | None:
    """The recipe in a model configuration's ``quantization_config``, or None where that is not 4-bit bitsandbytes.

    What the object leaves out means bitsandbytes' own defaults, FP4 without double quantization, since transformers writes
    every setting that differs from them.
    """
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict) or not quantization.get("load_in_4bit", quantization.get("_load_in_4bit", False)):
        return None
    skip = quantization.get("llm_int8_skip_modules")
    settings = {
        "quant_type": quantization.get("bnb_4bit_quant_type", "fp4"),
        "double_quant": quantization.get("bnb_4bit_use_double_quant", False),
        "skip_modules": tuple(skip) if isinstance(skip, list) else skip,
    }
    return QuantRecipe(**settings, origins=dict.fromkeys(settings, origin))


def read_recipe(adapter_folder: Path) -> QuantRecipe | None:
    """The recipe recorded beside the adapter, or None where there is no record."""
    path = Path(adapter_folder) / RECIPE_FILE
    if not path.is_file():
        return None
    return _recipe_of_record(read_json(path, "the quantization recipe"), path, origin=RECIPE_FILE)


def read_sample(adapter_folder: Path) -> tuple[QuantRecipe, BaseSample] | None:
    """The recipe recorded beside the adapter and the sample of the base's weights under it; None where either is lacking."""
    recipe, path = read_recipe(adapter_folder), Path(adapter_folder) / RECIPE_FILE
    sample = None if recipe is None else read_json(path, "the quantization recipe").get("base_sample")
    return None if recipe is None or sample is None else (recipe, parse_sample(sample, str(path)))


def resemblance(adapter_folder: Path, base: Checkpoint) -> Resemblance | None:
    """How ``base`` compares with the weights that the adapter was trained on; None where nothing beside the adapter tells.

    Raises:
        MergeError: the record cannot be read.
    """
    known = read_sample(adapter_folder)
    return None if known is None else compare(known[1], base, known[0])


def _recipe_of_record(record: Mapping[str, Any], path: Path, origin: str) -> QuantRecipe:
    if record.get("format") != _FORMAT or record.get("version") != _VERSION:
        raise MergeError(
            f"{path}: format {record.get('format')!r} version {record.get('version')!r}; expected {_FORMAT!r} version {_VERSION}"
        )
    return QuantRecipe.from_json(record.get("recipe"), origin=origin)


def recipe_of(model: Any) -> QuantRecipe | None:
    """The recipe of a live model with bitsandbytes 4-bit layers, read from the layers themselves; None without such layers.

    ``model`` may be wrapped by PEFT; module names are given as the bare model has them.

    Raises:
        MergeError: the layers do not agree on one recipe, none of them has been quantized yet, or an adapter is merged into them.
    """
    layers = _live_layers(model)
    if not layers:
        return None
    merged = next((name for name, module in _bare(model).named_modules() if getattr(module, "merged_adapters", None)), None)
    if merged is not None:
        raise MergeError(f"{merged}: an adapter is merged into it, so that it was quantized anew; record the recipe before that")
    found = {}
    for name, layer in layers.items():
        state = getattr(layer.weight, "quant_state", None)
        if state is None:
            raise MergeError(f"{name}: not quantized yet; move the model to its device before recording its recipe")
        found[(state.quant_type, bool(state.nested), state.blocksize, str(state.dtype).removeprefix("torch."))] = name
    if len(found) > 1:
        first, second = list(found.items())[:2]
        raise MergeError(
            f"{first[1]} and {second[1]} were quantized differently ({first[0]} and {second[0]}); one recipe cannot describe both"
        )
    quant_type, double_quant, block_size, quant_dtype = next(iter(found))
    settings: dict[str, Any] = {
        "quant_type": quant_type,
        "double_quant": double_quant,
        "block_size": block_size,
        "quant_dtype": quant_dtype,
        "quantized_modules": tuple(sorted(layers)),
    }
    return QuantRecipe(**settings, origins=dict.fromkeys(settings, "live model"))


def _bare(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _live_layers(model: Any) -> dict[str, Any]:
    """The 4-bit layers of a live model by the names of the bare one: PEFT keeps a layer that it wraps as its base_layer."""
    import bitsandbytes

    modules = _bare(model).named_modules()
    return {
        name.removesuffix(".base_layer"): module for name, module in modules if isinstance(module, bitsandbytes.nn.Linear4bit)
    }


def record_recipe(model: Any, adapter_folder: str | os.PathLike[str]) -> QuantRecipe:
    """Write down beside a just-trained adapter how its base was quantized, so that a merge need not guess.

    A sample of the 4-bit weights goes with it (:mod:`~lora_merge.merging.base_sample`), by which the base is known again.

    Args:
        model: the live model at the end of training: plain transformers, PEFT, ``trainer.model`` of TRL, or Unsloth's. Not what
            ``merge_and_unload`` makes of it, whose 4-bit weights are others.
        adapter_folder: the folder that ``save_pretrained`` wrote the adapter to.

    Returns:
        The recipe, read from the bitsandbytes layers themselves.

    Raises:
        MergeError: the model has no 4-bit layers, they disagree, the folder holds no adapter, or the record cannot be written.
    """
    from importlib.metadata import version

    folder = Path(adapter_folder)
    if not (folder / "adapter_config.json").is_file():
        raise MergeError(f"{folder}: no adapter_config.json; {adapters_within(folder) or 'save the adapter there first'}")
    recipe = recipe_of(model)
    if recipe is None:
        raise MergeError(f"{type(model).__name__}: has no bitsandbytes 4-bit layers; there is no quantization recipe to record")
    record = {
        "format": _FORMAT,
        "version": _VERSION,
        "recipe": recipe.to_json(),
        "base_sample": sample_live(_live_layers(model)),
        "environment": {name: version(name) for name in ("bitsandbytes", "peft", "torch", "transformers")},
    }
    _write_whole(folder / RECIPE_FILE, json.dumps(record, indent=2) + "\n")
    return recipe


def _write_whole(path: Path, text: str) -> None:
    """Write a file that appears complete or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise MergeError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)
