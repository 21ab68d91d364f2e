"""Reads a base checkpoint's headers: which tensors it has, where they lie, and its configuration. No tensor data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_merge.merging.errors import MergeError
from lora_merge.merging.folders import ModelFolder, read_json
from lora_merge.merging.safetensors_file import SafetensorsHeader, TensorInfo, read_header

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf")


@dataclass(frozen=True)
class Checkpoint:
    """A base checkpoint: its configuration and its shards in the order of their names.

    Attributes:
        folder: where it lies and how it was named.
        config: ``config.json``.
        shards: the header of every weight file.
        index: ``model.safetensors.index.json``, or None for a single file.
    """

    folder: ModelFolder
    config: Mapping[str, Any]
    shards: tuple[SafetensorsHeader, ...]
    index: Mapping[str, Any] | None

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor by its name."""
        return {tensor.name: tensor for shard in self.shards for tensor in shard.tensors}


def read_checkpoint(folder: ModelFolder, what: str = "base checkpoint") -> Checkpoint:
    """Read the headers of the checkpoint in ``folder``; ``what`` names it in errors.

    Raises:
        MergeError: no safetensors weights, or of an unusual name, a shard that is missing or outside the folder, an index that
            contradicts the shards, a tensor that lies in two shards.
    """
    if not (folder.path / "config.json").is_file() and (folder.path / "adapter_config.json").is_file():
        raise MergeError(f"{folder.path}: is an adapter; expected a {what}")
    config = read_json(folder.path / "config.json", f"the configuration of a {what}")
    if reason := weights_elsewhere(config):
        raise MergeError(f"{folder.path}: {reason}")
    index_path = folder.path / INDEX_FILE
    if index_path.is_file():
        if (folder.path / SINGLE_FILE).is_file():
            raise MergeError(f"{folder.path}: holds both {SINGLE_FILE} and {INDEX_FILE}; remove the one that does not belong")
        index = read_json(index_path, "the shard index")
        shards = _read_shards(folder.path, index)
        return Checkpoint(folder, config, shards, index)
    single = folder.path / SINGLE_FILE
    if not single.is_file():
        raise MergeError(_no_weights(folder.path, what))
    return Checkpoint(folder, config, (read_header(single),), None)


def weights_elsewhere(config: Mapping[str, Any]) -> str | None:
    """Why the weights that Transformers would load are not those of the usual name, which every other engine loads; else None.

    Source: transformers 5, ``transformers_weights`` in ``modeling_utils.py``.
    """
    named = config.get("transformers_weights")
    if named in (None, SINGLE_FILE, INDEX_FILE):
        return None
    return (
        f"config.json says transformers_weights {named!r}: Transformers loads that file, other engines {SINGLE_FILE}; "
        "save the weights that are meant under the usual name, and take the setting out"
    )


def _no_weights(folder: Path, what: str) -> str:
    for pattern in _OTHER_WEIGHTS:
        found = next(iter(sorted(folder.glob(pattern))), None)
        if found is not None:
            return (
                f"{folder}: no {SINGLE_FILE}, only {found.name}; expected safetensors, since other formats execute code or lose "
                "precision; save it once with save_pretrained(..., safe_serialization=True)"
            )
    return f"{folder}: no {SINGLE_FILE} and no {INDEX_FILE}; expected a {what} in safetensors"


def _read_shards(folder: Path, index: Mapping[str, Any]) -> tuple[SafetensorsHeader, ...]:
    where = folder / INDEX_FILE
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise MergeError(f"{where}: no weight_map, expected one that maps tensor names to files")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise MergeError(
                f"{where}: tensor {name!r} lies in {file!r}; expected the plain name of a .safetensors file in this folder"
            )
    shards = tuple(read_header(folder / file) for file in sorted(set(weight_map.values())))
    seen: dict[str, str] = {}
    for shard in shards:
        for tensor in shard.tensors:
            if tensor.name in seen:
                raise MergeError(f"{folder}: tensor {tensor.name!r} lies in {seen[tensor.name]} and in {shard.path.name}")
            seen[tensor.name] = shard.path.name
    for name, file in weight_map.items():
        if seen.get(name) != file:
            found = f"it is in {seen[name]}" if name in seen else "no shard has it"
            raise MergeError(f"{where}: says that tensor {name!r} is in {file}, but {found}")
    unlisted = sorted(set(seen) - set(weight_map))
    if unlisted:
        raise MergeError(f"{where}: tensor {unlisted[0]!r} of {seen[unlisted[0]]} is not listed")
    return shards
