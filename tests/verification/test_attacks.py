"""A release manager in a hurry tries to get a wrong merge certified; no shortcut may lead to PASSED.

Each test is one shortcut that once worked, or one that is near at hand, on the tiny QLoRA run of this folder.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import bitsandbytes.functional
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lora_merge.merging.api import MergeOptions, merge
from tests.engines.builders import make_tokenizer
from tests.verification.test_verify import certificate, outcomes, verify
from tests.verification.tiny_qlora import make_prompt_rows, write_rows
from verification.checks import Outcome
from verification.errors import VerificationError
from verification.gate import check_certificate
from verification.reference import Reference, read_reference, record_reference
from verification.reference_file import write_reference
from verification.sources import SourceOptions, find_sources


def changed(place: Path, **changes: Any) -> Reference:
    """The recorded reference with other facts in its header, written in its place."""
    other = dataclasses.replace(read_reference(place / "reference.jsonl"), **changes)
    write_reference(other, place / "reference.jsonl")
    return other


def test_a_reference_recorded_from_the_original_weights_does_not_vouch_for_a_naive_merge(place: Path, trained: Path) -> None:
    """Adapter and prompts are right, and the naive merge agrees with it: only the trainer's record tells."""
    base = AutoModelForCausalLM.from_pretrained(trained / "base", dtype=torch.bfloat16)
    model = PeftModel.from_pretrained(base, trained / "adapter")
    record_reference(model, make_tokenizer(), place / "prompts.jsonl", place / "reference.jsonl", adapter_dir=trained / "adapter")
    verdict = verify(place, merged="naive", exit_code=3)
    assert outcomes(verdict)["recipe-agreement"] == "INCONCLUSIVE"
    assert "quantization_recipe.json says that the adapter was trained through NF4" in verdict["reasons"][0]
    assert "recorded without 4-bit layers" in verdict["reasons"][0]
    assert not certificate(place, "naive").exists()


def test_a_merge_through_4_bit_against_an_unquantized_reference_is_a_warning(place: Path, trained: Path) -> None:
    shutil.copytree(trained / "adapter", place / "bare")
    (place / "bare" / "quantization_recipe.json").unlink()
    merged = merge(trained / "base", place / "bare", place / "second", MergeOptions(from_4bit=True)).out
    found = find_sources(merged, SourceOptions(), changed(place, recipe=None)).findings
    agreement = [check for check in found if check.name == "recipe-agreement"]
    assert [check.outcome for check in agreement] == [Outcome.WARNED]


def test_an_adapter_that_is_switched_off_is_not_recorded(place: Path, trained: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(trained / "base", dtype=torch.bfloat16)
    model = PeftModel.from_pretrained(base, trained / "adapter")
    out = place / "off.jsonl"
    arguments = (model, make_tokenizer(), place / "prompts.jsonl", out)
    with model.disable_adapter(), pytest.raises(VerificationError, match="switched off"):
        record_reference(*arguments, adapter_dir=trained / "adapter")
    assert not out.exists()
    record_reference(*arguments, adapter_dir=trained / "adapter")


def test_without_the_weight_audit_a_pass_is_a_warning(place: Path) -> None:
    verdict = verify(place, "--no-audit", exit_code=0)
    assert (verdict["outcome"], outcomes(verdict)["weights"]) == ("WARNED", "WARNED")
    with pytest.raises(VerificationError, match=r"WARNED \(weights\).*--accept-warnings"):
        check_certificate(place / "merged", certificate(place))


def test_an_adapter_that_cannot_be_found_leaves_the_weights_unaudited(place: Path, trained: Path) -> None:
    shutil.copytree(trained / "adapter", place / "moved")
    merge(trained / "base", place / "moved", place / "second", MergeOptions(from_4bit=True))
    shutil.rmtree(place / "moved")
    verdict = verify(place, merged="second", exit_code=0)
    assert verdict["outcome"] == "WARNED"
    assert [reason for reason in verdict["reasons"] if "no adapter on this machine" in reason]


def test_a_weaker_adapter_is_not_vouched_for_by_the_manifest_that_says_so(place: Path, trained: Path) -> None:
    """The audit replays the merge with the manifest's weights, so by itself it finds everything as planned."""
    merge(trained / "base", trained / "adapter", place / "weak", MergeOptions(from_4bit=True, weights=(0.97,)))
    verdict = verify(place, merged="weak", exit_code=0)
    assert (verdict["outcome"], outcomes(verdict)["weights"]) == ("WARNED", "PASSED")
    assert [reason for reason in verdict["reasons"] if "0.97 times as strong" in reason]
    with pytest.raises(VerificationError, match="adapter-identity"):
        check_certificate(place / "weak", certificate(place, "weak"))


def test_prompts_cannot_be_picked_by_way_of_a_sample(place: Path) -> None:
    """A file of picked prompts and one more, sampled so that the one more is left out."""
    write_rows(place / "prompts.jsonl", make_prompt_rows()[:301])
    verdict = verify(place, "--num-prompts", 300, exit_code=3)
    assert "has 99 prompts that the prompt file lacks" in verdict["reasons"][0]


def test_edited_weights_without_a_manifest_are_found(place: Path, trained: Path) -> None:
    """One row of the embedding, of a word that no prompt has: no score moves."""
    path = place / "merged" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][-1] += 1
    save_file(tensors, path, metadata={"format": "pt"})
    (place / "merged" / "merge_manifest.json").unlink()
    named = ["--base", trained / "base", "--adapter", trained / "adapter"]
    verdict = verify(place, *named, exit_code=1)
    assert {name for name, outcome in outcomes(verdict).items() if outcome == "FAILED"} == {"weights"}
    assert "some values are others" in verdict["reasons"][0]


