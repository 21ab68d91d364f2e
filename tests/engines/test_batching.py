"""Which prompts share a batch."""

from __future__ import annotations

import pytest

from lora_merge.engines.batching import common_prefix_length, equal_length_batches, sorted_batches
from lora_merge.engines.prompts import Prompt


def prompts(*rows: tuple[int, ...]) -> list[Prompt]:
    return [Prompt(str(index), row) for index, row in enumerate(rows)]


def test_a_batch_has_one_length_and_every_prompt_is_in_one_batch():
    mixed = prompts(*[tuple(range(length)) for length in (3, 5, 3, 3, 5, 4, 3)])
    batches = equal_length_batches(mixed, 2)
    assert batches == [[0, 2], [3, 6], [5], [1, 4]]


def test_batches_for_writing_run_from_long_to_short_and_are_even_where_they_can():
    mixed = prompts(*[tuple(range(length)) for length in (3, 5, 3, 3, 5, 4, 3)])
    assert sorted_batches(mixed, 3) == [[1, 4, 5], [0, 2, 3], [6]]
    assert sorted_batches(mixed, 2) == [[1, 4], [5], [0, 2], [3, 6]]
    assert sorted_batches(mixed, 9) == [[1, 4, 5, 0, 2, 3, 6]]


def test_batches_for_writing_are_no_more_than_needed():
    """Lengths that no batch divides: 7 of each of five lengths, four a batch, are 35 prompts and so 9 batches, 5 of them even."""
    mixed = prompts(*[tuple(range(3 + index % 5)) for index in range(35)])
    batches = sorted_batches(mixed, 4)
    assert len(batches) == 9
    assert sorted(position for batch in batches for position in batch) == list(range(35))
    assert sum(len({len(mixed[position].token_ids) for position in batch}) == 1 and len(batch) == 4 for batch in batches) == 5


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
