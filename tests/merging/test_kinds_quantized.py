"""Kinds of adapters merged through 4-bit bases, and bases that bitsandbytes has stored quantized.

Oracles: bitsandbytes' own dequantization of a real load by transformers, taken before any forward pass; float64 arithmetic on
it; and PEFT's live model in float32 on the dequantized base. Widths are multiples of 64: bitsandbytes 0.50.2 dequantizes
others wrongly on a CPU.
"""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant, quantize_4bit
from safetensors.torch import load_file, save_file

from lora_merge.merging.api import MergeOptions, merge, plan_merge
from lora_merge.merging.errors import MergeError
from tests.merging.kinds import Kind, answer, load, model_class, save_base, train
from tests.merging.oracle import adapted, assert_rounded_once, assert_same_bits, load_folder, prefixed

SINGLE = {"quant_type": "nf4", "double_quant": False, "block_size": 64, "quant_dtype": "bfloat16"}


def bnb(**settings: Any) -> transformers.BitsAndBytesConfig:
    return transformers.BitsAndBytesConfig(
        **{"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16, **settings}
    )


def load_quantized(base: Path, architecture: str, config: transformers.BitsAndBytesConfig | None) -> Any:
    settings = {"quantization_config": config} if config else {}
    return model_class(architecture).from_pretrained(base, dtype=torch.bfloat16, **settings)


def dequantized(model: Any) -> dict[str, torch.Tensor]:
    """``module.weight`` -> values, for every module that bitsandbytes quantized."""
    found = {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind == "Linear4bit":
            found[f"{name}.weight"] = dequantize_4bit(module.weight.data, module.weight.quant_state)
        elif kind == "Linear8bitLt":
            found[f"{name}.weight"] = int8_vectorwise_dequant(module.weight.data, module.weight.SCB)
    assert found
    return found


def live_on(values: dict[str, torch.Tensor], base: Path, architecture: str, turned: bool = False) -> Any:
    """The float32 model with dequantized values in place."""
    model = load(base, architecture)
    with torch.no_grad():
        for name, tensor in values.items():
            model.get_parameter(name).copy_(tensor.float().T if turned else tensor.float())
    return model


KINDS = {
    "dora": Kind({"target_modules": "all-linear", "use_dora": True}),
    "embedding": Kind({"target_modules": ["embed_tokens", "q_proj"]}),
    "saved-head": Kind({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "tokens": Kind({"target_modules": ["q_proj"], "trainable_token_indices": [3, 7]}),
    "bias": Kind({"target_modules": ["q_proj"], "bias": "all"}),
    "lora-bias": Kind({"target_modules": ["q_proj"], "lora_bias": True}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["qwen2", "gemma3"])
def test_kinds_through_the_4bit_base(kind, architecture, tmp_path):
    """PEFT's merge in 4 bit would forget the scaling of ``lora_bias``; the live model, which is the oracle, does not."""
    if architecture == "gemma3" and "bias" in kind:
        kind = "dora"
    base = save_base(tmp_path / "base", architecture)
    values = dequantized(load_quantized(base, architecture, bnb()))
    live = train(live_on(values, base, architecture), KINDS[kind])
    live.save_pretrained(tmp_path / "adapter")
    expected = answer(live, architecture)
    options = MergeOptions(from_4bit=True, recipe=SINGLE, dtype="float32")
    out = merge(base, tmp_path / "adapter", tmp_path / "out", options).out
    assert (answer(load(out, architecture, None), architecture) - expected).abs().max() < 2e-4 * expected.abs().max()
    if kind == "dora":
        after, before = (
            load_folder(merge(base, tmp_path / "adapter", tmp_path / "b", MergeOptions(True, SINGLE)).out),
            load_folder(base),
        )
        for name, tensor in before.items():
            path, exact = name.removesuffix(".weight"), values.get(name, tensor).double().numpy()
            if f"{path}.lora_A.weight" in prefixed(tmp_path / "adapter"):
                exact = adapted(exact, path, tmp_path / "adapter")
            assert_rounded_once(after[name], exact, name, allowed=2e-3)


def test_gpt2_is_quantized_the_other_way_round(tmp_path):
    """transformers turns a Conv1D before it quantizes it; transformers' own dequantize() does not turn it back."""
    base = save_base(tmp_path / "base", "gpt2")
    values = dequantized(load_quantized(base, "gpt2", bnb()))
    assert "transformer.h.0.attn.c_attn.weight" in values
    live = train(live_on(values, base, "gpt2", turned=True), Kind({"target_modules": ["c_attn", "c_proj"], "use_dora": True}))
    live.save_pretrained(tmp_path / "adapter")
    # As the quantized model's own adapter says, whose layers are Linear4bit.
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "fan_in_fan_out": False}))
    expected = answer(live, "gpt2")
    result = merge(base, tmp_path / "adapter", tmp_path / "out", MergeOptions(from_4bit=True, recipe=SINGLE, dtype="float32"))
    assert (answer(load(result.out, "gpt2", None), "gpt2") - expected).abs().max() < 2e-4 * expected.abs().max()
    after = load_folder(merge(base, tmp_path / "adapter", tmp_path / "b", MergeOptions(from_4bit=True, recipe=SINGLE)).out)
    name = "transformer.h.0.mlp.c_fc.weight"
    assert_same_bits(after[name], values[name].T, name)


def test_vision_language_model_through_4bit(tmp_path):
    """Modules are called otherwise in memory than in the file. Oracle: which ones transformers quantized, and their values."""
    base = save_base(tmp_path / "base", "gemma3_vlm")
    values = dequantized(load_quantized(base, "gemma3_vlm", bnb()))
    live = train(live_on(values, base, "gemma3_vlm"), Kind({"target_modules": ["q_proj", "fc1"]}))
    live.save_pretrained(tmp_path / "adapter")
    options = MergeOptions(from_4bit=True, recipe=SINGLE, dtype="float32")
    result = merge(base, tmp_path / "adapter", tmp_path / "out", options)
    trips = [
        tensor.name
        for tensor in result.plan.tensors
        if tensor.operations and tensor.operations[0].to_json()["operation"] == "round trip"
    ]
    assert len(trips) == len(values)
    expected = answer(live, "gemma3_vlm")
    assert (answer(load(result.out, "gemma3_vlm", None), "gemma3_vlm") - expected).abs().max() < 2e-4 * expected.abs().max()


# Which modules were quantized


def test_skip_modules_and_an_explicit_list(tmp_path):
    base = save_base(tmp_path / "base", "llama")
    train(load(base, "llama"), Kind({"target_modules": ["q_proj"]})).save_pretrained(tmp_path / "adapter")
    by_transformers = set(dequantized(load_quantized(base, "llama", bnb(llm_int8_skip_modules=["o_proj", "lm_head"]))))

    def quantized(**recipe: Any) -> set[str]:
        plan = plan_merge(base, tmp_path / "adapter", MergeOptions(from_4bit=True, recipe={**SINGLE, **recipe}))
        return {
            tensor.name
            for tensor in plan.tensors
            if tensor.operations and tensor.operations[0].to_json()["operation"] == "round trip"
        }

    assert quantized(skip_modules=("o_proj", "lm_head")) == by_transformers
    assert quantized(quantized_modules=("*.up_proj",)) == {f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1)}
    assert quantized(quantized_modules=("default", "lm_head")) == quantized() | {"lm_head.weight"}
    for wrong in ("*.nothing", "model.layers.7.mlp.up_proj"):
        with pytest.raises(MergeError, match=wrong.replace("*", r"\*")):
            quantized(quantized_modules=(wrong,))


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe"])
def test_experts_were_quantized_by_transformers_4_only(architecture, tmp_path):
    """Oracle: bitsandbytes on each expert's layer by itself, as version 4 had them; version 5 leaves fused experts alone."""
    from tests.merging.test_kinds_layers import FAMILIES, expert_by_expert, fused

    single = save_base(tmp_path / "single", architecture)
    stacked = fused(single, tmp_path / "fused", architecture)
    options = MergeOptions(from_4bit=True, recipe=SINGLE)
    # An adapter of version 5: experts are parameters.
    parameters = Kind({"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]})
    train(load(single, architecture), parameters).save_pretrained(tmp_path / "five")
    before, after = load_folder(single), load_folder(merge(single, tmp_path / "five", tmp_path / "a", options).out)
    gate = FAMILIES[architecture][0]
    names = [name for name in before if f".experts.1.{gate}.weight" in name]
    assert names and all(torch.equal(after[name], before[name]) for name in names)
    # One of version 4: experts are layers, and so is the router.
    four = expert_by_expert(single, tmp_path / "four", architecture)
    after = load_folder(merge(single, four, tmp_path / "b", options).out)
    router = next(name for name in before if name.endswith(".gate.weight"))
    packed, state = quantize_4bit(before[router], quant_type="nf4", blocksize=64)
    assert_same_bits(after[router], dequantize_4bit(packed, state), router)
    # The same through the fused base: each expert's half was a layer of its own.
    file = four / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "rank_pattern": {}, "alpha_pattern": {}, "use_rslora": False}))
    double = MergeOptions(from_4bit=True, recipe={**SINGLE, "double_quant": True})
    one, other = (merge(base, four, tmp_path / f"d-{base.name}", double).out for base in (single, stacked))
    reloaded = load(one, architecture, torch.bfloat16).state_dict()
    for name, tensor in load_folder(other).items():
        assert_same_bits(tensor, reloaded[name], name)


