"""Checkpoints that are broken, or say something else than they hold: one clear line about the checkpoint, and no traceback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_merge.engines.errors import EngineError
from lora_merge.engines.model_files import load_config, load_tokenizer
from lora_merge.merging.errors import MergeError
from lora_merge.merging.manifest import read_manifest
from tests.tiny import save_tiny_base
from tests.verification.test_verify import outcomes, verify
from verification.audit_cli import main as audit
from verification.checks import Outcome
from verification.prepare import tied_head_findings


def edit(path: Path, change: Callable[[Any], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


@pytest.mark.parametrize("head", ["another", "the same", "none"])
@pytest.mark.parametrize("stated", [True, False, None])
def test_a_class_that_ties_by_default_ties(tmp_path: Path, head: str, stated: bool | None) -> None:
    """Gemma 3's, whose original configurations do not say so. Oracle: what Transformers makes of the configuration."""
    folder = save_tiny_base(tmp_path / "gemma", "gemma3")
    edit(folder / "config.json", lambda config: config.pop("tie_word_embeddings", None))
    if stated is not None:
        edit(folder / "config.json", lambda config: config.update(tie_word_embeddings=stated))
    tied = load_config(folder).tie_word_embeddings
    assert tied is (stated is not False)
    if head != "none":
        tensors = load_file(folder / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * (1 if head == "the same" else 0.5)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    found = list(tied_head_findings(folder))
    wanted = {"another": [Outcome.INCONCLUSIVE], "the same": [Outcome.PASSED], "none": []}[head] if tied else []
    assert [check.outcome for check in found] == wanted
    assert all(check.detail.startswith("the class in config.json ties") is (stated is None) for check in found)


def test_a_quantization_that_a_merge_script_left_behind_is_named(place: Path) -> None:
    left = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    edit(place / "merged" / "config.json", lambda config: config.update(quantization_config=left))
    verdict = verify(place, exit_code=3)
    assert outcomes(verdict)["quantization-config"] == "INCONCLUSIVE"
    (reason,) = [reason for reason in verdict["reasons"] if reason.startswith("quantization-config")]
    assert reason.endswith("the files hold no weights that it quantized; take quantization_config out of config.json")


@pytest.mark.parametrize(
    "change",
    [
        lambda config: config.update(max_position_embeddings="256"),
        lambda config: config.update(text_config=5),
        lambda config: config.update(model_type="no such type"),
    ],
)
def test_a_configuration_that_its_class_refuses_is_one_line(place: Path, change: Callable[[Any], None]) -> None:
    edit(place / "merged" / "config.json", change)
    verdict = verify(place, "--no-audit", "--no-control", exit_code=3)
    assert "\n" not in verdict["reasons"][0] and "config" in verdict["reasons"][0]


@pytest.mark.parametrize("content", ["[]", "{", '"text"'])
def test_a_configuration_that_is_none_is_one_line(place: Path, content: str) -> None:
    (place / "merged" / "config.json").write_text(content)
    (reason,) = verify(place, "--no-audit", exit_code=3)["reasons"]
    assert "config.json: the configuration of a merged checkpoint" in reason and "\n" not in reason
    with pytest.raises(EngineError, match=r"merged: its config\.json is none that transformers can load: ."):
        load_config(place / "merged")


def test_a_tokenizer_of_another_shape_is_one_line(place: Path) -> None:
    (place / "merged" / "tokenizer_config.json").write_text("[]")
    with pytest.raises(EngineError, match=r"^no tokenizer loads from .*merged: ."):
        load_tokenizer(place / "merged")


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("weights", ["x"], r"weights \['x'\]; expected a list of finite numbers"),
        ("weights", {"a": 1}, "weights .*; expected a list"),
        ("weights", [10**400], "weights .*; expected a list of finite"),
        ("more_adapters", 5, "more_adapters 5; expected a list"),
        ("more_adapters", [5], "more_adapters: expected source"),
        ("environment", ["x"], r"environment \['x'\]; expected an object"),
        ("dtype", 7, "dtype 7; expected text"),
        ("base_is_residual", "no", "base_is_residual 'no'; expected true or false"),
        ("expert_packing", 7, "expert_packing 7; expected one of"),
        ("recipe", [], r"merge_manifest\.json: quantization recipe: found a JSON list, expected an object"),
        ("output", None, "output: files must map names"),
        ("output", {"files": {"config.json": 5}, "root": "x"}, "output: files must map names to hexadecimal SHA-256"),
        ("base", {"source": 5, "commit": None, "path": None, "files": {}, "root": ""}, "base: source, commit and path must be"),
    ],
)
def test_a_manifest_of_another_shape_is_one_line(place: Path, name: str, value: Any, found: str) -> None:
    edit(place / "merged" / "merge_manifest.json", lambda manifest: manifest.update({name: value}))
    with pytest.raises(MergeError, match=found):
        read_manifest(place / "merged")


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("model.safetensors", None, "and no model.safetensors.index.json; expected a merged checkpoint in safetensors"),
        ("config.json", "[]", "config.json: the configuration of a merged checkpoint is a JSON list, expected an object"),
        (
            "model.safetensors",
            "version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 5\n",
            "model.safetensors: is a git-lfs pointer and not the weights; fetch them with: git lfs pull",
        ),
    ],
)
def test_the_audit_says_what_is_wrong_with_the_merged_checkpoint(place: Path, name: str, content: str | None, found: str) -> None:
    if content is None:
        (place / "merged" / name).unlink()
    else:
        (place / "merged" / name).write_text(content)
    result = click.testing.CliRunner().invoke(audit, ["--merged", str(place / "merged"), "--quiet"], catch_exceptions=False)
    assert result.exit_code == 3 and found in result.stderr and "Traceback" not in result.stderr, result.stderr


def test_weights_really_quantized_are_no_leftover(trained: Path, tmp_path: Path) -> None:
    """The configuration is right about them; what they are is for the audit."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from verification.prepare import _file_findings

    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = AutoModelForCausalLM.from_pretrained(
        trained / "merged", quantization_config=settings, dtype=torch.bfloat16, device_map={"": "cpu"}
    )
    model.save_pretrained(tmp_path / "again")
    assert "quantization_config" in json.loads((tmp_path / "again" / "config.json").read_text())
    assert list(_file_findings(tmp_path / "again")) == []
