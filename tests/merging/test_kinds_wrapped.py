"""Names that wrappers leave in an adapter, and what PEFT stores beside the trained tensors. Oracle: the live model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_merge.merging.api import MergeOptions, merge
from lora_merge.merging.errors import MergeError
from tests.merging.kinds import Kind, answer, load, model_class, save_base, train
from tests.merging.live import assert_merge_is_live
from tests.merging.oracle import assert_same_bits, load_folder

QV = Kind({"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["norm"]})


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return save_base(tmp_path_factory.mktemp("wrapped") / "base", "llama")


def test_a_base_that_was_compiled_before_peft(base, tmp_path):
    """``torch.compile`` puts ``_orig_mod.`` right behind PEFT's prefix."""
    live = train(torch.compile(load(base, "llama"), backend="eager"), QV)
    live.save_pretrained(tmp_path / "adapter")
    assert all("base_model.model._orig_mod." in name for name in load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    assert_merge_is_live(base, tmp_path / "adapter", live, model_class("llama"), tmp_path / "out")


@pytest.mark.parametrize(
    ("plain", "wrapped"),
    [
        ("base_model.model.", "_orig_mod.base_model.model."),
        ("base_model.model.", "_fsdp_wrapped_module.base_model.model."),
        ("base_model.model.", "base_model.model._fsdp_wrapped_module._orig_mod."),
        (".model.layers.1.", ".model._fsdp_wrapped_module.layers.1._checkpoint_wrapped_module._fsdp_wrapped_module."),
        (".q_proj.", ".q_proj._orig_mod."),
    ],
)
def test_wrappers_anywhere_in_a_name(plain, wrapped, base, tmp_path):
    """The same merge as without them."""
    train(load(base, "llama"), QV).save_pretrained(tmp_path / "adapter")
    expected = load_folder(merge(base, tmp_path / "adapter", tmp_path / "one").out)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    renamed = {name.replace(plain, wrapped): tensor for name, tensor in load_file(file).items()}
    assert renamed.keys() != load_file(file).keys()
    save_file(renamed, file)
    for name, tensor in load_folder(merge(base, tmp_path / "adapter", tmp_path / "other").out).items():
        assert_same_bits(tensor, expected[name], name)


@pytest.mark.parametrize(("architecture", "rows"), [
    ("llama", [3, 165]), ("llama", {"embed_tokens": [3, 165], "lm_head": [4, 166]}), ("gemma3", [3, 165])
])  # fmt: skip
def test_trained_rows_of_a_resized_vocabulary(architecture, rows, tmp_path):
    """PEFT stores the resized layers under the rows, which go on top."""
    base = save_base(tmp_path / "base", architecture)
    kind = Kind(
        {"target_modules": ["q_proj"], "trainable_token_indices": rows}, before=lambda model: model.resize_token_embeddings(170)
    )
    live = train(load(base, architecture), kind)
    live.save_pretrained(tmp_path / "adapter")
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert "base_model.model.model.embed_tokens.token_adapter.base_layer.weight" in stored
    assert_merge_is_live(base, tmp_path / "adapter", live, model_class(architecture), tmp_path / "out")


def test_counters_in_a_saved_module(tmp_path):
    """A batch norm counts its batches in int64; the merge has the adapter's count."""
    base = save_base(tmp_path / "base", "resnet")
    kind = Kind({"target_modules": ["convolution"], "modules_to_save": ["normalization"]})
    live = train(load(base, "resnet"), kind)
    for name, buffer in live.named_buffers():
        if "modules_to_save" in name:
            buffer.add_(7 if "num_batches" in name else 0.25)
    live.save_pretrained(tmp_path / "adapter")
    out = merge(base, tmp_path / "adapter", tmp_path / "out", MergeOptions(dtype="float32")).out
    expected = answer(live, "resnet")
    assert (answer(load(out, "resnet", None), "resnet") - expected).abs().max() < 2e-4 * expected.abs().max()
    counters = {name: tensor for name, tensor in load_folder(out).items() if name.endswith("num_batches_tracked")}
    assert counters and all(tensor.dtype == torch.int64 and int(tensor) == 7 for tensor in counters.values())


@pytest.mark.parametrize(("ending", "dtype"), [("num_batches_tracked", torch.int32), ("running_mean", torch.int64)])
def test_counters_of_another_type_than_the_bases(ending, dtype, tmp_path):
    base = save_base(tmp_path / "base", "resnet")
    train(load(base, "resnet"), Kind({"target_modules": ["convolution"], "modules_to_save": ["normalization"]})).save_pretrained(
        tmp_path / "adapter"
    )
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({key: tensor.to(dtype) if key.endswith(ending) else tensor for key, tensor in load_file(file).items()}, file)
    with pytest.raises(MergeError, match=rf"{ending}.*is of type I(32|64)"):
        merge(base, tmp_path / "adapter", tmp_path / "out")


def test_integers_in_a_low_rank_half(base, tmp_path):
    train(load(base, "llama"), QV).save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({key: tensor.to(torch.int64) if "lora_A" in key else tensor for key, tensor in load_file(file).items()}, file)
    with pytest.raises(MergeError, match=r"lora_A.*is of type I64"):
        merge(base, tmp_path / "adapter", tmp_path / "out")
