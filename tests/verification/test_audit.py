"""The weight audit against checkpoints with one known mistake each.

Oracles: PEFT's own merges, bitsandbytes' own quantization, merges whose adapter was scaled beforehand, and deltalint (PyPI),
which knows plain LoRA on a 16-bit base.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes.functional
import click.testing
import pytest
import torch
from deltalint.check import check_merge
from deltalint.models import Verdict as DeltalintVerdict
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from lora_merge.merging.api import MergeOptions, merge
from tests.tiny import save_tiny_adapter, save_tiny_base
from verification.audit import WeightAudit
from verification.audit_api import AuditOptions, AuditResult, audit_merge
from verification.audit_cli import main
from verification.checks import Outcome
from verification.errors import Inconclusive
from verification.histories import (
    DOUBLED,
    EDITED,
    EXPECTED,
    NAIVE,
    OMITTED,
    QUANTIZED_AGAIN,
    ROUNDED_TWICE,
    UNEXPLAINED,
    UNTOUCHED,
)
from verification.sources import SourceOptions

RECIPE = {"quant_type": "nf4", "double_quant": True, "block_size": 64, "quant_dtype": "bfloat16"}
FROM_4BIT = MergeOptions(from_4bit=True, recipe=RECIPE)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_base(tmp_path_factory.mktemp("audit") / "base")


@pytest.fixture(scope="module")
def adapter(base: Path) -> Path:
    return save_tiny_adapter(base.parent / "adapter", base)


@pytest.fixture(scope="module")
def right(base: Path, adapter: Path) -> Path:
    return merge(base, adapter, base.parent / "right", FROM_4BIT).out


@pytest.fixture(scope="module")
def omitted(base: Path, adapter: Path) -> Path:
    """The merge of an adapter that changes nothing."""
    silent = _scaled_adapter(adapter, base.parent / "silent", 0.0)
    return merge(base, silent, base.parent / "omitted", FROM_4BIT).out


@pytest.fixture(scope="module")
def doubled(base: Path, adapter: Path) -> Path:
    loud = _scaled_adapter(adapter, base.parent / "loud", 2.0)
    return merge(base, loud, base.parent / "doubled", FROM_4BIT).out


def _scaled_adapter(adapter: Path, target: Path, factor: float) -> Path:
    shutil.copytree(adapter, target)
    tensors = load_file(target / "adapter_model.safetensors")
    save_file(
        {name: tensor * factor if "lora_B" in name else tensor for name, tensor in tensors.items()},
        target / "adapter_model.safetensors",
    )
    return target


def audit(merged: Path, base: Path, adapter: Path, method: Any = "auto", **recipe: Any) -> AuditResult:
    sources = SourceOptions(str(base), str(adapter), recipe={**RECIPE, **recipe}, other_base_name=True)
    return audit_merge(merged, AuditOptions(sources, method))


def histories(audit: WeightAudit, adapted: bool = True) -> set[str]:
    """Of the tensors with an adapter, or of the others."""
    return {tensor.history for tensor in audit.tensors if ("_proj" in tensor.name) == adapted}


def change_tensors(source: Path, target: Path, change: Callable[[str, torch.Tensor], torch.Tensor | None]) -> Path:
    """A copy of a checkpoint, without its manifest, with changed tensors; None drops one."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("merge_manifest.json"))
    tensors = {name: change(name, tensor) for name, tensor in load_file(target / "model.safetensors").items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}, target / "model.safetensors")
    return target


def test_our_own_merge_is_exact(right: Path, base: Path, adapter: Path) -> None:
    result = audit(right, base, adapter).audit
    assert result.check().outcome is Outcome.PASSED
    assert {tensor.distance for tensor in result.tensors} == {0.0}
    assert f"all {len(result.tensors)} tensors are as planned (from-4bit), {len(result.tensors)} of them" in result.check().detail


def test_a_merge_into_the_original_weights_is_named(base: Path, adapter: Path, tmp_path: Path) -> None:
    naive = merge(base, adapter, tmp_path / "naive").out
    result = audit(naive, base, adapter).audit
    assert result.check().outcome is Outcome.FAILED
    assert histories(result) == {NAIVE}
    assert histories(result, adapted=False) == {EXPECTED}
    assert audit(naive, base, adapter, "original-weights").audit.check().outcome is Outcome.PASSED


