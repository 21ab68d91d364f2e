"""The generator of grocery pairs. Oracles: the issue's counts, set arithmetic on the rows, and Korean spelling written out."""

from __future__ import annotations

import json
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import pairs
import pytest
from catalogue import KINDS, TABLES, USES
from wording import INSTRUCTION, Noun

from tests.examples.conftest import read_lines


def unordered(row: dict[str, Any]) -> frozenset[str]:
    """The two goods that a prompt names."""
    return frozenset(line.split(": ", 1)[1] for line in row["prompt"].splitlines() if line.startswith("상품"))


@pytest.fixture(scope="module")
def train() -> list[dict[str, Any]]:
    return pairs.rows("train")


@pytest.fixture(scope="module")
def heldout() -> list[dict[str, Any]]:
    return pairs.rows("heldout")


def test_the_catalogue_is_large_and_consistent() -> None:
    items = [item for kind in KINDS for item in kind.items]
    assert len(items) >= 200 and len(set(items)) == len(items)
    assert len({kind.name for kind in KINDS}) == len(KINDS)
    assert len(USES) >= 30 and len({use.name for use in USES}) == len(USES)
    assert {kind for use in USES for role in use.roles for kind in role} <= {kind.name for kind in KINDS}
    assert {table for kind in KINDS for table in kind.tables} <= set(TABLES)
    assert all("가" <= item[-1] <= "힣" for item in items), "a particle needs a Hangul ending"


def test_no_kind_plays_two_parts_in_one_use() -> None:
    for use in USES:
        kinds = [kind for role in use.roles for kind in role]
        assert len(kinds) == len(set(kinds)), use.name


def test_held_out_and_training_share_no_pair_in_either_order(train: list[dict[str, Any]], heldout: list[dict[str, Any]]) -> None:
    trained, held = [unordered(row) for row in train], [unordered(row) for row in heldout]
    assert len(trained) >= 10_000 and len(held) >= 3_000
    assert all(len(pair) == 2 for pair in trained + held)
    assert len(set(trained)) == len(trained) and len(set(held)) == len(held)
    assert not set(trained) & set(held)


def test_every_held_out_item_is_met_in_training(train: list[dict[str, Any]], heldout: list[dict[str, Any]]) -> None:
    met = Counter(item for row in train for item in unordered(row))
    assert min(met[item] for row in heldout for item in unordered(row)) >= 30


def test_decisions_are_balanced_and_the_grey_zone_is_spread(train: list[dict[str, Any]]) -> None:
    writes = sum(row["expected"] == "write" for row in train) / len(train)
    assert 0.45 <= writes <= 0.55
    grey = [row for row in train if row["grey"]]
    assert len(grey) == 0.2 * len(train)
    middle = [row for row in grey if 0.3 <= row["write_probability"] <= 0.7]
    assert len(middle) > len(grey) / 2
    assert {row["write_probability"] for row in train if not row["grey"]} == {0.0, 1.0}


def test_grey_labels_follow_their_probability(train: list[dict[str, Any]]) -> None:
    grey = [row for row in train if row["grey"]]
    expected = sum(row["write_probability"] for row in grey)
    found = sum(row["expected"] == "write" for row in grey)
    deviation = sum(row["write_probability"] * (1 - row["write_probability"]) for row in grey) ** 0.5
    assert abs(found - expected) < 4 * deviation


def test_the_rule_is_symmetric_and_goods_of_one_kind_never_go_together() -> None:
    for one, other in combinations(KINDS, 2):
        assert pairs.judge(one, other) == pairs.judge(other, one)
    assert {pairs.judge(kind, kind).zone for kind in KINDS} == {"skip"}


@pytest.mark.parametrize(
    ("one", "other", "zone", "occasion"),
    [
        ("김치", "찌개용돼지고기", "write", "김치찌개"),
        ("세탁세제", "세탁보조", "write", "빨래"),
        ("세탁세제", "생선회", "skip", None),
        ("과일", "국거리소고기", "skip", None),
        ("쌀", "두부", "grey", "한식"),
    ],
)
def test_the_rule_on_kinds_that_a_cook_knows(one: str, other: str, zone: str, occasion: str | None) -> None:
    kinds = {kind.name: kind for kind in KINDS}
    judgement = pairs.judge(kinds[one], kinds[other])
    assert judgement.zone == zone
    assert (judgement.occasion.name if judgement.occasion else None) == occasion


def test_answers_are_json_that_starts_with_the_prefill(train: list[dict[str, Any]]) -> None:
    for row in train:
        answer = json.loads(row["answer"])
        assert row["answer"].startswith(pairs.PREFILL)
        assert answer["decision"] == row["expected"]
        assert set(answer) == ({"decision", "text"} if row["expected"] == "write" else {"decision"})
        if row["expected"] == "write":
            assert all(item in answer["text"] for item in unordered(row))


def test_every_prompt_opens_with_the_shared_instruction(train: list[dict[str, Any]], heldout: list[dict[str, Any]]) -> None:
    assert all(row["prompt"].startswith(INSTRUCTION) and row["prompt"].endswith("\n") for row in train + heldout)


def test_dish_and_categories_pass_through(heldout: list[dict[str, Any]]) -> None:
    categories = {kind.category for kind in KINDS}
    for row in heldout:
        assert {row["category_a"], row["category_b"]} <= categories
        assert (row["dish"] is not None) == (row["expected"] == "write" and not row["grey"])


def test_unseen_prompts_are_distinct_and_not_trained_on(train: list[dict[str, Any]]) -> None:
    unseen = pairs.rows("unseen", 10_000)
    assert len({row["prompt"] for row in unseen}) == 10_000
    assert not {unordered(row) for row in unseen} & {unordered(row) for row in train}


def test_validation_shares_no_pair_with_training_or_the_held_out_prompts(
    train: list[dict[str, Any]], heldout: list[dict[str, Any]]
) -> None:
    validation = pairs.rows("validation", 1_000)
    assert Counter(row["expected"] for row in validation if not row["grey"]) == {"write": 400, "skip": 400}
    assert not {unordered(row) for row in validation} & {unordered(row) for row in train + heldout}


def test_too_many_unseen_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="unseen prompts exist"):
        pairs.rows("unseen", 200_000)


def test_the_seed_decides_and_nothing_else() -> None:
    assert pairs.rows("heldout", 50, seed=7) == pairs.rows("heldout", 50, seed=7)
    assert pairs.rows("heldout", 50, seed=7) != pairs.rows("heldout", 50, seed=8)
    # Written out from SHA-256 of "20\x1fa\x1fb": the same on every platform and Python version.
    assert pairs.chance(20, "a", "b") == int("90f513c1121a64e0", 16) / 2**64


def test_the_shipped_prompts_are_what_the_generator_makes(grocery: Path, heldout: list[dict[str, Any]]) -> None:
    assert read_lines(grocery / "heldout.jsonl") == heldout


@pytest.mark.parametrize(
    ("noun", "particles", "spelled"),
    [
        ("우유", "를을", "우유를"),
        ("식빵", "를을", "식빵을"),
        ("두부", "와과", "두부와"),
        ("딸기잼", "와과", "딸기잼과"),
        ("김", "가이", "김이"),
    ],
)
def test_particles_follow_the_final_consonant(noun: str, particles: str, spelled: str) -> None:
    assert format(Noun(noun), particles) == spelled
