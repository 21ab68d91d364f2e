"""Whole blocks of experts that were trained (``modules_to_save``): fused in the class, one by one in most files. Oracle: the live
model."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file, save_file

from lora_merge.merging.api import merge
from lora_merge.merging.errors import MergeError
from tests.merging.kinds import Kind, load, model_class, save_base, train
from tests.merging.live import assert_merge_is_live
from tests.merging.oracle import load_folder

SAVED = Kind({"target_modules": ["q_proj"], "modules_to_save": ["mlp"]})


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("original", [True, False])
def test_trained_experts(architecture, original, tmp_path):
    """``original``: the names of the hub, each expert by itself but for GPT-OSS; otherwise those of the class, fused."""
    base = save_base(tmp_path / "base", architecture, save_original_format=original)
    live = train(load(base, architecture), SAVED)
    live.save_pretrained(tmp_path / "adapter")
    out = assert_merge_is_live(base, tmp_path / "adapter", live, model_class(architecture), tmp_path / "out")
    assert load_folder(out).keys() == load_folder(base).keys()


def broken(tmp_path, change):
    base = save_base(tmp_path / "base", "mixtral")
    train(load(base, "mixtral"), SAVED).save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)
    return base, tmp_path / "adapter"


def test_trained_experts_that_are_missing_in_one_layer(tmp_path):
    lost = "layers.1.mlp.experts.down_proj"
    base, adapter = broken(tmp_path, lambda tensors: {key: tensor for key, tensor in tensors.items() if lost not in key})
    with pytest.raises(MergeError, match=rf"{lost}.*modules_to_save.*incomplete"):
        merge(base, adapter, tmp_path / "out")


@pytest.mark.parametrize("cut", [lambda tensor: tensor[:3], lambda tensor: tensor[:, :-2]])
def test_trained_experts_of_another_shape(cut, tmp_path):
    base, adapter = broken(
        tmp_path,
        lambda tensors: {key: cut(tensor).contiguous() if "gate_up" in key else tensor for key, tensor in tensors.items()},
    )
    with pytest.raises(MergeError, match=r"gate_up_proj.*has shape \[\d+, \d+"):
        merge(base, adapter, tmp_path / "out")
