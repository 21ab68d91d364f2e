"""Training examples as token ids, joined exactly as they will be at generation.

At generation the model gets ids(prompt + prefill) and continues token by token. So the answer's ids are those that follow
these very ids, never a tokenization of the whole text that might cut the seam elsewhere, and a final end-of-sequence id.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from pairs import PREFILL, chance
from torch import Tensor

from lora_merge.engines.prompts import encode, rows_from_mappings, tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Example:
    """``prompt_ids`` hold BOS, prompt and prefill; ``answer_ids`` start with the decision token and end with EOS."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.answer_ids)


@dataclass(frozen=True)
class Batch:
    """Examples side by side, filled up on the right.

    No attention mask goes with it: attention is causal, so no real token ever sees what stands to its right.
    """

    #: (examples, tokens) int64.
    ids: Tensor
    #: (targets, 2) int64: row and column of each position *before* an answer token, where its logits are read.
    positions: Tensor
    #: (targets,) int64: the answer tokens.
    targets: Tensor
    #: (targets,) bool: which of them are decision tokens.
    is_decision: Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(*(tensor.to(device) for tensor in (self.ids, self.positions, self.targets, self.is_decision)))


def make_examples(rows: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase) -> list[Example]:
    """One example a row of ``pairs.rows("train")``. Raises ValueError where the answer would change the prompt's ids."""
    prompts = tokenize(rows_from_mappings({"id": row["id"], "prompt": row["prompt"]} for row in rows), tokenizer, prefill=PREFILL)
    examples = []
    for row, prompt in zip(rows, prompts, strict=True):
        rest = row["answer"].removeprefix(PREFILL)
        answer_ids = encode(tokenizer, rest)
        whole = encode(tokenizer, row["prompt"] + row["answer"])
        if whole != [*prompt.token_ids, *answer_ids][-len(whole) :]:
            raise ValueError(
                f"{row['id']}: the answer changes the token ids of the prompt before it; end the prompt with a line break"
            )
        examples.append(Example(prompt.token_ids, (*answer_ids, int(tokenizer.eos_token_id))))
    return examples


def epoch_batches(examples: Sequence[Example], batch_size: int, seed: int, epoch: int) -> Iterator[list[Example]]:
    """Every example once, shuffled, in batches of similar prompt length: shuffled runs of 16 batches are sorted by it and cut.

    By the *prompt's* length: sorted by the whole length, a batch would hold one decision only, because ``skip`` is short, and the
    gradient would swing between the two. The last, smaller batch is left out so that every step weighs the same.
    """
    order = sorted(range(len(examples)), key=lambda index: chance(seed, "epoch", str(epoch), str(index)))
    batches = []
    for start in range(0, len(order), 16 * batch_size):
        run = sorted(order[start : start + 16 * batch_size], key=lambda index: len(examples[index].prompt_ids))
        batches += [run[at : at + batch_size] for at in range(0, len(run), batch_size)]
    full = [batch for batch in batches if len(batch) == batch_size]
    for number in sorted(range(len(full)), key=lambda number: chance(seed, "batch", str(epoch), str(number))):
        yield [examples[index] for index in full[number]]


def collate(examples: Sequence[Example], pad_id: int) -> Batch:
    """``examples`` as one batch."""
    width = max(map(len, examples))
    ids, positions, targets, is_decision = [], [], [], []
    for number, example in enumerate(examples):
        ids.append([*example.prompt_ids, *example.answer_ids, *[pad_id] * (width - len(example))])
        start = len(example.prompt_ids) - 1
        positions += [(number, start + offset) for offset in range(len(example.answer_ids))]
        targets += example.answer_ids
        is_decision += [offset == 0 for offset in range(len(example.answer_ids))]
    return Batch(torch.tensor(ids), torch.tensor(positions), torch.tensor(targets), torch.tensor(is_decision))
