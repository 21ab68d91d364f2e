"""Chooses where the arithmetic of a merge runs."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass

from lora_merge.merging.binding import Bound, bind
from lora_merge.merging.cuda import BLOCK_ELEMENTS, IN_FLIGHT, TorchDevice, computable, split_trip
from lora_merge.merging.cuda_start import begin, is_running, what_is_missing
from lora_merge.merging.dtypes import DType
from lora_merge.merging.errors import MergeError
from lora_merge.merging.operations import Operation, ReadInto
from lora_merge.merging.safetensors_file import TensorInfo

DEVICES = ("auto", "cpu", "cuda")


def choose_device(
    requested: str, tensors: Iterable[tuple[TensorInfo, tuple[Operation, ...]]]
) -> TorchDevice | StartingDevice | None:
    """The device that ``requested`` (of :data:`DEVICES`) stands for; None for the processor's own kernels.

    ``"auto"`` is CUDA for a merge with a round trip in a process that has CUDA running already, such as a training script, on a
    card with room. A fresh process goes without: loading the libraries and starting the device takes longer than the
    processor needs for the whole of a small model. ``"cuda"`` there begins to start it and does not wait.

    Args:
        tensors: what will be merged: sources and their operations.

    Raises:
        MergeError: an unknown name; ``"cuda"`` where there is none to be had, unless it is only starting.
    """
    if requested not in DEVICES:
        raise MergeError(f"device {requested!r}: expected one of {', '.join(DEVICES)}")
    mine = [(source, operations) for source, operations in tensors if computable(source, operations)]
    quantizing = any(split_trip(operations)[0] is not None for _, operations in mine)
    if requested == "cpu" or (requested == "auto" and not (quantizing and is_running())):
        return None
    if not is_running():
        return StartingDevice(begin(quantizing))
    missing = what_is_missing(quantizing)
    if requested == "cuda":
        return _current_device(missing)
    return _current_device(None) if missing is None and _has_room(mine) else None


@dataclass(frozen=True)
class StartingDevice:
    """A :class:`TorchDevice` to be, for a process without CUDA: it is waited for by the first tensor with a round trip.

    Low-rank sums alone are the same to the last bit on the processor, which computes them until the device is there.

    Attributes:
        missing: what keeps it from starting, in words, or None.
    """

    missing: Future[str | None]

    @property
    def name(self) -> str:
        """:attr:`TorchDevice.name`; raises :class:`MergeError` where it cannot start."""
        return _current_device(self.missing.result()).name

    def bind(self, source: TensorInfo, dtype: DType, operations: tuple[Operation, ...], read_rows: ReadInto) -> Bound:
        """:meth:`TorchDevice.bind`; raises :class:`MergeError` as well where the device cannot start."""
        waiting = not self.missing.done() and split_trip(operations)[0] is None
        if waiting or not computable(source, operations):
            return bind(source, dtype, operations, read_rows)
        return _current_device(self.missing.result()).bind(source, dtype, operations, read_rows)


def _current_device(missing: str | None) -> TorchDevice:
    if missing is not None:
        raise MergeError(f"--device cuda: {missing}; merge with --device cpu, or install what is missing")
    import torch

    return TorchDevice(torch.device("cuda", torch.cuda.current_device()))


def _has_room(tensors: list[tuple[TensorInfo, tuple[Operation, ...]]]) -> bool:
    """Whether the device's free memory holds what binding and computing ``tensors`` takes at most."""
    import torch

    largest = max((source.nbytes for source, _ in tensors), default=0)
    free: int = torch.cuda.mem_get_info(torch.cuda.current_device())[0]
    return IN_FLIGHT * (2 * largest + 48 * BLOCK_ELEMENTS) < free
