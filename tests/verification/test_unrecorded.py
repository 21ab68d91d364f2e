"""A checkpoint without a merge manifest: what stands beside its weights, against base and adapter.

Oracle: Transformers' own tokenizers, each test states in what they differ; PEFT's merge_and_unload and Transformers'
save_pretrained for what other tools leave.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes.functional
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from lora_merge.engines.model_files import load_tokenizer
from lora_merge.merging.folders import ModelFolder
from tests.verification.test_merged_files import detail
from tests.verification.test_verify import certificate, outcomes, verify
from verification.checks import Check, Outcome
from verification.errors import VerificationError
from verification.gate import check_certificate
from verification.sources import Sources
from verification.unrecorded import unrecorded_findings

SAME = (
    "there is no merge manifest; compared with base and adapter, the checkpoint has the same tokenizer, chat template, "
    "configuration and ids that end a text"
)
OTHER = "there is no merge manifest; compared with base and adapter, the checkpoint has another "


def merge_with_peft(base: Path, adapter: Path, out: Path) -> None:
    """Into the base as bitsandbytes dequantizes it; then the base's tokenizer, as scripts do it."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            codes, state = bitsandbytes.functional.quantize_4bit(module.weight.data, quant_type="nf4", compress_statistics=True)
            module.weight.data = bitsandbytes.functional.dequantize_4bit(codes, state)
    model.config.use_cache = False
    PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(out)
    AutoTokenizer.from_pretrained(base).save_pretrained(out)


