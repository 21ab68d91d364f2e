"""Carries out a plan: streams every shard through its operations into a folder, hashing what it reads and what it writes.

Three things run at once: a surveyor reads the base in file order, hashes it and takes the block scales of what will be
quantized; a pool of workers computes blocks of rows; the caller's thread writes them in order while a helper hashes them.
Memory holds a few blocks per worker and the bound form of two tensors, whatever the model's size.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lora_merge.console import Progress, no_progress
from lora_merge.merging.digests import file_digest
from lora_merge.merging.errors import MergeError
from lora_merge.merging.operations import BoundTensor, bind, matrix_shape
from lora_merge.merging.plan import MergePlan, ShardPlan, TensorPlan
from lora_merge.merging.safetensors_file import TensorInfo, bytes_of, read_exactly
from lora_merge.merging.side_files import SideFile

_CHUNK = 1 << 22
_TENSORS_AHEAD = 2


@dataclass(frozen=True)
class WrittenFiles:
    """Hexadecimal SHA-256 by file name: of the base's weight files as read, and of everything written."""

    base: dict[str, str]
    output: dict[str, str]


@dataclass(frozen=True)
class _BaseFile:
    """An open file with tensors: a base shard, or an adapter whose tensors take the place of base tensors."""

    path: Path
    descriptor: int

    def read_rows(self, tensor: TensorInfo, columns: int, start: int, stop: int) -> NDArray[Any]:
        values = np.empty((stop - start, columns), tensor.dtype.carrier)
        if values.size:
            offset = tensor.start + start * columns * tensor.dtype.itemsize
            read_exactly(self.descriptor, offset, bytes_of(values), self.path)
        return values


def write_plan(plan: MergePlan, folder: Path, *, jobs: int, progress: Progress = no_progress) -> WrittenFiles:
    """Write every file of ``plan`` into ``folder`` and make them durable.

    Args:
        jobs: worker threads that compute.
        progress: told of tensor bytes written.

    Raises:
        MergeError: a read or write failed, the base changed meanwhile, a result is not finite.
    """
    base, output = {}, {}
    before = {shard.file: _identity(plan.base.folder.path / shard.file) for shard in plan.shards}
    with ThreadPoolExecutor(jobs) as workers, ThreadPoolExecutor(1) as syncer:
        syncs = []
        for shard in plan.shards:
            target = folder / shard.file
            base[shard.file], output[shard.file] = _write_shard(shard, plan, target, workers, jobs, progress)
            # Each file goes to the disk while the next one is computed.
            syncs.append(syncer.submit(_sync, target))
        for file in plan.side_files:
            output[file.name] = write_side_file(file, folder)
        for sync in syncs:
            sync.result()
    for name, identity in before.items():
        path = plan.base.folder.path / name
        if _identity(path) != identity:
            raise MergeError(f"{path}: changed while the base was merged; merge again when nothing writes to it")
    return WrittenFiles(base, output)


def check_disk(plan: MergePlan, out: Path) -> None:
    """Raise :class:`MergeError` unless the disk of ``out`` has room for the plan."""
    parent = out.parent
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    needed = plan.output_bytes + (1 << 20)  # manifest, folder, rounding to blocks
    if free < needed:
        raise MergeError(f"{out}: needs {needed:,} bytes, its disk has {free:,} free; make room or choose another disk")


def _write_shard(
    shard: ShardPlan, plan: MergePlan, target: Path, workers: ThreadPoolExecutor, jobs: int, progress: Progress
) -> tuple[str, str]:
    path = plan.base.folder.path / shard.file
    written = hashlib.sha256()
    with (
        contextlib.closing(_Survey(path, shard.tensors)) as survey,
        ThreadPoolExecutor(1) as hasher,
        _opened_for_writing(target) as descriptor,
    ):
        hashing: deque[Future[None]] = deque()
        for part in _parts(shard, survey, workers, ahead=2 * jobs + 2):
            content = part.read() if isinstance(part, _Span) else part
            if not (isinstance(part, _Span) and part.copied_to(descriptor)):
                _write_all(descriptor, content, target)
            hashing.append(hasher.submit(written.update, content))
            progress(len(content))
            if len(hashing) > 2 * jobs + 2:
                hashing.popleft().result()
        for pending in hashing:
            pending.result()
        return survey.digest(), written.hexdigest()


@dataclass(frozen=True)
class _Span:
    """Bytes of an input file that go to the output as they are."""

    file: _BaseFile
    start: int
    nbytes: int

    def read(self) -> memoryview:
        """The bytes, for whoever hashes them."""
        values = np.empty(self.nbytes, np.uint8)
        read_exactly(self.file.descriptor, self.start, bytes_of(values), self.file.path)
        return bytes_of(values)

    def copied_to(self, descriptor: int) -> bool:
        """Let the kernel append the bytes to ``descriptor``, which shares them on file systems that can.

        False where it cannot copy between these two files; then nothing was written.
        """
        try:
            done = os.copy_file_range(self.file.descriptor, descriptor, self.nbytes, self.start)
        except OSError as error:
            if error.errno in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
                return False
            raise MergeError(f"{self.file.path.name}: copy failed: {error.strerror or error}") from error
        if done == self.nbytes:
            return True
        os.lseek(descriptor, -done, os.SEEK_CUR)  # a short copy: written over from memory
        return False


