"""Bases that bitsandbytes quantized already: their values come from the stored state, never from a second quantization.

A 4-bit weight ``X`` is stored as packed codes (uint8, two a byte, the high nibble first) with ``X.absmax``, ``X.quant_map``,
for double quantization ``X.nested_absmax`` and ``X.nested_quant_map``, and a JSON object in
``X.quant_state.bitsandbytes__nf4`` (or fp4). An 8-bit weight is int8 with one scale a row in ``SCB``. Modules that were left
out (Unsloth's dynamic quantization) are stored as they are.
Source: bitsandbytes 0.50, ``functional.QuantState``, ``nn.Linear8bitLt`` and ``functional.int8_vectorwise_dequant``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lora_merge.merging.dtypes import BY_TORCH_NAME, FLOATING, DType, round_through
from lora_merge.merging.errors import MergeError
from lora_merge.merging.operations import Decoder, ReadRows
from lora_merge.merging.quantization import BLOCK_SIZES, GIVEN, QUANT_TYPES, QuantRecipe, code_table, dequantize_absmax
from lora_merge.merging.safetensors_file import TensorInfo, read_tensor

_STATE = ".quant_state.bitsandbytes__"
_EIGHTH = np.float32(7.874015718698502e-3)
"""1 / 127 as bitsandbytes writes it."""


@dataclass(frozen=True)
class Dequantize4Bit(Decoder):
    """The values of a packed 4-bit weight.

    Attributes:
        shape: of the weight, (out_features, in_features).
        dtype: the type it had when it was quantized, which dequantization returns.
        absmax: (blocks,), float32, or uint8 codes under double quantization.
        nested_absmax, nested_map, nested_block, offset: the second quantization, or None and 0.
    """

    shape: tuple[int, ...]
    dtype: DType
    quant_type: str
    block_size: int
    absmax: TensorInfo
    nested_absmax: TensorInfo | None = None
    nested_map: TensorInfo | None = None
    nested_block: int = 0
    offset: float = 0.0

    def source_shape(self, source: TensorInfo) -> tuple[int, int]:
        return math.prod(source.shape), 1

    def row_multiple(self, columns: int) -> int:
        return self.block_size // math.gcd(self.block_size, max(columns, 1))

    def bound_bytes(self, elements: int) -> int:
        return 4 * elements // self.block_size

    def bind_decoder(self, columns: int) -> Callable[[ReadRows, int, int], NDArray[np.float32]]:
        table, absmax = code_table(self.quant_type), self._read_absmax()

        def decode(read_rows: ReadRows, start: int, stop: int) -> NDArray[np.float32]:
            first, last = start * columns, stop * columns
            packed = read_rows(first // 2, -(-last // 2)).reshape(-1)
            codes = np.empty(2 * packed.size, np.uint8)
            codes[0::2], codes[1::2] = packed >> 4, packed & 0xF
            values = table[codes[: last - first]]
            scales = absmax[first // self.block_size : -(-last // self.block_size)]
            values *= np.repeat(scales, self.block_size)[: values.size]
            return round_through(values.reshape(stop - start, columns), self.dtype)

        return decode

    def _read_absmax(self) -> NDArray[np.float32]:
        absmax = read_tensor(self.absmax).reshape(-1)
        if self.nested_absmax is None or self.nested_map is None:
            return absmax
        nested, table = read_tensor(self.nested_absmax).reshape(-1), read_tensor(self.nested_map).reshape(-1)
        return dequantize_absmax(absmax, nested, np.float32(self.offset), self.nested_block, table)

    def to_json(self) -> dict[str, Any]:
        double = "double" if self.nested_absmax else "single"
        return {
            "operation": "dequantize",
            "recipe": f"stored {self.quant_type.upper()}, {double} quantization, block {self.block_size}",
        }


@dataclass(frozen=True)
class Dequantize8Bit(Decoder):
    """The values of an int8 weight with one scale a row: ``code * scale * (1 / 127)`` in float32, rounded twice as
    bitsandbytes does.

    Attributes:
        shape: (out_features, in_features).
        dtype: type of the output by default; the values themselves are float32.
        scales: (out_features,) float32.
    """

    shape: tuple[int, ...]
    dtype: DType
    scales: TensorInfo

    def source_shape(self, source: TensorInfo) -> tuple[int, int]:
        return source.shape[0], source.shape[1]

    def bound_bytes(self, elements: int) -> int:
        return 4 * self.shape[0]

    def bind_decoder(self, columns: int) -> Callable[[ReadRows, int, int], NDArray[np.float32]]:
        scales = read_tensor(self.scales).reshape(-1)

        def decode(read_rows: ReadRows, start: int, stop: int) -> NDArray[np.float32]:
            values: NDArray[np.float32] = read_rows(start, stop).astype(np.float32)
            values *= scales[start:stop, None]
            values *= _EIGHTH
            return values

        return decode

    def to_json(self) -> dict[str, Any]:
        return {"operation": "dequantize", "recipe": "stored 8-bit, one scale a row"}


@dataclass(frozen=True)
class StoredState:
    """What bitsandbytes left in a checkpoint.

    Attributes:
        decoders: by the name of the weight.
        parts: names of the tensors that belong to the state and are no weights of the model.
    """

    decoders: Mapping[str, Dequantize4Bit | Dequantize8Bit]
    parts: frozenset[str]


def read_stored_state(tensors: Mapping[str, TensorInfo], default_dtype: str) -> StoredState:
    """Find the stored quantization state among ``tensors``.

    Args:
        default_dtype: type of 8-bit weights in the output, which their state does not tell: the checkpoint's.

    Raises:
        MergeError: a part of a state is missing, or contradicts the packed weight.
    """
    decoders: dict[str, Dequantize4Bit | Dequantize8Bit] = {}
    parts: set[str] = set()
    for name in tensors:
        weight, mark, quant_type = name.partition(_STATE)
        if mark:
            decoder, used = _read_4bit(weight, quant_type, tensors)
            decoders[weight] = decoder
            parts.update(used)
        elif name.endswith(".SCB"):
            weight = f"{name.removesuffix('.SCB')}.weight"
            decoders[weight] = _read_8bit(weight, name, tensors, default_dtype)
            parts.update({name, f"{name.removesuffix('.SCB')}.weight_format"} & set(tensors))
    return StoredState(decoders, frozenset(parts))


def stored_recipe(stored: StoredState, asked: QuantRecipe) -> QuantRecipe | None:
    """The recipe that the stored 4-bit state tells, to be recorded; None for 8 bit.

    Args:
        asked: the recipe as it was settled without looking at the state.

    Raises:
        MergeError: a setting given explicitly contradicts the state.
    """
    first = next((decoder for decoder in stored.decoders.values() if isinstance(decoder, Dequantize4Bit)), None)
    told: dict[str, Any] = {}
    if first is not None:
        told = {
            "quant_type": first.quant_type,
            "double_quant": first.nested_absmax is not None,
            "block_size": first.block_size,
            "quant_dtype": first.dtype.torch_name,
        }
    for name, origin in asked.origins.items():
        if origin == GIVEN and told.get(name) != getattr(asked, name):
            raise MergeError(
                f"{name} {getattr(asked, name)!r} was given, but the base is stored quantized and its own state counts "
                f"({told.get(name, 'which tells the modules, too')}); leave it out"
            )
    if first is None:
        return None
    return QuantRecipe(
        **told, skip_modules=asked.skip_modules, origins=dict.fromkeys([*told, "skip_modules"], "the base's stored state")
    )


def _read_4bit(weight: str, quant_type: str, tensors: Mapping[str, TensorInfo]) -> tuple[Dequantize4Bit, set[str]]:
    state_name = f"{weight}{_STATE}{quant_type}"
    packed, absmax = _part(weight, tensors), _part(f"{weight}.absmax", tensors)
    state = _state(tensors[state_name])
    used = {state_name, f"{weight}.absmax"}
    shape, block_size, dtype = tuple(state.get("shape") or ()), state.get("blocksize"), BY_TORCH_NAME.get(str(state.get("dtype")))
    elements = math.prod(shape)
    if (
        quant_type not in QUANT_TYPES
        or block_size not in BLOCK_SIZES
        or dtype is None
        or dtype.name not in FLOATING
        or len(shape) != 2
    ):
        raise MergeError(
            f"{packed.path}: {state_name!r} says {state}; expected nf4 or fp4, a known block size and type, and two dimensions"
        )
    if (
        packed.dtype.name != "U8"
        or math.prod(packed.shape) != -(-elements // 2)
        or math.prod(absmax.shape) != -(-elements // block_size)
    ):
        raise MergeError(
            f"{packed.path}: {weight!r} is {packed.dtype.name} {list(packed.shape)} with absmax {list(absmax.shape)}, which "
            f"does not fit its state of shape {list(shape)}, block size {block_size}"
        )
    if f"{weight}.quant_map" in tensors:
        used.add(f"{weight}.quant_map")
        if not np.array_equal(read_tensor(tensors[f"{weight}.quant_map"]).reshape(-1), code_table(quant_type)):
            raise MergeError(f"{packed.path}: {weight}.quant_map is not the table of {quant_type}")
    decoder = Dequantize4Bit(shape, dtype, quant_type, block_size, absmax)
    if "nested_blocksize" not in state:
        return decoder, used
    nested = (f"{weight}.nested_absmax", f"{weight}.nested_quant_map")
    used.update(nested)
    nested_absmax, nested_map = (_part(name, tensors) for name in nested)
    if (
        absmax.dtype.name != "U8"
        or nested_map.shape != (256,)
        or nested_absmax.shape[0] != -(-absmax.shape[0] // state["nested_blocksize"])
    ):
        raise MergeError(
            f"{packed.path}: the second quantization of {weight!r} is {absmax.dtype.name} {list(absmax.shape)} with "
            f"{list(nested_absmax.shape)}; the checkpoint is damaged"
        )
    return (
        Dequantize4Bit(
            shape,
            dtype,
            quant_type,
            block_size,
            absmax,
            nested_absmax,
            nested_map,
            state["nested_blocksize"],
            state["nested_offset"],
        ),
        used,
    )


def _read_8bit(weight: str, scales: str, tensors: Mapping[str, TensorInfo], dtype: str) -> Dequantize8Bit:
    codes, scale = _part(weight, tensors), tensors[scales]
    if codes.dtype.name != "I8" or len(codes.shape) != 2 or scale.shape != codes.shape[:1] or scale.dtype.name != "F32":
        raise MergeError(
            f"{codes.path}: {weight!r} is {codes.dtype.name} {list(codes.shape)} with {scale.dtype.name} {list(scale.shape)} "
            "scales; expected an int8 matrix with one float32 scale a row"
        )
    layout = f"{weight}_format"
    if layout in tensors and read_tensor(tensors[layout]).reshape(-1)[:1].tolist() != [0]:
        raise MergeError(f"{codes.path}: {layout!r} is not 0 (row by row); save the base again with a current bitsandbytes")
    known = BY_TORCH_NAME.get(dtype)
    return Dequantize8Bit(codes.shape, known if known is not None and known.name in FLOATING else BY_TORCH_NAME["float16"], scale)


def _part(name: str, tensors: Mapping[str, TensorInfo]) -> TensorInfo:
    if name not in tensors:
        raise MergeError(
            f"base: tensor {name!r} is missing, a part of a weight's quantization state; the checkpoint is incomplete"
        )
    return tensors[name]


def _state(tensor: TensorInfo) -> dict[str, Any]:
    try:
        state = json.loads(read_tensor(tensor).tobytes().decode("utf-8"))
    except (UnicodeDecodeError, ValueError) as error:
        raise MergeError(f"{tensor.path}: {tensor.name!r} is no quantization state: {error}") from error
    if not isinstance(state, dict):
        raise MergeError(f"{tensor.path}: {tensor.name!r} is a JSON {type(state).__name__}, expected an object")
    return state
