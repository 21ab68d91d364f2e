"""Files that appear complete or not at all, and that survive a power failure once they are there."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from lora_merge.generation.errors import GenerationError


@contextlib.contextmanager
def replaced_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to that takes the name ``path`` at the end of the block, and never if the block raises."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync_folder(path.parent)
    except OSError as error:
        raise GenerationError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)


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
