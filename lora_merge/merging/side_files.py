"""The files beside the weights: configuration, tokenizer, processor, index, model card, folders of further modules.

Tokenizer and processor come from the adapter or from the base, whole (:mod:`~lora_merge.merging.tokenizer_files`). Everything
else comes from the base. What describes other weights than ours is left behind, and so are folders that no file names as a part
of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_merge.merging.adapter import Adapter
from lora_merge.merging.checkpoint import INDEX_FILE, Checkpoint
from lora_merge.merging.folders import check_link
from lora_merge.merging.module_folders import WEIGHT_SUFFIXES, module_files
from lora_merge.merging.quantization import QuantRecipe
from lora_merge.merging.tokenizer_files import choose_processor, choose_tokenizer, is_of_a_set
from lora_merge.readable import json_text, readable

MANIFEST_FILE = "merge_manifest.json"
CARD_FILE = "README.md"
CONFIG_FILE = "config.json"
TIE_FLAG = "tie_word_embeddings"
TIE_FLAG_OF_LFM2 = "tie_embedding"
# What the merged checkpoint has of its own, and what belongs to a repository rather than to a model.
_NEVER_COPIED = (CARD_FILE, MANIFEST_FILE, CONFIG_FILE, INDEX_FILE, ".gitattributes", ".gitignore")


@dataclass(frozen=True)
class SideFile:
    """A file to write beside the weights: copied from ``source``, or made of ``content``; ``origin`` says which for people.

    ``name``: in the output's folder, or in a folder of it, with ``/``.
    """

    name: str
    origin: str
    source: Path | None = None
    content: bytes | None = None

    @property
    def nbytes(self) -> int:
        return len(self.content) if self.content is not None else self.source.stat().st_size if self.source else 0

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "origin": self.origin, "bytes": self.nbytes}


@dataclass(frozen=True)
class ConfigChanges:
    """What ``config.json`` has to say differently from the base's.

    Attributes:
        dtype: the output's floating type; None keeps what is there.
        untied: whether tied weights stopped being equal.
        vocabulary: rows of a resized vocabulary, else None.
    """

    dtype: str | None = None
    untied: bool = False
    vocabulary: int | None = None


def plan_side_files(
    base: Checkpoint,
    adapters: tuple[Adapter, ...],
    changes: ConfigChanges,
    contents: Mapping[str, Sequence[tuple[str, int]]],
    method: str,
    recipe: QuantRecipe | None,
) -> tuple[SideFile, ...]:
    """Settle every file beside the weights, in the order of their names.

    Args:
        contents: weight file -> names and bytes of its tensors.
    """
    files: dict[str, SideFile] = {}
    for path in sorted(base.folder.path.iterdir()):
        if path.name in _NEVER_COPIED or path.name.endswith(WEIGHT_SUFFIXES) or path.name.startswith("."):
            continue
        check_link(path)
        if path.is_file() and not is_of_a_set(path.name):
            files[path.name] = SideFile(path.name, "base", source=path)
    folders = [adapter.folder for adapter in adapters]
    for chosen in (choose_tokenizer(base.folder, folders), choose_processor(base.folder, folders)):
        files |= {name: SideFile(name, chosen.origins[name], source=path) for name, path in chosen.files.items()}
    files |= {name: SideFile(name, "base", source=path) for name, path in module_files(base.folder.path).items()}
    check_link(base.folder.path / CONFIG_FILE)
    files[CONFIG_FILE] = _config(base, changes)
    if base.index is not None:
        files[INDEX_FILE] = _index(base, contents)
    files[CARD_FILE] = SideFile(CARD_FILE, "written", content=readable(_model_card(base, adapters, method, recipe)).encode())
    return tuple(files[name] for name in sorted(files))


def _config(base: Checkpoint, changes: ConfigChanges) -> SideFile:
    config = dict(base.config)
    config.pop("quantization_config", None)
    if changes.dtype is not None:
        # transformers 5 writes "dtype", 4 wrote "torch_dtype"; nested text configurations repeat it.
        _set_dtype(config, changes.dtype)
    if changes.untied:
        config[TIE_FLAG] = False
        _untie_parts(config)
        if config.get(TIE_FLAG_OF_LFM2):
            config[TIE_FLAG_OF_LFM2] = False
    if changes.vocabulary is not None:
        _set_everywhere(config, "vocab_size", changes.vocabulary)
    if config == base.config:
        return SideFile(CONFIG_FILE, "base", source=base.folder.path / CONFIG_FILE)
    return SideFile(CONFIG_FILE, "base, adapted", content=_json_bytes(config))


def _set_everywhere(config: dict[str, Any], key: str, value: Any) -> None:
    """Set ``key`` where the configuration has it; where it has it nowhere, at the top and for the text model."""
    text = config.get("text_config")
    nested = dict(text) if isinstance(text, dict) else None
    nowhere = key not in config and key not in (nested or {})
    if key in config or nowhere:
        config[key] = value
    if nested is not None and (key in nested or nowhere):
        nested[key] = value
        config["text_config"] = nested


def _untie_parts(config: dict[str, Any]) -> None:
    """A part of a composite model, such as a decoder under a vision tower, can tie its weights by a flag of its own.

    The text model gets one in any case: it is a class of its own to some engines (vLLM's Gemma 3), and ties by default.
    """
    for name, part in config.items():
        if isinstance(part, dict):
            config[name] = {**part, TIE_FLAG: False} if part.get(TIE_FLAG) or name == "text_config" else dict(part)
            _untie_parts(config[name])


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[key] = dtype
    for name, value in config.items():
        if name.endswith("_config") and isinstance(value, dict) and ("dtype" in value or "torch_dtype" in value):
            nested = dict(value)
            _set_dtype(nested, dtype)
            config[name] = nested


def _index(base: Checkpoint, contents: Mapping[str, Sequence[tuple[str, int]]]) -> SideFile:
    index = dict(base.index or {})
    metadata = dict(index.get("metadata") or {})
    metadata["total_size"] = sum(nbytes for tensors in contents.values() for _, nbytes in tensors)
    index["metadata"] = metadata
    # The order of the base's index is kept, so that only what differs differs.
    here = {name: file for file, tensors in contents.items() for name, _ in tensors}
    known = [name for name in index.get("weight_map", {}) if name in here]
    index["weight_map"] = {name: here[name] for name in dict.fromkeys([*known, *here])}
    return SideFile(INDEX_FILE, "base, adapted", content=_json_bytes(index))


def _json_bytes(value: Any) -> bytes:
    return (json_text(value, indent=2, ensure_ascii=False) + "\n").encode()


def _model_card(base: Checkpoint, adapters: tuple[Adapter, ...], method: str, recipe: QuantRecipe | None) -> str:
    base_name = adapters[0].named_base or base.folder.source
    how = (
        f"The base was taken through the 4-bit quantization the adapter was trained on ({recipe.describe()}; {recipe.source})."
        if recipe
        else "The adapter was added to the original weights. If it was trained with QLoRA, it was trained on other weights than "
        "these."
    )
    front = ["---", f"base_model: {json_text(base_name)}", "library_name: transformers", "tags:", "- lora", "- merged", "---"]
    return "\n".join(
        [
            *front,
            "",
            f"# {base_name} with a merged LoRA adapter",
            "",
            f"Merged by lora-merge, method `{method}`. {how}",
            "",
            f"`{MANIFEST_FILE}` holds the digests of base, adapter and output. The base's licence and terms apply.",
            "",
        ]
    )
