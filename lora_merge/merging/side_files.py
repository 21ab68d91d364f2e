"""The files beside the weights: configuration, tokenizer, chat template, index, model card.

Precedence of the tokenizer's files: the adapter's folder first, since training may have added tokens or a chat template, then the
base's. Everything else comes from the base. What describes other weights than ours is left behind.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_merge.merging.adapter import Adapter
from lora_merge.merging.checkpoint import INDEX_FILE, Checkpoint
from lora_merge.merging.quantization import QuantRecipe

MANIFEST_FILE = "merge_manifest.json"
CARD_FILE = "README.md"
CONFIG_FILE = "config.json"
TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".tflite", ".index.json")
# What the merged checkpoint has of its own, and what belongs to a repository rather than to a model.
_NEVER_COPIED = (CARD_FILE, MANIFEST_FILE, CONFIG_FILE, INDEX_FILE, ".gitattributes", ".gitignore")


@dataclass(frozen=True)
class SideFile:
    """A file to write beside the weights: copied from ``source``, or made of ``content``; ``origin`` says which for people."""

    name: str
    origin: str
    source: Path | None = None
    content: bytes | None = None

    @property
    def nbytes(self) -> int:
        return len(self.content) if self.content is not None else self.source.stat().st_size if self.source else 0

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "origin": self.origin, "bytes": self.nbytes}


def plan_side_files(
    base: Checkpoint, adapter: Adapter, dtype: str | None, weight_bytes: int, method: str, recipe: QuantRecipe | None
) -> tuple[SideFile, ...]:
    """Settle every file beside the weights, in the order of their names."""
    files: dict[str, SideFile] = {}
    for path in sorted(base.folder.path.iterdir()):
        if path.is_file() and path.name not in _NEVER_COPIED and not path.name.endswith(_WEIGHT_SUFFIXES) and path.name[0] != ".":
            files[path.name] = SideFile(path.name, "base", source=path)
    for name in TOKENIZER_FILES:
        path = adapter.folder.path / name
        if path.is_file():
            files[name] = SideFile(name, "adapter", source=path)
    files[CONFIG_FILE] = _config(base, dtype)
    if base.index is not None:
        files[INDEX_FILE] = _index(base, weight_bytes)
    files[CARD_FILE] = SideFile(CARD_FILE, "written", content=_model_card(base, adapter, method, recipe).encode())
    return tuple(files[name] for name in sorted(files))


def _config(base: Checkpoint, dtype: str | None) -> SideFile:
    config = dict(base.config)
    config.pop("quantization_config", None)
    if dtype is not None:
        # transformers 5 writes "dtype", 4 wrote "torch_dtype"; nested text configurations repeat it.
        _set_dtype(config, dtype)
    if config == base.config:
        return SideFile(CONFIG_FILE, "base", source=base.folder.path / CONFIG_FILE)
    return SideFile(CONFIG_FILE, "base, adapted", content=_json_bytes(config))


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[key] = dtype
    for name, value in config.items():
        if name.endswith("_config") and isinstance(value, dict) and ("dtype" in value or "torch_dtype" in value):
            nested = dict(value)
            _set_dtype(nested, dtype)
            config[name] = nested


def _index(base: Checkpoint, weight_bytes: int) -> SideFile:
    index = dict(base.index or {})
    metadata = dict(index.get("metadata") or {})
    metadata["total_size"] = weight_bytes
    index["metadata"] = metadata
    return SideFile(INDEX_FILE, "base, adapted", content=_json_bytes(index))


def _json_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _model_card(base: Checkpoint, adapter: Adapter, method: str, recipe: QuantRecipe | None) -> str:
    base_name = adapter.named_base or base.folder.source
    how = (
        f"The base was taken through the 4-bit quantization the adapter was trained on ({recipe.describe()}; {recipe.source})."
        if recipe
        else "The adapter was added to the original weights. If it was trained with QLoRA, it was trained on other weights than "
        "these."
    )
    front = ["---", f"base_model: {json.dumps(base_name)}", "library_name: transformers", "tags:", "- lora", "- merged", "---"]
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
