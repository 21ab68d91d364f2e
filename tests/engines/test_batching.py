"""Which prompts share a batch."""

from __future__ import annotations

import itertools
import random

import pytest

from lora_merge.engines.batching import batch_cost, common_prefix_length, equal_length_batches, sorted_batches
from lora_merge.engines.prompts import Prompt


def prompts(*rows: tuple[int, ...]) -> list[Prompt]:
    return [Prompt(str(index), row) for index, row in enumerate(rows)]


def test_a_batch_has_one_length_and_every_prompt_is_in_one_batch():
    mixed = prompts(*[tuple(range(length)) for length in (3, 5, 3, 3, 5, 4, 3)])
    batches = equal_length_batches(mixed, 2)
    assert batches == [[0, 2], [3, 6], [5], [1, 4]]


def of_lengths(*lengths: int) -> list[Prompt]:
    return prompts(*[tuple(range(length)) for length in lengths])


def waste(mixed: list[Prompt], batch: list[int]) -> int:
    lengths = [len(mixed[position].token_ids) for position in batch]
    return max(lengths) * len(lengths) - sum(lengths)


def test_batches_for_writing_run_from_large_to_small_and_are_even_where_they_can():
    mixed = of_lengths(3, 5, 3, 3, 5, 4, 3)
    assert sorted_batches(mixed, 3, 100) == [[1, 4, 5], [0, 2, 3], [6]]
    assert sorted_batches(mixed, 2, 100) == [[1, 4], [0, 2], [3, 6], [5]]
    assert sorted_batches(mixed, 9, 100) == [[1, 4, 5, 0, 2, 3, 6]]


def test_batches_for_writing_are_no_more_than_needed():
    """Lengths that no batch divides: 7 of each of five lengths, four a batch, are 35 prompts and so 9 batches, 5 of them even."""
    mixed = of_lengths(*(3 + index % 5 for index in range(35)))
    batches = sorted_batches(mixed, 4, 100)
    assert len(batches) == 9
    assert sorted(position for batch in batches for position in batch) == list(range(35))
    assert sum(len({len(mixed[position].token_ids) for position in batch}) == 1 and len(batch) == 4 for batch in batches) == 5


def test_a_long_prompt_pads_no_batch_of_short_ones():
    """31 prompts of 76 tokens and one of 573, eight tokens to write on a CPU: of those 15,407 tokens of fill none is computed."""
    mixed = of_lengths(*[76] * 20, 573, *[76] * 11)
    cost = batch_cost("cpu", 8, 18, 268_000_000)
    assert cost < 573 - 76
    assert sorted_batches(mixed, 128, cost) == [[position for position in range(32) if position != 20], [20]]


def test_what_costs_less_than_another_batch_is_filled():
    """Fill of 80 each: four batches' worth of steps for two prompts would be dearer than 160 tokens."""
    mixed = of_lengths(20, 100, 20)
    assert sorted_batches(mixed, 128, 160) == [[1, 0, 2]]
    assert sorted_batches(mixed, 128, 159) == [[1, 0], [2]]


@pytest.mark.parametrize("spread", [(1, 3000), (60, 90), (500, 520)])
@pytest.mark.parametrize("seed", range(4))
def test_padding_is_bounded_and_no_batch_is_one_too_many(seed, spread):
    """Whatever the lengths: every prompt once, few enough rows, no more fill than another batch costs; and two batches that stand
    beside each other in length, of which neither is full of one length, would be too many rows or too much fill as one."""
    draw = random.Random(seed)
    mixed = of_lengths(*(round(spread[0] * (spread[1] / spread[0]) ** draw.random()) for _ in range(500)))
    size, cost = draw.choice([1, 7, 32, 128]), draw.choice([0, 50, 2560])
    batches = sorted_batches(mixed, size, cost)
    assert sorted(position for batch in batches for position in batch) == list(range(500))
    assert max(map(len, batches)) <= size
    assert all(waste(mixed, batch) <= cost for batch in batches)
    areas = [len(batch) * max(len(mixed[position].token_ids) for position in batch) for batch in batches]
    assert areas == sorted(areas, reverse=True)
    shared = [batch for batch in batches if waste(mixed, batch) or len(batch) < size]
    shared.sort(key=lambda batch: [-len(mixed[position].token_ids) for position in batch])
    for longer, shorter in itertools.pairwise(shared):
        joined = [*longer, shorter[0]]
        assert len(joined) > size or waste(mixed, joined) > cost
    assert batches == sorted_batches(mixed, size, cost)


def test_a_prompt_that_would_lose_its_shared_beginning_counts_that_as_fill():
    """Beyond 100 tokens nothing is shared. A prompt of 99 beside one of 101 is 2 tokens of fill and 40 that it could share."""
    mixed = of_lengths(99, 101, 99)
    assert sorted_batches(mixed, 128, 50) == [[1, 0, 2]]
    assert sorted_batches(mixed, 128, 50, shared=40, shares_up_to=100) == [[1, 0], [2]]
    assert sorted_batches(mixed, 128, 41, shared=40, shares_up_to=100) == [[0, 2], [1]]
    assert sorted_batches(mixed, 128, 41, shared=40, shares_up_to=None) == [[1, 0, 2]]


def test_another_batch_costs_the_steps_that_it_writes():
    """On a GPU a step is dear beside a prompt's token. The limit on a text says little of its length from 64 tokens on.

    Oracle: one long prompt among 512 of Gemma 3 270M on an H200 (docs/results/gpu.md), whose 263,000 tokens of fill took less
    than the steps of another batch. A larger model fills more slowly, by its parameters over its layers.
    """
    small, large = (18, 268_098_176), (34, 3_880_099_328)
    for model in (small, large):
        assert batch_cost("cpu", 1, *model) == 40
        assert batch_cost("cpu", 64, *model) == batch_cost("cpu", 4096, *model) == 2560
        assert batch_cost("cuda", 64, *model) == batch_cost("cuda", 4096, *model) == 64 * batch_cost("cuda", 1, *model)
    assert batch_cost("cuda", 64, *small) > 263_000
    by_layer = [batch_cost("cuda", 64, *model) * model[1] / model[0] for model in (small, large)]
    assert by_layer[0] == pytest.approx(by_layer[1], rel=0.01)


@pytest.mark.parametrize(
    ("rows", "length"),
    [
        ([(1, 2, 3, 4), (1, 2, 5)], 2),
        ([(1, 2, 3)], 2),
        ([(1, 2), (1, 2, 3)], 1),
        ([(9, 2), (1, 2)], 0),
        ([(1, 2, 3), (1, 9, 3), (1, 2, 3)], 1),
        ([], 0),
    ],
)
def test_the_shared_beginning_leaves_every_prompt_a_token(rows, length):
    assert common_prefix_length(prompts(*rows)) == length
