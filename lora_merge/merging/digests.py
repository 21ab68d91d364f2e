"""SHA-256 of files and of folders.

A folder's root digest is SHA-256 over the raw digests of its files in the order of their names: the root that OpenSSF
model-signing computes. It binds no names, so whoever relies on it lists the files beside it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lora_merge.console import Progress, no_progress
from lora_merge.merging.errors import MergeError
from lora_merge.merging.folders import read_json
from lora_merge.merging.safetensors_file import read_header, read_tensor

_CHUNK = 1 << 22


def file_digest(path: str | os.PathLike[str], progress: Progress = no_progress) -> str:
    """Hexadecimal SHA-256 of the bytes of ``path``; ``progress`` is told of bytes."""
    hasher = hashlib.sha256()
    try:
        with open(path, "rb", buffering=0) as file:
            buffer = bytearray(_CHUNK)
            view = memoryview(buffer)
            while count := file.readinto(buffer):
                hasher.update(view[:count])
                progress(count)
    except OSError as error:
        raise MergeError(f"{path}: cannot be read: {error.strerror or error}") from error
    return hasher.hexdigest()


def is_digest(value: Any) -> bool:
    """Whether ``value`` is a hexadecimal SHA-256 as this module writes it."""
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


def root_digest(files: Mapping[str, str]) -> str:
    """The root of a folder's file digests (name -> hexadecimal SHA-256)."""
    return hashlib.sha256(b"".join(bytes.fromhex(files[name]) for name in sorted(files))).hexdigest()


def folder_digests(folder: str | os.PathLike[str], progress: Progress = no_progress, jobs: int | None = None) -> dict[str, str]:
    """Hexadecimal SHA-256 of every file below ``folder``, by its path relative to it with ``/``, read in parallel.

    Symbolic links are followed: what an engine would read counts, not where it lies.

    Raises:
        MergeError: a file cannot be read, or something is neither a file nor a folder.
    """
    root = Path(folder)
    names = []
    for path in sorted(root.rglob("*")):
        if path.is_dir():
            continue
        if not path.is_file():
            raise MergeError(f"{path}: neither a file nor a folder (a dangling link?)")
        names.append(path.relative_to(root).as_posix())
    return file_digests(root, names, progress, jobs)


def file_digests(
    folder: str | os.PathLike[str], names: Sequence[str], progress: Progress = no_progress, jobs: int | None = None
) -> dict[str, str]:
    """Hexadecimal SHA-256 of the files of these ``names`` in ``folder``, read in parallel; raises :class:`MergeError`."""
    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        digests = pool.map(lambda name: file_digest(Path(folder) / name, progress), names)
        return dict(zip(names, digests, strict=True))


ADAPTER_CONFIG = "adapter_config.json"
_SETS = ("target_modules", "exclude_modules")
"""Of PEFT's ``LoraConfig``: a list given here becomes a set, and is written in a set's order."""
_ABOUT = frozenset("base_model_name_or_path revision peft_version inference_mode library_name transformers_version".split())
"""Of the same: what tells of the adapter and does not make it. People correct the base's name before they upload one."""
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


def adapter_digests(folder: str | os.PathLike[str]) -> dict[str, str]:
    """What an adapter is known by: the digests of its configuration and its tensors, whatever else lies in its folder."""
    # The safetensors file counts where both are there, as for whoever reads the adapter.
    weights = next((name for name in ADAPTER_WEIGHTS if (Path(folder) / name).is_file()), ADAPTER_WEIGHTS[0])
    return {name: file_digest(Path(folder) / name) for name in (ADAPTER_CONFIG, weights)}


def adapter_identity(folder: str | os.PathLike[str], files: Mapping[str, str]) -> str:
    """What an adapter stays known by when it is only saved again: the root of ``files`` (:func:`adapter_digests` of ``folder``)
    with digests taken of what makes the adapter instead of the bytes that say it.

    Of the configuration the order of keys and white space do not count, nor the order of the lists that PEFT holds as sets and so
    writes in another order each time, nor what tells of the adapter only, nor a setting that is null, false or empty, as newer
    versions write their new ones. Of the tensors names, types, shapes and bytes count, not how a file arranges them.
    """
    config = read_json(Path(folder) / ADAPTER_CONFIG, "the adapter's configuration")
    for name in _SETS:
        if isinstance(value := config.get(name), list) and all(isinstance(entry, str) for entry in value):
            config[name] = sorted(set(value))
    made = {name: value for name, value in config.items() if name not in _ABOUT and value not in (None, False, [], {}, "")}
    content = json.dumps(made, sort_keys=True, separators=(",", ":"))
    digests = {**files, ADAPTER_CONFIG: hashlib.sha256(content.encode("ascii")).hexdigest()}
    if ADAPTER_WEIGHTS[0] in files:
        digests[ADAPTER_WEIGHTS[0]] = _tensors_digest(Path(folder) / ADAPTER_WEIGHTS[0])
    return root_digest(digests)


def _tensors_digest(path: Path) -> str:
    hasher = hashlib.sha256()
    for tensor in sorted(read_header(path).tensors, key=lambda tensor: tensor.name):
        hasher.update(json.dumps([tensor.name, tensor.dtype.name, tensor.shape]).encode("ascii"))
        hasher.update(read_tensor(tensor).tobytes())
    return hasher.hexdigest()
