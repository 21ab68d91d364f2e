"""Which prompts get a text, which text an answer holds, what a row says, which part a shard takes."""

from __future__ import annotations

import json
import math

import pytest

from lora_merge.engines.labels import DecisionLabels, Label
from lora_merge.engines.prompts import Prompt
from lora_merge.engines.protocol import Completion
from lora_merge.engines.scores import DecisionScore
from lora_merge.generation.answers import read_answer
from lora_merge.generation.errors import GenerationError
from lora_merge.generation.rows import KEYS, Tally, encode_row, result_row
from lora_merge.generation.selection import Selection
from lora_merge.generation.shards import Shard, chunk_count

LABELS = DecisionLabels(Label("skip", 11), Label("write", 22))


def score(skip: float, argmax: int, mass: float = 0.9) -> DecisionScore:
    return DecisionScore.from_log_probabilities("a", math.log(mass * skip), math.log(mass * (1 - skip)), argmax, LABELS)


@pytest.mark.parametrize(
    ("skip", "argmax", "threshold", "kept", "written", "written_by_all"),
    [
        (0.2, 22, 0.3, True, True, True),
        (0.4, 22, 0.3, False, False, True),
        (0.2, 33, 0.3, False, False, False),  # other, however small the skip probability
        (0.7, 11, 0.9, False, False, False),  # skip, however large the threshold
        (0.4, 22, 1.0, True, True, True),
        (0.4, 22, 0.0, False, False, True),
    ],
)
def test_a_text_is_written_before_nothing_but_the_threshold(skip, argmax, threshold, kept, written, written_by_all):
    assert Selection(threshold).keeps(score(skip, argmax)) is kept
    assert Selection(threshold).writes(score(skip, argmax)) is written
    assert Selection(threshold, write_all=True).keeps(score(skip, argmax)) is kept
    assert Selection(threshold, write_all=True).writes(score(skip, argmax)) is written_by_all


def test_a_skip_probability_of_exactly_the_threshold_is_kept():
    even = DecisionScore.from_log_probabilities("a", -1.0, -1.0, 22, LABELS)
    assert even.skip_probability == 0.5
    assert Selection(0.5).keeps(even)
    assert not Selection(math.nextafter(0.5, 0)).keeps(even)


@pytest.mark.parametrize("threshold", [-0.1, 1.1, math.nan, math.inf])
def test_a_threshold_that_is_no_probability_is_refused(threshold):
    with pytest.raises(GenerationError, match="from 0 to 1"):
        Selection(threshold)


@pytest.mark.parametrize(
    ("whole", "status", "text"),
    [
        ('{"decision": "write", "text": "김치와 두부"}', "ok", "김치와 두부"),
        (' {"decision": "write", "text": "a"} \n', "ok", "a"),
        ('{"decision": "write", "text": ""}', "ok", ""),
        ('{"decision": "write", "text": "a"}\n{"decision"', "trailing", "a"),
        ('{"decision": "write", "text": "a', "broken", None),
        ('{"decision": "write"', "broken", None),
        ('{"text": "a", "text": "b"}', "broken", None),
        ("", "broken", None),
        ('["text"]', "broken", None),
        ("[" * 100_000, "broken", None),
        ('{"decision": "write"}', "missing", None),
        ('{"text": 5}', "missing", None),
        ('{"text": null}', "missing", None),
        ('{"text": "\\ud83d"}', "missing", None),  # half a surrogate pair is no character
        ('{"text": "\\ud83d\\ude00"}', "ok", "😀"),
    ],
)
def test_the_text_of_an_answer(whole, status, text):
    answer = read_answer(whole)
    assert (answer.status, answer.text) == (status, text)
    assert answer.raw == (None if status == "ok" else whole)


def test_the_text_key_can_be_another():
    assert read_answer('{"empfehlung": "a"}', "empfehlung").text == "a"


def test_a_row_has_the_documented_keys_and_cannot_be_shadowed_by_fields():
    prompt = Prompt("a", (2, 3, 4), {"text": "mine", "id": "mine", "카테고리": [1, {"x": None}]})
    answer = read_answer('{"text": "그럼"}')
    row = result_row(prompt, score(0.25, 22), True, Completion("a", (5, 6), "...", "stop"), answer, gated=True)
    assert tuple(row) == KEYS
    line = encode_row(row)
    assert line.endswith(b"}\n") and "그럼".encode() in line
    read = json.loads(line)
    assert read["fields"] == prompt.fields
    assert (read["text"], read["text_status"], read["raw"]) == ("그럼", "ok", None)
    assert (read["prompt_tokens"], read["text_tokens"], read["finish_reason"]) == (3, 2, "stop")
    assert read["skip_probability"] == score(0.25, 22).skip_probability  # to the last bit
    assert read["label_mass"] == pytest.approx(0.9)


def test_a_row_without_a_text():
    row = result_row(Prompt("a", (2, 3)), score(0.9, 11), False, None, None, gated=False)
    assert [row[key] for key in ("text", "text_status", "raw", "finish_reason", "text_tokens")] == [None, None, None, None, 0]
    assert row["gated"] is False


def test_a_tally_counts_every_kind_once():
    broken, fine = read_answer("{"), read_answer('{"text": "a"}')
    completion = Completion("a", (5, 6, 7), "", "length")
    prompt = Prompt("a", (2, 3))
    tally = Tally()
    for row in (
        result_row(prompt, score(0.1, 22), True, completion, fine, True),
        result_row(prompt, score(0.1, 22), True, completion, broken, True),
        result_row(prompt, score(0.45, 22), False, None, None, True),
        result_row(prompt, score(0.9, 11), False, None, None, True),
        result_row(prompt, score(0.1, 33), False, None, None, True),
    ):
        tally.add(row)
    assert tally.to_json() == {
        "rows": 5,
        "skip": 1,
        "write": 3,
        "other": 1,
        "kept": 2,
        "above_threshold": 1,
        "written": 2,
        "text_status": {"ok": 1, "trailing": 0, "broken": 1, "missing": 0},
        "finish_reason": {"stop": 0, "length": 2},
        "prompt_tokens": 10,
        "text_tokens": 6,
        "mean_label_mass": pytest.approx(0.9),
    }


@pytest.mark.parametrize(("accepted", "size", "count"), [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2), (8, 4, 2)])
def test_chunks_cover_every_prompt(accepted, size, count):
    assert chunk_count(accepted, size) == count


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_every_chunk_belongs_to_exactly_one_shard(count):
    shards = [Shard(index, count) for index in range(1, count + 1)]
    assert all(sum(shard.takes(chunk) for shard in shards) == 1 for chunk in range(30))


def test_a_shard_is_read_as_it_is_shown():
    assert Shard.parse("2/4") == Shard(2, 4)
    assert str(Shard(2, 4)) == "2/4"
    for wrong in ("0/4", "5/4", "2", "2/", "a/b", "-1/2", "1/0", "1/4/2"):
        with pytest.raises(GenerationError, match="expected i/n"):
            Shard.parse(wrong)
