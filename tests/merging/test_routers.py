"""Which routers of mixture-of-experts layers were quantized, by the generation of transformers that trained the adapter.

Oracle: the classes. Version 4 quantized what was an ``nn.Linear`` there; checked live with 4.57.3 for the families below.
"""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import save_file

from lora_merge.merging.api import MergeOptions, plan_merge
from lora_merge.merging.errors import MergeError
from tests.merging.oracle import load_folder

COMMON = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}
EXPERTS = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}
MLA = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
FAMILIES = {
    "deepseek_v3": {**COMMON, **EXPERTS, **MLA, "n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "glm4_moe": {**COMMON, **EXPERTS, "head_dim": 16, "n_routed_experts": 4, "first_k_dense_replace": 1},
    "dots1": {**COMMON, **EXPERTS, "head_dim": 16, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "qwen3_moe": {**COMMON, **EXPERTS, "head_dim": 16, "num_experts": 4},
    "granitemoe": {**COMMON, "num_local_experts": 4, "num_experts_per_tok": 2},
    "llama4_text": {**COMMON, "intermediate_size_mlp": 128, "head_dim": 16, "num_local_experts": 4, "moe_layers": [1]},
}
RECIPE = {"quant_type": "nf4", "double_quant": False, "block_size": 64, "quant_dtype": "bfloat16"}


def saved(kind, folder):
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind](**FAMILIES[kind])
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def adapter(folder, shapes):
    """An adapter of the layers with these names and shapes."""
    folder.mkdir()
    tensors = {}
    for path, (rows, columns) in shapes.items():
        tensors[f"base_model.model.{path}.lora_A.weight"] = torch.ones(2, columns)
        tensors[f"base_model.model.{path}.lora_B.weight"] = torch.ones(rows, 2)
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({path.rpartition(".")[2] for path in shapes})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 2, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def quantized(base, adapter, **recipe):
    plan = plan_merge(base, adapter, MergeOptions(from_4bit=True, recipe={**RECIPE, **recipe}))
    return {
        tensor.name
        for tensor in plan.tensors
        if tensor.operations and tensor.operations[0].to_json()["operation"] == "round trip"
    }


@pytest.mark.parametrize(("kind", "routed"), [("deepseek_v3", False), ("glm4_moe", False), ("dots1", False), ("qwen3_moe", True)])
def test_a_router_that_was_a_parameter_was_never_quantized(kind, routed, tmp_path):
    """The adapter tells by its experts' layers that version 4 trained it."""
    base = saved(kind, tmp_path / "base")
    layers = [layer for layer in range(2) if f"model.layers.{layer}.mlp.experts.0.up_proj.weight" in load_folder(base)]
    names = [f"{expert}.{name}" for expert in range(4) for name in ("gate_proj", "up_proj", "down_proj")]
    shapes = {f"model.layers.{layer}.mlp.experts.{name}": (64, 64) for layer in layers for name in names}
    found = quantized(base, adapter(tmp_path / "adapter", shapes))
    assert all(f"{path}.weight" in found for path in shapes)
    assert ("model.layers.1.mlp.gate.weight" in found) == routed


@pytest.mark.parametrize(
    ("kind", "router", "pattern"),
    [
        ("granitemoe", "model.layers.1.block_sparse_moe.router.layer.weight", "*.router.layer"),
        ("llama4_text", "model.layers.1.feed_forward.router.weight", "*.feed_forward.router"),
    ],
)
def test_a_router_that_only_version_4_quantized_is_a_question(kind, router, pattern, tmp_path):
    base = saved(kind, tmp_path / "base")
    some = adapter(tmp_path / "adapter", {f"model.layers.{layer}.self_attn.q_proj": (64, 64) for layer in range(2)})
    with pytest.raises(MergeError, match="were quantized by transformers 4 and are not by transformers 5") as caught:
        quantized(base, some)
    assert f"--quantized-modules 'default,{pattern}' for version 4" in str(caught.value)
    assert router not in quantized(base, some, quantized_modules=("default",))
    assert router in quantized(base, some, quantized_modules=("default", pattern))