@pytest.fixture(scope="session")
def by_peft(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read only."""
    out = tmp_path_factory.mktemp("peft") / "merged"
    merge_with_peft(trained / "base", trained / "adapter", out)
    return out


@pytest.fixture
def folders(trained: Path, by_peft: Path, tmp_path: Path) -> Path:
    """``merged`` by PEFT, ``base`` and ``adapter``; free to change."""
    shutil.copytree(by_peft, tmp_path / "merged")
    for name in ("base", "adapter"):
        shutil.copytree(trained / name, tmp_path / name, ignore=shutil.ignore_patterns("*.safetensors"))
    return tmp_path


def find(folders: Path, *roles: str) -> Check:
    base, adapter = (ModelFolder(folders / role, role) if role in roles else None for role in ("base", "adapter"))
    sources = Sources(None, base, adapter, None, "none", False, ())
    (check,) = unrecorded_findings(folders / "merged", load_tokenizer(folders / "merged"), sources)
    return check


def edit(path: Path, change: Callable[[Any], object]) -> None:
    value = json.loads(path.read_text()) if path.exists() else {}
    change(value)
    path.write_text(json.dumps(value))


def swap_ids(state: Any) -> None:
    vocabulary = state["model"]["vocab"]
    vocabulary["X"], vocabulary["Z"] = vocabulary["Z"], vocabulary["X"]


def lower_case(state: Any) -> None:
    state["normalizer"] = {"type": "Lowercase"}


def add_no_bos(state: Any) -> None:
    state["post_processor"] = None


@pytest.mark.parametrize("reference", [True, False])
def test_a_right_merge_by_peft_passes(place: Path, trained: Path, by_peft: Path, reference: bool) -> None:
    shutil.rmtree(place / "merged")
    shutil.copytree(by_peft, place / "merged")
    named = ["--base", trained / "base", "--adapter", trained / "adapter"]
    verdict = verify(place, *named, "--num-prompts", 300, reference=reference, exit_code=0)
    assert verdict["outcome"] == "PASSED", verdict["reasons"]
    assert detail(verdict, "merged-files") == SAME
    assert check_certificate(place / "merged", certificate(place)).outcome is Outcome.PASSED


def test_a_merge_of_ours_that_lost_its_manifest_passes(folders: Path, trained: Path) -> None:
    shutil.rmtree(folders / "merged")
    shutil.copytree(trained / "merged", folders / "merged", ignore=shutil.ignore_patterns("merge_manifest.json"))
    assert find(folders, "base", "adapter") == Check("merged-files", Outcome.PASSED, SAME)


def test_a_checkpoint_with_its_manifest_is_left_to_that(place: Path) -> None:
    verdict = verify(place, "--no-control", "--no-audit", exit_code=0)
    assert "as lora-merge wrote them" in detail(verdict, "merged-files")


def test_other_ids_for_letters_that_no_prompt_has_are_a_warning(place: Path, trained: Path) -> None:
    (place / "merged" / "merge_manifest.json").unlink()
    edit(place / "merged" / "tokenizer.json", swap_ids)
    named = ["--base", trained / "base", "--adapter", trained / "adapter"]
    verdict = verify(place, *named, "--no-control", exit_code=0)
    assert (outcomes(verdict)["token-ids"], outcomes(verdict)["merged-files"]) == ("PASSED", "WARNED")
    assert detail(verdict, "merged-files") == f"{OTHER}vocabulary: take theirs unless that is meant"
    with pytest.raises(VerificationError, match=r"merged-files.*--accept-warnings"):
        check_certificate(place / "merged", certificate(place))


@pytest.mark.parametrize(
    ("file", "change", "found"),
    [
        ("tokenizer.json", lower_case, "way of splitting text"),
        ("tokenizer.json", add_no_bos, "way of splitting text and special tokens"),
        ("tokenizer_config.json", lambda config: config.update(eos_token="<bos>"), "special tokens and set"),
        ("generation_config.json", lambda config: config.update(eos_token_id=[1, 5]), "set of ids that end a text (1, 5 in"),
        ("config.json", lambda config: config.update(rms_norm_eps=0.1), "rms_norm_eps in config.json"),
        ("config.json", lambda config: config.update(max_position_embeddings=9), "max_position_embeddings in config.json"),
    ],
)  # fmt: skip
def test_what_differs_is_a_warning_by_name(folders: Path, file: str, change: Callable[[Any], None], found: str) -> None:
    edit(folders / "merged" / file, change)
    check = find(folders, "base", "adapter")
    assert check.outcome is Outcome.WARNED and check.detail.startswith(f"{OTHER}{found}"), check.detail


@pytest.mark.parametrize("content", ["{{ bos_token }}{{ messages[0]['content'] }}", ""])
def test_another_chat_template_is_a_warning(folders: Path, content: str) -> None:
    (folders / "merged" / "chat_template.jinja").write_text(content)
    assert find(folders, "base", "adapter").detail == f"{OTHER}chat template: take theirs unless that is meant"


def test_the_adapters_own_template_is_the_one_to_have(folders: Path) -> None:
    """On the base's tokenizer, as the merge would put it there."""
    for path in (folders / "adapter").glob("tokenizer*"):
        path.unlink()
    (folders / "adapter" / "chat_template.jinja").write_text("another: {{ messages }}")
    assert find(folders, "base", "adapter").detail == f"{OTHER}chat template: take theirs unless that is meant"
    shutil.copy(folders / "adapter" / "chat_template.jinja", folders / "merged")
    assert find(folders, "base", "adapter").detail == SAME


def test_what_changes_no_prompt_and_no_text_does_not_count(folders: Path) -> None:
    """Padding, as many training runs set it, other words for the same, and what other tools write down."""
    folder = folders / "merged"
    tokenizer = AutoTokenizer.from_pretrained(folder, pad_token="<eos>", padding_side="left", model_max_length=99)
    tokenizer("a", padding="max_length", truncation=True, max_length=8)  # the state is saved in tokenizer.json
    tokenizer.save_pretrained(folder)
    assert "Left" in (folder / "tokenizer.json").read_text()
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    edit(folder / "tokenizer_config.json", lambda config: config.update(chat_template=template))
    edit(
        folder / "config.json",
        lambda config: config.update(attention_dropout=0.1, transformers_version="4.57.0", dtype="float16"),
    )
    GenerationConfig(eos_token_id=[1], max_length=20, temperature=0.7, do_sample=True).save_pretrained(folder)
    assert find(folders, "base", "adapter").detail == SAME


@pytest.mark.parametrize(
    ("roles", "absent"), [((), "no base and no adapter"), (("base",), "no adapter"), (("adapter",), "no base")]
)
def test_what_cannot_be_compared_is_a_warning(folders: Path, roles: tuple[str, ...], absent: str) -> None:
    assert find(folders, *roles) == Check(
        "merged-files",
        Outcome.WARNED,
        f"there is no merge manifest, and {absent} on this machine: configuration and tokenizer were not compared with theirs",
    )


def test_a_tokenizer_that_does_not_load_cannot_be_compared(folders: Path) -> None:
    (folders / "adapter" / "tokenizer.json").write_text("{")
    check = find(folders, "base", "adapter")
    assert (
        check.outcome is Outcome.WARNED and "could not be compared with those of base and adapter: no tokenizer" in check.detail
    )
    for role in ("adapter", "base"):
        for path in [*(folders / role).glob("tokenizer*"), *(folders / role).glob("chat*")]:
            path.unlink()
    assert find(folders, "base", "adapter").detail.endswith("base and adapter: neither of them has a tokenizer")
