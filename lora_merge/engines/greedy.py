"""Greedy decoding with a key-value cache, in batches whose finished rows leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lora_merge.engines.batching import common_prefix_length
from lora_merge.engines.live_model import LiveModel, SharedPrefix
from lora_merge.engines.prompts import Prompt

_LEAVE_SHARE = 0.125
"""Share of a batch that must have finished before the cache is cut down: cutting copies it, as one step of decoding does."""


@dataclass(frozen=True)
class TokenCounts:
    """What decoding computed, in tokens through the model: the first three are work, the last two are waste.

    ``prompt``: of prompts, each row's own; ``shared``: of shared beginnings, computed once; ``new``: written; ``padding``:
    fill of shorter prompts; ``waiting``: steps of rows that had finished and not yet left.
    """

    prompt: int = 0
    shared: int = 0
    new: int = 0
    padding: int = 0
    waiting: int = 0

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(
            self.prompt + other.prompt,
            self.shared + other.shared,
            self.new + other.new,
            self.padding + other.padding,
            self.waiting + other.waiting,
        )

    @property
    def wasted_share(self) -> float:
        """Padding and waiting over everything computed, in [0, 1]."""
        computed = self.prompt + self.shared + self.new + self.padding + self.waiting
        return (self.padding + self.waiting) / computed if computed else 0.0


def greedy_batch(
    model: LiveModel,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    stop_ids: frozenset[int],
    prefix: SharedPrefix,
    shared: int,
    finished: Callable[[int], None],
) -> tuple[list[list[int]], TokenCounts]:
    """The new ids of each prompt, the stop id included, and what it cost. Call within :meth:`LiveModel.reading`.

    ``shared``: leading ids of every prompt that come from ``prefix``. Shorter prompts are filled up on the left of their own
    part, with a mask and true positions; ``finished`` is called with the number of rows that ended, as they end.
    """
    batch = _Batch.start(model, prompts, prefix, shared)
    written: list[list[int]] = [[] for _ in prompts]
    alive = list(range(len(prompts)))
    done: set[int] = set()
    for step in range(max_new_tokens):
        tokens = batch.logits.max(dim=-1).indices  # the first of equal ones, as argmax, in a quarter of its time on a CPU
        chosen = tokens.tolist()
        for row, token in zip(alive, chosen, strict=True):
            if row not in done:
                written[row].append(token)
        ended = {row for row, token in zip(alive, chosen, strict=True) if row not in done and token in stop_ids}
        finished(len(ended))
        done |= ended
        if len(done) == len(prompts) or step + 1 == max_new_tokens:
            break
        if model.turning_length == len(prompts[0].token_ids) + step + 1:  # of equal length, as nothing else may turn
            alive = [row for row in alive if row not in done]
            longer = [replace(prompts[row], token_ids=(*prompts[row].token_ids, *written[row])) for row in alive]
            again = _Batch.start(model, longer, prefix, 0)
            batch = replace(again, counts=batch.counts + again.counts)
            continue
        if model.has_plain_cache and sum(row in done for row in alive) >= _LEAVE_SHARE * len(alive):
            kept = [index for index, row in enumerate(alive) if row not in done]
            batch, tokens, alive = batch.cut(kept), tokens[kept], [alive[index] for index in kept]
        batch = batch.step(tokens, sum(row in done for row in alive))
    finished(len(prompts) - len(done))
    return written, batch.counts


@dataclass(frozen=True)
class _Batch:
    """Rows in the middle of decoding: logits of the next token, cache, and mask and positions where some row is padded."""

    model: LiveModel
    logits: Tensor
    cache: Any
    mask: Tensor | None
    positions: Tensor | None
    counts: TokenCounts

    @classmethod
    def start(cls, model: LiveModel, prompts: Sequence[Prompt], prefix: SharedPrefix, shared: int) -> _Batch:
        """The prompts' own parts behind the shared one, through the model once."""
        own = [prompt.token_ids[shared:] for prompt in prompts]
        width = max(len(ids) for ids in own)
        padding = [width - len(ids) for ids in own]
        rows = [(0,) * fill + ids for fill, ids in zip(padding, own, strict=True)]
        ids = model.ids_tensor(rows)
        mask = positions = next_positions = None
        if any(padding):
            mask = model.ids_tensor([(1,) * shared + (0,) * fill + (1,) * (width - fill) for fill in padding])
            positions = (mask.cumsum(dim=-1) - 1).clamp(min=0)[:, shared:]
            next_positions = positions[:, -1:] + 1
        cache = prefix.cache_for(prompts[0].token_ids[:shared], len(prompts))
        logits, cache = model.last_logits(ids, cache=cache, attention_mask=mask, position_ids=positions, use_cache=True)
        counts = TokenCounts(prompt=sum(map(len, own)), padding=sum(padding))
        return cls(model, logits, cache, mask, next_positions, counts)

    def cut(self, kept: Sequence[int]) -> _Batch:
        """The same batch with only the rows at ``kept``."""
        rows = torch.tensor(kept, dtype=torch.long, device=self.model.device)
        self.cache.batch_select_indices(rows)
        mask, positions = (None if part is None else part[rows] for part in (self.mask, self.positions))
        return replace(self, logits=self.logits[rows], mask=mask, positions=positions)

    def step(self, tokens: Tensor, waiting: int) -> _Batch:
        """One more token a row, ``(rows,)``; ``waiting`` of the rows had already finished."""
        ids = tokens[:, None]
        mask = None if self.mask is None else torch.cat([self.mask, torch.ones_like(ids)], dim=-1)
        logits, cache = self.model.last_logits(
            ids, cache=self.cache, attention_mask=mask, position_ids=self.positions, use_cache=True
        )
        positions = None if self.positions is None else self.positions + 1
        counts = self.counts + TokenCounts(new=len(tokens) - waiting, waiting=waiting)
        return _Batch(self.model, logits, cache, mask, positions, counts)


def shareable_prefix(model: LiveModel, prompts: Sequence[Prompt], max_new_tokens: int) -> int:
    """How many leading ids of a batch may come from a shared cache without moving any position.

    Filling between the shared and the own part shifts cache places against positions. Full attention does not mind; a sliding
    window counts places, so once a row could outgrow it nothing is shared in a batch of unequal lengths.
    """
    lengths = {len(prompt.token_ids) for prompt in prompts}
    if not model.is_plain(max(lengths) + max_new_tokens):
        return 0
    window = model.sliding_window
    if len(lengths) > 1 and window is not None and max(lengths) + max_new_tokens > window:
        return 0
    return common_prefix_length(prompts)
