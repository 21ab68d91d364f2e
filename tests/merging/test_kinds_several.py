"""Several adapters in one merge: the exact sum of weighted deltas. Oracle: float64 arithmetic written out, and PEFT's live
model."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from lora_merge.merging.api import MergeOptions, merge
from lora_merge.merging.cli import main
from lora_merge.merging.errors import MergeError
from lora_merge.merging.manifest import read_manifest
from tests.merging.kinds import Kind, answer, load, save_base, train
from tests.merging.oracle import assert_rounded_once, load_folder, prefixed, scaling_of


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    root = tmp_path_factory.mktemp("several")
    base = save_base(root / "base", "llama")
    kinds = {
        "a": Kind({"target_modules": ["q_proj", "v_proj", "embed_tokens"]}),
        "b": Kind({"target_modules": ["q_proj", "up_proj"], "r": 3, "use_rslora": True}),
        "dora": Kind({"target_modules": ["q_proj"], "use_dora": True}),
        "saved": Kind({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
        "tokens": Kind({"target_modules": ["q_proj"], "trainable_token_indices": [1]}),
    }
    for seed, (name, kind) in enumerate(kinds.items()):
        train(load(base, "llama"), kind, seed).save_pretrained(root / name)
    return root


@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.7, 0.3), (1.0, -1.0)])
def test_weighted_sum(weights, three, tmp_path):
    result = merge(three / "base", [three / "a", three / "b"], tmp_path / "out", MergeOptions(weights=weights))
    before, after = load_folder(three / "base"), load_folder(result.out)
    for name, tensor in before.items():
        path, exact = name.removesuffix(".weight"), tensor.double().numpy()
        for adapter, weight in zip(("a", "b"), weights, strict=True):
            pieces, config = prefixed(three / adapter), json.loads((three / adapter / "adapter_config.json").read_text())
            if f"{path}.lora_A.weight" in pieces:
                delta = pieces[f"{path}.lora_B.weight"] @ pieces[f"{path}.lora_A.weight"]
                exact = exact + scaling_of(config, path) * weight * delta
            if f"{path}.lora_embedding_A" in pieces:
                exact = (
                    exact
                    + scaling_of(config, path)
                    * weight
                    * (pieces[f"{path}.lora_embedding_B"] @ pieces[f"{path}.lora_embedding_A"]).T
                )
        assert_rounded_once(after[name], exact, name, allowed=1e-4)
    manifest = read_manifest(result.out)
    assert manifest.weights == weights
    assert [artifact.path for artifact in manifest.adapters] == [str((three / name).resolve()) for name in ("a", "b")]


def test_logits_are_those_of_both_adapters_at_once(three, tmp_path):
    """Oracle: PEFT with both adapters active, each with its own weight."""
    from peft import PeftModel

    live = PeftModel.from_pretrained(load(three / "base", "llama"), three / "a", adapter_name="a")
    live.load_adapter(three / "b", adapter_name="b")
    live.base_model.set_adapter(["a", "b"])
    expected = answer(live.eval(), "llama")
    out = merge(three / "base", [three / "a", three / "b"], tmp_path / "out", MergeOptions(dtype="float32")).out
    assert (answer(load(out, "llama", None), "llama") - expected).abs().max() < 2e-4 * expected.abs().max()


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("first", [["q_proj", "lm_head"], ["embed_tokens", "lm_head"]])
def test_adapters_that_store_the_layer_under_them(first, architecture, tmp_path):
    """PEFT stores embedding and head beside their updates, though nothing has changed them. Oracle: both adapters active."""
    from peft import PeftModel

    base = save_base(tmp_path / "base", architecture)
    for name, targets in (("a", first), ("b", ["embed_tokens", "lm_head"])):
        train(load(base, architecture), Kind({"target_modules": targets}), ord(name)).save_pretrained(tmp_path / name)
    assert "lm_head.base_layer.weight" in prefixed(tmp_path / "b")
    live = PeftModel.from_pretrained(load(base, architecture), tmp_path / "a", adapter_name="a")
    live.load_adapter(tmp_path / "b", adapter_name="b")
    live.base_model.set_adapter(["a", "b"])
    expected = answer(live.eval(), architecture)
    for order in ("a", "b"), ("b", "a"):
        out = merge(base, [tmp_path / name for name in order], tmp_path / "-".join(order), MergeOptions(dtype="float32")).out
        found = answer(load(out, architecture, None), architecture)
        assert (found - expected).abs().max() < 2e-4 * expected.abs().max()


def test_adapters_on_layers_of_other_values_are_refused(tmp_path):
    """One of them was trained after the head had changed: the two have no sum."""
    base = save_base(tmp_path / "base", "llama")
    for name, factor in (("a", 1.0), ("b", 2.0)):
        kind = Kind(
            {"target_modules": ["embed_tokens", "lm_head"]}, before=lambda model, by=factor: model.lm_head.weight.data.mul_(by)
        )
        train(load(base, "llama"), kind).save_pretrained(tmp_path / name)
    with pytest.raises(MergeError, match=r"lm_head.*another tensor changes already"):
        merge(base, [tmp_path / "a", tmp_path / "b"], tmp_path / "out")


def test_from_the_command_line(three, tmp_path):
    adapters = [text for name in ("a", "b") for text in ("--adapter", str(three / name))]
    arguments = ["--base", str(three / "base"), *adapters, "--weights", "0.7,0.3", "--out", str(tmp_path / "out"), "--quiet"]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    assert read_manifest(tmp_path / "out").weights == (0.7, 0.3)
    plan = CliRunner().invoke(main, [*arguments[:-1], "--dry-run", "--format", "json"])
    assert [entry["weight"] for entry in json.loads(plan.stdout)["adapters"]] == [0.7, 0.3]
    broken = CliRunner().invoke(main, [*arguments[:7], "0.7;0.3", *arguments[8:]])
    assert broken.exit_code == 2 and "--weights" in broken.stderr


@pytest.mark.parametrize(("other", "named"), [("dora", "use_dora"), ("saved", "lm_head"), ("tokens", "trainable_tokens_delta")])
def test_what_does_not_add_up_is_refused(other, named, three, tmp_path):
    with pytest.raises(MergeError, match=named):
        merge(three / "base", [three / "a", three / other], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("weights", [(1.0,), (1.0, float("nan")), (1.0, 2.0, 3.0)])
def test_weights_fit_the_adapters(weights, three, tmp_path):
    with pytest.raises(MergeError, match="weights"):
        merge(three / "base", [three / "a", three / "b"], tmp_path / "out", MergeOptions(weights=weights))
