"""SHA-256 of a shard of the base and of the output file made from it, taken while the one is read and the other written."""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from lora_merge.merging.hash_pair import HashPair, hash_pair
from lora_merge.merging.streaming import Block, SourceFile

_CHUNK = 1 << 22


class ShardDigests(Protocol):
    """Both digests. The blocks of the output come in order, from one thread."""

    def add(self, block: Block) -> None:
        """Take the next block."""
        ...

    def finish(self) -> tuple[str, str]:
        """Hexadecimal digests of the base's whole file and of the output; raises :class:`MergeError` where reading fails."""
        ...

    def close(self) -> None:
        """End what is still at work."""
        ...


def shard_digests(base: SourceFile, cores: int) -> ShardDigests:
    """For a caller that has so many cores for hashing one shard, 1 or 2."""
    return Together(base) if cores == 1 else Apart(base)


class Together:
    """On one core, the base beside the output.

    The output is made in the order of the base's bytes, and mostly of as many: so what a block was computed from is hashed beside
    it, and read again only where it is no longer at hand. What no block was made from (the header, quantization states, tensors
    that an adapter's take the place of) is read when its turn comes.
    """

    def __init__(self, base: SourceFile) -> None:
        self._base = base
        self._done = 0
        self._pair: HashPair | None = None

    @property
    def _hashes(self) -> HashPair:
        if self._pair is None:
            self._pair = hash_pair()  # in the hashing thread, since code may have to be loaded for it
        return self._pair

    def add(self, block: Block) -> None:
        if block.base_start is not None:
            self._catch_up(block.base_start)
        if block.base_start != self._done:
            self._hashes.update(b"", block.content)
            return
        base = block.base if block.base is not None else self._base.read(block.base_start, block.base_bytes)
        self._hashes.update(base, block.content)
        self._done += len(base)

    def finish(self) -> tuple[str, str]:
        self._catch_up(self._base.size)
        return self._hashes.hexdigests()

    def close(self) -> None:
        if self._pair is not None:
            self._pair.close()

    def _catch_up(self, stop: int) -> None:
        while self._done < stop:
            part = self._base.read(self._done, min(_CHUNK, stop - self._done))
            self._hashes.update(part, b"")
            self._done += len(part)


class Apart:
    """On two cores: the base by itself from the beginning, also while a card is starting and nothing can be computed yet.

    Its bytes are read once more for that; one of the two readers finds them in the page cache.
    """

    def __init__(self, base: SourceFile) -> None:
        self._base = base
        self._output = hashlib.sha256()
        self._stop = threading.Event()
        self._thread = ThreadPoolExecutor(1)
        self._read = self._thread.submit(self._hash_base)

    def add(self, block: Block) -> None:
        self._output.update(block.content)

    def finish(self) -> tuple[str, str]:
        return self._read.result(), self._output.hexdigest()

    def close(self) -> None:
        self._stop.set()
        self._thread.shutdown()

    def _hash_base(self) -> str:
        found, done, size = hashlib.sha256(), 0, self._base.size
        while done < size and not self._stop.is_set():
            part = self._base.read(done, min(_CHUNK, size - done))
            found.update(part)
            done += len(part)
        return found.hexdigest()
