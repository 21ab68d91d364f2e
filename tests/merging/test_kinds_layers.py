"""Layers that are no plain linear ones: experts, GPT-2's Conv1D, convolutions, attention blocks. Oracles as in test_kinds."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from lora_merge.merging.api import MergeOptions, merge
from lora_merge.merging.errors import MergeError
from tests.merging.kinds import Kind, answer, load, save_base, train
from tests.merging.oracle import adapted, assert_rounded_once, assert_same_bits, load_folder, prefixed

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = {
    "both": Kind({"target_modules": ATTENTION, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}),
    "one": Kind({"target_modules": [], "target_parameters": ["experts.down_proj"]}),
    "router": Kind({"target_modules": ["q_proj"], "target_parameters": ["mlp.gate.weight"]}, scale=0.3),
}
FAMILIES = {"mixtral": ("w1", "w3", "w2"), "qwen3_moe": ("gate_proj", "up_proj", "down_proj")}


def fused(base: Path, target: Path, architecture: str) -> Path:
    """The base with its experts stacked, as transformers 5 holds them. Oracle for names and order: its own state_dict."""
    model = load(base, architecture, torch.bfloat16)
    target.mkdir()
    for name in ("config.json", "generation_config.json"):
        shutil.copy(base / name, target / name)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    """``moe(architecture)`` -> the base with single experts (as it is saved) and with fused ones."""
    root = tmp_path_factory.mktemp("moe")

    def make(architecture: str) -> tuple[Path, Path]:
        single, stacked = root / architecture, root / f"{architecture}-fused"
        if not single.exists():
            save_base(single, architecture)
            fused(single, stacked, architecture)
        return single, stacked

    return make


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("kind", EXPERTS)
def test_adapters_on_fused_parameters(kind, architecture, moe, tmp_path):
    """On a base with single experts and on one with fused ones. Oracles: the live model's logits; PEFT's einsum written out."""
    single, stacked = moe(architecture)
    live = train(load(single, architecture), EXPERTS[kind])
    live.save_pretrained(tmp_path / "adapter")
    expected = answer(live, architecture)
    assert (answer(load(single, architecture), architecture) - expected).abs().max() > 1e-2
    for base in (single, stacked):
        out = merge(base, tmp_path / "adapter", tmp_path / f"out-{base.name}", MergeOptions(dtype="float32")).out
        assert load_folder(out).keys() == load_folder(base).keys()
        assert (answer(load(out, architecture, None), architecture) - expected).abs().max() < 2e-4 * expected.abs().max()
    if kind == "both":
        _check_expert_weights(architecture, single, stacked, tmp_path)


def _check_expert_weights(architecture: str, single: Path, stacked: Path, root: Path) -> None:
    pieces = prefixed(root / "adapter")
    before = load_folder(stacked)
    merged, merged_single = (
        load_folder(merge(base, root / "adapter", root / f"bf16-{base.name}").out) for base in (stacked, single)
    )
    gate, up, down = FAMILIES[architecture]
    for parameter, path, projections in (("gate_up_proj", ".base_layer", (gate, up)), ("down_proj", "", (down,))):
        stack = "model.layers.1.mlp.experts"
        a, b = pieces[f"{stack}{path}.lora_A.weight"], pieces[f"{stack}{path}.lora_B.weight"]
        a, b = a.reshape(4, -1, a.shape[1]), b.reshape(b.shape[0], -1, 4)
        exact = before[f"{stack}.{parameter}"].double().numpy() + 6 / 4 * np.einsum("ore,eri->eoi", b, a)
        assert_rounded_once(merged[f"{stack}.{parameter}"], exact, parameter, allowed=1e-3)
        for position, projection in enumerate(projections):
            rows = exact.shape[1] // len(projections)
            block = "block_sparse_moe" if architecture == "mixtral" else "mlp"
            name = f"model.layers.1.{block}.experts.2.{projection}.weight"
            assert_rounded_once(merged_single[name], exact[2, position * rows : (position + 1) * rows], name, allowed=1e-3)


def expert_by_expert(base: Path, folder: Path, architecture: str) -> Path:
    """An adapter as transformers 4 and PEFT wrote it: a pair of halves for each expert's layer."""
    block = "block_sparse_moe" if architecture == "mixtral" else "mlp"
    gate, up, down = FAMILIES[architecture]
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    shapes = {name: tuple(tensor.shape) for name, tensor in load_folder(base).items()}
    for layer in range(2):
        for expert in range(4):
            for projection in (gate, up, down):
                path = f"model.layers.{layer}.{block}.experts.{expert}.{projection}"
                rows, columns = shapes[f"{path}.weight"]
                tensors[f"base_model.model.{path}.lora_A.weight"] = torch.randn(4, columns, generator=generator) * 0.1
                tensors[f"base_model.model.{path}.lora_B.weight"] = torch.randn(rows, 4, generator=generator) * 0.1
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 6, "target_modules": [gate, up, down]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("architecture", FAMILIES)
def test_adapters_on_single_experts(architecture, moe, tmp_path):
    """Oracles: float64 arithmetic on the single experts, and PEFT, which converts such an adapter to the fused experts."""
    single, stacked = moe(architecture)
    adapter = expert_by_expert(single, tmp_path / "adapter", architecture)
    plain, into_stack = merge(single, adapter, tmp_path / "single").out, merge(stacked, adapter, tmp_path / "stacked").out
    config = {"rank_pattern": {}, "alpha_pattern": {}, "use_rslora": False}
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    before, after = load_folder(single), load_folder(plain)
    for name, weight in before.items():
        exact = weight.double().numpy()
        if ".experts." in name:
            exact = adapted(exact, name.removesuffix(".weight"), adapter)
        assert_rounded_once(after[name], exact, name)
    reloaded = load(plain, architecture, torch.bfloat16).state_dict()
    for name, tensor in load_folder(into_stack).items():
        assert_same_bits(tensor, reloaded[name], name)
    live = PeftModel.from_pretrained(load(single, architecture), adapter).eval()
    expected = answer(live, architecture)
    exactly = merge(stacked, adapter, tmp_path / "float32", MergeOptions(dtype="float32")).out
    assert (answer(load(exactly, architecture, None), architecture) - expected).abs().max() < 2e-4 * expected.abs().max()