def test_pefts_merge_into_the_original_weights_is_named_too(base: Path, adapter: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(tmp_path / "peft")
    result = audit(tmp_path / "peft", base, adapter).audit
    assert histories(result) == {NAIVE}
    as_naive = audit(tmp_path / "peft", base, adapter, "original-weights").audit
    assert as_naive.check().outcome is Outcome.PASSED
    assert histories(as_naive) <= {EXPECTED, ROUNDED_TWICE}


def test_an_update_that_was_rounded_before_the_sum_is_named(base: Path, adapter: Path, omitted: Path, tmp_path: Path) -> None:
    """What adding in bfloat16 does: the update is rounded, then the sum."""
    scaling, tensors = 6 / 4, load_file(adapter / "adapter_model.safetensors")

    def add(name: str, tensor: torch.Tensor) -> torch.Tensor:
        halves = [tensors.get(f"base_model.model.{name.removesuffix('.weight')}.lora_{half}.weight") for half in "AB"]
        return tensor if halves[0] is None else tensor + (scaling * (halves[1].double() @ halves[0].double())).bfloat16()

    result = audit(change_tensors(omitted, tmp_path / "twice", add), base, adapter).audit
    assert histories(result) == {ROUNDED_TWICE}
    assert result.check().outcome is Outcome.PASSED


def test_pefts_merge_into_a_dequantized_base_is_right_up_to_rounding(base: Path, adapter: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            codes, state = bitsandbytes.functional.quantize_4bit(module.weight.data, quant_type="nf4", compress_statistics=True)
            module.weight.data = bitsandbytes.functional.dequantize_4bit(codes, state)
    PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(tmp_path / "peft")
    result = audit(tmp_path / "peft", base, adapter).audit
    assert result.check().outcome is Outcome.PASSED
    assert histories(result) <= {EXPECTED, ROUNDED_TWICE}
    assert 0 < max(tensor.distance for tensor in result.tensors) < 0.1


@pytest.mark.parametrize(("factor", "history"), [(1.02, EXPECTED), (1.4, EDITED)])
def test_a_block_scale_that_machines_disagree_on_is_no_edit_however_weak_the_adapter(
    base: Path, adapter: Path, tmp_path: Path, factor: float, history: str
) -> None:
    """One block in 128 has a scale that is a step off, as CPUs and CUDA have under double quantization."""
    weak = _scaled_adapter(adapter, tmp_path / "weak", 0.0005)
    merged = merge(base, weak, tmp_path / "merged", FROM_4BIT).out
    name = "model.layers.1.mlp.down_proj.weight"

    def other_scale(other: str, tensor: torch.Tensor) -> torch.Tensor:
        moved = tensor.clone()
        if other == name:
            moved.view(-1)[:64] *= factor
        return moved

    result = audit(change_tensors(merged, tmp_path / "moved", other_scale), base, weak).audit
    found = next(tensor for tensor in result.tensors if tensor.name == name)
    assert (found.history, found.distance > 0) == (history, True)


def test_a_merge_back_into_4_bit_is_named(base: Path, adapter: Path, right: Path, tmp_path: Path) -> None:
    def quantize_again(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if "_proj" not in name:
            return tensor
        codes, state = bitsandbytes.functional.quantize_4bit(tensor, quant_type="nf4", compress_statistics=True)
        return bitsandbytes.functional.dequantize_4bit(codes, state)

    result = audit(change_tensors(right, tmp_path / "again", quantize_again), base, adapter).audit
    assert histories(result) == {QUANTIZED_AGAIN}


def test_a_lost_adapter_is_named_and_at_distance_1(base: Path, adapter: Path, omitted: Path) -> None:
    result = audit(omitted, base, adapter).audit
    assert histories(result) == {OMITTED}
    assert all(tensor.distance == pytest.approx(1, abs=0.01) for tensor in result.tensors if "_proj" in tensor.name)
    assert audit(base, base, adapter).audit.check().outcome is Outcome.FAILED


def test_the_bare_base_is_named(base: Path, adapter: Path) -> None:
    assert histories(audit(base, base, adapter).audit) == {UNTOUCHED}


@pytest.mark.parametrize("mistake", ["omitted", "doubled"])
def test_every_single_layer_is_found(
    base: Path, adapter: Path, right: Path, tmp_path: Path, mistake: str, request: pytest.FixtureRequest
) -> None:
    wrong = load_file(request.getfixturevalue(mistake) / "model.safetensors")
    adapted = sorted(name for name in wrong if "_proj" in name)
    assert len(adapted) == 14
    for index, name in enumerate(adapted):
        merged = change_tensors(
            right, tmp_path / str(index), lambda other, tensor, name=name: wrong[name] if other == name else tensor
        )
        result = audit(merged, base, adapter)
        assert result.outcome is Outcome.FAILED
        found = [tensor for tensor in result.audit.tensors if not tensor.as_planned]
        assert [(tensor.name, tensor.history) for tensor in found] == [(name, OMITTED if mistake == "omitted" else DOUBLED)]
        assert found[0].distance == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("factor", [0.5, 1.5, 1.1, -1.0])
def test_another_scale_is_named(base: Path, adapter: Path, tmp_path: Path, factor: float) -> None:
    other = _scaled_adapter(adapter, tmp_path / "other", factor)
    merged = merge(base, other, tmp_path / "merged", FROM_4BIT).out
    (merged / "merge_manifest.json").unlink()
    result = audit(merged, base, adapter).audit
    assert histories(result) == {f"another scale of the adapter: {factor:.3g} times"}
    assert all(tensor.distance == pytest.approx(abs(factor - 1), rel=0.05) for tensor in result.tensors if "_proj" in tensor.name)


@pytest.mark.parametrize("change", [{"quant_type": "fp4"}, {"double_quant": False}, {"quant_dtype": "float16"}])
def test_another_recipe_is_named(base: Path, adapter: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    merged = merge(base, adapter, tmp_path / "merged", MergeOptions(from_4bit=True, recipe={**RECIPE, **change})).out
    (merged / "merge_manifest.json").unlink()
    result = audit(merged, base, adapter)
    found = {history for history in histories(result.audit) if history.startswith("another recipe")}
    words = {"quant_type": "FP4, double", "double_quant": "NF4, single", "quant_dtype": "from float16"}
    assert len(found) == 1
    assert words[next(iter(change))] in found.pop()
    assert result.outcome is Outcome.FAILED
    assert audit(merged, base, adapter, **change).audit.check().outcome is Outcome.PASSED


def test_noise_is_explained_by_nothing(base: Path, adapter: Path, right: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    torch.manual_seed(0)
    merged = change_tensors(
        right, tmp_path / "noisy", lambda other, tensor: torch.randn_like(tensor) * 0.08 if other == name else tensor
    )
    found = [tensor for tensor in audit(merged, base, adapter).audit.tensors if not tensor.as_planned]
    assert [(tensor.name, tensor.history) for tensor in found] == [(name, UNEXPLAINED)]


def test_a_copied_tensor_that_changed_is_found(base: Path, adapter: Path, right: Path, tmp_path: Path) -> None:
    for index, name in enumerate(("model.norm.weight", "model.embed_tokens.weight", "lm_head.weight")):
        merged = change_tensors(
            right, tmp_path / str(index), lambda other, tensor, name=name: tensor * 2 if other == name else tensor
        )
        found = [tensor for tensor in audit(merged, base, adapter).audit.tensors if not tensor.as_planned]
        assert [tensor.name for tensor in found] == [name]


@pytest.mark.parametrize("method", ["from-4bit", "original-weights"])
def test_a_few_edited_values_are_found(base: Path, adapter: Path, right: Path, tmp_path: Path, method: str) -> None:
    """Wherever they lie, and however few: one row of an embedding, a few weights of a matrix, one weight."""
    source = right if method == "from-4bit" else merge(base, adapter, tmp_path / "naive").out

    def one_row(tensor: torch.Tensor) -> None:
        tensor[-1] = tensor[3]

    def few(tensor: torch.Tensor) -> None:
        tensor.view(-1)[::200] = 0

    def one(tensor: torch.Tensor) -> None:
        tensor[-1, -1] += 4 * tensor.abs().max()

    edits = [("model.embed_tokens.weight", one_row), ("model.layers.1.mlp.down_proj.weight", few)]
    edits += [("model.layers.0.self_attn.v_proj.weight", one), ("lm_head.weight", one)]
    for index, (name, edit) in enumerate(edits):

        def change(other: str, tensor: torch.Tensor, name: str = name, edit: Any = edit) -> torch.Tensor:
            edited = tensor.clone()
            if other == name:
                edit(edited)
            return edited

        result = audit(change_tensors(source, tmp_path / str(index), change), base, adapter, method)
        found = [tensor for tensor in result.audit.tensors if not tensor.as_planned]
        assert [(tensor.name, tensor.history) for tensor in found] == [(name, EDITED)], name
        assert 0 < found[0].differing < 0.01
        assert result.outcome is Outcome.FAILED


def test_broken_tensors_are_found(base: Path, adapter: Path, right: Path, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"

    def with_nan(other: str, tensor: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.arange(tensor.numel()).view(tensor.shape) == 5, torch.nan, tensor) if other == name else tensor

    changes: dict[str, Callable[[str, torch.Tensor], torch.Tensor | None]] = {
        "NaN or infinite values": with_nan,
        "of shape [32, 64], expected [64, 64]": lambda other, tensor: tensor[:32] if other == name else tensor,
    }
    for index, (history, change) in enumerate(changes.items()):
        result = audit(change_tensors(right, tmp_path / str(index), change), base, adapter)
        assert [tensor.history for tensor in result.audit.tensors if not tensor.as_planned] == [history]
        json.dumps(result.audit.to_json(), allow_nan=False)


def test_missing_and_unknown_tensors_are_found(base: Path, adapter: Path, right: Path, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    missing = audit(change_tensors(right, tmp_path / "a", lambda other, tensor: None if other == name else tensor), base, adapter)
    assert missing.audit.missing == (name,)
    assert "1 tensor or file is missing" in missing.audit.check().detail
    shutil.copytree(right, tmp_path / "b")
    save_file({**load_file(right / "model.safetensors"), "stray.weight": torch.ones(2)}, tmp_path / "b" / "model.safetensors")
    unknown = audit(tmp_path / "b", base, adapter)
    assert unknown.audit.unknown == ("stray.weight",)
    assert unknown.outcome is Outcome.FAILED


def test_names_of_another_transformers_version_are_found(base: Path, adapter: Path, right: Path, tmp_path: Path) -> None:
    shutil.copytree(right, tmp_path / "renamed")
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(right / "model.safetensors").items()
    }
    save_file(tensors, tmp_path / "renamed" / "model.safetensors")
    assert audit(tmp_path / "renamed", base, adapter).audit.check().outcome is Outcome.PASSED


def test_a_float32_checkpoint_is_held_to_float32(base: Path, adapter: Path, right: Path, tmp_path: Path) -> None:
    merged = merge(base, adapter, tmp_path / "float32", MergeOptions(from_4bit=True, recipe=RECIPE, dtype="float32")).out
    assert {tensor.distance for tensor in audit(merged, base, adapter).audit.tensors} == {0.0}


@pytest.mark.parametrize(
    "settings",
    [{"use_dora": True}, {"target_modules": ["q_proj", "embed_tokens"]}, {"use_rslora": True}, {"modules_to_save": ["lm_head"]}],
)
def test_other_kinds_of_adapters(base: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    adapter = save_tiny_adapter(tmp_path / "adapter", base, **settings)
    for index, options in enumerate((FROM_4BIT, MergeOptions())):
        merged = merge(base, adapter, tmp_path / str(index), options).out
        method = "from-4bit" if options.from_4bit else "original-weights"
        other = "original-weights" if options.from_4bit else "from-4bit"
        assert {tensor.distance for tensor in audit(merged, base, adapter, method).audit.tensors} == {0.0}
        wrong = audit(merged, base, adapter, other).audit
        assert wrong.check().outcome is Outcome.FAILED


def test_a_base_that_is_stored_quantized(base: Path, adapter: Path, tmp_path: Path) -> None:
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16
    )
    AutoModelForCausalLM.from_pretrained(base, quantization_config=config, dtype=torch.bfloat16).save_pretrained(
        tmp_path / "base"
    )
    merged = merge(tmp_path / "base", adapter, tmp_path / "merged", MergeOptions(from_4bit=True)).out
    result = audit_merge(merged, AuditOptions(SourceOptions(other_base_name=True)))
    assert {tensor.distance for tensor in result.audit.tensors} == {0.0}
    silent = merge(
        tmp_path / "base", _scaled_adapter(adapter, tmp_path / "silent", 0.0), tmp_path / "lost", MergeOptions(from_4bit=True)
    ).out
    (silent / "merge_manifest.json").unlink()
    lost = audit_merge(silent, AuditOptions(SourceOptions(str(tmp_path / "base"), str(adapter), other_base_name=True)))
    assert histories(lost.audit) == {OMITTED}


def test_several_adapters_are_taken_from_the_manifest(base: Path, adapter: Path, tmp_path: Path) -> None:
    second = save_tiny_adapter(tmp_path / "second", base, seed=9)
    options = MergeOptions(from_4bit=True, recipe=RECIPE, weights=(0.5, 2.0))
    merged = merge(base, [adapter, second], tmp_path / "merged", options).out
    result = audit_merge(merged)
    assert {tensor.distance for tensor in result.audit.tensors} == {0.0}
    assert result.outcome is Outcome.WARNED  # the recipe is known from the manifest alone


def test_without_a_record_and_a_manifest_the_method_has_to_be_said(
    base: Path, adapter: Path, right: Path, tmp_path: Path
) -> None:
    shutil.copytree(right, tmp_path / "merged", ignore=shutil.ignore_patterns("merge_manifest.json"))
    sources = SourceOptions(str(base), str(adapter))
    with pytest.raises(Inconclusive, match="nothing says whether the adapter was trained on a 4-bit base"):
        audit_merge(tmp_path / "merged", AuditOptions(sources))
    assert audit_merge(tmp_path / "merged", AuditOptions(sources, "from-4bit")).audit.check().outcome is Outcome.PASSED
    with pytest.raises(Inconclusive, match="give --base"):
        audit_merge(tmp_path / "merged")
    with pytest.raises(Inconclusive, match="no such folder"):
        audit_merge(tmp_path / "none")


@pytest.mark.parametrize("case", ["right", "omitted", "doubled", "scaled", "one layer lost", "one layer doubled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_agreement_with_deltalint_wherever_it_gives_a_verdict(
    adapter: Path, tmp_path: Path, dtype: torch.dtype, case: str
) -> None:
    """Plain LoRA into 16-bit or float32 weights, layer by layer."""
    base = save_tiny_base(tmp_path / "base", dtype=dtype)
    factors = {"omitted": 0.0, "doubled": 2.0, "scaled": 1.5, "one layer lost": 0.0, "one layer doubled": 2.0}
    merged = merge(base, adapter, tmp_path / "right").out
    if case != "right":
        wrong = merge(base, _scaled_adapter(adapter, tmp_path / "other", factors[case]), tmp_path / "wrong").out
        tensors = load_file(wrong / "model.safetensors")
        only = "model.layers.1.mlp.down_proj.weight" if case.startswith("one") else None
        merged = change_tensors(
            merged, tmp_path / "merged", lambda name, tensor: tensors[name] if only in (None, name) else tensor
        )
    ours = {tensor.name: tensor.as_planned for tensor in audit(merged, base, adapter, "original-weights").audit.tensors}
    theirs = check_merge(base, adapter, merged)
    judged = [layer for layer in theirs.layers if layer.verdict in (DeltalintVerdict.PASS, DeltalintVerdict.FAIL)]
    assert len(judged) == 14
    for layer in judged:
        assert ours[f"{layer.name}.weight"] == (layer.verdict is DeltalintVerdict.PASS), layer


def test_the_command_line(right: Path, base: Path, adapter: Path, omitted: Path) -> None:
    named = ["--base", str(base), "--adapter", str(adapter)]
    recipe = ["--quant-type", "nf4", "--double-quant", "--blocksize", "64", "--quant-dtype", "bfloat16"]
    runner = click.testing.CliRunner()
    passed = runner.invoke(main, ["--merged", str(right), *recipe, "--format", "json"], catch_exceptions=False)
    assert passed.exit_code == 0
    shown = json.loads(passed.stdout)
    assert (shown["outcome"], shown["method"], shown["missing"]) == ("WARNED", "from-4bit", [])
    assert len(shown["tensors"]) == 21
    failed = runner.invoke(main, ["--merged", str(omitted), *named, *recipe, "--quiet"], catch_exceptions=False)
    assert failed.exit_code == 3  # its manifest names another adapter
    assert "adapter-identity" in failed.stdout
    (omitted / "merge_manifest.json").rename(omitted / "manifest.kept")
    failed = runner.invoke(main, ["--merged", str(omitted), *named, *recipe, "--quiet"], catch_exceptions=False)
    (omitted / "manifest.kept").rename(omitted / "merge_manifest.json")
    assert failed.exit_code == 1
    assert failed.stdout.startswith("FAILED: 14 of 21 tensors are not as planned (14: adapter omitted)")
    assert runner.invoke(main, []).exit_code == 2
    assert runner.invoke(main, ["--merged", str(base / "none")]).exit_code == 3
