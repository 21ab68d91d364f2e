"""Every kind of LoRA adapter on the architectures it occurs with.

Two oracles for each: PEFT's live, unmerged model in float32 on the same base, whose logits the reloaded merge must give; and
float64 arithmetic written out in ``oracle.adapted`` for the merged weights, rounded once to the base's bfloat16.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lora_merge.merging.api import MergeOptions, merge
from tests.merging.kinds import Kind, answer, load, save_base, train
from tests.merging.oracle import adapted, assert_rounded_once, assert_same_bits, load_folder, prefixed

ALL = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}
QV = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}

KINDS = {
    "plain": Kind(ALL),
    "rslora": Kind({**ALL, "use_rslora": True}),
    "patterns": Kind({**ALL, "rank_pattern": {r".*\.1\..*": 6}, "alpha_pattern": {r"layers\.0\..*": 11}}),
    "dora": Kind({**ALL, "use_dora": True}),
    "lora-bias": Kind({"target_modules": ["q_proj", "v_proj"], "lora_bias": True}),
    "bias-all": Kind({**QV, "bias": "all"}),
    "bias-lora-only": Kind({**QV, "bias": "lora_only"}),
    "embedding": Kind({"target_modules": ["q_proj", "embed_tokens"]}),
    "embedding-dora": Kind({"target_modules": ["q_proj", "embed_tokens"], "use_dora": True}),
    "head": Kind({"target_modules": ["q_proj", "lm_head"]}),
    "embedding-and-head": Kind({"target_modules": ["embed_tokens", "lm_head"]}),
    "saved-head": Kind({**QV, "modules_to_save": ["lm_head"]}),
    "saved-embedding": Kind({**QV, "modules_to_save": ["embed_tokens"]}),
    "saved-norms": Kind({**QV, "modules_to_save": ["norm", "input_layernorm"]}),
    "saved-layer": Kind({**QV, "modules_to_save": ["mlp"]}),
    "tokens": Kind({**QV, "trainable_token_indices": [7, 3, 150]}),
    "resized": Kind(QV, before=lambda model: model.resize_token_embeddings(170)),
    "resized-saved": Kind(
        {**QV, "modules_to_save": ["embed_tokens", "lm_head"]}, before=lambda model: model.resize_token_embeddings(170)
    ),
}
MATRIX = [
    *[(kind, "llama") for kind in KINDS if not kind.startswith(("lora-bias", "bias"))],
    *[
        (kind, "qwen2")
        for kind in ("plain", "dora", "lora-bias", "bias-all", "bias-lora-only", "embedding", "saved-head", "tokens")
    ],
    *[(kind, "gemma3") for kind in KINDS if not kind.startswith(("lora-bias", "bias"))],
    *[(kind, "phi3") for kind in ("plain", "rslora", "dora")],
    *[(kind, "gemma3_vlm") for kind in ("plain", "dora", "embedding", "saved-embedding", "tokens", "saved-norms")],
    ("phi3-tokens", "phi3"),
]
KINDS["phi3-tokens"] = Kind({"target_modules": ["qkv_proj"], "trainable_token_indices": {"embed_tokens": [4], "lm_head": [9, 5]}})


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """``folders(kind, architecture)`` -> base, adapter, the live PEFT model's answer and the bare base's."""
    root = tmp_path_factory.mktemp("kinds")
    made: dict[str, tuple] = {}

    def make(kind: str, architecture: str) -> tuple[Path, Path, torch.Tensor, torch.Tensor]:
        base = root / architecture
        if not base.exists():
            save_base(base, architecture)
        key = f"{kind}-{architecture}"
        if key not in made:
            bare = load(base, architecture)
            without = answer(bare, architecture)
            live = train(bare, KINDS[kind])
            live.save_pretrained(root / key)
            made[key] = (base, root / key, answer(live, architecture), without)
        return made[key]

    return make


@pytest.mark.parametrize(("kind", "architecture"), MATRIX)
def test_logits_are_the_unmerged_models(kind, architecture, folders, tmp_path):
    base, adapter, expected, without = folders(kind, architecture)
    out = merge(base, adapter, tmp_path / "out", MergeOptions(dtype="float32")).out
    found = answer(load(out, architecture, None), architecture)
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < 2e-4 * expected.abs().max()
    if without.shape == expected.shape:
        assert (without - expected).abs().max() > 1e-2, "the adapter must matter for this test to mean anything"


@pytest.mark.parametrize(("kind", "architecture"), [pair for pair in MATRIX if pair[1] != "gemma3_vlm"])
def test_weights_are_float64_arithmetic_rounded_once(kind, architecture, folders, tmp_path):
    base, adapter, _, _ = folders(kind, architecture)
    result = merge(base, adapter, tmp_path / "out")
    before, after, pieces = load_folder(base), load_folder(result.out), prefixed(adapter)
    config = json.loads((adapter / "adapter_config.json").read_text())
    tied = "lm_head.weight" not in before
    for name, tensor in after.items():
        module, _, parameter = name.rpartition(".")
        stored = next((key for key in (name, f"{module}.base_layer.{parameter}") if key in pieces), None)
        weight = before.get(name, before["model.embed_tokens.weight"]).double().numpy() if stored is None else pieces[stored]
        if stored is None and tied and name == "lm_head.weight" and "model.embed_tokens.base_layer.weight" in pieces:
            weight = pieces["model.embed_tokens.base_layer.weight"]
        if f"{module}.lora_B.bias" in pieces and parameter == "bias":
            weight = weight + config["lora_alpha"] / config["r"] * pieces[f"{module}.lora_B.bias"]
        if parameter == "weight" and any(key.startswith(f"{module}.lora_") for key in pieces):
            weight = adapted(weight, module, adapter)
        rows = pieces.get(f"{module}.token_adapter.trainable_tokens_delta")
        if rows is not None:
            indices = config["trainable_token_indices"]
            weight[indices if isinstance(indices, list) else indices[module.rpartition(".")[2]]] = rows
        assert_rounded_once(tensor, weight, name, allowed=1e-3 if config["use_dora"] else 0.0)


@pytest.mark.parametrize(
    ("kind", "untied"),
    [
        ("plain", False),
        ("tokens", False),
        ("resized", False),
        ("embedding", True),
        ("embedding-dora", True),
        ("head", True),
        ("saved-head", True),
        ("saved-embedding", True),
    ],
)
def test_a_tied_head_is_untied_exactly_when_it_has_to_be(kind, untied, folders, tmp_path):
    """PEFT's own merge adds an embedding's update to the shared tensor and so changes the head too, which was not trained."""
    base, adapter, _, _ = folders(kind, "gemma3")
    out = merge(base, adapter, tmp_path / "out").out
    assert ("lm_head.weight" in load_folder(out)) == untied
    config = json.loads((out / "config.json").read_text())
    assert config.get("tie_word_embeddings", True) is not untied


def test_peft_itself_gets_a_tied_embedding_wrong(folders):
    """The reason for untying: PEFT's merged model does not give its own unmerged logits."""
    base, adapter, expected, _ = folders("embedding", "gemma3")
    from peft import PeftModel

    merged = PeftModel.from_pretrained(load(base, "gemma3"), adapter).merge_and_unload()
    assert (answer(merged, "gemma3") - expected).abs().max() > 0.1


