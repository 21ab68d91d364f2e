"""Which part of the prompts a run takes on.

The prompts that passed intake are cut into chunks of ``chunk_size`` in the order of the file, and shard *i* of *n* takes the
chunks *i*, *i* + *n*, *i* + 2*n*, ... So every prompt is computed in the same company whether the run is sharded or not, and
the shards joined are the whole run byte for byte wherever the engine repeats itself for equal batches.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lora_merge.generation.errors import GenerationError


@dataclass(frozen=True)
class Shard:
    """Part ``index`` (from 1) of ``count``."""

    index: int = 1
    count: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.index <= self.count:
            raise GenerationError(f"shard {self}: expected i/n with i from 1 to n, such as 1/4")

    @classmethod
    def parse(cls, text: str) -> Shard:
        """``"2/4"`` as the second of four parts."""
        found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text.strip())
        if found is None:
            raise GenerationError(f"shard {text!r}: expected i/n with i from 1 to n, such as 1/4")
        return cls(int(found[1]), int(found[2]))

    def takes(self, chunk: int) -> bool:
        """Whether chunk number ``chunk`` (from 0) belongs to this part."""
        return chunk % self.count == self.index - 1

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def chunk_count(accepted: int, chunk_size: int) -> int:
    """How many chunks ``accepted`` prompts make."""
    return -(-accepted // chunk_size)
