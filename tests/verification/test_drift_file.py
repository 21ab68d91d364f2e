"""The measurement file: what is written is read back exactly, anything else is refused, and judging it again changes nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lora_merge.engines.prompts import Prompt
from tests.verification.builders import ordinary, scores
from verification.checks import Check, Outcome
from verification.drift_file import read_measurements, write_measurements
from verification.errors import Inconclusive, VerificationError
from verification.limits import Limits
from verification.measurement import match_token_ids, pair
from verification.verdict import judge


@pytest.fixture
def path(tmp_path: Path) -> Path:
    target = tmp_path / "drift.jsonl"
    write_measurements(ordinary(30), target)
    return target


def test_what_was_written_is_read_back(path: Path) -> None:
    assert read_measurements(path) == ordinary(30)


def test_a_finding_comes_back(tmp_path: Path) -> None:
    import dataclasses

    finding = Check("recipe-provenance", Outcome.WARNED, "assumed", 0.1, None, 0.2)
    source = ordinary(30)
    source = dataclasses.replace(source, conditions=dataclasses.replace(source.conditions, findings=(finding,)))
    write_measurements(source, tmp_path / "drift.jsonl")
    assert read_measurements(tmp_path / "drift.jsonl").conditions.findings == (finding,)


def test_judging_the_file_is_judging_the_measurements(path: Path) -> None:
    for limits in (Limits(0.02), Limits(0.2, max_bias=0.1, max_flip_rate=0.05)):
        assert judge(read_measurements(path), limits) == judge(ordinary(30), limits)


def test_the_same_measurements_give_the_same_bytes(path: Path, tmp_path: Path) -> None:
    digest = write_measurements(read_measurements(path), tmp_path / "again.jsonl")
    assert (tmp_path / "again.jsonl").read_bytes() == path.read_bytes()
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()


def test_one_header_then_one_line_a_prompt(path: Path) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert (lines[0]["format"], lines[0]["version"]) == ("lora-merge/drift", 2)
    assert [line["id"] for line in lines[1:]] == [f"p{index}" for index in range(30)]


def _set(*keys: Any, to: Any) -> Callable[[list[dict[str, Any]]], None]:
    def change(lines: list[dict[str, Any]]) -> None:
        part: Any = lines
        for key in keys[:-1]:
            part = part[key]
        part[keys[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set(0, "version", to=1), "version 1; expected"),
        (_set(0, "format", to="other"), "format 'other'"),
        (_set(0, "extra", to=1), "'extra' is not known"),
        (lambda lines: lines[0].pop("findings"), "'findings' is missing"),
        (_set(0, "recipe_origin", to="somebody"), "another type"),
        (_set(0, "prompts", "scored", to=31), "holds 30 prompts"),
        (_set(0, "labels", "skip", "token_id", to="11"), "label 'skip'"),
        (_set(0, "noise_floors", 0, "mean_abs_delta", to=-0.1), "noise floor"),
        (_set(0, "noise_floors", 0, "prompts", to=0), "noise floor"),
        (_set(0, "findings", to=[{"name": "x"}]), "expected an object with exactly"),
        (_set(3, "scores", "merged", "log_p_skip", to=0.5), "line 4: merged"),
        (_set(3, "scores", "merged", "log_p_skip", to="-1"), "line 4: merged"),
        (_set(3, "scores", "merged", "log_p_skip", to=True), "line 4: merged"),
        (_set(3, "scores", "merged", "argmax", to=1.5), "line 4: merged"),
        (_set(3, "scores", "other_arm", to={}), "'other_arm' is not known"),
        (lambda lines: lines[3]["scores"].pop("reference"), "'reference' is missing"),
        (_set(3, "id", to="p0"), "29 different ids"),
        (lambda lines: lines.pop(), "holds 29 prompts"),
        (lambda lines: lines.clear(), "is empty"),
    ],
)
def test_anything_else_is_refused(path: Path, change: Callable[[list[dict[str, Any]]], None], message: str) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(VerificationError, match=message):
        read_measurements(path)


@pytest.mark.parametrize(
    ("old", "new"), [('"argmax":22', '"argmax":22,"argmax":11'), ('"log_p_skip":-', '"log_p_skip":NaN,"x":-'), ("}\n", "\n")]
)
def test_broken_json_is_refused(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(VerificationError, match="is not valid JSON"):
        read_measurements(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match=r"none\.jsonl: cannot be read"):
        read_measurements(tmp_path / "none.jsonl")


def test_pairing_is_by_id_whatever_the_order() -> None:
    prompts = [Prompt(f"p{index}", (1, index)) for index in range(3)]
    reference, merged = scores([0.1, 0.2, 0.3]), scores([0.4, 0.5, 0.6])
    rows = pair(prompts, {"reference": reference[::-1], "merged": merged, "base": merged[1:2]})
    assert [row.scores["reference"].skip_probability for row in rows] == pytest.approx([0.1, 0.2, 0.3])
    assert ["base" in row.scores for row in rows] == [False, True, False]


def test_prompts_that_do_not_pair_are_inconclusive() -> None:
    prompts = [Prompt(f"p{index}", (1, index)) for index in range(3)]
    three = scores([0.1, 0.2, 0.3])
    with pytest.raises(Inconclusive, match="arm merged lacks 1 of 3 prompts, 'p2' first"):
        pair(prompts, {"reference": three, "merged": three[:2]})
    with pytest.raises(Inconclusive, match="scored prompt 'p2', which is none of the 2 prompts"):
        pair(prompts[:2], {"reference": three, "merged": three})
    with pytest.raises(Inconclusive, match="scored prompt 'p0' twice"):
        pair(prompts, {"reference": [*three, three[0]], "merged": three})
    with pytest.raises(Inconclusive, match="1 prompt ids occur twice"):
        pair([*prompts, prompts[0]], {"reference": three, "merged": three})


def test_long_fields_stay_out_of_the_file() -> None:
    prompts = [Prompt("p0", (1,), {"shop": "a", "text": "x" * 201, "count": 3, "share": 0.5, "tags": ["a"], "expected": "skip"})]
    row = pair(prompts, {"reference": scores([0.1]), "merged": scores([0.1])})[0]
    assert row.fields == {"shop": "a", "count": 3, "expected": "skip"}


def test_a_recorded_reference_must_be_of_these_very_prompts() -> None:
    from lora_merge.engines.prompts import token_ids_sha256

    prompts = [Prompt(f"p{index}", (1, index)) for index in range(3)]
    recorded = {prompt.id: token_ids_sha256(prompt) for prompt in prompts}
    match_token_ids(prompts, recorded)
    with pytest.raises(Inconclusive, match="has 1 prompts that the prompt file lacks, 'p2' first"):
        match_token_ids(prompts[:2], recorded)
    with pytest.raises(Inconclusive, match="has no score for 1 of 4 prompts, 'p9' first"):
        match_token_ids([*prompts, Prompt("p9", (1,))], recorded)
    with pytest.raises(Inconclusive, match="token ids of 1 of 3 prompts differ"):
        match_token_ids([*prompts[:2], Prompt("p2", (1, 1, 2))], recorded)
