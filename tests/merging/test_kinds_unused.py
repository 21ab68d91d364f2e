"""Bases that hold layers which their own class leaves alone: shared keys and values, multi-token prediction. Oracle: the live
model, which has no such layers."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from lora_merge.merging.api import merge
from lora_merge.merging.errors import MergeError
from tests.merging.kinds import TEXT, Kind, load, save_base, train
from tests.merging.live import assert_merge_is_live, save_class
from tests.merging.oracle import assert_same_bits, load_folder

EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1, "n_group": 1}
SHARED = {
    "num_hidden_layers": 4, "head_dim": 16, "sliding_window": 16, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 160, "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip


def _shared_layers(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Keys and values of layers 2 and 3, as the hub's checkpoints have them, where the class shares those of 0 and 1."""
    return {
        name.replace(".layers.1.", f".layers.{layer}."): tensor + 1
        for name, tensor in tensors.items()
        for layer in (2, 3)
        if ".layers.1.self_attn.k_" in name or ".layers.1.self_attn.v_" in name
    }


def _prediction_layer(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One layer more than the configuration counts, as GLM-4.5 and DeepSeek-V3 have it for multi-token prediction."""
    return {name.replace(".layers.1.", ".layers.2."): tensor + 1 for name, tensor in tensors.items() if ".layers.1." in name}


def _gemma3n() -> Any:
    return transformers.Gemma3nForCausalLM(transformers.Gemma3nTextConfig(**{**TEXT, **SHARED}, laurel_rank=8))


def _gemma4() -> Any:
    return transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**{**TEXT, **SHARED}, global_head_dim=16))


def _glm() -> Any:
    config = transformers.Glm4MoeConfig(**TEXT, **EXPERTS, head_dim=16, first_k_dense_replace=1, topk_group=1)
    return transformers.Glm4MoeForCausalLM(config)


BASES = {"gemma3n": (_gemma3n, _shared_layers), "gemma4": (_gemma4, _shared_layers), "glm4": (_glm, _prediction_layer)}


def made(name: str, folder: Path) -> tuple[Path, Path, Any, set[str]]:
    """Base, adapter, live model and the names of the tensors that the class leaves alone."""
    make, extra = BASES[name]
    model = make()
    base = save_class(folder / "base", model)
    tensors = load_file(base / "model.safetensors")
    unused = extra(tensors)
    assert unused and not unused.keys() & tensors.keys()
    save_file({**tensors, **unused}, base / "model.safetensors", {"format": "pt"})
    live = train(type(model).from_pretrained(base, dtype=torch.float32), Kind({"target_modules": ["q_proj", "k_proj", "v_proj"]}))
    live.save_pretrained(folder / "adapter")
    return base, folder / "adapter", live, set(unused)


@pytest.mark.parametrize("name", BASES)
def test_layers_that_the_class_leaves_alone_go_over_unchanged(name, tmp_path):
    base, adapter, live, unused = made(name, tmp_path)
    out = assert_merge_is_live(base, adapter, live, type(live.get_base_model()), tmp_path / "out")
    before, after = load_folder(base), load_folder(out)
    for tensor in unused:
        assert_same_bits(after[tensor], before[tensor].float(), tensor)


@pytest.mark.parametrize(("name", "layer"), [("gemma3n", 0), ("glm4", 1)])
def test_a_layer_that_the_class_uses_is_still_missed(name, layer, tmp_path):
    base, adapter, _, _ = made(name, tmp_path)
    file = adapter / "adapter_model.safetensors"
    lost = f"layers.{layer}.self_attn.k_proj"
    save_file({key: tensor for key, tensor in load_file(file).items() if lost not in key}, file)
    with pytest.raises(MergeError, match=rf"{lost}.*incomplete"):
        merge(base, adapter, tmp_path / "out")


EXPERT_TARGETS = Kind({"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]})


def test_experts_that_are_missing_in_one_layer(tmp_path):
    base = save_base(tmp_path / "base", "mixtral")
    train(load(base, "mixtral"), EXPERT_TARGETS).save_pretrained(tmp_path / "adapter")
    merge(base, tmp_path / "adapter", tmp_path / "whole")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({key: tensor for key, tensor in load_file(file).items() if "layers.1.mlp.experts" not in key}, file)
    with pytest.raises(MergeError, match=r"layers\.1\.mlp\.experts\.\w+_proj.*target_parameters.*incomplete"):
        merge(base, tmp_path / "adapter", tmp_path / "out")


@pytest.mark.parametrize("stacked", [False, True])
def test_an_expert_that_is_missing(stacked, tmp_path):
    """An adapter as transformers 4 trained it, on experts by themselves and on fused ones; the class has only fused ones."""
    base = save_base(tmp_path / "base", "mixtral", save_original_format=not stacked)
    path = "base_model.model.model.layers.{}.block_sparse_moe.experts.{}.w1.lora_{}.weight"
    tensors = {}
    for layer, expert in itertools.product(range(2), range(4)):
        tensors[path.format(layer, expert, "A")] = torch.ones(4, 64)
        tensors[path.format(layer, expert, "B")] = torch.ones(128, 4)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["w1"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, adapter / "adapter_model.safetensors")
    merge(base, adapter, tmp_path / "whole")
    for half in "AB":
        del tensors[path.format(1, 2, half)]
    save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(MergeError, match=r"layers\.1\.block_sparse_moe\.experts\.2\.w1.*target_modules.*incomplete"):
        merge(base, adapter, tmp_path / "out")


def test_a_class_that_cannot_be_asked(tmp_path):
    """Then what is missing counts as missing, and the reason stands beside it."""
    base, adapter, _, _ = made("glm4", tmp_path)
    config = base / "config.json"
    config.write_text(config.read_text().replace("{", '{"auto_map": {"AutoConfig": "x.Y"},', 1))
    with pytest.raises(MergeError, match=r"layers\.2\.self_attn.*incomplete, unless.*--trust-remote-code"):
        merge(base, adapter, tmp_path / "out")
