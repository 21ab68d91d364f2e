"""One output file as a stream of blocks: bound a few tensors ahead, computed a few blocks ahead, given in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lora_merge.merging.binding import Bound
from lora_merge.merging.dtypes import DType
from lora_merge.merging.errors import MergeError
from lora_merge.merging.operations import Decoder, Operation, ReadInto, matrix_shape
from lora_merge.merging.plan import ShardPlan, TensorPlan
from lora_merge.merging.safetensors_file import TensorInfo, bytes_of, read_exactly

_SPAN = 1 << 22
_TENSORS_AHEAD = 2

Binder = Callable[[TensorInfo, DType, tuple[Operation, ...], ReadInto], Bound]
"""Readies a tensor to be computed somewhere: :func:`~lora_merge.merging.binding.bind` on the processor."""


@dataclass(frozen=True)
class SourceFile:
    """An open file with tensors: a base shard, or an adapter whose tensors take the place of base tensors."""

    path: Path
    descriptor: int

    @classmethod
    def opened(cls, path: Path) -> SourceFile:
        """Open ``path`` for reading; raises :class:`MergeError`. The caller closes it."""
        try:
            return cls(path, os.open(path, os.O_RDONLY))
        except OSError as error:
            raise MergeError(f"{path}: cannot be read: {error.strerror or error}") from error

    @property
    def size(self) -> int:
        """Its size in bytes."""
        return os.fstat(self.descriptor).st_size

    def read(self, start: int, nbytes: int) -> memoryview:
        """``nbytes`` from byte ``start`` on."""
        values = np.empty(nbytes, np.uint8)
        read_exactly(self.descriptor, start, bytes_of(values), self.path)
        return bytes_of(values)


@dataclass(frozen=True)
class Block:
    """A piece of the output.

    Attributes:
        content: its bytes.
        base_start: where in the base's file the bytes lie that it was made from; None where it was made from no such range.
        base_bytes: how many these are.
        base: these bytes, if they were read into memory on the way.
        copied_from, copied_start: the file whose bytes these are unchanged, and from where on.
    """

    content: memoryview
    base_start: int | None = None
    base_bytes: int = 0
    base: memoryview | None = None
    copied_from: SourceFile | None = None
    copied_start: int = 0


@dataclass(frozen=True)
class _Reader:
    """Rows of one tensor, as :func:`~lora_merge.merging.operations.matrix_shape` sees it."""

    file: SourceFile
    tensor: TensorInfo
    columns: int

    def __call__(self, start: int, stop: int, out: NDArray[Any] | None = None) -> NDArray[Any]:
        values = np.empty((stop - start, self.columns), self.tensor.dtype.carrier) if out is None else out
        if values.size:
            read_exactly(self.file.descriptor, self.offset(start), bytes_of(values), self.file.path)
        return values

    def offset(self, row: int) -> int:
        return self.tensor.start + row * self.columns * self.tensor.dtype.itemsize


class ShardStream:
    """The blocks of one output file.

    Args:
        base: the base's file of the same name.
        workers: threads that compute.
        ahead: blocks that are computed before they are taken.
        binder: where the arithmetic runs.
    """

    def __init__(self, shard: ShardPlan, base: Path, workers: ThreadPoolExecutor, ahead: int, binder: Binder) -> None:
        self._shard = shard
        self.base = SourceFile.opened(base)
        self._files = {base: self.base}
        self._workers = workers
        self._ahead = ahead
        self._binder = binder
        self._surveyor = ThreadPoolExecutor(1)

    def __enter__(self) -> ShardStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._surveyor.shutdown(cancel_futures=True)
        for file in self._files.values():
            os.close(file.descriptor)

    def __iter__(self) -> Iterator[Block]:
        yield Block(memoryview(self._shard.header))
        pending: deque[Future[Block]] = deque()
        try:
            for work in self._tensors():
                for task in work:
                    pending.append(self._workers.submit(task))
                    if len(pending) > self._ahead:
                        yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for block in pending:
                block.cancel()

    def _tensors(self) -> Iterator[list[Callable[[], Block]]]:
        """The work on each tensor, bound some tensors ahead: what must see a whole tensor first looks through it there."""
        ahead: deque[Future[list[Callable[[], Block]]]] = deque()
        for tensor in self._shard.tensors:
            ahead.append(self._surveyor.submit(self._bind, tensor))
            if len(ahead) > _TENSORS_AHEAD:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()

    def _bind(self, tensor: TensorPlan) -> list[Callable[[], Block]]:
        source = tensor.source
        if source.path not in self._files:
            self._files[source.path] = SourceFile.opened(source.path)
        file = self._files[source.path]
        if tensor.copied:
            end = source.start + source.nbytes
            return [_Copy(file, start, min(_SPAN, end - start), file is self.base) for start in range(source.start, end, _SPAN)]
        reader = _Reader(file, source, matrix_shape(source, tensor.operations)[1])
        bound = self._binder(source, tensor.dtype, tensor.operations, reader)
        # Rows of the result are rows of the source, unless the source is decoded.
        row_by_row = file is self.base and not any(isinstance(operation, Decoder) for operation in tensor.operations)
        return [_Computation(bound, reader, start, stop, row_by_row) for start, stop in bound.blocks]


@dataclass(frozen=True)
class _Copy:
    """The task of reading a piece that goes over unchanged."""

    file: SourceFile
    start: int
    nbytes: int
    from_base: bool

    def __call__(self) -> Block:
        content = self.file.read(self.start, self.nbytes)
        origin = {"base_start": self.start, "base_bytes": self.nbytes, "base": content} if self.from_base else {}
        return Block(content, copied_from=self.file, copied_start=self.start, **origin)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Computation:
    """The task of computing rows ``[start, stop)`` of a tensor."""

    bound: Bound
    reader: _Reader
    start: int
    stop: int
    row_by_row: bool

    def __call__(self) -> Block:
        seen: list[NDArray[Any]] = []

        def read_rows(start: int, stop: int) -> NDArray[Any]:
            values = self.reader(start, stop)
            seen.append(values)
            return values

        content = bytes_of(self.bound.compute(read_rows, self.start, self.stop))
        if not self.row_by_row:
            return Block(content)
        start = self.reader.offset(self.start)
        return Block(content, start, self.reader.offset(self.stop) - start, bytes_of(seen[0]) if len(seen) == 1 else None)
