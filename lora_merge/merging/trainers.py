"""The quantization recipe in what trainers leave beside an adapter without meaning to record one.

Each reader knows one trainer's habits and its defaults, and says nothing where it finds none of its marks: PEFT's own block in
README.md, axolotl's configuration (a file, or quoted in README.md), LLaMA-Factory's and TRL's YAML, and the names of Unsloth's
pre-quantized bases. Pickles (``training_args.bin``) are never opened.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lora_merge.merging.errors import MergeError
from lora_merge.merging.quantization import QuantRecipe

_README = "README.md"
_MAX_BYTES = 1_000_000
_PEFT_BLOCK = re.compile(r"The following `bitsandbytes` quantization config was used during training:\n((?:- .*\n?)+)")
_YAML_BLOCK = re.compile(r"```ya?ml\n(.*?)```", re.DOTALL)
_FOUR_BIT = re.compile(r"(?<![a-z0-9])(4[-_]?bit|int4|nf4|fp4|w4a16)(?![a-z0-9])", re.IGNORECASE)
_BNB = ("bnb", "bitsandbytes")
_DTYPES = {
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "float32": "float32",
    "fp32": "float32",
}


def leftover_recipe(adapter_folder: Path, named_base: str | None) -> QuantRecipe | None:
    """The recipe that a trainer's leftovers tell, or None where they tell nothing.

    Raises:
        MergeError: two leftovers contradict each other, or the training was not in 4 bit.
    """
    found = [recipe for recipe in _all(adapter_folder, named_base) if recipe is not None]
    for other in found[1:]:
        for name in set(found[0].origins) & set(other.origins):
            if getattr(found[0], name) != getattr(other, name):
                raise MergeError(
                    f"{adapter_folder}: {found[0].origins[name]} says {name} {getattr(found[0], name)!r}, {other.origins[name]} "
                    f"says {getattr(other, name)!r}; give the right one as a flag or with --quant-config"
                )
    return found[0] if found else None


def eight_bit_training(adapter_folder: Path) -> str | None:
    """Which leftover says that the base was in 8 bit (bitsandbytes' LLM.int8) in training; None where none does."""
    card = _text(adapter_folder / _README)
    if match := _PEFT_BLOCK.search(card):
        values = _values_of_peft_block(match[1])
        if values.get("load_in_8bit", values.get("_load_in_8bit")) == "True":
            return f"{_README} (PEFT)"
    for text, file in _yaml_texts(adapter_folder, card):
        config = _mapping(text)
        if config.get("quantization_bit") == 8 and config.get("quantization_method", "bnb") in _BNB:
            return f"{file} (LLaMA-Factory)"
        if config.get("load_in_8bit") is True and config.get("load_in_4bit") is not True:
            trainer = "axolotl" if "base_model" in config else "TRL" if "model_name_or_path" in config else None
            if trainer is not None:
                return f"{file} ({trainer})"
    return None


def named_in_4bit(named_base: str | None) -> bool:
    """Whether the name of a base says that it is in 4 bit, by whatever method: ``...-bnb-4bit``, ``...-NF4``, ``...-Int4``."""
    return _FOUR_BIT.search((named_base or "").rstrip("/").rpartition("/")[2]) is not None


def _all(folder: Path, named_base: str | None) -> Iterator[QuantRecipe | None]:
    card = _text(folder / _README)
    if match := _PEFT_BLOCK.search(card):
        yield _of_peft_block(match[1])
    for text, file in _yaml_texts(folder, card):
        yield _of_yaml(text, file)
    yield _of_base_name(named_base)


def _yaml_texts(folder: Path, card: str) -> Iterator[tuple[str, str]]:
    """Every piece of YAML in the model card and beside it, and the file it is in."""
    for block in _YAML_BLOCK.findall(card):
        yield block, _README
    for path in sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")]):
        yield _text(path), path.name


def _text(path: Path) -> str:
    try:
        if path.is_file() and path.stat().st_size <= _MAX_BYTES:
            return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise MergeError(f"{path}: cannot be read: {error.strerror or error}") from error
    return ""


def _values_of_peft_block(block: str) -> dict[str, str]:
    """PEFT writes every setting of the live BitsAndBytesConfig as ``- name: value``."""
    return {name.strip(): value.strip() for name, _, value in (line[2:].partition(":") for line in block.splitlines())}


def _of_peft_block(block: str) -> QuantRecipe | None:
    values = _values_of_peft_block(block)
    if values.get("load_in_4bit", values.get("_load_in_4bit")) != "True":
        return None
    skip = values.get("llm_int8_skip_modules", "None")
    settings: dict[str, Any] = {
        "quant_type": values.get("bnb_4bit_quant_type", "fp4"),
        "double_quant": values.get("bnb_4bit_use_double_quant") == "True",
        "block_size": 64,
        "skip_modules": None if skip == "None" else tuple(re.findall(r"'([^']+)'", skip)),
    }
    return _recipe(settings, f"{_README} (PEFT)")


def _mapping(text: str) -> dict[str, Any]:
    """The mapping that a piece of YAML is; empty where it is none."""
    import yaml  # type: ignore[import-untyped]

    try:
        config = yaml.safe_load(text)
    # Beside its own errors PyYAML has those of Python, for a value that only looks like a date (2024-31-12) or a number. Trainers
    # read by it too, so that none was configured by such a text.
    except Exception:
        return {}
    return config if isinstance(config, dict) else {}


def _of_yaml(text: str, file: str) -> QuantRecipe | None:
    config = _mapping(text)
    if "quantization_bit" in config:
        return _of_llama_factory(config, file)
    if config.get("load_in_4bit") is True:
        return (
            _of_axolotl(config, file)
            if "base_model" in config
            else _of_trl(config, file)
            if "model_name_or_path" in config
            else None
        )
    return None


def _of_axolotl(config: Mapping[str, Any], file: str) -> QuantRecipe:
    """axolotl loads NF4 with double quantization unless ``bnb_config_kwargs`` says otherwise (``loaders/model.py``)."""
    kwargs = config.get("bnb_config_kwargs")
    given = kwargs if isinstance(kwargs, dict) else {}
    settings: dict[str, Any] = {
        "quant_type": given.get("bnb_4bit_quant_type", "nf4"),
        "double_quant": given.get("bnb_4bit_use_double_quant", True),
        "block_size": 64,
    }
    dtype = _dtype_of_axolotl(config)
    if dtype is not None:
        settings["quant_dtype"] = dtype
    if (skip := given.get("llm_int8_skip_modules")) is not None:
        settings["skip_modules"] = tuple(skip) if isinstance(skip, list) else skip
    return _recipe(settings, f"{file} (axolotl)")


def _dtype_of_axolotl(config: Mapping[str, Any]) -> str | None:
    """The type in which axolotl loads the weights (``resolve_dtype`` in ``utils/config/__init__.py``), or None for a guess.

    ``bf16`` is "auto" where nothing is said: bfloat16 on every card since Ampere. Which of "auto" and a 16-bit type of the other
    kind wins, versions and cards disagree about.
    """
    automatic, half = config.get("bf16", "auto") == "auto", bool(config.get("fp16") or config.get("float16"))
    if config.get("bfloat16") or (config.get("bf16") and not automatic):
        return "bfloat16"
    if automatic:
        return None if half else "bfloat16"
    return "float16" if half else "float32"


def _of_llama_factory(config: Mapping[str, Any], file: str) -> QuantRecipe | None:
    """LLaMA-Factory quantizes to ``quantization_bit`` with NF4 and double quantization by default (``hparams/model_args.py``)."""
    if config["quantization_bit"] is None or config.get("quantization_method", "bnb") not in _BNB:
        return None
    if config["quantization_bit"] != 4:
        raise MergeError(f"{file}: quantization_bit is {config['quantization_bit']}; the adapter was not trained on a 4-bit base")
    settings: dict[str, Any] = {
        "quant_type": config.get("quantization_type", "nf4"),
        "double_quant": config.get("double_quantization", True),
        "block_size": 64,
    }
    if config.get("bf16") is True:
        settings["quant_dtype"] = "bfloat16"
    elif config.get("fp16") is True:
        settings["quant_dtype"] = "float16"
    return _recipe(settings, f"{file} (LLaMA-Factory)")


def _of_trl(config: Mapping[str, Any], file: str) -> QuantRecipe:
    """TRL's ``ModelConfig``: NF4, and no double quantization unless ``use_bnb_nested_quant``."""
    settings: dict[str, Any] = {
        "quant_type": config.get("bnb_4bit_quant_type", "nf4"),
        "double_quant": config.get("use_bnb_nested_quant", False),
        "block_size": 64,
    }
    dtype = _DTYPES.get(str(config.get("dtype", config.get("torch_dtype"))))
    if dtype is not None:
        settings["quant_dtype"] = dtype
    return _recipe(settings, f"{file} (TRL)")


def _of_base_name(named_base: str | None) -> QuantRecipe | None:
    """Unsloth trains on its own pre-quantized copies, ``...-bnb-4bit``: NF4, double quantization, from bfloat16."""
    name = (named_base or "").rstrip("/").rpartition("/")[2].lower()
    if not name.endswith("-bnb-4bit"):
        return None
    if name.endswith("-unsloth-bnb-4bit"):
        raise MergeError(
            f"the adapter was trained on {named_base}, which keeps some layers in 16 bit that only its own files tell; give it "
            "as --base, and its stored values are used"
        )
    settings = {"quant_type": "nf4", "double_quant": True, "block_size": 64, "quant_dtype": "bfloat16"}
    return _recipe(settings, f"the base's name {named_base} (Unsloth)")


def _recipe(settings: Mapping[str, Any], origin: str) -> QuantRecipe:
    return QuantRecipe(**settings, origins=dict.fromkeys(settings, origin))