def test_experts_that_are_stored_transposed(tmp_path):
    """GPT-OSS: (experts, in, out); its down projection is square here, so that only the class tells which way round. Oracle:
    the live model."""
    base = save_base(tmp_path / "base", "gpt_oss")
    kind = Kind({"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]})
    live = train(load(base, "gpt_oss"), kind)
    live.save_pretrained(tmp_path / "adapter")
    expected = answer(live, "gpt_oss")
    out = merge(base, tmp_path / "adapter", tmp_path / "out", MergeOptions(dtype="float32")).out
    assert (answer(load(out, "gpt_oss", None), "gpt_oss") - expected).abs().max() < 2e-4 * expected.abs().max()
    assert (answer(load(base, "gpt_oss"), "gpt_oss") - expected).abs().max() > 1e-2


def test_the_other_packing_of_experts_is_a_flag(moe, tmp_path):
    """The same adapter with lora_B laid out expert by expert: the flag, and only the flag, gives the same merge."""
    base = moe("qwen3_moe")[1]
    live = train(load(base, "qwen3_moe"), EXPERTS["both"])
    live.save_pretrained(tmp_path / "adapter")
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "adapter", other)
    tensors = load_file(other / "adapter_model.safetensors")
    for name, tensor in tensors.items():
        if "experts" in name and "lora_B" in name:
            tensors[name] = tensor.reshape(len(tensor), -1, 4).transpose(1, 2).reshape(len(tensor), -1).contiguous()
    save_file(tensors, other / "adapter_model.safetensors")
    expected = load_folder(merge(base, tmp_path / "adapter", tmp_path / "a").out)
    result = merge(base, other, tmp_path / "b", MergeOptions(packing="expert-major"))
    for name, tensor in load_folder(result.out).items():
        assert_same_bits(tensor, expected[name], name)
    assert result.manifest.to_json()["expert_packing"] == "expert-major"
    wrong = load_folder(merge(base, other, tmp_path / "c").out)
    assert any(not torch.equal(wrong[name], tensor) for name, tensor in expected.items())


GPT2 = {
    "plain": Kind({"target_modules": ["c_attn", "c_proj", "c_fc"]}),
    "dora": Kind({"target_modules": ["c_attn", "c_proj", "c_fc"], "use_dora": True}),
    "square": Kind({"target_modules": ["attn.c_proj"]}, scale=0.3),
    "bias": Kind({"target_modules": ["c_attn"], "bias": "all", "lora_bias": True}),
    "embedding": Kind({"target_modules": ["wte", "c_attn"]}),
    "tokens": Kind({"target_modules": ["c_attn"], "trainable_token_indices": {"wte": [4, 9]}}),
    "saved-head": Kind({"target_modules": ["c_attn"], "modules_to_save": ["lm_head"]}),
}


@pytest.mark.parametrize("kind", GPT2)
@pytest.mark.parametrize("prefixed_names", [True, False])
def test_gpt2(kind, prefixed_names, tmp_path):
    """Conv1D stores (in, out). The hub's checkpoints lack the ``transformer.`` that adapters have; both are merged."""
    base = save_base(tmp_path / "base", "gpt2")
    live = train(load(base, "gpt2"), GPT2[kind])
    live.save_pretrained(tmp_path / "adapter")
    expected = answer(live, "gpt2")
    file = base / "model.safetensors"
    if not prefixed_names:
        save_file({name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    out = merge(base, tmp_path / "adapter", tmp_path / "out", MergeOptions(dtype="float32")).out
    assert (answer(load(out, "gpt2", None), "gpt2") - expected).abs().max() < 2e-4 * expected.abs().max()
    if kind in ("plain", "dora", "square"):
        before, after = load_folder(base), load_folder(merge(base, tmp_path / "adapter", tmp_path / "bf16").out)
        for name, tensor in before.items():
            path = f"transformer.{name.removeprefix('transformer.')}".removesuffix(".weight")
            exact = tensor.double().numpy()
            if f"{path}.lora_A.weight" in prefixed(tmp_path / "adapter"):
                exact = adapted(exact, path, tmp_path / "adapter", stored_transposed=True)
            assert_rounded_once(after[name], exact, name, allowed=1e-3 if kind == "dora" else 0.0)


CONVOLUTIONS = {
    "2d": ("resnet", Kind({"target_modules": ["convolution"]})),
    "2d-dora": ("resnet", Kind({"target_modules": ["convolution"], "use_dora": True})),
    "2d-saved": ("resnet", Kind({"target_modules": ["convolution"], "modules_to_save": ["classifier"]})),
    "1d": ("wav2vec2", Kind({"target_modules": r".*feature_extractor.*\.conv|.*q_proj"})),
    "1d-dora": ("wav2vec2", Kind({"target_modules": r".*feature_extractor.*\.conv|.*q_proj", "use_dora": True})),
    "3d": ("videomae", Kind({"target_modules": ["projection"]})),
    "3d-dora": ("videomae", Kind({"target_modules": ["projection"], "use_dora": True})),
}


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions(case, tmp_path):
    architecture, kind = CONVOLUTIONS[case]
    base = save_base(tmp_path / "base", architecture)
    live = train(load(base, architecture), kind)
    live.save_pretrained(tmp_path / "adapter")
    expected = answer(live, architecture)
    assert (answer(load(base, architecture), architecture) - expected).abs().max() > 1e-3
    out = merge(base, tmp_path / "adapter", tmp_path / "out", MergeOptions(dtype="float32")).out
    assert (answer(load(out, architecture, None), architecture) - expected).abs().max() < 2e-4 * expected.abs().max()
    before, after, pieces = load_folder(base), load_folder(merge(base, tmp_path / "adapter", tmp_path / "bf16").out), 0
    for name, tensor in before.items():
        path = name.removesuffix(".weight")
        keys = [key for key in prefixed(tmp_path / "adapter") if key.endswith(f"{path}.lora_A.weight")]
        if keys and name.endswith(".weight"):
            pieces += 1
            exact = adapted(tensor.double().numpy(), keys[0].removesuffix(".lora_A.weight"), tmp_path / "adapter")
            assert_rounded_once(after[name], exact, name, allowed=2e-3 if "dora" in case else 0.0)
    assert pieces > 0


def test_dilated_convolutions_are_refused(tmp_path):
    """PEFT's lora_A ignores dilation and groups, so that no kernel computes the sum of both branches."""
    base = save_base(tmp_path / "base", "resnet")
    live = train(load(base, "resnet"), CONVOLUTIONS["2d"][1])
    live.save_pretrained(tmp_path / "adapter")
    from lora_merge.merging.architecture import Architecture
    from lora_merge.merging.checkpoint import read_checkpoint
    from lora_merge.merging.folders import ModelFolder

    architecture = Architecture(read_checkpoint(ModelFolder(base, str(base))))
    path = "resnet.embedder.embedder.convolution"
    architecture.check_convolution(path, "adapter")
    architecture.module(path).dilation = (2, 2)
    with pytest.raises(MergeError, match=re.escape(path)):
        architecture.check_convolution(path, "adapter")


def test_attention_block(tmp_path):
    """nn.MultiheadAttention. PEFT adds the output projection's update twice in its forward pass, so twice is what was trained."""
    base = save_base(tmp_path / "base", "siglip")
    live = train(load(base, "siglip"), Kind({"target_modules": ["attention"]}, scale=0.3))
    live.save_pretrained(tmp_path / "adapter")
    expected = answer(live, "siglip")
    assert (answer(load(base, "siglip"), "siglip") - expected).abs().max() > 1e-2
    out = merge(base, tmp_path / "adapter", tmp_path / "out", MergeOptions(dtype="float32")).out
    assert (answer(load(out, "siglip", None), "siglip") - expected).abs().max() < 2e-4 * expected.abs().max()
    pieces, before, after = prefixed(tmp_path / "adapter"), load_folder(base), load_folder(out)
    (key,) = [key for key in pieces if key.endswith("out_proj.lora_A.weight")]
    stem = key.removesuffix(".lora_A.weight")
    (name,) = [name for name in before if name.endswith("attention.out_proj.weight")]
    update = 2 * 6 / 4 * pieces[f"{stem}.lora_B.weight"] @ pieces[f"{stem}.lora_A.weight"]
    assert_rounded_once(after[name], before[name].double().numpy() + update, name, allowed=1e-3)
