"""Both merges against float64 arithmetic, PEFT, Transformers and bitsandbytes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from peft import PeftModel
from safetensors.torch import load_file, save_file

import lora_merge
from lora_merge.merging.api import MergeOptions, merge, plan_merge
from lora_merge.merging.errors import MergeError
from lora_merge.merging.manifest import read_manifest
from tests.merging.conftest import ARCHITECTURES
from tests.merging.oracle import assert_same_bits, delta, load_folder, rounded
from tests.tiny import save_tiny_adapter, save_tiny_base

SINGLE = {"quant_type": "nf4", "double_quant": False, "block_size": 64, "quant_dtype": "bfloat16"}


def _quantized_by_transformers(base: Path, double_quant: bool = False) -> dict[str, torch.Tensor]:
    """Module -> dequantized weight of a 4-bit load by transformers and bitsandbytes themselves, before any forward pass."""
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double_quant,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(base, quantization_config=config, dtype=torch.bfloat16)
    return {
        f"{name}.weight": dequantize_4bit(module.weight.data, module.weight.quant_state)
        for name, module in model.named_modules()
        if type(module).__name__ == "Linear4bit"
    }


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("sharded", [False, True])
def test_merge_into_original_weights_is_float64_arithmetic_rounded_once(architecture, sharded, bases, adapters, tmp_path):
    base, adapter = bases(architecture, sharded), adapters(architecture)
    result = merge(base, adapter, tmp_path / "out")
    before, after = load_folder(base), load_folder(result.out)
    assert list(before) == list(after)
    updated = 0
    for name, weight in before.items():
        update = delta(adapter, name)
        updated += update is not None
        expected = weight if update is None else rounded(weight.double().numpy() + update, weight.dtype)
        assert_same_bits(after[name], expected, name)
    assert updated == len(result.plan.adapter.pairs) > 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("sharded", [False, True])
def test_merge_from_4bit_is_bitsandbytes_dequantized_plus_delta(architecture, sharded, bases, adapters, tmp_path):
    """Oracle: bitsandbytes' dequantized values of a real 4-bit load, which also says which modules were quantized."""
    base = bases(architecture, sharded)
    adapter = adapters(architecture, target_modules=["q_proj", "down_proj"])
    result = merge(base, adapter, tmp_path / "out", MergeOptions(from_4bit=True, recipe=SINGLE))
    quantized = _quantized_by_transformers(base)
    before, after = load_folder(base), load_folder(result.out)
    without_adapter = 0
    for name, weight in before.items():
        weight = quantized.get(name, weight)
        update = delta(adapter, name)
        without_adapter += name in quantized and update is None
        expected = weight if update is None else rounded(weight.double().numpy() + update, weight.dtype)
        assert_same_bits(after[name], expected, name)
    assert without_adapter > 0, "quantized linears without an adapter must be replaced too"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_double_quantization_differs_from_cpu_bitsandbytes_in_few_elements_only(architecture, bases, adapters, tmp_path):
    """Ours follows CUDA (test_quantization); the CPU library takes another 8-bit code for about a thousandth of the blocks."""
    base, adapter = bases(architecture), adapters(architecture, target_modules=["q_proj"])
    result = merge(base, adapter, tmp_path / "out", MergeOptions(from_4bit=True))
    after = load_folder(result.out)
    quantized = _quantized_by_transformers(base, double_quant=True)
    plain = {name: weight for name, weight in quantized.items() if delta(adapter, name) is None}
    differ = sum((after[name] != weight).sum().item() for name, weight in plain.items())
    assert differ <= 0.01 * sum(weight.numel() for weight in plain.values())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_equal_the_unmerged_peft_model(architecture, bases, adapters, tmp_path):
    """Oracle: PEFT's own forward in float32 on the same base, which is exact in float32 output up to its arithmetic."""
    base, adapter = bases(architecture), adapters(architecture)
    out = merge(base, adapter, tmp_path / "out", MergeOptions(dtype="float32")).out
    merged = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert merged.dtype == torch.float32
    unmerged = PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)
    tokens = torch.arange(2, 42).reshape(2, 20)
    with torch.no_grad():
        found, expected = merged(tokens).logits, unmerged(tokens).logits
        bare = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)(tokens).logits
    assert (found - expected).abs().max() < 1e-4
    assert (bare - expected).abs().max() > 1e-2, "the adapter must matter for this test to mean anything"


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("base_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_pair_of_types(dtype, base_dtype, bases, adapters, tmp_path):
    base, adapter = bases("llama", dtype=base_dtype), adapters("llama", dtype=torch.bfloat16)
    out = merge(base, adapter, tmp_path / "out", MergeOptions(dtype=dtype)).out
    after = load_folder(out)
    for name, weight in load_folder(base).items():
        update = delta(adapter, name)
        exact = weight.double().numpy() + (0 if update is None else update)
        assert_same_bits(after[name], rounded(exact, getattr(torch, dtype)), name)
    assert json.loads((out / "config.json").read_text())["dtype"] == dtype


@pytest.mark.parametrize(
    ("quant_dtype", "base_dtype"), [("bfloat16", torch.float32), ("float16", torch.bfloat16), ("float32", torch.bfloat16)]
)
def test_weights_take_their_type_at_quantization_first(quant_dtype, base_dtype, bases, adapters, tmp_path):
    """A float32 checkpoint that training loaded as bfloat16 was rounded before it was quantized. Oracle: bitsandbytes."""
    base, adapter = bases("llama", dtype=base_dtype), adapters("llama", target_modules=["q_proj"])
    recipe = {**SINGLE, "quant_dtype": quant_dtype}
    out = merge(base, adapter, tmp_path / "out", MergeOptions(from_4bit=True, recipe=recipe, dtype="float32")).out
    name = "model.layers.0.mlp.up_proj.weight"
    packed, state = quantize_4bit(load_folder(base)[name].to(getattr(torch, quant_dtype)), quant_type="nf4", blocksize=64)
    assert_same_bits(load_folder(out)[name], dequantize_4bit(packed, state).float(), name)


@pytest.mark.parametrize(
    "settings", [{"use_rslora": True}, {"rank_pattern": {"q_proj": 7}, "alpha_pattern": {r"layers\.1\..*up_proj": 3}}]
)
def test_scalings(settings, bases, adapters, tmp_path):
    base, adapter = bases("llama"), adapters("llama", **settings)
    after = load_folder(merge(base, adapter, tmp_path / "out").out)
    for name, weight in load_folder(base).items():
        update = delta(adapter, name)
        if update is not None:
            assert_same_bits(after[name], rounded(weight.double().numpy() + update, weight.dtype), name)


def test_result_does_not_depend_on_the_number_of_jobs(bases, adapters, tmp_path):
    base, adapter = bases("gemma3", True), adapters("gemma3")
    roots = {
        merge(base, adapter, tmp_path / str(jobs), MergeOptions(from_4bit=True, jobs=jobs)).manifest.to_json()["output"]["root"]
        for jobs in (1, 2, 5)
    }
    assert len(roots) == 1


def test_files_beside_the_weights(bases, adapters, tmp_path):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    shutil.copytree(bases("llama", True), base)
    shutil.copytree(adapters("llama"), adapter)
    for name, text in {
        "tokenizer.json": "{}",
        "tokenizer.model": "base",
        "chat_template.jinja": "base",
        "LICENSE": "terms",
        "pytorch_model.bin": "x",
    }.items():
        (base / name).write_text(text)
    (adapter / "chat_template.jinja").write_text("adapter")
    out = merge(base, adapter, tmp_path / "out").out
    assert (out / "chat_template.jinja").read_text() == "adapter", "the adapter's tokenizer files come before the base's"
    assert (out / "tokenizer.model").read_text() == "base"
    assert (out / "LICENSE").read_text() == "terms"
    assert (out / "generation_config.json").read_bytes() == (base / "generation_config.json").read_bytes()
    assert not (out / "pytorch_model.bin").exists()
    assert not (out / "adapter_config.json").exists()
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in load_folder(out).values())
    assert "merged" in (out / "README.md").read_text()