@pytest.mark.parametrize("architecture", ["gpt_oss"])
def test_experts_that_never_were_layers_stay(architecture, tmp_path):
    """Oracle: what transformers quantizes. Such experts are one parameter in both its versions, and no question."""
    base = save_base(tmp_path / "base", architecture)
    train(load(base, architecture), Kind({"target_modules": ["q_proj"]})).save_pretrained(tmp_path / "adapter")
    plan = plan_merge(base, tmp_path / "adapter", MergeOptions(from_4bit=True, recipe=SINGLE))
    trips = {
        tensor.name for tensor in plan.tensors if tensor.operations and "round" in tensor.operations[0].to_json()["operation"]
    }
    assert trips == set(dequantized(load_quantized(base, architecture, bnb())))
    assert not any("experts" in name for name in trips)


def test_experts_of_unknown_generation_are_an_error(tmp_path):
    base = save_base(tmp_path / "base", "mixtral")
    train(load(base, "mixtral"), Kind({"target_modules": ["q_proj"]})).save_pretrained(tmp_path / "adapter")
    with pytest.raises(MergeError, match="--quantized-modules default"):
        merge(base, tmp_path / "adapter", tmp_path / "out", MergeOptions(from_4bit=True, recipe=SINGLE))
    for modules, count in ((("default",), 8), (("default", "*.experts.*", "*.gate"), 8 + 24 + 2)):
        plan = plan_merge(
            base, tmp_path / "adapter", MergeOptions(from_4bit=True, recipe={**SINGLE, "quantized_modules": modules})
        )
        assert sum(bool(tensor.operations) for tensor in plan.tensors) == count


