"""Reads safetensors files: a strict header, then bytes by position.

The library maps a whole file into memory, which counts against the process and ends in a bus error when the file shrinks while it
is read; a streaming merge needs the offsets and plain reads. The header rules are those of the format's own validator: sizes that
agree with shape and type, no holes, no overlaps, nothing beyond the end of the file.
Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lora_merge.merging.dtypes import BY_NAME, DType
from lora_merge.merging.errors import MergeError

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit; a larger length field is a corrupt or hostile file."""
_POINTER = b"version "
"""How a git-lfs pointer begins; as the length of a header it would be 2 exabytes."""


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: its file, type, shape and the absolute byte range ``[start, start + nbytes)`` in that file."""

    name: str
    path: Path
    dtype: DType
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True)
class SafetensorsHeader:
    """The tensors of one file in the order of their bytes, and the free-form metadata (strings)."""

    path: Path
    tensors: tuple[TensorInfo, ...]
    metadata: Mapping[str, str]


def read_header(path: Path) -> SafetensorsHeader:
    """Read and check the header of ``path``; tensor bytes are not touched. Raises :class:`MergeError`."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise MergeError(f"{path}: is no regular file; expected a safetensors file")
        size = status.st_size
        with path.open("rb") as file:
            beginning = file.read(8)
            if beginning == _POINTER:
                raise MergeError(f"{path}: is a git-lfs pointer and not the weights; fetch them with: git lfs pull")
            length = int.from_bytes(beginning, "little")
            if size < 8 or length > size - 8:
                raise MergeError(
                    f"{path}: truncated: the header should take {length + 8} bytes, the file has {size}; fetch it again"
                )
            if length > MAX_HEADER_BYTES:
                raise MergeError(f"{path}: header of {length} bytes; the format allows {MAX_HEADER_BYTES}")
            text = file.read(length)
    except OSError as error:
        raise MergeError(f"{path}: cannot be read: {error.strerror or error}") from error
    return SafetensorsHeader(path, *_parse(path, text, data_start=8 + length, file_size=size))


def _parse(path: Path, text: bytes, data_start: int, file_size: int) -> tuple[tuple[TensorInfo, ...], dict[str, str]]:
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique_keys)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise MergeError(f"{path}: not a safetensors file: the header is no valid JSON ({error})") from error
    if not isinstance(header, dict):
        raise MergeError(f"{path}: not a safetensors file: the header is a JSON {type(header).__name__}, expected an object")
    metadata = header.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise MergeError(f"{path}: __metadata__ must map strings to strings")
    tensors = sorted(
        (_tensor(path, name, entry, data_start) for name, entry in header.items()),
        key=lambda tensor: (tensor.start, tensor.nbytes),
    )
    position = data_start
    for tensor in tensors:
        if tensor.start != position:
            fault = "overlaps the tensor before it" if tensor.start < position else "leaves a hole before it"
            raise MergeError(
                f"{path}: tensor {tensor.name!r} {fault} (starts at byte {tensor.start}, expected {position}); corrupt header"
            )
        position += tensor.nbytes
    if position != file_size:
        state = "truncated" if position > file_size else "followed by bytes that belong to no tensor"
        raise MergeError(f"{path}: {state}: the header describes {position} bytes, the file has {file_size}; fetch it again")
    return tuple(tensors), metadata


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"duplicate key {next(name for name in names if names.count(name) > 1)!r}")
    return keys


def _tensor(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    def fault(reason: str) -> MergeError:
        return MergeError(f"{path}: tensor {name!r}: {reason}")

    if not name.isprintable():
        raise fault("its name holds unprintable characters")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise fault("its entry needs exactly dtype, shape and data_offsets")
    dtype = BY_NAME.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise fault(f"unknown type {entry['dtype']!r}; expected one of {', '.join(BY_NAME)}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_sizes(shape):
        raise fault(f"shape {shape!r} is no list of sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise fault(f"data_offsets {offsets!r} are no [begin, end]")
    expected = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != expected:
        raise fault(f"its offsets span {offsets[1] - offsets[0]} bytes, its shape {shape} of {dtype.name} needs {expected}")
    return TensorInfo(name, path, dtype, tuple(shape), data_start + offsets[0], expected)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def bytes_of(values: NDArray[Any]) -> memoryview:
    """The bytes of a contiguous array, shared with it."""
    return memoryview(values.reshape(-1).view(np.uint8).data)


def read_exactly(descriptor: int, start: int, buffer: memoryview, path: Path) -> None:
    """Fill ``buffer`` from byte ``start`` of an open file, or raise :class:`MergeError` where the file ends early or fails."""
    filled = 0
    try:
        while filled < len(buffer):
            count = os.preadv(descriptor, [buffer[filled:]], start + filled)
            if count == 0:
                raise MergeError(
                    f"{path}: ended at byte {start + filled} while it was read; did something change it during the merge?"
                )
            filled += count
    except OSError as error:
        raise MergeError(f"{path}: read failed at byte {start + filled}: {error.strerror or error}") from error


def read_tensor(tensor: TensorInfo) -> NDArray[Any]:
    """The whole tensor in its carrier type, shape ``tensor.shape``."""
    values = np.empty(tensor.shape, tensor.dtype.carrier)
    if tensor.nbytes:
        try:
            descriptor = os.open(tensor.path, os.O_RDONLY)
        except OSError as error:
            raise MergeError(f"{tensor.path}: cannot be read: {error.strerror or error}") from error
        try:
            read_exactly(descriptor, tensor.start, bytes_of(values), tensor.path)
        finally:
            os.close(descriptor)
    return values


def encode_header(entries: Mapping[str, tuple[DType, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """The bytes in front of the tensors, which follow one another in the order of ``entries``; padded to 8 bytes by spaces."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, (dtype, shape) in entries.items():
        end = position + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": dtype.name, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
