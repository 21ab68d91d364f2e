"""Which prompts share a batch. Pure arithmetic on lengths and ids; knows no model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from lora_merge.engines.prompts import Prompt


def equal_length_batches(prompts: Sequence[Prompt], batch_size: int) -> list[list[int]]:
    """Positions of ``prompts`` in batches of one length each, shortest first, at most ``batch_size`` a batch.

    Nothing in such a batch is padded, so no mask is needed: a padded batch can lose its label mass in some attention kernels. The
    result depends on the lengths and their order only, so the same prompts make the same batch shapes every time.
    """
    by_length: dict[int, list[int]] = {}
    for position, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt.token_ids), []).append(position)
    return [
        positions[start : start + batch_size]
        for _, positions in sorted(by_length.items())
        for start in range(0, len(positions), batch_size)
    ]


def sorted_batches(prompts: Sequence[Prompt], batch_size: int) -> list[list[int]]:
    """Positions of ``prompts`` in batches for writing, longest first, so that memory runs out at once or never.

    Batches are of one length as long as a length fills them: without padding there is no mask to make and to apply at each step.
    What is left over is sorted and shares batches. There are never more batches than there have to be.
    """
    by_length: dict[int, list[int]] = {}
    for position, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt.token_ids), []).append(position)
    full, left = [], []
    for _, positions in sorted(by_length.items(), reverse=True):
        end = len(positions) // batch_size * batch_size
        full += [positions[start : start + batch_size] for start in range(0, end, batch_size)]
        left += positions[end:]
    batches = full + [left[start : start + batch_size] for start in range(0, len(left), batch_size)]
    return sorted(batches, key=lambda batch: -len(prompts[batch[0]].token_ids))


def common_prefix_length(prompts: Sequence[Prompt]) -> int:
    """How many leading ids all ``prompts`` share, at most one less than the shortest has: its last token is always computed."""
    if not prompts:
        return 0
    first, last = min(prompt.token_ids for prompt in prompts), max(prompt.token_ids for prompt in prompts)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))
    return min(shared, min(len(prompt.token_ids) for prompt in prompts) - 1)