# Bases that are stored quantized

STORED = {
    "nf4": bnb(),
    "nf4-double": bnb(bnb_4bit_use_double_quant=True),
    "fp4": bnb(bnb_4bit_quant_type="fp4"),
    "dynamic": bnb(bnb_4bit_use_double_quant=True, llm_int8_skip_modules=["lm_head", "model.layers.0.mlp", "o_proj"]),
    "8bit": transformers.BitsAndBytesConfig(load_in_8bit=True),
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """``stored(case, architecture)`` -> a quantized checkpoint, the 16-bit one it was made from, and bitsandbytes' values of
    it."""
    root = tmp_path_factory.mktemp("stored")

    def make(case: str, architecture: str) -> tuple[Path, Path, dict[str, torch.Tensor]]:
        plain, folder = root / architecture, root / f"{architecture}-{case}"
        if not plain.exists():
            save_base(plain, architecture)
        if not folder.exists():
            load_quantized(plain, architecture, STORED[case]).save_pretrained(folder)
        return folder, plain, dequantized(load_quantized(folder, architecture, None))

    return make


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gemma3_vlm"])
@pytest.mark.parametrize("case", STORED)
def test_stored_state_is_dequantized_as_bitsandbytes_does(case, architecture, stored, tmp_path):
    folder, plain, values = stored(case, architecture)
    kind = Kind({"target_modules": ["q_proj", "v_proj"]})
    live = train(live_on(values, plain, architecture), kind)
    live.save_pretrained(tmp_path / "adapter")
    result = merge(folder, tmp_path / "adapter", tmp_path / "out", MergeOptions(from_4bit=True))
    assert result.manifest.method == ("from-8bit" if case == "8bit" else "from-4bit")
    after, before = load_folder(result.out), load_folder(plain)
    assert after.keys() == before.keys(), "the parts of the state are gone, everything else is there"
    in_memory = load(result.out, architecture, torch.bfloat16).state_dict()
    untouched = 0
    for name, tensor in values.items():
        path = name.removesuffix(".weight")
        exact = tensor.double().numpy()
        if f"{path}.lora_A.weight" in prefixed(tmp_path / "adapter"):
            exact = adapted(exact, path, tmp_path / "adapter")
        else:
            untouched += 1
        assert_rounded_once(in_memory[name], exact, name)
    assert untouched > 0
    config = json.loads((result.out / "config.json").read_text())
    assert "quantization_config" not in config
    exactly = merge(folder, tmp_path / "adapter", tmp_path / "float32", MergeOptions(from_4bit=True, dtype="float32")).out
    expected = answer(live, architecture)
    assert (answer(load(exactly, architecture, None), architecture) - expected).abs().max() < 2e-4 * expected.abs().max()


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("nf4-double", []),
        ("nf4", ["double_quant is False by the base's stored state, but the record beside the adapter says True"]),
        (
            "fp4",
            [
                "quant_type is fp4 by the base's stored state, but the record beside the adapter says nf4",
                "double_quant is False by the base's stored state, but the record beside the adapter says True",
            ],
        ),
        (
            "8bit",
            ["a 4-bit base (NF4, double quantization, block 64, from bfloat16; quantization_recipe.json), and base"],
        ),
    ],
)
def test_a_base_stored_in_another_way_than_recorded_is_said(case, said, stored, tmp_path):
    folder, plain, _ = stored(case, "llama")
    train(load(plain, "llama"), Kind({"target_modules": ["q_proj"]})).save_pretrained(tmp_path / "adapter")
    recipe = {"quant_type": "nf4", "double_quant": True, "block_size": 64, "quant_dtype": "bfloat16", "quantized_modules": ["x"]}
    record = {"format": "lora-merge/quantization-recipe", "version": 1, "recipe": recipe}
    (tmp_path / "adapter" / "quantization_recipe.json").write_text(json.dumps(record))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        merge(folder, tmp_path / "adapter", tmp_path / "out", MergeOptions(from_4bit=True))
    messages = [str(warning.message) for warning in caught]
    found = [message for message in messages if "the record beside" in message or "quantization_recipe.json" in message]
    assert len(found) == len(said)
    assert all(words in message for words, message in zip(said, found, strict=True))


