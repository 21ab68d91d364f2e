"""The files of a checkpoint against its merge manifest, and what a run that cannot measure leaves alone."""

from __future__ import annotations

import json
from pathlib import Path

from tests.verification.test_verify import certificate, outcomes, run, verify


def test_one_flipped_bit_is_refused_however_little_it_moves(place: Path) -> None:
    """The lowest bit of one weight: no drift that anybody could measure, and not the file that was merged."""
    weights = place / "merged" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-2] ^= 1
    weights.write_bytes(content)
    verdict = verify(place, "--no-control", exit_code=1)
    assert outcomes(verdict)["merged-files"] == "FAILED"
    assert outcomes(verdict)["mean-delta"] == "PASSED"
    assert any("model.safetensors is not the file that lora-merge wrote" in reason for reason in verdict["reasons"])
    # What is said first is about the files, since the decisions are the same.
    human = run("--merged", place / "merged", "--prompts", place / "prompts.jsonl", "--reference", place / "reference.jsonl",
                "--engine", "hf", "--no-control", "--quiet", exit_code=1)  # fmt: skip
    assert human.stdout.startswith("FAILED: the merged checkpoint is not what its base, adapter and recipe make")


def test_another_file_that_changed_is_a_warning(place: Path) -> None:
    config = place / "merged" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "use_cache": True}))
    verdict = verify(place, exit_code=0)
    assert (verdict["outcome"], outcomes(verdict)["merged-files"]) == ("WARNED", "WARNED")


def test_what_makes_a_measurement_say_nothing_is_said_before_anything_is_scored(place: Path) -> None:
    (place / "merged" / "tokenizer.json").write_bytes((place / "merged" / "tokenizer.json").read_bytes() + b" ")
    config = json.loads((place / "merged" / "config.json").read_text())
    (place / "merged" / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    verdict = verify(place, exit_code=3)
    assert outcomes(verdict)["tied-head"] == "INCONCLUSIVE" and verdict["numbers"] == {}
    assert not certificate(place).exists()


def test_a_mistyped_name_leaves_an_earlier_report_alone(place: Path) -> None:
    verify(place, exit_code=0)
    before = {path.name: path.read_bytes() for path in (place / "merged-report").iterdir()}
    missing = ["--merged", place / "merged", "--prompts", place / "promts.jsonl", "--engine", "hf"]
    assert "promts.jsonl: no such file" in run(*missing, exit_code=3).stdout
    wrong = ["--merged", place / "merged", "--prompts", place / "prompts.jsonl", "--reference", place / "referense.jsonl"]
    assert "referense.jsonl: no such file" in run(*wrong, exit_code=3).stdout
    assert {path.name: path.read_bytes() for path in (place / "merged-report").iterdir()} == before