def test_manifest_names_what_was_merged(bases, adapters, tmp_path):
    import hashlib

    base, adapter = bases("llama", True), adapters("llama")
    out = merge(base, adapter, tmp_path / "out", MergeOptions(from_4bit=True)).out
    manifest = read_manifest(out)
    digest = lambda path: hashlib.sha256(path.read_bytes()).hexdigest()  # noqa: E731
    assert manifest.method == "from-4bit"
    assert manifest.recipe is not None and manifest.recipe.assumed
    assert manifest.base.path == str(base.resolve()) and manifest.base.commit is None
    assert manifest.base.files == {
        p.name: digest(p)
        for p in base.iterdir()
        if p.suffix == ".safetensors" or p.name in ("config.json", "model.safetensors.index.json")
    }
    assert manifest.adapter.files == {n: digest(adapter / n) for n in ("adapter_config.json", "adapter_model.safetensors")}
    assert manifest.output == {p.name: digest(p) for p in out.iterdir() if p.name != "merge_manifest.json"}


def test_a_manifest_with_another_identity_than_a_digest_is_refused(bases, adapters, tmp_path):
    manifest = merge(bases("llama"), adapters("llama"), tmp_path / "out").manifest
    assert read_manifest(tmp_path / "out") == manifest and manifest.base.identity is None
    value = manifest.to_json()
    value["adapter"]["identity"] = "x"
    (tmp_path / "out" / "merge_manifest.json").write_text(json.dumps(value))
    with pytest.raises(MergeError, match="adapter: identity must be a hexadecimal SHA-256 digest"):
        read_manifest(tmp_path / "out")


