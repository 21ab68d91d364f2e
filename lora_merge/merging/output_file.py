"""Writes one output file in order, past the page cache where the file system allows it.

A merge writes what it will not read again. Through the page cache every byte is copied once more and every page accounted for,
which takes a processor longer than a merge's arithmetic; so large files go from aligned buffers straight to the disk
(``O_DIRECT``), one buffer on its way while the next is filled. What goes over unchanged is copied by the kernel
(``copy_file_range``), except its ends, which share a disk block with something else. Small files, and file systems without
direct writing, take the ordinary way.
"""

from __future__ import annotations

import errno
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from lora_merge.merging.errors import MergeError
from lora_merge.merging.streaming import Block

ALIGNMENT = 4096
"""Direct writes start and end at multiples of this: no disk in use has larger blocks."""
BUFFER_BYTES = 1 << 23
DIRECT_FROM = 1 << 26
"""Bytes from which a file is written directly; a smaller one may as well be in memory when it is read next."""

_NOT_OFFERED = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)


class OutputFile:
    """A new file of ``nbytes``, written from the beginning to the end and then :meth:`finish`\\ ed.

    Attributes:
        cached_bytes: written so far by way of the page cache: what a sync will have to wait for.

    Raises:
        MergeError: the file exists, or writing fails; one line with what to do.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path = path
        self.cached_bytes = 0
        self._position = 0
        self._descriptor = self._opened(os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        self._direct: _DirectWriter | None = None
        if nbytes >= DIRECT_FROM and hasattr(os, "O_DIRECT"):
            try:
                self._direct = _DirectWriter(os.open(path, os.O_WRONLY | os.O_DIRECT), self._descriptor)
            except OSError as error:
                if error.errno not in _NOT_OFFERED:
                    os.close(self._descriptor)
                    raise self._failure(error) from error

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._direct:
            self._direct.close()
        os.close(self._descriptor)

    def append(self, block: Block) -> None:
        """Write a block behind what there is."""
        try:
            if not self._copied(block):
                self._write(block.content)
        except OSError as error:
            raise self._failure(error) from error

    def finish(self) -> None:
        """Write what is still in buffers. The file is complete then, and durable once it is synced."""
        if self._direct:
            try:
                self._direct.finish()
            except OSError as error:
                raise self._failure(error) from error

    def _write(self, content: memoryview) -> None:
        if self._direct:
            self._direct.append(content)
        else:
            _write_all(self._descriptor, content, self._position)
            self.cached_bytes += len(content)
        self._position += len(content)

    def _copied(self, block: Block) -> bool:
        """Let the kernel copy what of the block it can; then write the rest, and say so."""
        if block.copied_from is None:
            return False
        first, last = (self._position, self._position + len(block.content))
        if self._direct:
            first, last = -(-first // ALIGNMENT) * ALIGNMENT, last // ALIGNMENT * ALIGNMENT
        if last <= first:
            return False
        before, after = first - self._position, last - self._position
        descriptor, start = block.copied_from.descriptor, block.copied_start + before
        try:
            copied = os.copy_file_range(descriptor, self._descriptor, after - before, start, first)
        except OSError as error:
            if error.errno in _NOT_OFFERED:
                return False
            raise
        if copied != after - before:
            return False  # written over from memory
        if self._direct:
            self._direct.skip(block.content[:before], after - before)
        self._position = last
        self.cached_bytes += copied
        self._write(block.content[after:])
        return True

    def _opened(self, flags: int) -> int:
        try:
            return os.open(self.path, flags, 0o644)
        except OSError as error:
            raise MergeError(f"{self.path}: cannot be created: {error.strerror or error}") from error

    def _failure(self, error: OSError) -> MergeError:
        hint = "; make room and merge again" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        return MergeError(f"{self.path.name}: write failed: {error.strerror or error}{hint}")


class _DirectWriter:
    """Fills one of two buffers while the other one is on its way to the disk.

    Args:
        direct: a descriptor opened with ``O_DIRECT``; closed here.
        cached: another one of the same file without it, for file systems that refuse only when it comes to writing.
    """

    def __init__(self, direct: int, cached: int) -> None:
        self._direct: int | None = direct
        self._cached = cached
        self._maps = [mmap.mmap(-1, BUFFER_BYTES) for _ in range(2)]  # page-aligned, as the disk wants it
        self._buffers = [np.frombuffer(buffer, np.uint8) for buffer in self._maps]
        self._on_its_way: list[Future[None] | None] = [None, None]
        self._thread = ThreadPoolExecutor(1)
        self._filling = 0
        self._start = 0
        self._filled = 0

    def append(self, content: memoryview) -> None:
        data = np.frombuffer(content, np.uint8)
        while data.size:
            part = data[: BUFFER_BYTES - self._filled]
            self._buffers[self._filling][self._filled : self._filled + part.size] = part
            self._filled += part.size
            data = data[part.size :]
            if self._filled == BUFFER_BYTES:
                self._send(BUFFER_BYTES)

    def skip(self, before: memoryview, nbytes: int) -> None:
        """Append ``before``, then leave ``nbytes`` to someone else; both end at multiples of the alignment."""
        self.append(before)
        if self._filled:
            self._send(self._filled)
        self._start += nbytes

    def finish(self) -> None:
        size = self._start + self._filled
        if self._filled:
            padded = -(-self._filled // ALIGNMENT) * ALIGNMENT
            self._buffers[self._filling][self._filled : padded] = 0
            self._send(padded)
        for write in self._on_its_way:
            if write is not None:
                write.result()
        os.ftruncate(self._cached, size)

    def close(self) -> None:
        self._thread.shutdown()
        if self._direct is not None:
            os.close(self._direct)
        # The arrays hold on to the maps; both go with this object.

    def _send(self, nbytes: int) -> None:
        """Start writing the buffer being filled, and go on with the other one once that is free."""
        content = memoryview(self._buffers[self._filling].data)[:nbytes]
        self._on_its_way[self._filling] = self._thread.submit(self._write, content, self._start)
        self._start += nbytes
        self._filled = 0
        self._filling = 1 - self._filling
        earlier = self._on_its_way[self._filling]
        if earlier is not None:
            earlier.result()

    def _write(self, content: memoryview, position: int) -> None:
        if self._direct is not None:
            try:
                _write_all(self._direct, content, position)
                return
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            os.close(self._direct)
            self._direct = None
        _write_all(self._cached, content, position)


def _write_all(descriptor: int, content: memoryview, position: int) -> None:
    while len(content):
        written = os.pwrite(descriptor, content, position)
        content, position = content[written:], position + written
