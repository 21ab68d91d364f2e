"""Reads the tensors of a ``torch.save`` file without executing anything from it.

Such a file is a zip archive: ``data.pkl`` describes the tensors, one uncompressed member a storage holds their bytes. The
description is a pickle, a small program; it is run by an interpreter that knows four names, each of which stands for a
harmless function of ours. Whatever else it asks for is refused, torch included. So a tensor of such a file becomes a byte
range of the file, as in safetensors.
Source: ``torch/serialization.py`` and ``torch/_utils.py`` (``_rebuild_tensor_v2``).
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_merge.merging.dtypes import BY_TORCH_NAME, DType
from lora_merge.merging.errors import MergeError
from lora_merge.merging.safetensors_file import TensorInfo

_MAX_DESCRIPTION = 64_000_000
_LOCAL_HEADER = 30
_STORAGES = {
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "DoubleStorage": "float64",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}


@dataclass(frozen=True)
class _StorageType:
    dtype: DType


@dataclass(frozen=True)
class _Storage:
    dtype: DType
    key: str
    elements: int


@dataclass(frozen=True)
class _Tensor:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> _Tensor:
    sizes = (offset, *shape, *strides)
    if not isinstance(storage, _Storage) or not all(type(size) is int and 0 <= size < 2**62 for size in sizes):
        raise pickle.UnpicklingError("a tensor without a storage, or with absurd sizes")
    return _Tensor(storage, offset, tuple(shape), tuple(strides))


def _rebuild_parameter(tensor: Any, *_: Any) -> Any:
    return tensor


class _Interpreter(pickle.Unpickler):
    """Runs a description. Nothing can be called but what :meth:`find_class` returns."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild_tensor
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return _rebuild_parameter
        if module == "torch" and name in _STORAGES:
            return _StorageType(BY_TORCH_NAME[_STORAGES[name]])
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no table of tensors needs")

    def persistent_load(self, pid: Any) -> _Storage:
        if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage" or not isinstance(pid[1], _StorageType):
            raise pickle.UnpicklingError("a storage that is described in an unknown way")
        return _Storage(pid[1].dtype, str(pid[2]), int(pid[4]))


def read_pickled_tensors(path: Path) -> tuple[TensorInfo, ...]:
    """The tensors of a ``torch.save`` file that holds a flat dictionary of them; no bytes of theirs are read.

    Raises:
        MergeError: another format, a description that asks for code, a tensor that is not laid out row by row.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            root = _root(archive, path)
            described = _describe(archive, root, path)
            return tuple(_locate(name, tensor, archive, root, path) for name, tensor in described.items())
    except zipfile.BadZipFile as error:
        raise MergeError(
            f"{path}: not the zip format of torch.save; older pickles are not read, since they cannot be without executing them; "
            "save the adapter again with PEFT, as safetensors"
        ) from error
    except (OSError, KeyError, EOFError) as error:
        raise MergeError(f"{path}: damaged torch.save file: {error}") from error


def _root(archive: zipfile.ZipFile, path: Path) -> str:
    roots = [name.removesuffix("data.pkl") for name in archive.namelist() if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(roots) != 1:
        raise MergeError(f"{path}: not a torch.save file: expected one data.pkl in it, found {len(roots)}")
    order = f"{roots[0]}byteorder"
    if order in archive.namelist() and archive.read(order) != b"little":
        raise MergeError(f"{path}: stored big-endian; save the adapter again on a little-endian machine, as safetensors")
    return roots[0]


def _describe(archive: zipfile.ZipFile, root: str, path: Path) -> dict[str, _Tensor]:
    member = archive.getinfo(f"{root}data.pkl")
    if member.file_size > _MAX_DESCRIPTION:
        raise MergeError(
            f"{path}: data.pkl takes {member.file_size:,} bytes; expected at most {_MAX_DESCRIPTION:,} for a table of tensors"
        )
    try:
        described = _Interpreter(io.BytesIO(archive.read(member))).load()
    # A pickle that is not what it should be can fail in any way while it is interpreted; none of them runs its code.
    except Exception as error:
        raise MergeError(f"{path}: its description is no table of tensors: {error}; nothing of it was executed") from error
    if not isinstance(described, dict):
        raise MergeError(f"{path}: holds a {type(described).__name__}, expected a dictionary of tensors")
    for name, tensor in described.items():
        if not isinstance(name, str) or not isinstance(tensor, _Tensor):
            raise MergeError(f"{path}: entry {name!r} is no tensor")
    return described


def _locate(name: str, tensor: _Tensor, archive: zipfile.ZipFile, root: str, path: Path) -> TensorInfo:
    member = archive.getinfo(f"{root}data/{tensor.storage.key}")
    if member.compress_type != zipfile.ZIP_STORED:
        raise MergeError(f"{path}: tensor {name!r} is compressed; torch.save does not do that")
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        if size > 1 and stride != expected:
            raise MergeError(f"{path}: tensor {name!r} is not laid out row by row; save the adapter again as safetensors")
        expected *= size
    dtype = tensor.storage.dtype
    nbytes = math.prod(tensor.shape) * dtype.itemsize
    start = tensor.offset * dtype.itemsize
    if start + nbytes > member.file_size:
        raise MergeError(f"{path}: tensor {name!r} reaches beyond its storage; the file is damaged")
    return TensorInfo(name, path, dtype, tensor.shape, _data_start(member, path) + start, nbytes)


def _data_start(member: zipfile.ZipInfo, path: Path) -> int:
    """Where the member's bytes begin: after its local header, whose two variable parts can differ from the directory's."""
    with path.open("rb") as file:
        file.seek(member.header_offset)
        header = file.read(_LOCAL_HEADER)
    return (
        member.header_offset + _LOCAL_HEADER + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    )
