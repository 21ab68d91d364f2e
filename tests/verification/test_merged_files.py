"""The files of a checkpoint against its merge manifest, and what a run that cannot measure leaves alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lora_merge.merging.digests import root_digest
from tests.verification.test_verify import certificate, outcomes, run, verify
from verification.checks import Outcome
from verification.merged_files import folder_files, manifest_findings


def detail(verdict: dict[str, Any], name: str) -> str:
    (found,) = (check["detail"] for check in verdict["checks"] if check["name"] == name)
    return str(found)


def reshard(folder: Path) -> None:
    """Save the weights again as Transformers does, in small files."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    (folder / "model.safetensors").unlink()
    side_files = {path: path.read_bytes() for path in folder.iterdir()}
    model.save_pretrained(folder, max_shard_size="100KB")
    for path, content in side_files.items():
        path.write_bytes(content)


def resave(folder: Path, dtype: torch.dtype) -> None:
    """Save the weights again in one file, in another order, with other metadata, in ``dtype``."""
    tensors = load_file(folder / "model.safetensors")
    anew = {name: tensors[name].to(dtype) for name in sorted(tensors, reverse=True)}
    save_file(anew, folder / "model.safetensors", metadata={"format": "pt", "saved": "again"})


@pytest.mark.parametrize("how", ["in small files", "in another order", "in float32"])
def test_weights_that_were_only_stored_anew_pass(place: Path, how: str) -> None:
    """Other bytes, the same values: Transformers' own save_pretrained, or the safetensors library's."""
    before = load_file(place / "merged" / "model.safetensors")
    if how == "in small files":
        reshard(place / "merged")
        assert len(list((place / "merged").glob("model-*.safetensors"))) > 2
    else:
        resave(place / "merged", torch.bfloat16 if how == "in another order" else torch.float32)
    files = sorted((place / "merged").glob("*.safetensors"))
    after = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert {name: torch.equal(after[name].float(), tensor.float()) for name, tensor in before.items()} == dict.fromkeys(
        after, True
    )
    verdict = verify(place, "--no-control", exit_code=0)
    assert (outcomes(verdict)["merged-files"], outcomes(verdict)["weights"]) == ("PASSED", "PASSED")
    assert detail(verdict, "merged-files") == (
        "model.safetensors is not the file that lora-merge wrote, but every weight is as planned, bit by bit: the weights were "
        "stored anew, in other files, another order or type, or with other metadata"
    )
    assert ("rounded to bfloat16 before" in detail(verdict, "weights")) == (how == "in float32")
    assert certificate(place).exists()


def test_weights_stored_anew_that_nobody_audited_fail(place: Path) -> None:
    resave(place / "merged", torch.bfloat16)
    assert outcomes(verify(place, "--no-control", "--no-audit", exit_code=1))["merged-files"] == "FAILED"
    shown = run("--merged", place / "merged", "--prompts", place / "prompts.jsonl", "--reference", place / "reference.jsonl",
                "--engine", "hf", "--no-control", "--no-audit", "--quiet", exit_code=1)  # fmt: skip
    assert shown.stdout.startswith("FAILED: the merged checkpoint is not as lora-merge wrote it (merged-files)")


def test_weights_stored_anew_beside_another_file_that_changed_are_a_warning(place: Path) -> None:
    resave(place / "merged", torch.bfloat16)
    config = place / "merged" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "use_cache": True}))
    verdict = verify(place, "--no-control", exit_code=0)
    found = {check["outcome"]: check["detail"] for check in verdict["checks"] if check["name"] == "merged-files"}
    assert found.keys() == {"PASSED", "WARNED"} and "stored anew" in found["PASSED"] and "config.json is not" in found["WARNED"]


def test_a_flipped_bit_within_rounding_fails_and_is_not_said_to_be_another_merge(place: Path) -> None:
    """The lowest bit of an adapted weight: the audit finds it as planned up to rounding, the manifest another file."""
    tensors = load_file(place / "merged" / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"].view(torch.int16)[0, 0] ^= 1
    save_file(tensors, place / "merged" / "model.safetensors", metadata={"format": "pt"})
    verdict = verify(place, "--no-control", exit_code=1)
    assert (outcomes(verdict)["merged-files"], outcomes(verdict)["weights"]) == ("FAILED", "PASSED")
    assert "20 of them bit by bit" in detail(verdict, "weights")
    shown = run("--merged", place / "merged", "--prompts", place / "prompts.jsonl", "--reference", place / "reference.jsonl",
                "--engine", "hf", "--no-control", "--quiet", exit_code=1)  # fmt: skip
    assert shown.stdout.startswith("FAILED: the merged checkpoint is not as lora-merge wrote it (merged-files)")


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


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["chat_template.jinja"], "chat_template.jinja is not of the merge"),
        (["generation_config.json", "special_tokens_map.json"], "generation_config.json and special_tokens_map.json are"),
        (
            ["processor_config.json", "pytorch_model.bin", "sub/vocab.txt"],
            "processor_config.json, pytorch_model.bin and sub/vocab",
        ),
        ([f"{letter}.py" for letter in "abcdefg"], "a.py, b.py, c.py, d.py, e.py and 2 more are not of the merge"),
    ],
)
def test_a_file_that_was_added_is_a_warning_by_name(trained: Path, tmp_path: Path, names: list[str], found: str) -> None:
    """Oracle: the names that Transformers reads. Of the merge's own files none is touched."""
    folder = shutil.copytree(trained / "merged", tmp_path / "merged")
    manifest = json.loads((folder / "merge_manifest.json").read_text())
    for name in names:  # as if the merge had written none of that name
        manifest["output"]["files"].pop(name, None)
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    manifest["output"]["root"] = root_digest(manifest["output"]["files"])
    (folder / "merge_manifest.json").write_text(json.dumps(manifest))
    (check,) = manifest_findings(folder, folder_files(folder), bit_by_bit=True)
    assert check.outcome is Outcome.WARNED and check.detail.startswith(found), check.detail


def test_an_added_template_is_not_certified_as_passed(place: Path) -> None:
    """It would take the place of the one in tokenizer_config.json."""
    (place / "merged" / "special_tokens_map.json").write_text('{"bos_token": "<bos>", "eos_token": "<eos>"}')
    verdict = verify(place, "--no-control", exit_code=0)
    assert (verdict["outcome"], outcomes(verdict)["merged-files"]) == ("WARNED", "WARNED")
    assert detail(verdict, "merged-files") == (
        "special_tokens_map.json is not of the merge; engines and tokenizers could read that; take out what is not meant"
    )


def test_what_comes_when_a_merge_is_moved_is_no_addition(place: Path) -> None:
    """Oracle: what git, the hub and file managers leave behind."""
    folder = place / "merged"
    left = (
        ".gitattributes",
        ".cache/huggingface/download/config.json.metadata",
        ".git/config",
        "LICENSE",
        ".DS_Store",
        "README.md",
    )
    for name in left:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("left behind")
    assert [check.outcome for check in manifest_findings(folder, folder_files(folder))] == [Outcome.PASSED]


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