def test_a_quantized_base_has_to_be_meant(stored, tmp_path):
    folder, plain, _ = stored("nf4-double", "llama")
    train(load(plain, "llama"), Kind({"target_modules": ["q_proj"]})).save_pretrained(tmp_path / "adapter")
    with pytest.raises(MergeError, match="--from-4bit"):
        merge(folder, tmp_path / "adapter", tmp_path / "out")


def test_the_stored_state_is_the_recipe(stored, tmp_path):
    """Nothing of it is assumed, and a flag that contradicts it is an error rather than ignored."""
    folder, plain, _ = stored("nf4-double", "llama")
    train(load(plain, "llama"), Kind({"target_modules": ["q_proj"]})).save_pretrained(tmp_path / "adapter")
    recipe = plan_merge(folder, tmp_path / "adapter", MergeOptions(from_4bit=True)).recipe
    assert recipe is not None and not recipe.assumed
    assert (recipe.quant_type, recipe.double_quant, recipe.block_size, recipe.quant_dtype) == ("nf4", True, 64, "bfloat16")
    plan_merge(folder, tmp_path / "adapter", MergeOptions(from_4bit=True, recipe={"quant_type": "nf4"}))
    for wrong in ({"quant_type": "fp4"}, {"double_quant": False}, {"quantized_modules": ("lm_head",)}):
        with pytest.raises(MergeError, match=next(iter(wrong))):
            plan_merge(folder, tmp_path / "adapter", MergeOptions(from_4bit=True, recipe=wrong))


