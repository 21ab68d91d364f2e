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


def _all(folder: Path, named_base: str | None) -> Iterator[QuantRecipe | None]:
    card = _text(folder / _README)
    if match := _PEFT_BLOCK.search(card):
        yield _of_peft_block(match[1])
    for block in _YAML_BLOCK.findall(card):
        yield _of_yaml(block, _README)
    for path in sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")]):
        yield _of_yaml(_text(path), path.name)
    yield _of_base_name(named_base)


def _text(path: Path) -> str:
    try:
        if path.is_file() and path.stat().st_size <= _MAX_BYTES:
            return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise MergeError(f"{path}: cannot be read: {error.strerror or error}") from error
    return ""


def _of_peft_block(block: str) -> QuantRecipe | None:
    """PEFT writes every setting of the live BitsAndBytesConfig as ``- name: value``."""
    values = {name.strip(): value.strip() for name, _, value in (line[2:].partition(":") for line in block.splitlines())}
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


def _of_yaml(text: str, file: str) -> QuantRecipe | None:
    import yaml  # type: ignore[import-untyped]

    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError:
        return None
    if not isinstance(config, dict):
        return None
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
    given = config.get("bnb_config_kwargs") or {}
    dtype = "bfloat16" if config.get("bf16") in (True, "auto", "full") else "float16" if config.get("fp16") else "float32"
    settings: dict[str, Any] = {
        "quant_type": given.get("bnb_4bit_quant_type", "nf4"),
        "double_quant": given.get("bnb_4bit_use_double_quant", True),
        "block_size": 64,
        "quant_dtype": dtype,
    }
    if given.get("llm_int8_skip_modules") is not None:
        settings["skip_modules"] = tuple(given["llm_int8_skip_modules"])
    return _recipe(settings, f"{file} (axolotl)")


def _of_llama_factory(config: Mapping[str, Any], file: str) -> QuantRecipe | None:
    """LLaMA-Factory quantizes to ``quantization_bit`` with NF4 and double quantization by default (``hparams/model_args.py``)."""
    if config["quantization_bit"] is None or config.get("quantization_method", "bnb") not in ("bnb", "bitsandbytes"):
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