def test_dry_run_plan_accounts_for_every_tensor(bases, adapters):
    base, adapter = bases("qwen2", True), adapters("qwen2")
    plan = plan_merge(base, adapter, MergeOptions(from_4bit=True))
    value = plan.to_json(jobs=2)
    weights = load_folder(base)
    assert {tensor["name"] for tensor in value["tensors"]} == set(weights)
    used = [
        step[half]
        for tensor in value["tensors"]
        for step in tensor["operations"]
        if step["operation"] == "add low rank"
        for half in "ab"
    ]
    from safetensors import safe_open

    with safe_open(adapter / "adapter_model.safetensors", "np") as file:
        assert sorted(used) == sorted(file.keys()), "every adapter tensor is consumed exactly once"
    assert value["recipe"]["assumed"] is True
    on_disk = sum(p.stat().st_size for p in base.glob("*.safetensors"))
    assert abs(value["output_bytes"] - on_disk) < 20_000


def test_public_names_work_from_the_package(bases, adapters, tmp_path):
    assert lora_merge.merge(bases("llama"), adapters("llama"), tmp_path / "out").out == tmp_path / "out"


def test_blocks_that_span_rows(tmp_path):
    """in_features that is no multiple of the block size. Oracle: bitsandbytes on the same elements as rows of one block.

    On a CPU bitsandbytes 0.50.2 itself dequantizes such a matrix wrongly (mean error 2.5 times that of the quantization),
    because its kernel lets every row start a new block, which the quantizing kernel does not.
    """
    torch.manual_seed(0)
    weight = torch.randn(64, 96).to(torch.bfloat16)
    packed, state = quantize_4bit(weight.reshape(-1, 64).contiguous(), quant_type="nf4", blocksize=64)
    expected = dequantize_4bit(packed, state).reshape(64, 96)

    base = save_tiny_base(tmp_path / "base", intermediate_size=96)
    name = "model.layers.0.mlp.down_proj.weight"
    file = base / "model.safetensors"
    save_file({**load_file(file), name: weight}, file, metadata={"format": "pt"})
    adapter = save_tiny_adapter(tmp_path / "adapter", base, target_modules=["q_proj"])
    out = merge(base, adapter, tmp_path / "out", MergeOptions(from_4bit=True, recipe=SINGLE)).out
    assert_same_bits(load_folder(out)[name], expected, name)
