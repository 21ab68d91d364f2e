"""The measurement file: what is written is read back exactly, anything else is refused, and judging it again changes nothing."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lora_merge.engines.prompts import Prompt
from tests.verification.builders import ENGINE, SETTLED, ordinary, scores
from verification.api import judge_again
from verification.audit import AUDIT_CHECK
from verification.checks import Check, Outcome
from verification.cli import main
from verification.drift_file import read_measurements, write_measurements
from verification.drift_format import SETTLED_BEFORE
from verification.errors import Inconclusive, VerificationError
from verification.gate import RECIPE_CHECK
from verification.limits import Limits
from verification.measurement import Measurements, match_token_ids, pair
from verification.verdict import judge


@pytest.fixture
def path(tmp_path: Path) -> Path:
    target = tmp_path / "drift.jsonl"
    write_measurements(ordinary(30), target)
    return target


def test_what_was_written_is_read_back(path: Path) -> None:
    assert read_measurements(path) == ordinary(30)


def _split() -> Measurements:
    """With both functions in float32 arithmetic, which lie close to the others."""
    source = ordinary(30)
    rows = [
        dataclasses.replace(
            row,
            scores={**row.scores, "reference_float32": row.scores["reference"], "merged_float32": row.scores["merged"]},
        )
        for row in source.rows
    ]
    arms = {**source.conditions.arms, "reference_float32": ENGINE, "merged_float32": ENGINE}
    return Measurements(dataclasses.replace(source.conditions, arms=arms), tuple(rows))


def _recorded() -> Measurements:
    """A recorded reference of a model without 4-bit layers, on a sample of the prompts, some of them with fields."""
    source = ordinary(30)
    about = source.conditions
    reference = {**about.arms["reference"], "dtype": None, "base": None, "adapter": None, "recorded": True, "sha256": "ab" * 32}
    fields = [{"": "가게", "shop": "", "count": 3, "fresh": True, "size": None}, *({} for _ in range(29))]
    return Measurements(
        dataclasses.replace(
            about,
            arms={**about.arms, "reference": reference},
            prompts={**about.prompts, "total": 400, "seed": 7},
            recipe=None,
            recipe_origin="reference",
        ),
        tuple(dataclasses.replace(row, fields=field) for row, field in zip(source.rows, fields, strict=True)),
    )


@pytest.mark.parametrize("measured", [ordinary(30), _split(), _recorded()], ids=["live", "split", "recorded"])
def test_an_untouched_file_judges_as_the_measurements_did(measured: Measurements, tmp_path: Path) -> None:
    write_measurements(measured, tmp_path / "drift.jsonl")
    assert read_measurements(tmp_path / "drift.jsonl") == measured
    assert judge_again(tmp_path / "drift.jsonl", Limits(0.2)) == judge(measured, Limits(0.2))


def test_every_run_checks_what_a_file_must_have_checked() -> None:
    assert {RECIPE_CHECK, AUDIT_CHECK} < set(SETTLED_BEFORE)


def test_a_finding_comes_back(tmp_path: Path) -> None:
    findings = (Check("recipe-provenance", Outcome.WARNED, "assumed", 0.1, None, 0.2), *SETTLED[1:])
    source = ordinary(30)
    source = dataclasses.replace(source, conditions=dataclasses.replace(source.conditions, findings=findings))
    write_measurements(source, tmp_path / "drift.jsonl")
    assert read_measurements(tmp_path / "drift.jsonl").conditions.findings == findings


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


Lines = list[dict[str, Any]]
Change = Callable[[Lines], object]


def _set(*keys: Any, to: Any) -> Change:
    def change(lines: Lines) -> None:
        part: Any = lines
        for key in keys[:-1]:
            part = part[key]
        part[keys[-1]] = to

    return change


def _drop(*keys: Any) -> Change:
    def change(lines: Lines) -> None:
        part: Any = lines
        for key in keys[:-1]:
            part = part[key]
        del part[keys[-1]]

    return change


def _without_finding(name: str) -> Change:
    return lambda lines: lines[0].update(findings=[finding for finding in lines[0]["findings"] if finding["name"] != name])


HEADER: list[tuple[Change, str]] = [
    (_set(0, "version", to=1), "version 1; expected"),
    (_set(0, "version", to=2.0), "version 2.0; expected"),
    (_set(0, "format", to="other"), "format 'other'"),
    (_set(0, "extra", to=1), "'extra' is not known"),
    (_drop(0, "findings"), "'findings' is missing"),
    (_set(0, "prefill", to=5), "prefill is 5, expected a text"),
    (_set(0, "recipe_origin", to="somebody"), 'recipe_origin is "somebody", expected one of reference, adapter'),
    (_set(0, "recipe_origin", to=["adapter"]), "recipe_origin is"),
    (_set(0, "labels", "skip", "token_id", to="11"), "labels: skip: token_id is"),
    (_set(0, "labels", "skip", "token_id", to=-1), "labels: skip: token_id is -1, expected a whole number from 0 to 4294967295"),
    (_set(0, "labels", "skip", "token_id", to=22), "are both token 22"),
    (_set(0, "labels", "skip", "text", to="write"), "labels: skip and write are both 'write'"),
    (_set(0, "labels", "skip", "text", to=""), "labels: skip: text is"),
    (_set(0, "labels", "other", to={"text": "x", "token_id": 1}), "'other' is not known"),
    (_set(0, "prompts", "source", to=["x"]), "prompts: source is"),
    (_set(0, "prompts", "total", to=0), "prompts: total is 0, expected a whole number from 1"),
    (_set(0, "prompts", "total", to=29), "scored is 30 of a total of 29"),
    (_set(0, "prompts", "total", to=31), "seed is null, but 30 of 31 prompts were scored"),
    (_set(0, "prompts", "seed", to=0), "seed is 0, but all 30 prompts were scored"),
    (_set(0, "prompts", "seed", to=-1), "prompts: seed is -1, expected a whole number from 0"),
    (_set(0, "prompts", "scored", to=31), "holds 30 prompts"),
    (_set(0, "prompts", "scored", to=True), "prompts: scored is true"),
    (_set(0, "prompts", "token_ids_sha256", to="cd"), "prompts: token_ids_sha256 is"),
    (_set(0, "prompts", "token_ids_sha256", to="cd" * 32), "do not add up to the digest in its header"),
    (_drop(0, "arms", "merged"), "arms: 'merged' is missing"),
    (_drop(0, "arms", "reference"), "arms: 'reference' is missing"),
    (_drop(0, "arms", "base"), "arm base is scored but not in its header"),
    (_set(0, "arms", "other_arm", to={}), "'other_arm' is not known"),
    (_set(0, "arms", "merged", to={}), "arms: merged: 'device' is missing"),
    (_set(0, "arms", "merged", "kind", to=["x"]), "arms: merged: kind is"),
    (_set(0, "arms", "merged", "dtype", to={"a": 1}), "arms: merged: dtype is"),
    (_set(0, "arms", "merged", "device", to=None), "arms: merged: device is null, expected a text"),
    (_set(0, "arms", "merged", "versions", to={"torch": 2}), "arms: merged: versions: torch is 2, expected a text"),
    (_set(0, "arms", "merged", "settings", to=None), "arms: merged: settings is null, expected an object"),
    (_set(0, "arms", "reference", "recorded", to="no"), "arms: reference: recorded is"),
    (_set(0, "arms", "reference", "sha256", to="no"), "arms: reference: sha256 is"),
    (_set(0, "recipe", to={"x": 1}), "recipe: quantization recipe: unknown setting 'x'"),
    (_set(0, "recipe", to=[1]), "recipe: quantization recipe: found a JSON list"),
    (_set(0, "recipe", "quant_type", to=["nf4"]), "recipe: quantization recipe: quant_type is"),
    (_set(0, "merged", "files", to={}), "merged: files is {}, expected an object that is not empty"),
    (_set(0, "merged", "files", "a", to=1), "merged: files: a is 1, expected a hexadecimal SHA-256"),
    (_set(0, "merged", "files", "a", to="AB" * 32), "merged: files: a is"),
    (_set(0, "merged", "files", "", to="ab" * 32), "merged: files: '' is no file's name"),
    (_set(0, "merged", "files", ".", to="ab" * 32), "merged: files: '.' is no file's name"),
    (_set(0, "merged", "root_with_manifest", to=5), "merged: root_with_manifest is 5, expected a hexadecimal SHA-256"),
    (_set(0, "merged", "root_with_manifest", to="ab" * 32), "merged: root_with_manifest is not that of its files"),
    (_set(0, "noise_floors", to={}), "noise_floors is {}, expected a list"),
    (_set(0, "noise_floors", 0, "source", to=5), "noise_floors 1: source is 5"),
    (_set(0, "noise_floors", 0, "mean_abs_delta", to=-0.1), "noise_floors 1: mean_abs_delta is -0.1, expected a number from 0"),
    (_set(0, "noise_floors", 0, "mean_abs_delta", to=0.02), "noise_floors 1: mean_abs_delta is 0.02, above max_abs_delta 0.01"),
    (_set(0, "noise_floors", 0, "max_abs_delta", to=10**400), "noise_floors 1: max_abs_delta is"),
    (_set(0, "noise_floors", 0, "prompts", to=0), "noise_floors 1: prompts is 0, expected a whole number from 1"),
    (_set(0, "noise_floors", 0, "flips", to=401), "noise_floors 1: 401 of 400 prompts flip"),
    (_set(0, "noise_floors", 0, "flips", to=-1), "noise_floors 1: flips is -1, expected a whole number from 0"),
    (_drop(0, "noise_floors", 0, "flips"), "noise_floors 1: 'flips' is missing"),
    (_set(0, "findings", to=[]), "lack 'recipe-provenance', which every run checks before it scores"),
    (_without_finding("recipe-provenance"), "lack 'recipe-provenance'"),
    (_without_finding("token-ids"), "lack 'token-ids'"),
    (_without_finding("weights"), "lack 'weights'"),
    (_set(0, "findings", to=[{"name": "x"}]), "findings 1: check .*: expected an object with exactly"),
    (_set(0, "findings", 0, "outcome", to="GREAT"), "findings 1: check 'recipe-provenance': outcome is 'GREAT'"),
    (_set(0, "findings", 0, "outcome", to=["PASSED"]), "findings 1: check 'recipe-provenance': outcome is"),
    (_set(0, "findings", 0, "value", to=-(10**400)), "findings 1: check 'recipe-provenance': value is"),
    (_set(0, "findings", 0, "detail", to="x\udcff"), "half of a surrogate pair"),
]
ROWS: list[tuple[Change, str]] = [
    (_set(3, "id", to=""), 'line 4: id is "", expected a text that is not empty'),
    (_set(3, "id", to="p0"), "29 different ids"),
    (_set(3, "token_ids_sha256", to="x"), "line 4: token_ids_sha256 is"),
    (_set(3, "token_ids_sha256", to="ab" * 32), "do not add up to the digest in its header"),
    (_set(3, "fields", to=[]), r"line 4: fields is \[\], expected an object"),
    (_set(3, "fields", "shop", to=[1]), "line 4: fields: shop is"),
    (_set(3, "fields", "shop", to=0.5), "line 4: fields: shop is 0.5, expected true, false, a whole number"),
    (_set(3, "fields", "shop", to="x" * 201), "line 4: fields: shop is"),
    (_set(3, "extra", to=1), "line 4: 'extra' is not known"),
    (_set(3, "scores", "merged", "log_p_skip", to=0.5), "line 4: scores: merged: log_p_skip is 0.5, expected a number up to 0"),
    (_set(3, "scores", "merged", "log_p_skip", to="-1"), "line 4: scores: merged: log_p_skip"),
    (_set(3, "scores", "merged", "log_p_skip", to=True), "line 4: scores: merged: log_p_skip"),
    (_set(3, "scores", "merged", "log_p_skip", to=-(10**400)), "line 4: scores: merged: log_p_skip"),
    (
        lambda lines: lines[3]["scores"]["merged"].update(log_p_skip=-0.1, log_p_write=-0.1),
        "line 4: scores: merged: both labels together have the probability 1.8",
    ),
    (_set(3, "scores", "merged", "argmax", to=1.5), "line 4: scores: merged: argmax"),
    (_set(3, "scores", "merged", "argmax", to=-1), "line 4: scores: merged: argmax is -1, expected a whole number from 0 to"),
    (_set(3, "scores", "merged", "argmax", to=2**32), "line 4: scores: merged: argmax"),
    (_set(3, "scores", "other_arm", to={}), "'other_arm' is not known"),
    (_drop(3, "scores", "reference"), "'reference' is missing"),
    (lambda lines: [line["scores"].pop("base") for line in lines[1:]], "arm base is in its header but nowhere scored"),
    (lambda lines: lines.pop(), "holds 29 prompts"),
    (lambda lines: lines.clear(), "is empty"),
]
SPLIT: list[tuple[Change, str]] = [
    (_drop(3, "scores", "merged_float32"), "reference_float32 and merged_float32 are not of the same prompts, 'p2' first"),
    (_drop(3, "scores", "reference_float32"), "reference_float32 and merged_float32 are not of the same prompts, 'p2' first"),
    (
        lambda lines: [line["scores"].pop("merged_float32") for line in lines[1:]] and lines[0]["arms"].pop("merged_float32"),
        "reference_float32 and merged_float32 are not of the same prompts, 'p0' first",
    ),
]


def _edited(path: Path, change: Change) -> Path:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize(("change", "message"), [*HEADER, *ROWS])
def test_anything_else_is_refused(path: Path, change: Change, message: str) -> None:
    with pytest.raises(VerificationError, match=message) as refused:
        read_measurements(_edited(path, change))
    assert str(refused.value).startswith(str(path)) and "\n" not in str(refused.value)


@pytest.mark.parametrize(("change", "message"), SPLIT)
def test_both_functions_in_float32_are_of_the_same_prompts(tmp_path: Path, change: Change, message: str) -> None:
    write_measurements(_split(), tmp_path / "drift.jsonl")
    with pytest.raises(VerificationError, match=message):
        read_measurements(_edited(tmp_path / "drift.jsonl", change))


@pytest.mark.parametrize(("change", "message"), [*HEADER, *ROWS])
def test_a_refused_file_is_inconclusive_and_the_report_stays(path: Path, change: Change, message: str) -> None:
    report = path.with_name("report")
    judge_again(path, Limits(), report)
    before = {file.name: file.read_bytes() for file in report.iterdir()}
    verdict = judge_again(_edited(path, change), Limits(), report)
    assert (verdict.exit_code, len(verdict.checks)) == (3, 1) and re.search(message, verdict.checks[0].detail)
    assert {file.name: file.read_bytes() for file in report.iterdir()} == before


def test_long_values_are_shown_by_their_beginning(path: Path) -> None:
    with pytest.raises(VerificationError) as refused:
        read_measurements(_edited(path, _set(0, "prompts", "source", to=["x" * 5000])))
    assert len(str(refused.value)) < len(str(path)) + 200


def test_the_command_ends_in_one_line_and_exit_code_3(path: Path) -> None:
    done = CliRunner().invoke(main, ["judge", str(_edited(path, _drop(0, "arms", "merged"))), "--format", "json"])
    assert (done.exit_code, done.stderr) == (3, "")
    assert json.loads(done.stdout)["reasons"] == [
        f"measurement: {path} line 1: arms: 'merged' is missing; was it written by another version?"
    ]


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
