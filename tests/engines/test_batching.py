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


def test_sorted_batches_run_from_long_to_short():
    mixed = prompts(*[tuple(range(length)) for length in (3, 5, 3, 3, 5, 4, 3)])
    assert sorted_batches(mixed, 3) == [[1, 4, 5], [0, 2, 3], [6]]


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
