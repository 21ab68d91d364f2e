"""Which prompts share a batch. Pure arithmetic on lengths and ids; knows no model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from lora_merge.engines.prompts import Prompt

_STEP_TOKENS_ON_A_CPU = 40
_LAYER_ON_A_GPU = 100_000_000_000
_STEPS = 64


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


def sorted_batches(
    prompts: Sequence[Prompt], batch_size: int, another: int, *, shared: int = 0, shares_up_to: int | None = None
) -> list[list[int]]:
    """Positions of ``prompts`` in batches for writing, largest first, so that memory runs out at once or never.

    Batches are of one length as long as a length fills them: without padding there is no mask to make and to apply at each step.
    What is left over is sorted, longest first, and shares batches. Every row is filled up to the first of its batch, so a batch
    takes the next prompt while it has rows and while what it computes for nothing stays within what another batch would cost:
    prompts of about one length make as few batches as there have to be, and one long prompt is not paid for by all others.
    It is no share of the real work that bounds the fill: twice the tokens of a few short prompts are nothing beside the steps
    that another batch writes, and a fiftieth of a thousand long ones is a lot.

    Args:
        prompts: what is written behind.
        batch_size: most rows.
        another: what one more batch costs, in tokens of a prompt; see :func:`batch_cost`.
        shared: leading ids that batches compute once for all rows.
        shares_up_to: prompts longer than that share nothing in a batch of several lengths, so that a shorter one beside them
            computes its ``shared`` ids for nothing; None where any may share.
    """
    by_length: dict[int, list[int]] = {}
    for position, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt.token_ids), []).append(position)
    batches, left = [], []
    for length, positions in sorted(by_length.items(), reverse=True):
        end = len(positions) // batch_size * batch_size
        batches += [positions[start : start + batch_size] for start in range(0, end, batch_size)]
        left += [(length, position) for position in positions[end:]]
    longest, rows, wasted = 0, 0, 0
    for length, position in left:
        loses = shares_up_to is not None and length <= shares_up_to < longest
        wasted += longest - length + (shared if loses else 0)
        if rows in (0, batch_size) or wasted > another:
            batches.append([])
            longest, rows, wasted = length, 0, 0
        batches[-1].append(position)
        rows += 1
    return sorted(batches, key=lambda batch: -len(batch) * len(prompts[batch[0]].token_ids))


def batch_cost(device: str, max_new_tokens: int, layers: int, parameters: int) -> int:
    """What one more batch costs, in tokens of a prompt: the part of a step that does not grow with its rows, for every step.

    On a CPU that part is reading the weights: Gemma 3 270M in bfloat16 on two cores takes 58 ms for a step of one row and 3 ms
    for each further one, and 0.7 ms for a token of a prompt, 1.1 to 1.4 ms where a mask is applied; both grow with the weights.
    On a GPU it is launching, which grows with the layers alone, on an H200 by a millisecond (docs/results/gpu.md), while a token
    of fill costs what the parameters do. That card could multiply 4e11 of them with a token in a millisecond; 1e11 are counted,
    since attention behind a mask is slow and other cards are, too. So many steps are counted as may be written, at most 64: most
    texts end far before a limit that is higher.

    Args:
        device: type of the device, as torch names it.
        max_new_tokens: limit of a text.
        layers, parameters: of the model.
    """
    step = _STEP_TOKENS_ON_A_CPU if device == "cpu" else _LAYER_ON_A_GPU * layers // parameters
    return step * min(max_new_tokens, _STEPS)


def common_prefix_length(prompts: Sequence[Prompt]) -> int:
    """How many leading ids all ``prompts`` share, at most one less than the shortest has: its last token is always computed."""
    if not prompts:
        return 0
    first, last = min(prompt.token_ids for prompt in prompts), max(prompt.token_ids for prompt in prompts)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))
    return min(shared, min(len(prompt.token_ids) for prompt in prompts) - 1)
