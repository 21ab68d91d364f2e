"""Files that appear complete or not at all, and that survive a power failure once they are there."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lora_merge.generation.errors import GenerationError


class PendingFile:
    """A file that takes the name ``path`` when it is kept, and goes when it is closed before that."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._partial = path.with_name(f".{path.name}.partial")
        self._hasher = hashlib.sha256()
        with _said_of(path):
            self._file = open(self._partial, "wb")  # noqa: SIM115  closed by close()

    def write(self, data: bytes) -> None:
        """Append ``data``."""
        with _said_of(self.path):
            self._file.write(data)
        self._hasher.update(data)

    @property
    def sha256(self) -> str:
        """Of what was written so far, hexadecimal."""
        return self._hasher.hexdigest()

    def keep(self) -> None:
        """Make the file durable and give it its name."""
        with _said_of(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())
            os.replace(self._partial, self.path)
            sync_folder(self.path.parent)

    def close(self) -> None:
        """Take back what was not kept."""
        with contextlib.suppress(OSError):  # what a full disk kept from being written is not missed any more
            self._file.close()
        self._partial.unlink(missing_ok=True)


@contextlib.contextmanager
def replaced_file(path: Path) -> Iterator[PendingFile]:
    """A file to write to that takes the name ``path`` at the end of the block, and never if the block raises."""
    with contextlib.closing(PendingFile(path)) as file:
        yield file
        file.keep()


@contextlib.contextmanager
def _said_of(path: Path) -> Iterator[None]:
    """An error of the disk names the file that was meant."""
    try:
        yield
    except OSError as error:
        raise GenerationError(f"{path}: cannot be written: {error.strerror or error}") from error


def sync_folder(folder: Path) -> None:
    """Make names that were just given in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class ScannedFile:
    """A file of lines as it was when it was read through.

    Attributes:
        path: where it lies.
        sha256: of its bytes, hexadecimal.
        lines: how many there are; the last one needs no line feed.
    """

    path: Path
    sha256: str
    lines: int


def scan(path: Path) -> ScannedFile:
    """Read ``path`` through, in constant memory; :class:`GenerationError` when it cannot be."""
    hasher, lines, last = hashlib.sha256(), 0, b"\n"
    try:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                hasher.update(block)
                lines += block.count(b"\n")
                last = block[-1:]
    except OSError as error:
        raise GenerationError(f"{path}: cannot be read: {error.strerror or error}") from error
    return ScannedFile(path, hasher.hexdigest(), lines + (last != b"\n"))