def _parts(shard: ShardPlan, survey: _Survey, workers: ThreadPoolExecutor, ahead: int) -> Iterator[memoryview | _Span]:
    """The content of an output file in order, computed up to ``ahead`` blocks in advance."""
    yield memoryview(shard.header)
    pending: deque[Future[NDArray[Any]] | _Span] = deque()
    try:
        for bound in survey:
            reader = survey.reader(bound)
            if bound.copied:
                pending.extend(reader.spans())
            else:
                for start, stop in bound.blocks:
                    pending.append(workers.submit(bound.compute, reader, start, stop))
                    if len(pending) > ahead:
                        yield _finished(pending.popleft())
            while len(pending) > ahead:
                yield _finished(pending.popleft())
        while pending:
            yield _finished(pending.popleft())
    finally:
        for item in pending:
            if isinstance(item, Future):
                item.cancel()


def _finished(item: Future[NDArray[Any]] | _Span) -> memoryview | _Span:
    return item if isinstance(item, _Span) else bytes_of(item.result())


class _Survey:
    """Reads one base shard in file order, ahead of the workers: hashes it and binds its tensors.

    Iterating gives every tensor bound, in the order of the output. The digest is known when the iteration has ended.
    """

    def __init__(self, path: Path, tensors: tuple[TensorPlan, ...]) -> None:
        self._file = _opened(path)
        self._others: dict[Path, _BaseFile] = {}
        self._tensors = tensors
        self._hasher = hashlib.sha256()
        self._hashed = 0
        self._thread = ThreadPoolExecutor(1)

    def __iter__(self) -> Iterator[BoundTensor]:
        ahead: deque[Future[BoundTensor]] = deque()
        for tensor in self._tensors:
            ahead.append(self._thread.submit(self._bind, tensor))
            if len(ahead) > _TENSORS_AHEAD:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
        # What no output tensor came from: quantization states, tensors that an adapter's take the place of.
        self._thread.submit(self._hash_to, os.fstat(self._file.descriptor).st_size).result()

    def reader(self, bound: BoundTensor) -> _RowReader:
        return _RowReader(self._file_of(bound.source), bound.source, bound.source_columns)

    def digest(self) -> str:
        """Hexadecimal SHA-256 of the whole file."""
        return self._hasher.hexdigest()

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        for file in (self._file, *self._others.values()):
            os.close(file.descriptor)

    def _file_of(self, source: TensorInfo) -> _BaseFile:
        return self._file if source.path == self._file.path else self._others[source.path]

    def _bind(self, tensor: TensorPlan) -> BoundTensor:
        source = tensor.source
        if source.path != self._file.path and source.path not in self._others:
            self._others[source.path] = _opened(source.path)
        file = self._file_of(source)
        if file is self._file:
            self._hash_to(source.start)

        def read_rows(start: int, stop: int) -> NDArray[Any]:
            values = file.read_rows(source, columns, start, stop)
            # The first look at a tensor goes through it in order, and so hashes it in passing.
            if file is self._file and self._hashed == source.start + start * columns * source.dtype.itemsize:
                self._hasher.update(bytes_of(values))
                self._hashed += values.nbytes
            return values

        columns = matrix_shape(source, tensor.operations)[1]
        bound = bind(source, tensor.dtype, tensor.operations, read_rows)
        if file is self._file:
            # Nothing of it was needed in advance; the workers' own reads of it find it in the page cache.
            self._hash_to(source.start + source.nbytes)
        return bound

    def _hash_to(self, stop: int) -> None:
        """Hash on to byte ``stop`` of the base's file, if that is ahead."""
        buffer = bytearray(min(_CHUNK, max(stop - self._hashed, 1)))
        while self._hashed < stop:
            part = memoryview(buffer)[: min(len(buffer), stop - self._hashed)]
            read_exactly(self._file.descriptor, self._hashed, part, self._file.path)
            self._hasher.update(part)
            self._hashed += len(part)


def _opened(path: Path) -> _BaseFile:
    try:
        return _BaseFile(path, os.open(path, os.O_RDONLY))
    except OSError as error:
        raise MergeError(f"{path}: cannot be read: {error.strerror or error}") from error


@dataclass(frozen=True)
class _RowReader:
    file: _BaseFile
    tensor: TensorInfo
    columns: int

    def __call__(self, start: int, stop: int) -> NDArray[Any]:
        return self.file.read_rows(self.tensor, self.columns, start, stop)

    def spans(self) -> Iterator[_Span]:
        """The tensor's bytes in pieces."""
        end = self.tensor.start + self.tensor.nbytes
        for start in range(self.tensor.start, end, _CHUNK):
            yield _Span(self.file, start, min(_CHUNK, end - start))


def _identity(path: Path) -> tuple[int, ...]:
    """What changes when a file is replaced, grown or written to."""
    try:
        now = path.stat()
    except OSError as error:
        raise MergeError(f"{path}: disappeared while the base was merged: {error.strerror or error}") from error
    return (now.st_size, now.st_mtime_ns, now.st_dev, now.st_ino)


@contextlib.contextmanager
def _opened_for_writing(path: Path) -> Iterator[int]:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except OSError as error:
        raise MergeError(f"{path}: cannot be created: {error.strerror or error}") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, part: memoryview, path: Path) -> None:
    try:
        while len(part):
            part = part[os.write(descriptor, part) :]
    except OSError as error:
        hint = "; make room and merge again" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise MergeError(f"{path.name}: write failed: {error.strerror or error}{hint}") from error


def write_side_file(file: SideFile, folder: Path) -> str:
    """Write one file beside the weights, durably; its hexadecimal SHA-256."""
    target = folder / file.name
    try:
        if file.content is not None:
            target.write_bytes(file.content)
        elif file.source is not None:
            shutil.copyfile(file.source, target)
    except OSError as error:
        raise MergeError(f"{file.name}: cannot be written: {error.strerror or error}") from error
    _sync(target)
    return file_digest(target)


def _sync(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise MergeError(f"{path.name}: could not be made durable: {error.strerror or error}") from error