def test_a_manifest_that_was_rewritten_after_an_edit_is_found_out(place: Path) -> None:
    from lora_merge.merging.digests import file_digest
    from lora_merge.merging.manifest import read_manifest

    path = place / "merged" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.up_proj.weight"].view(-1)[::300] = 0
    save_file(tensors, path, metadata={"format": "pt"})
    manifest = read_manifest(place / "merged")
    output = {**manifest.output, path.name: file_digest(path)}
    (place / "merged" / "merge_manifest.json").write_bytes(dataclasses.replace(manifest, output=output).to_bytes())
    verdict = verify(place, exit_code=1)
    assert (outcomes(verdict)["merged-files"], outcomes(verdict)["weights"]) == ("PASSED", "FAILED")


def test_a_reference_that_says_the_same_of_every_prompt_is_inconclusive(place: Path) -> None:
    reference = read_reference(place / "reference.jsonl")
    first = reference.scores[0]
    same = tuple(dataclasses.replace(first, id=score.id) for score in reference.scores)
    write_reference(dataclasses.replace(reference, scores=same), place / "reference.jsonl")
    verdict = verify(place, exit_code=3)
    assert outcomes(verdict)["reference-spread"] == "INCONCLUSIVE"
    assert "says the same of every prompt" in verdict["reasons"][0]


def test_a_stray_weight_file_beside_the_right_one_is_found(place: Path) -> None:
    """Transformers does not read it; vLLM reads every one, and the later wins."""
    save_file({"model.norm.weight": torch.ones(64)}, place / "merged" / "stray.safetensors", metadata={"format": "pt"})
    verdict = verify(place, exit_code=1)
    assert outcomes(verdict)["weights"] == "FAILED"
    assert "stray.safetensors" in verdict["reasons"][0]


@pytest.mark.parametrize("audited", [True, False])
def test_weights_that_only_transformers_is_told_to_load_are_inconclusive(place: Path, audited: bool) -> None:
    """It loads the file that config.json names; the audit and vLLM read the one of the usual name."""
    merged = place / "merged"
    (merged / "sub").mkdir()
    save_file(load_file(merged / "model.safetensors"), merged / "sub" / "other.safetensors", metadata={"format": "pt"})
    config = json.loads((merged / "config.json").read_text())
    (merged / "config.json").write_text(json.dumps({**config, "transformers_weights": "sub/other.safetensors"}))
    verdict = verify(place, *([] if audited else ["--no-audit"]), exit_code=3)
    assert any("config.json says transformers_weights 'sub/other.safetensors'" in reason for reason in verdict["reasons"])
    if not audited:
        assert outcomes(verdict)["weights-file"] == "INCONCLUSIVE"


def test_an_adapter_in_the_checkpoints_own_folder_is_inconclusive(place: Path, trained: Path) -> None:
    """A base without its adapter, and the adapter beside it: in Transformers it decides as the reference does."""
    for path in (trained / "adapter").glob("adapter_*"):
        shutil.copy(path, place / "merged")
    verdict = verify(place, exit_code=3)
    assert outcomes(verdict)["adapter-files"] == "INCONCLUSIVE"
    assert "move the adapter to a folder of its own" in verdict["reasons"][0]


def test_the_certificate_binds_the_reference_by_its_bytes(place: Path) -> None:
    import hashlib

    verify(place, exit_code=0)
    statement = json.loads(certificate(place).read_text())
    bound = next(entry for entry in statement["predicate"]["configuration"] if entry["name"] == "reference")
    assert bound["annotations"]["sha256"] == hashlib.sha256((place / "reference.jsonl").read_bytes()).hexdigest()


def test_a_reference_of_another_adapter_is_inconclusive_without_a_manifest_too(place: Path, trained: Path) -> None:
    shutil.copytree(trained / "adapter", place / "other")
    tensors = load_file(place / "other" / "adapter_model.safetensors")
    save_file({name: tensor * 0.99 for name, tensor in tensors.items()}, place / "other" / "adapter_model.safetensors")
    merge(trained / "base", place / "other", place / "second", MergeOptions(from_4bit=True))
    (place / "second" / "merge_manifest.json").unlink()
    named = ["--base", trained / "base", "--adapter", place / "other"]
    verdict = verify(place, *named, merged="second", exit_code=3)
    assert outcomes(verdict)["adapter-identity"] == "INCONCLUSIVE"
    blamed = verify(place, *named[:2], "--adapter", trained / "adapter", merged="second", exit_code=1)
    assert outcomes(blamed)["weights"] == "FAILED"


def test_a_base_that_went_through_the_round_trip_twice_is_found(place: Path, trained: Path) -> None:
    """Quantized by another block size in the merge than in training, with a manifest that claims the right recipe."""
    path = place / "merged" / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.gate_proj.weight"
    codes, state = bitsandbytes.functional.quantize_4bit(tensors[name], quant_type="nf4", blocksize=128)
    tensors[name] = bitsandbytes.functional.dequantize_4bit(codes, state)
    save_file(tensors, path, metadata={"format": "pt"})
    (place / "merged" / "merge_manifest.json").unlink()
    verdict = verify(place, "--base", trained / "base", "--adapter", trained / "adapter", exit_code=1)
    assert outcomes(verdict)["weights"] == "FAILED"
