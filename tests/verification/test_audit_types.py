"""The weight audit of checkpoints that were saved in another type than they were merged in.

Oracles: torch's own conversions of right and wrong merges, and PEFT's own merge.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from lora_merge.merging.api import MergeOptions, merge
from tests.tiny import save_tiny_adapter, save_tiny_base
from tests.verification.test_audit import FROM_4BIT, RECIPE, _scaled_adapter, audit, change_tensors, histories
from verification.checks import Outcome
from verification.histories import EDITED, EXPECTED, NAIVE, OMITTED, ROUNDED_TWICE


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_base(tmp_path_factory.mktemp("types") / "base")


@pytest.fixture(scope="module")
def adapter(base: Path) -> Path:
    return save_tiny_adapter(base.parent / "adapter", base)


@pytest.fixture(scope="module")
def right(base: Path, adapter: Path) -> Path:
    return merge(base, adapter, base.parent / "right", FROM_4BIT).out


@pytest.fixture(scope="module")
def omitted(base: Path, adapter: Path) -> Path:
    silent = _scaled_adapter(adapter, base.parent / "silent", 0.0)
    return merge(base, silent, base.parent / "omitted", FROM_4BIT).out


def with_dtype(source: Path, target: Path, dtype: torch.dtype, change: Callable[[str, torch.Tensor], None] | None = None) -> Path:
    """A copy of a checkpoint saved in another type, as ``model.half()`` or ``model.float()`` and ``save_pretrained`` do."""

    def convert(name: str, tensor: torch.Tensor) -> torch.Tensor:
        converted = tensor.to(dtype)
        if change is not None:
            change(name, converted)
        return converted

    return change_tensors(source, target, convert)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_right_merge_that_was_saved_in_another_type_is_right(
    base: Path, adapter: Path, right: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    """A float32 copy loses nothing; a float16 copy loses what the smallest weights have below 2^-24."""

    def tiny(name: str, tensor: torch.Tensor) -> torch.Tensor:
        scaled = tensor.clone()
        if name.endswith("down_proj.weight"):
            scaled.view(-1)[::64] *= 2.0**-14
        return scaled

    small = change_tensors(base, tmp_path / "base", tiny)
    merged = merge(small, adapter, tmp_path / "right", FROM_4BIT).out
    result = audit(with_dtype(merged, tmp_path / "copy", dtype), small, adapter)
    assert result.audit.check().outcome is Outcome.PASSED
    assert histories(result.audit) == {"as planned, rounded to bfloat16 before"}
    assert histories(result.audit, adapted=False) == {EXPECTED}
    assert {(tensor.distance, tensor.differing) for tensor in result.audit.tensors} == {(0.0, 0.0)}
    assert result.audit.check().detail == (
        "all 21 tensors are as planned (from-4bit), 21 of them bit by bit, 14 rounded to bfloat16 before"
    )
    assert result.audit.bit_by_bit


def test_a_float16_merge_that_was_saved_in_float32_is_right(base: Path, adapter: Path, tmp_path: Path) -> None:
    merged = merge(base, adapter, tmp_path / "half", MergeOptions(from_4bit=True, recipe=RECIPE, dtype="float16")).out
    result = audit(with_dtype(merged, tmp_path / "copy", torch.float32), base, adapter).audit
    assert histories(result) == {"as planned, rounded to float16 before"} and result.bit_by_bit


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_another_tools_merge_that_was_saved_in_another_type_is_right_up_to_rounding(
    base: Path, adapter: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    """Oracle: PEFT's own merge in bfloat16, saved by Transformers."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    PeftModel.from_pretrained(model, adapter).merge_and_unload().to(dtype).save_pretrained(tmp_path / "peft")
    result = audit(tmp_path / "peft", base, adapter, "original-weights").audit
    assert result.check().outcome is Outcome.PASSED
    assert histories(result) <= {"as planned, rounded to bfloat16 before", ROUNDED_TWICE} and not result.bit_by_bit
    assert histories(audit(tmp_path / "peft", base, adapter).audit) == {NAIVE}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_copy_in_another_type_hides_no_mistake(
    base: Path, adapter: Path, right: Path, omitted: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    name = "model.layers.0.self_attn.v_proj.weight"
    assert histories(audit(with_dtype(omitted, tmp_path / "omitted", dtype), base, adapter).audit) == {OMITTED}

    def last_bit(other: str, tensor: torch.Tensor) -> None:
        if other == name:
            tensor.view(torch.int32 if dtype is torch.float32 else torch.int16)[-1, -1] ^= 1

    def bfloat16_value(other: str, tensor: torch.Tensor) -> None:
        if other == name:
            tensor[-1, -1] = 3.0

    def too_large(other: str, tensor: torch.Tensor) -> None:
        if other == name:
            tensor[-1, -1] = torch.inf

    for index, (change, history) in enumerate(
        [(last_bit, EDITED), (bfloat16_value, EDITED), (too_large, "NaN or infinite values")]
    ):
        result = audit(with_dtype(right, tmp_path / str(index), dtype, change), base, adapter).audit
        assert [(tensor.name, tensor.history) for tensor in result.tensors if not tensor.as_planned] == [(name, history)]
        assert not result.bit_by_bit


def test_a_zero_of_the_other_sign_is_as_planned_but_not_bit_by_bit(base: Path, adapter: Path, tmp_path: Path) -> None:
    """An adapted weight that is zero: nothing computes with its sign, and still it is not the byte that was planned."""

    def silent(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(tensor) if "q_proj" in name else tensor

    hollow = change_tensors(base, tmp_path / "base", silent)
    lost = _scaled_adapter(adapter, tmp_path / "adapter", 0.0)
    merged = merge(hollow, lost, tmp_path / "merged", MergeOptions()).out
    assert audit(merged, hollow, lost, "original-weights").audit.bit_by_bit

    def negative(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return -tensor if name == "model.layers.0.self_attn.q_proj.weight" else tensor

    result = audit(change_tensors(merged, tmp_path / "signs", negative), hollow, lost, "original-weights").audit
    assert result.check().outcome is Outcome.PASSED and not result.bit_by_bit
    assert "all 21 tensors are as planned (original-weights), 20 of them bit by bit" in result.check().detail
