"""The arithmetic of a merge on a CUDA device.

bitsandbytes itself does the round trip there, so the merge goes through what training held, to the last bit. torch adds low-rank
updates in float64 and the sum is rounded once: a merged weight is defined as on the processor. A tensor is read once, into pinned
memory, hashed in passing, and leaves in blocks through pinned memory; the device holds the few tensors in flight. What is neither
round trip nor low-rank sum (magnitudes, token rows, stored quantized weights) is left to the processor's kernels, which then get
the round trip's result from the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from lora_merge.merging.binding import Bound, BoundTensor, bind, not_finite
from lora_merge.merging.dtypes import BY_TORCH_NAME, FLOATING, DType
from lora_merge.merging.errors import MergeError
from lora_merge.merging.operations import (
    AddLowRank,
    Operation,
    ReadInto,
    ReadRows,
    RoundTrip,
    block_ranges,
    matrix_shape,
    not_quantizable,
)
from lora_merge.merging.quantization import QuantRecipe
from lora_merge.merging.safetensors_file import TensorInfo
from lora_merge.merging.updates import TransposedRoundTrip

if TYPE_CHECKING:
    import torch

BLOCK_ELEMENTS = 1 << 22
"""Elements a block: 8 MiB of bfloat16 in pinned memory, about 100 MiB on the device while it is added up and rounded."""
IN_FLIGHT = 8
"""Tensors and blocks that the device holds at the same time, at most, for the estimate of its memory."""


@dataclass(frozen=True)
class TorchDevice:
    """Where torch computes: :meth:`bind` takes the place of :func:`~lora_merge.merging.binding.bind`."""

    device: torch.device

    @property
    def name(self) -> str:
        """The card's name as its driver gives it."""
        import torch

        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"

    def bind(self, source: TensorInfo, dtype: DType, operations: tuple[Operation, ...], read_rows: ReadInto) -> Bound:
        """Read ``source`` onto the device and through its round trip; a tensor with nothing to do there is left to the processor.

        Raises:
            MergeError: a value is not finite, or the device's memory is full.
        """
        trip, rest = split_trip(operations)
        if not computable(source, operations):
            return bind(source, dtype, operations, read_rows)
        import torch

        try:
            weight = self._read(source, operations, read_rows)
            if trip is not None:
                weight, source = _round_trip(weight, source, trip)
            elif not bool(torch.isfinite(weight).all()):
                raise not_finite(source, "the base's value", *_first_not_finite(weight), source.dtype)
        except torch.OutOfMemoryError as error:
            raise _out_of_memory(source, self.device) from error
        on_device = _DeviceTensor(source, dtype, self, weight)
        if all(type(operation) is AddLowRank for operation in rest):
            return replace(on_device, updates=tuple(self._update(operation) for operation in rest))
        return _FinishedOnProcessor(on_device, bind(source, dtype, rest, on_device.rows))

    def _read(self, source: TensorInfo, operations: tuple[Operation, ...], read_rows: ReadInto) -> torch.Tensor:
        import torch

        rows, columns = matrix_shape(source, operations)
        weight = torch.empty((rows, columns), dtype=getattr(torch, source.dtype.torch_name), device=self.device)
        for start, stop in block_ranges(rows, _block_rows(columns)):
            part = self.host_block((stop - start, columns), weight.dtype)
            read_rows(start, stop, _as_numpy(part))
            # The allocator of pinned memory does not give this block out again before the copy from it has ended.
            weight[start:stop].copy_(part, non_blocking=True)
        return weight

    def _update(self, operation: Operation) -> _DeviceUpdate:
        import torch

        assert isinstance(operation, AddLowRank)
        halves = operation.read()
        left, right = (torch.from_numpy(half).to(self.device) for half in (halves.left, halves.right))
        return _DeviceUpdate(left, right, halves.scaling)

    def host_block(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory of the host to copy from and to: pinned, so that the device's copy engine reaches it."""
        import torch

        return torch.empty(shape, dtype=dtype, pin_memory=self.device.type == "cuda")


def split_trip(operations: tuple[Operation, ...]) -> tuple[RoundTrip | TransposedRoundTrip | None, tuple[Operation, ...]]:
    """The round trip, which comes first if there is one, and the rest."""
    if operations and isinstance(operations[0], RoundTrip | TransposedRoundTrip):
        return operations[0], operations[1:]
    return None, operations


def computable(source: TensorInfo, operations: tuple[Operation, ...]) -> bool:
    """Whether the device has something to do for a tensor: a round trip, or low-rank sums and nothing else."""
    trip, rest = split_trip(operations)
    sums_only = bool(rest) and all(type(operation) is AddLowRank for operation in rest)
    return source.dtype.name in FLOATING and (trip is not None or sums_only)


@dataclass(frozen=True)
class _DeviceUpdate:
    """``scaling * left @ right``, float64 on the device."""

    left: torch.Tensor
    right: torch.Tensor
    scaling: float


@dataclass(frozen=True)
class _DeviceTensor:
    """A :class:`Bound` tensor whose weight (rows, columns) lies on the device, after its round trip."""

    source: TensorInfo
    dtype: DType
    device: TorchDevice
    weight: torch.Tensor
    updates: tuple[_DeviceUpdate, ...] = ()

    @property
    def blocks(self) -> list[tuple[int, int]]:
        rows, columns = self.weight.shape
        return block_ranges(rows, _block_rows(columns))

    def compute(self, read_rows: ReadRows, start: int, stop: int) -> NDArray[Any]:
        """The source was read when the tensor was bound, so ``read_rows`` is not called."""
        import torch

        try:
            values = self.weight[start:stop].double()
            for update in self.updates:
                values += update.scaling * (update.left[start:stop] @ update.right)
            result = rounded_once(values, getattr(torch, self.dtype.torch_name))
            if not bool(torch.isfinite(result).all()):
                row, column = _first_not_finite(result)
                raise not_finite(self.source, "the merged value", start + row, column, self.dtype)
            return self._to_host(result)
        except torch.OutOfMemoryError as error:
            raise _out_of_memory(self.source, self.device.device) from error

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Rows ``[start, stop)`` of the weight in its carrier type: for steps that the processor does."""
        return self._to_host(self.weight[start:stop])

    def _to_host(self, values: torch.Tensor) -> NDArray[Any]:
        block = self.device.host_block(tuple(values.shape), values.dtype)
        block.copy_(values)  # returns when it has arrived
        return _as_numpy(block)


@dataclass(frozen=True)
class _FinishedOnProcessor:
    """A :class:`Bound` tensor that the device took through the round trip and the processor takes through the rest."""

    before: _DeviceTensor
    after: BoundTensor

    @property
    def blocks(self) -> list[tuple[int, int]]:
        return self.after.blocks

    def compute(self, read_rows: ReadRows, start: int, stop: int) -> NDArray[Any]:
        return self.after.compute(self.before.rows, start, stop)


def rounded_once(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float64 ``values`` rounded once to float32, bfloat16 or float16, to nearest with ties to even.

    torch itself goes from float64 to the 16-bit types by way of float32 and rounds twice. Here the way through float32 rounds to
    odd: towards zero, with the last bit set where something was cut off. That keeps apart what the second rounding has to tell
    apart (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", IEEE Transactions on Computers 57, 2008).
    """
    import torch

    nearest = values.to(torch.float32)
    if dtype == torch.float32:
        return nearest
    back = nearest.double()
    bits = nearest.view(torch.int32)
    # The patterns of a float's magnitude count upwards: one less is the next float towards zero.
    towards_zero = bits - (back.abs() > values.abs()).to(torch.int32)
    return torch.where(back != values, towards_zero | 1, bits).view(torch.float32).to(dtype)


def _round_trip(
    weight: torch.Tensor, source: TensorInfo, operation: RoundTrip | TransposedRoundTrip
) -> tuple[torch.Tensor, TensorInfo]:
    """``weight`` quantized and dequantized by bitsandbytes, and ``source`` as if it had been stored so: in the recipe's type."""
    import torch

    recipe = operation.recipe
    weight = weight.to(getattr(torch, recipe.quant_dtype))
    if not bool(torch.isfinite(weight).all()):
        row = _first_not_finite(weight)[0]
        raise not_quantizable(source, recipe, row, row + 1)
    if isinstance(operation, TransposedRoundTrip):
        weight = _by_bitsandbytes(weight.T.contiguous(), recipe).T.contiguous()
    else:
        operation.check_parts(source, weight.numel())
        for part in weight.chunk(operation.parts):
            part.copy_(_by_bitsandbytes(part, recipe))
    return weight, replace(source, dtype=BY_TORCH_NAME[recipe.quant_dtype])


def _by_bitsandbytes(weight: torch.Tensor, recipe: QuantRecipe) -> torch.Tensor:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    packed, state = quantize_4bit(
        weight, blocksize=recipe.block_size, compress_statistics=recipe.double_quant, quant_type=recipe.quant_type
    )
    return dequantize_4bit(packed, state).reshape(weight.shape)


def _first_not_finite(values: torch.Tensor) -> tuple[int, int]:
    row, column = (~values.isfinite()).nonzero()[0].tolist()
    return int(row), int(column)


def _block_rows(columns: int) -> int:
    return max(1, BLOCK_ELEMENTS // max(columns, 1))


def _as_numpy(block: torch.Tensor) -> NDArray[Any]:
    """The memory of a host tensor in its carrier type."""
    import torch

    carried: NDArray[Any] = (block.view(torch.uint16) if block.dtype == torch.bfloat16 else block).numpy()
    return carried


def _out_of_memory(source: TensorInfo, device: torch.device) -> MergeError:
    return MergeError(f"{source.name}: the memory of {device} is full; free some or merge with --device cpu")