def test_ensure_weight_tying_keeps_one_tensor(tmp_path):
    base = save_base(tmp_path / "base", "gemma3")
    live = train(load(base, "gemma3"), Kind({"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True}))
    live.save_pretrained(tmp_path / "adapter")
    out = merge(base, tmp_path / "adapter", tmp_path / "out", MergeOptions(dtype="float32")).out
    assert "lm_head.weight" not in load_folder(out)
    expected = answer(live, "gemma3")
    assert (answer(load(out, "gemma3", None), "gemma3") - expected).abs().max() < 2e-4 * expected.abs().max()


def test_resized_vocabulary_is_in_the_configuration(folders, tmp_path):
    for architecture in ("llama", "gemma3"):
        base, adapter, _, _ = folders("resized", architecture)
        out = merge(base, adapter, tmp_path / architecture).out
        assert json.loads((out / "config.json").read_text())["vocab_size"] == 170
        assert load_folder(out)["model.embed_tokens.weight"].shape == (170, 64)


@pytest.mark.parametrize("form", ["modules_to_save", "modules_to_save.default"])
def test_older_keys_of_saved_modules(form, folders, tmp_path):
    from safetensors.torch import save_file

    base, adapter, _, _ = folders("saved-norms", "llama")
    older = tmp_path / "adapter"
    older.mkdir()
    (older / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    renamed = {name.replace("norm.weight", f"norm.{form}.weight"): tensor for name, tensor in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, older / "adapter_model.safetensors")
    after, expected = load_folder(merge(base, older, tmp_path / "a").out), load_folder(merge(base, adapter, tmp_path / "b").out)
    for name, tensor in expected.items():
        assert_same_bits(after[name], tensor, name)


def test_a_pickled_adapter_gives_the_same_merge(folders, tmp_path):
    """``adapter_model.bin`` written by torch.save, in bfloat16 and with a parameter in it."""
    base, adapter, _, _ = folders("dora", "llama")
    pickled = tmp_path / "adapter"
    pickled.mkdir()
    (pickled / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    first = next(iter(tensors))
    torch.save({**tensors, first: torch.nn.Parameter(tensors[first])}, pickled / "adapter_model.bin")
    one, other = merge(base, pickled, tmp_path / "a"), merge(base, adapter, tmp_path / "b")
    assert one.manifest.output["model.safetensors"] == other.manifest.output["model.safetensors"]
    assert set(one.manifest.adapter.files) == {"adapter_config.json", "adapter_model.bin"}


TIED = {
    "tokens-by-name": Kind({**QV, "trainable_token_indices": {"embed_tokens": [9, 2]}}),
    "saved-and-kept-tied": Kind({**QV, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    "resized-under-lora": Kind({"target_modules": ["embed_tokens"]}, before=lambda model: model.resize_token_embeddings(170)),
    "head-and-tokens": Kind({**QV, "trainable_token_indices": {"embed_tokens": [9], "lm_head": [4, 5]}}),
    "saved-both": Kind({**QV, "modules_to_save": ["embed_tokens", "lm_head"]}),
}


@pytest.mark.parametrize("kind", TIED)
@pytest.mark.parametrize("shard_size", [None, "60KB"])
def test_tied_bases_in_one_file_and_in_several(kind, shard_size, tmp_path):
    """The head gets its place in the embedding's file and in the index. Oracle: the live model."""
    base = save_base(tmp_path / "base", "gemma3", **({"max_shard_size": shard_size} if shard_size else {}))
    live = train(load(base, "gemma3"), TIED[kind])
    live.save_pretrained(tmp_path / "adapter")
    expected = answer(live, "gemma3")
    out = merge(base, tmp_path / "adapter", tmp_path / "out", MergeOptions(dtype="float32")).out
    assert (answer(load(out, "gemma3", None), "gemma3") - expected).abs().max() < 2e-4 * expected.abs().max()
    if shard_size:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == set(load_folder(out))
        assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in load_folder(out).values())
        manifest = merge(base, tmp_path / "adapter", tmp_path / "again").manifest
        import hashlib

        for name, digest in manifest.base.files.items():
            assert hashlib.sha256((base / name).read_bytes()).hexdigest() == digest, "hashed in passing, whatever was replaced"


def test_a_tied_base_that_stores_its_head_all_the_same(tmp_path):
    """A copy of the embedding as lm_head.weight: both follow, unless they differ already, which is an error."""
    from safetensors.torch import save_file

    from lora_merge.merging.errors import MergeError

    base = save_base(tmp_path / "base", "gemma3")
    live = train(load(base, "gemma3"), KINDS["tokens"])
    live.save_pretrained(tmp_path / "adapter")
    expected = answer(live, "gemma3")
    file = base / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file, {"format": "pt"})
    out = merge(base, tmp_path / "adapter", tmp_path / "out", MergeOptions(dtype="float32")).out
    after = load_folder(out)
    assert torch.equal(after["lm_head.weight"], after["model.embed_tokens.weight"])
    assert (answer(load(out, "gemma3", None), "gemma3") - expected).abs().max() < 2e-4 * expected.abs().max()
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, file, {"format": "pt"})
    with pytest.raises(MergeError, match="tie_word_embeddings"):
        merge(base, tmp_path / "adapter", tmp_path / "two")
