"""Finds the folder behind what the user typed: a folder, or a model id on the Hugging Face hub resolved to a commit."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_merge.merging.errors import MergeError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# Weights in other formats would be fetched for nothing; original/ repeats the weights in the maker's own format.
_HUB_IGNORE = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.tflite", "*.ot", "original/*", "onnx/*")


@dataclass(frozen=True)
class ModelFolder:
    """A folder on disk and how it was named.

    Attributes:
        path: the folder.
        source: what the user gave: a path or a hub id.
        commit: for a hub id the commit it was resolved to (40 hexadecimal digits), else None.
    """

    path: Path
    source: str
    commit: str | None = None


def resolve_folder(source: str, role: str, revision: str | None = None, ignore: tuple[str, ...] = _HUB_IGNORE) -> ModelFolder:
    """Find ``source`` on disk, or fetch it from the hub at ``revision``. ``role`` (base, adapter) names it in errors."""
    path = Path(source).expanduser()
    if path.is_dir():
        if revision is not None:
            raise MergeError(
                f"{role} {source}: --revision {revision} given, but this is a folder on disk; a revision belongs to a hub id"
            )
        return ModelFolder(path, source)
    if path.exists():
        raise MergeError(f"{role} {source}: is a file, expected a folder or a hub id such as google/gemma-3-270m")
    if not _HUB_ID.fullmatch(source):
        raise MergeError(f"{role} {source}: no such folder, and not a hub id such as google/gemma-3-270m")
    return _fetch(source, role, revision, ignore)


def _fetch(hub_id: str, role: str, revision: str | None, ignore: tuple[str, ...]) -> ModelFolder:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        path = Path(snapshot_download(hub_id, revision=revision, ignore_patterns=list(ignore)))
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise MergeError(
            f"{role} {hub_id}: no such folder here, not in the local hub cache, and the hub cannot be reached; "
            "give a folder, or connect and try again"
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        raise MergeError(f"{role} {hub_id}: the hub did not give it: {str(error).splitlines()[0]}") from error
    # A snapshot's folder is named by its commit; that is the hub cache's layout.
    if not _COMMIT.fullmatch(path.name):
        raise MergeError(f"{role} {hub_id}: fetched to {path}, whose name is no commit; cannot record what was merged")
    return ModelFolder(path, hub_id, path.name)


def check_link(path: Path) -> None:
    """Refuse a symbolic link that leads out of its folder, unless to a file of a hub cache.

    What is copied beside the weights is published with them; a link in a folder from somewhere else could name any file of the
    machine. Weight files need no such care: they may lie on another disk, and nothing but tensors is taken from them.

    Raises:
        MergeError: it is such a link, or a broken one.
    """
    if not path.is_symlink():
        return
    if not path.exists():
        raise MergeError(f"{path}: is a broken link to {path.readlink()}; put the file itself there, or remove the link")
    target = path.resolve()
    in_hub_cache = target.parent.name == "blobs" and target.parent.parent.name.startswith("models--")
    if not in_hub_cache and not target.is_relative_to(path.parent.resolve()):
        raise MergeError(f"{path}: is a link to {target}, outside its folder; put the file itself there, or remove the link")


def adapters_within(folder: Path) -> str | None:
    """Where the folder, without an adapter itself, has one: PEFT saves one with a name of its own in a folder of that name."""
    found = sorted(path.parent.name for path in folder.glob("*/adapter_config.json"))
    if not found:
        return None
    return f"there is one in {folder / found[0]}" if len(found) == 1 else f"there are some in {folder}: {', '.join(found)}"


def read_json(path: Path, what: str) -> dict[str, Any]:
    """The JSON object in ``path``; ``what`` names it in errors."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise MergeError(f"{path}: no such file; expected {what}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise MergeError(f"{path}: {what} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(value, dict):
        raise MergeError(f"{path}: {what} is a JSON {type(value).__name__}, expected an object")
    return value
