"""The tensor types of safetensors files and their exact conversion to and from float64.

numpy has no bfloat16, so a bfloat16 array is carried as its bit patterns in uint16 and told apart by its safetensors name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lora_merge.merging import kernels
from lora_merge.merging.errors import MergeError


@dataclass(frozen=True)
class DType:
    """A tensor type: its name in safetensors headers, its name in torch, its size, and the numpy type that carries it."""

    name: str
    torch_name: str
    itemsize: int
    carrier: np.dtype


_ALL = (
    DType("F64", "float64", 8, np.dtype("<f8")),
    DType("F32", "float32", 4, np.dtype("<f4")),
    DType("F16", "float16", 2, np.dtype("<f2")),
    DType("BF16", "bfloat16", 2, np.dtype("<u2")),
    DType("I64", "int64", 8, np.dtype("<i8")),
    DType("I32", "int32", 4, np.dtype("<i4")),
    DType("I16", "int16", 2, np.dtype("<i2")),
    DType("I8", "int8", 1, np.dtype("i1")),
    DType("U64", "uint64", 8, np.dtype("<u8")),
    DType("U32", "uint32", 4, np.dtype("<u4")),
    DType("U16", "uint16", 2, np.dtype("<u2")),
    DType("U8", "uint8", 1, np.dtype("u1")),
    DType("BOOL", "bool", 1, np.dtype("u1")),
    DType("F8_E4M3", "float8_e4m3fn", 1, np.dtype("u1")),
    DType("F8_E5M2", "float8_e5m2", 1, np.dtype("u1")),
    DType("F8_E8M0", "float8_e8m0fnu", 1, np.dtype("u1")),
    DType("C64", "complex64", 8, np.dtype("<c8")),
)
BY_NAME = {dtype.name: dtype for dtype in _ALL}
BY_TORCH_NAME = {dtype.torch_name: dtype for dtype in _ALL}
FLOATING = ("F32", "F16", "BF16")
"""The types a weight can be merged in: what bitsandbytes quantizes and engines serve."""

INTEGERS = ("I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL")
"""The types of counters and masks, which are copied or replaced and never computed with."""


def widen(values: NDArray[Any], dtype: DType, out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """The exact float32 values of a float32, float16 or bfloat16 array; ``out`` (same shape, contiguous) is reused if given."""
    if dtype.name not in FLOATING:
        raise MergeError(f"a tensor of type {dtype.name} cannot be computed with; expected one of {', '.join(FLOATING)}")
    if out is None:
        out = np.empty(values.shape, np.float32)
    if dtype.name == "BF16":
        kernels.widen_bf16(np.ascontiguousarray(values).reshape(-1), out.reshape(-1).view(np.uint32))
    else:
        np.copyto(out, values)
    return out


def round_float64(values: NDArray[np.float64], dtype: DType) -> NDArray[Any]:
    """``values`` rounded once, to nearest with ties to even, to float32, float16 or bfloat16 (as uint16 patterns)."""
    if dtype.name == "BF16":
        out = np.empty(values.shape, np.uint16)
        kernels.float64_to_bf16(np.ascontiguousarray(values).reshape(-1), out.reshape(-1))
        return out
    if dtype.name not in FLOATING:
        raise MergeError(f"cannot round a weight to {dtype.name}; expected one of {', '.join(FLOATING)}")
    with np.errstate(over="ignore"):  # an overflow becomes infinite, and the caller refuses what is not finite
        return values.astype(dtype.carrier)


def round_through(values: NDArray[np.float32], dtype: DType) -> NDArray[np.float32]:
    """``values`` rounded in place to what ``dtype`` can hold, still as float32."""
    if dtype.name == "BF16":
        kernels.round_to_bf16(values.reshape(-1).view(np.uint32))
    elif dtype.name == "F16":
        with np.errstate(over="ignore"):
            np.copyto(values, values.astype(np.float16))
    elif dtype.name != "F32":
        raise MergeError(f"cannot quantize from {dtype.name}; expected one of {', '.join(FLOATING)}")
    return values