@pytest.mark.parametrize("case", ["nf4", "8bit"])
def test_a_stored_conv1d_is_refused(case, stored, tmp_path):
    """bitsandbytes stores it as a linear layer, which the class does not load: a square one would be merged turned."""
    folder, plain, _ = stored(case, "gpt2")
    train(load(plain, "gpt2"), Kind({"target_modules": ["attn.c_proj"]})).save_pretrained(tmp_path / "adapter")
    with pytest.raises(MergeError, match="Conv1D"):
        merge(folder, tmp_path / "adapter", tmp_path / "out", MergeOptions(from_4bit=True))


@pytest.mark.parametrize("settings", [{"target_modules": ["q_proj", "embed_tokens"]}, {"target_modules": ["q_proj", "lm_head"]}])
def test_a_stored_base_is_untied(settings, stored, tmp_path):
    folder, plain, values = stored("nf4-double", "gemma3")
    live = train(live_on(values, plain, "gemma3"), Kind(settings))
    live.save_pretrained(tmp_path / "adapter")
    expected = answer(live, "gemma3")
    out = merge(folder, tmp_path / "adapter", tmp_path / "out", MergeOptions(from_4bit=True, dtype="float32")).out
    assert (answer(load(out, "gemma3", None), "gemma3") - expected).abs().max() < 2e-4 * expected.abs().max()


@pytest.mark.parametrize("part", ["absmax", "nested_absmax", "nested_quant_map", "quant_map"])
def test_damaged_states_are_refused(part, stored, tmp_path):
    folder, plain, _ = stored("nf4-double", "llama")
    train(load(plain, "llama"), Kind({"target_modules": ["q_proj"]})).save_pretrained(tmp_path / "adapter")
    broken = tmp_path / "base"
    shutil.copytree(folder, broken)
    tensors = load_file(broken / "model.safetensors")
    name = f"model.layers.0.mlp.up_proj.weight.{part}"
    tensors[name] = tensors[name] * 0 if part == "quant_map" else tensors[name][:-1]
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(MergeError, match=r"layers\.0\.mlp\.up_proj"):
        merge(broken, tmp_path / "adapter", tmp_path / "out", MergeOptions(from_4bit=True))
    if part != "quant_map":
        del tensors[name]
        save_file(tensors, broken / "model.safetensors", {"format": "pt"})
        with pytest.raises(MergeError, match=r"layers\.0\.mlp\.up_proj.*missing"):
            merge(broken, tmp_path / "adapter", tmp_path / "out", MergeOptions(from_4bit=True))
    assert not (tmp_path / "out").exists()


def test_other_quantizations_are_refused(stored, tmp_path):
    _, plain, _ = stored("nf4", "llama")
    train(load(plain, "llama"), Kind({"target_modules": ["q_proj"]})).save_pretrained(tmp_path / "adapter")
    shutil.copytree(plain, tmp_path / "base")
    file = tmp_path / "base" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": {"quant_method": "gptq", "bits": 4}}))
    for options in (MergeOptions(), MergeOptions(from_4bit=True)):
        with pytest.raises(MergeError, match="gptq"):
            merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", options)
