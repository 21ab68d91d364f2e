"""SHA-256 of two streams that are fed together: a merge hashes what it reads and what it writes."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

Bytes = bytes | bytearray | memoryview


class HashPair(Protocol):
    """The SHA-256 of two streams that are fed together."""

    def update(self, first: Bytes, second: Bytes) -> None:
        """Append to both streams; either part may be empty. Contiguous bytes."""
        ...

    def hexdigests(self) -> tuple[str, str]:
        """Both digests, of what came so far."""
        ...

    def close(self) -> None:
        """Give back its thread, if it has one."""
        ...


def hash_pair() -> HashPair:
    """A fresh pair: on one core where that is fast, else on two."""
    from lora_merge.merging import sha256

    return sha256.Interleaved() if sha256.pays() else SideBySide()


class SideBySide:
    """A :class:`HashPair` of hashlib's, the second stream in a thread of its own."""

    def __init__(self) -> None:
        self._hashes = (hashlib.sha256(), hashlib.sha256())
        self._thread = ThreadPoolExecutor(1)

    def update(self, first: Bytes, second: Bytes) -> None:
        other = self._thread.submit(self._hashes[1].update, second)
        self._hashes[0].update(first)
        other.result()

    def hexdigests(self) -> tuple[str, str]:
        return self._hashes[0].hexdigest(), self._hashes[1].hexdigest()

    def close(self) -> None:
        self._thread.shutdown()
