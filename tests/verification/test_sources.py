"""Which base, adapter and recipe a reference has, and what speaks against them."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_merge.engines.loading import load_causal_model
from lora_merge.merging.api import MergeOptions, merge
from lora_merge.merging.errors import MergeError
from lora_merge.merging.folders import ModelFolder
from lora_merge.merging.model_names import commit_of, model_name, same_model, says_little
from lora_merge.merging.quantization import QuantRecipe
from lora_merge.merging.recipes import RECIPE_FILE, recipe_of
from tests.engines.builders import make_model
from verification.checks import Outcome
from verification.errors import Inconclusive
from verification.reference import Reference, read_reference
from verification.reference_file import write_reference
from verification.sources import SourceOptions, Sources, find_sources

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("google/gemma-3-270m", "gemma-3-270m"),
        ("gpt2", "gpt2"),
        ("/models/Gemma-3-270M/", "gemma-3-270m"),
        ("C:\\models\\Gemma-3-270M", "gemma-3-270m"),
        ("/cache/Qwen/Qwen2___5-7B-Instruct", "qwen2.5-7b-instruct"),
        (f"/root/.cache/hub/models--google--gemma-3-270m/snapshots/{COMMIT}", "gemma-3-270m"),
    ],
)
def test_the_name_of_a_model(source: str, name: str) -> None:
    assert model_name(source) == name


def test_names_that_can_be_one_model() -> None:
    assert same_model("google/gemma-3-270m", "models/gemma-3-270m")
    assert not same_model("google/gemma-3-270m", "google/gemma-3-270m-it")
    for quantized in ("unsloth/gemma-3-270m-bnb-4bit", "unsloth/gemma-3-270m-unsloth-bnb-4bit", "x/Gemma-3-270m-BNB-4bit"):
        assert same_model(quantized, "google/gemma-3-270m") and same_model("google/gemma-3-270m", quantized)
        assert not same_model(quantized, "google/gemma-3-270m-it")


@pytest.mark.parametrize(
    "name", ["base", "/data/model", "out/checkpoint-500", "./merged_model", "C:\\x\\Final", "v2", "llm-base"]
)
def test_names_that_say_little(name: str) -> None:
    assert says_little(name)


@pytest.mark.parametrize(
    "name",
    ["gpt2", "t5-base", "google/gemma-3-270m", "recommender-v2", "phi-2", f"/hub/models--org--base/snapshots/{COMMIT}"],
)
def test_names_that_say_something(name: str) -> None:
    assert not says_little(name)


def test_what_is_known_of_a_commit() -> None:
    assert commit_of("google/gemma-3-270m", COMMIT) == COMMIT
    assert commit_of("google/gemma-3-270m", "main") is None
    assert commit_of(f"/hub/models--google--gemma-3-270m/snapshots/{COMMIT}", None) == COMMIT


def findings(merged: Path, reference: Reference | None = None, **options: Any) -> dict[str, list[tuple[Outcome, str]]]:
    found: dict[str, list[tuple[Outcome, str]]] = {}
    for check in find_sources(merged, SourceOptions(**options), reference).findings:
        found.setdefault(check.name, []).append((check.outcome, check.detail))
    return found


def outcome(found: dict[str, list[tuple[Outcome, str]]], name: str) -> Outcome:
    assert len(found[name]) == 1
    return found[name][0][0]


def _edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture
def adapter(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained / "adapter", tmp_path / "adapter")
    return tmp_path / "adapter"


def test_everything_agrees_after_an_ordinary_merge(trained: Path) -> None:
    found = findings(trained / "merged")
    assert {checks[0][0] for checks in found.values()} == {Outcome.PASSED}
    assert set(found) == {"recipe-provenance", "base-weights", "base-identity", "base-files", "adapter-identity"}


def test_another_commit_of_the_base_is_inconclusive(trained: Path, adapter: Path, tmp_path: Path) -> None:
    hub = tmp_path / "models--org--base" / "snapshots" / COMMIT
    shutil.copytree(trained / "base", hub)
    _edit(adapter / "adapter_config.json", base_model_name_or_path="org/base", revision=COMMIT)
    merged = merge(hub, adapter, tmp_path / "merged", MergeOptions(from_4bit=True)).out
    assert outcome(findings(merged), "base-identity") is Outcome.PASSED
    _edit(adapter / "adapter_config.json", revision="f" * 40)
    assert "commit ffffffffffff of org/base, the base here is 0123456789ab" in findings(merged)["base-identity"][0][1]
    assert outcome(findings(merged, other_base_name=True), "base-identity") is Outcome.INCONCLUSIVE


def test_an_adapter_that_names_no_base_is_a_warning(trained: Path, adapter: Path) -> None:
    _edit(adapter / "adapter_config.json", base_model_name_or_path=None)
    merged = merge(trained / "base", adapter, adapter.parent / "merged", MergeOptions(from_4bit=True)).out
    assert outcome(findings(merged), "base-identity") is Outcome.PASSED  # by its weights
    _edit(adapter / RECIPE_FILE, base_sample=None)
    assert outcome(findings(merged), "base-identity") is Outcome.WARNED


@pytest.mark.parametrize("folder", ["base", "gemma-3-270m"])
def test_a_base_is_known_by_its_weights_before_its_name(folder: str, trained: Path, adapter: Path, tmp_path: Path) -> None:
    """Another model under the name of the training's, and the training's under another: names alone take each for the other."""
    here = tmp_path / "here"
    for name, factor in (("same", 1.0), (folder, 1.05)):
        shutil.copytree(trained / "base", here / name)
        tensors = load_file(here / name / "model.safetensors")
        noise = torch.Generator().manual_seed(0)
        for key, tensor in tensors.items():
            if key.endswith("proj.weight") and factor != 1:
                tensors[key] = tensor + 0.25 * tensor.std() * torch.randn(tensor.shape, generator=noise).to(tensor.dtype)
        save_file(tensors, here / name / "model.safetensors", metadata={"format": "pt"})
    _edit(adapter / "adapter_config.json", base_model_name_or_path=f"/elsewhere/{folder}")
    for name, weights, by_name in (
        ("same", Outcome.PASSED, Outcome.INCONCLUSIVE),
        (folder, Outcome.INCONCLUSIVE, Outcome.WARNED if folder == "base" else Outcome.PASSED),
    ):
        record = (adapter / RECIPE_FILE).read_bytes()
        merged = merge(here / name, adapter, tmp_path / f"merged-{name}", MergeOptions(from_4bit=True)).out
        found = findings(merged)
        assert outcome(found, "base-weights") is weights
        if weights is Outcome.PASSED:
            assert outcome(found, "base-identity") is Outcome.PASSED
        else:
            assert "other 4-bit weights in 14 of 14 layers by a sample" in found["base-weights"][0][1]
            assert found["base-weights"][0][1].endswith("was trained on another; merge again into that")
            shutil.copytree(here / name, here / "other", dirs_exist_ok=True)
            elsewhere = findings(merged, base=str(here / "other"), other_base_name=True)
            assert elsewhere["base-weights"][0][1].endswith("was trained on another; give that as --base")
        _edit(adapter / RECIPE_FILE, base_sample=None)
        found = findings(merged)
        assert "base-weights" not in found
        assert outcome(found, "base-identity") is by_name
        (adapter / RECIPE_FILE).write_bytes(record)


def test_a_reference_of_another_base_is_inconclusive(trained: Path) -> None:
    reference = read_reference(trained / "reference.jsonl")
    other = dataclasses.replace(reference, model={**reference.model, "name": "org/another"})
    assert [check[0] for check in findings(trained / "merged", other)["base-identity"]] == [Outcome.PASSED, Outcome.INCONCLUSIVE]


def test_a_reference_without_an_adapter_is_a_warning(trained: Path) -> None:
    reference = dataclasses.replace(read_reference(trained / "reference.jsonl"), adapter=None)
    found = findings(trained / "merged", reference)["adapter-identity"]
    assert (Outcome.WARNED, "the reference does not say which adapter it was recorded with") in found


def test_a_reference_of_another_recipe_contradicts_the_record(trained: Path) -> None:
    reference = read_reference(trained / "reference.jsonl")
    assert reference.recipe is not None
    other = dataclasses.replace(reference, recipe=dataclasses.replace(reference.recipe, double_quant=False))
    assert outcome(findings(trained / "merged", other), "recipe-agreement") is Outcome.INCONCLUSIVE


def test_a_merge_by_another_recipe_than_the_reference_is_a_warning(trained: Path, adapter: Path) -> None:
    (adapter / RECIPE_FILE).unlink()
    merged = merge(
        trained / "base", adapter, adapter.parent / "merged", MergeOptions(from_4bit=True, recipe={"quant_type": "fp4"})
    ).out
    found = findings(merged, read_reference(trained / "reference.jsonl"))
    assert outcome(found, "recipe-agreement") is Outcome.WARNED
    assert outcome(found, "recipe-provenance") is Outcome.PASSED


def test_a_merge_into_the_original_weights_is_a_warning_where_the_recipe_is_known(trained: Path) -> None:
    reference = read_reference(trained / "reference.jsonl")
    assert outcome(findings(trained / "naive"), "recipe-agreement") is Outcome.WARNED
    assert outcome(findings(trained / "naive", reference), "recipe-agreement") is Outcome.WARNED
    assert "recipe-agreement" not in findings(trained / "merged", reference)


def test_a_merge_into_the_original_weights_says_so_where_nobody_knows_how_the_adapter_was_trained(
    trained: Path, adapter: Path
) -> None:
    """An adapter that saw 4-bit weights is merged wrongly then, which the warning of an assumed recipe does not say."""
    _forget_the_training(adapter)
    ((found, detail),) = findings(trained / "naive", adapter=str(adapter))["recipe-agreement"]
    assert found is Outcome.WARNED
    assert detail == (
        "merged into the original weights, and nothing says how the adapter was trained: right only for an adapter that was not "
        "trained on a 4-bit base; if it was, merge again with --from-4bit"
    )
    by_hand = findings(trained / "naive", adapter=str(adapter), recipe={"quant_type": "nf4"})
    assert "but the adapter was trained through NF4" in by_hand["recipe-agreement"][0][1], "a part of a recipe is knowledge too"


def _forget_the_training(adapter: Path) -> None:
    (adapter / RECIPE_FILE).unlink()
    (adapter / "README.md").unlink(missing_ok=True)


@pytest.mark.parametrize("by_file", [True, False])
def test_a_setting_that_nobody_recorded_is_compared_as_the_merge_had_it(by_file: bool, trained: Path, adapter: Path) -> None:
    """A configuration of transformers names neither block size nor dtype: those are assumed, its FP4 is not.

    Oracle of the settings: the configuration that was given to the merge.
    """
    _forget_the_training(adapter)
    given = adapter.parent / "fp4.json"
    given.write_text(json.dumps({"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True}))
    options: dict[str, Any] = {"quant_config": given} if by_file else {"recipe": {"quant_type": "fp4"}}
    merged = merge(trained / "base", adapter, adapter.parent / "merged", MergeOptions(from_4bit=True, **options)).out
    sources = find_sources(merged, SourceOptions(), None)
    assert sources.recipe is not None
    assert (sources.recipe.quant_type, sources.recipe.double_quant, sources.recipe_origin) == ("fp4", True, "assumed")
    found = findings(merged)
    assert outcome(found, "recipe-provenance") is Outcome.WARNED
    assumed = "block_size, quant_dtype" if by_file else "double_quant, block_size, quant_dtype"
    assert f"is assumed in part ({assumed}); nothing recorded" in found["recipe-provenance"][0][1]
    assert "recipe-agreement" not in found
    by_hand = find_sources(merged, SourceOptions(recipe={"quant_type": "nf4"}), None).recipe
    assert by_hand is not None and by_hand.quant_type == "nf4", "what is said at verification comes first"


def _save_again(adapter: Path, **changes: Any) -> None:
    """The configuration with its keys and its modules in another order and without white space, and with ``changes``."""
    path = adapter / "adapter_config.json"
    config = {**json.loads(path.read_text()), **changes}
    config["target_modules"].reverse()
    path.write_text(json.dumps(dict(reversed(config.items())), separators=(",", ":")))


def test_an_adapter_that_was_only_saved_again_is_the_same(trained: Path, adapter: Path) -> None:
    reference = read_reference(trained / "reference.jsonl")
    before = (adapter / "adapter_config.json").read_bytes()
    _save_again(adapter)
    assert (adapter / "adapter_config.json").read_bytes() != before
    for known in (None, reference):
        assert outcome(findings(trained / "merged", known, adapter=str(adapter)), "adapter-identity") is Outcome.PASSED
    _save_again(adapter, lora_alpha=17)
    assert outcome(findings(trained / "merged", adapter=str(adapter)), "adapter-identity") is Outcome.INCONCLUSIVE


@pytest.mark.parametrize(
    "changes",
    [
        {"base_model_name_or_path": "org/base-uploaded", "revision": "main"},
        {"peft_version": "0.99.0", "a_setting_of_the_future": None, "another": False, "a_third": []},
        {"inference_mode": False},
    ],
)
def test_what_only_tells_of_an_adapter_does_not_make_it_another(changes: dict[str, Any], trained: Path, adapter: Path) -> None:
    """Nor does another arrangement of the same tensors in the file."""
    reference = read_reference(trained / "reference.jsonl")
    _edit(adapter / "adapter_config.json", **changes)
    path = adapter / "adapter_model.safetensors"
    save_file(dict(reversed(load_file(path).items())), path, metadata={"format": "pt", "by": "somebody else"})
    for known in (None, reference):
        assert outcome(findings(trained / "merged", known, adapter=str(adapter)), "adapter-identity") is Outcome.PASSED


@pytest.mark.parametrize("changes", [{"lora_alpha": 5}, {"use_rslora": True}, {"r": 9}, {"target_modules": ["q_proj"]}])
def test_what_makes_an_adapter_is_told_apart(changes: dict[str, Any], trained: Path, adapter: Path) -> None:
    _edit(adapter / "adapter_config.json", **changes)
    found = findings(trained / "merged", read_reference(trained / "reference.jsonl"), adapter=str(adapter))["adapter-identity"]
    assert found[0][0] is Outcome.INCONCLUSIVE
    assert "different adapters (by adapter_config.json)" in found[0][1]


def test_a_tensor_that_differs_is_told_apart(trained: Path, adapter: Path) -> None:
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    next(iter(tensors.values()))[0, 0] += 1
    save_file(tensors, path, metadata={"format": "pt"})
    found = findings(trained / "merged", adapter=str(adapter))["adapter-identity"]
    assert found[0][0] is Outcome.INCONCLUSIVE
    assert "different adapters (by adapter_model.safetensors)" in found[0][1]


def test_peft_saving_an_adapter_again_keeps_its_identity(trained: Path, tmp_path: Path) -> None:
    """In a process of its own, whose sets have another order."""
    script = f"""
import sys
from peft import PeftModel
from transformers import AutoModelForCausalLM
base = AutoModelForCausalLM.from_pretrained({str(trained / "base")!r})
PeftModel.from_pretrained(base, {str(trained / "adapter")!r}).save_pretrained(sys.argv[1])
"""
    configs = set()
    for seed in ("1", "2", "3"):
        saved = tmp_path / seed
        environment = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, "-c", script, saved], check=True, env=environment, capture_output=True)
        configs.add((saved / "adapter_config.json").read_bytes())
        assert outcome(findings(trained / "merged", adapter=str(saved)), "adapter-identity") is Outcome.PASSED
    assert len(configs) > 1, "the bytes do differ"


def test_what_was_recorded_before_there_was_an_identity_is_read_and_compared_by_its_bytes(
    trained: Path, adapter: Path, tmp_path: Path
) -> None:
    reference, merged = read_reference(trained / "reference.jsonl"), tmp_path / "merged"
    assert reference.adapter is not None
    older = dataclasses.replace(reference, adapter={name: reference.adapter[name] for name in ("files", "root")})
    write_reference(older, tmp_path / "older.jsonl")
    older = read_reference(tmp_path / "older.jsonl")
    shutil.copytree(trained / "merged", merged)
    manifest = json.loads((merged / "merge_manifest.json").read_text())
    del manifest["adapter"]["identity"]
    (merged / "merge_manifest.json").write_text(json.dumps(manifest))
    for found in (findings(merged, older), findings(trained / "merged", older), findings(merged, reference)):
        assert outcome(found, "adapter-identity") is Outcome.PASSED
    _save_again(adapter)
    assert outcome(findings(merged, adapter=str(adapter)), "adapter-identity") is Outcome.INCONCLUSIVE
    assert outcome(findings(trained / "merged", older, adapter=str(adapter)), "adapter-identity") is Outcome.INCONCLUSIVE


def test_a_recorded_reference_needs_neither_base_nor_adapter(trained: Path, adapter: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "base", tmp_path / "base")
    merged = merge(tmp_path / "base", adapter, tmp_path / "merged", MergeOptions(from_4bit=True)).out
    shutil.rmtree(tmp_path / "base")
    shutil.rmtree(adapter)
    sources = find_sources(merged, SourceOptions(), read_reference(trained / "reference.jsonl"))
    assert (sources.base, sources.adapter, sources.recipe_origin) == (None, None, "reference")
    assert {check.outcome for check in sources.findings} == {Outcome.PASSED}


@pytest.mark.parametrize("role", ["base", "adapter"])
def test_a_folder_that_only_has_the_name_is_not_there(role: str, trained: Path, adapter: Path, tmp_path: Path) -> None:
    """A recorded reference needs neither; for a live one the message says who named the folder and what to do."""
    shutil.copytree(trained / "base", tmp_path / "base")
    merged = merge(tmp_path / "base", adapter, tmp_path / "merged", MergeOptions(from_4bit=True)).out
    shutil.rmtree(tmp_path / role)
    (tmp_path / role).mkdir()
    assert getattr(find_sources(merged, SourceOptions(), read_reference(trained / "reference.jsonl")), role) is None
    with pytest.raises(Inconclusive, match=rf"where merge_manifest\.json says that it was; give --{role} where it lies now"):
        find_sources(merged, SourceOptions(), None)


def test_a_base_stored_in_another_way_than_the_record_says_is_inconclusive(trained: Path, adapter: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    def stored(name: str, **settings: Any) -> Path:
        config = BitsAndBytesConfig(**settings)
        model = AutoModelForCausalLM.from_pretrained(
            trained / "base", quantization_config=config, dtype=torch.bfloat16, device_map={"": "cpu"}
        )
        model.save_pretrained(tmp_path / name)
        for path in (trained / "base").glob("token*"):
            shutil.copy(path, tmp_path / name)
        return tmp_path / name

    right = stored("right", load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    wrong = stored("wrong", load_in_4bit=True, bnb_4bit_quant_type="fp4")
    eight = stored("eight", load_in_8bit=True)
    for base, said in ((right, None), (wrong, "the base is stored with fp4"), (eight, "the base is stored in 8 bit")):
        merged = merge(base, adapter, tmp_path / f"{base.name}-merged", MergeOptions(from_4bit=True)).out
        found = findings(merged, other_base_name=True)
        assert ("recipe-agreement" in found) == (said is not None)
        if said is not None:
            assert outcome(found, "recipe-agreement") is Outcome.INCONCLUSIVE
            assert said in found["recipe-agreement"][0][1]


def test_an_unsloth_adapter_without_a_record_is_of_the_base_that_is_stored(trained: Path, adapter: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    base = tmp_path / "base-unsloth-bnb-4bit"
    model = AutoModelForCausalLM.from_pretrained(
        trained / "base", quantization_config=config, dtype=torch.bfloat16, device_map={"": "cpu"}
    )
    model.save_pretrained(base)
    (adapter / RECIPE_FILE).unlink()
    _edit(adapter / "adapter_config.json", base_model_name_or_path="unsloth/base-unsloth-bnb-4bit")
    merged = merge(base, adapter, tmp_path / "merged", MergeOptions(from_4bit=True)).out
    found = findings(merged)
    assert outcome(found, "recipe-provenance") is Outcome.PASSED
    assert find_sources(merged, SourceOptions(), None).recipe_origin == "base"
    assert "recipe-agreement" not in findings(merged, read_reference(trained / "reference.jsonl"))


def test_leftovers_that_contradict_each_other_are_overruled(trained: Path, adapter: Path, tmp_path: Path) -> None:
    (adapter / RECIPE_FILE).unlink()
    (adapter / "one.yaml").write_text("base_model: x\nload_in_4bit: true\nadapter: qlora\n")
    (adapter / "other.yaml").write_text(
        "base_model: x\nload_in_4bit: true\nadapter: qlora\nbnb_config_kwargs:\n  bnb_4bit_quant_type: fp4\n"
    )
    flags = {"quant_type": "nf4", "double_quant": True, "block_size": 64, "quant_dtype": "bfloat16"}
    with pytest.raises(MergeError, match=r"one\.yaml"):
        merge(trained / "base", adapter, tmp_path / "refused", MergeOptions(from_4bit=True))
    merged = merge(trained / "base", adapter, tmp_path / "merged", MergeOptions(from_4bit=True, recipe=flags)).out
    assert find_sources(merged, SourceOptions(recipe=flags), None).recipe_origin == "flags"
    found = findings(merged, read_reference(trained / "reference.jsonl"))
    assert outcome(found, "recipe-provenance") is Outcome.PASSED
    with pytest.raises(MergeError, match=r"one\.yaml"):
        find_sources(merged, SourceOptions(), None)


def test_other_modules_left_out_than_those_recorded_are_another_recipe(trained: Path, adapter: Path, tmp_path: Path) -> None:
    """Where the record tells only what was left out."""
    record = json.loads((adapter / RECIPE_FILE).read_text())
    recipe = {**record["recipe"], "skip_modules": ["lm_head"], "quantized_modules": None}
    (adapter / RECIPE_FILE).write_text(json.dumps({**record, "recipe": recipe}))
    other = {**recipe, "skip_modules": ["down_proj", "gate_proj", "up_proj", "lm_head"]}
    (tmp_path / "other.json").write_text(json.dumps({**record, "recipe": other}))
    options = MergeOptions(from_4bit=True, quant_config=str(tmp_path / "other.json"))
    merged = merge(trained / "base", adapter, tmp_path / "merged", options).out
    found = findings(merged, quant_config=str(tmp_path / "other.json"))
    assert outcome(found, "recipe-agreement") is Outcome.INCONCLUSIVE
    assert "says skip_modules (1 names), at verification it is (4 names, down_proj among them)" in found["recipe-agreement"][0][1]
    assert "recipe-agreement" not in findings(merge(trained / "base", adapter, tmp_path / "b", MergeOptions(from_4bit=True)).out)


def test_a_recipe_given_beside_a_recorded_reference_says_the_same(trained: Path, tmp_path: Path) -> None:
    reference = read_reference(trained / "reference.jsonl")
    right = {"quant_type": "nf4", "double_quant": True}
    assert "recipe-agreement" not in findings(trained / "merged", reference, recipe=right)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": False}))
    for given, said in (
        ({"recipe": {"quant_type": "fp4"}}, "quant_type fp4 was given, the recorded reference has quant_type nf4"),
        ({"quant_config": str(config)}, "double_quant False was given, the recorded reference has double_quant True"),
    ):
        found = findings(trained / "merged", reference, **given)["recipe-agreement"]
        assert found[0][0] is Outcome.INCONCLUSIVE and said in found[0][1]
    with pytest.raises(MergeError, match=r"nowhere\.json"):
        findings(trained / "merged", reference, quant_config=str(tmp_path / "nowhere.json"))


def test_a_live_reference_is_of_one_adapter(trained: Path, adapter: Path, tmp_path: Path) -> None:
    for index, options in enumerate(({"weights": (0.5, 0.5)}, {"weights": (0.5,)})):
        adapters = [trained / "adapter", adapter][: len(options["weights"])]
        merged = merge(trained / "base", adapters, tmp_path / str(index), MergeOptions(from_4bit=True, **options)).out
        with pytest.raises(Inconclusive, match="record one with the adapters as they were"):
            find_sources(merged, SourceOptions(), None)
    found = findings(tmp_path / "0", read_reference(trained / "reference.jsonl"))
    assert outcome(found, "adapter-identity") is Outcome.WARNED


def test_the_reference_can_be_merged_anew(trained: Path, tmp_path: Path) -> None:
    """What --split measures against: the same function, in any dtype."""
    sources = find_sources(trained / "merged", SourceOptions(), None)
    assert sources.base is not None
    assert sources.adapter is not None
    options = sources.merge_options(dtype=None, trust_remote_code=False)
    again = merge(sources.base.path, sources.adapter.path, tmp_path / "again", options).out
    assert (again / "model.safetensors").read_bytes() == (trained / "merged" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("left_out", [(), ("up_proj", "gate_proj"), ("lm_head", "down_proj"), ("1.self_attn.q_proj",)])
def test_a_live_reference_quantizes_the_modules_that_the_record_names(left_out: tuple[str, ...], tmp_path: Path) -> None:
    """Whatever training left out, the head of an untied model or not. Oracle: the layers of the model that transformers loads."""
    model = make_model("llama", num_hidden_layers=2, tie_word_embeddings=False, vocab_size=384).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    linear = {name for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    named = {name for name in linear if not name.endswith(left_out)} if left_out else linear - {"lm_head"}
    recipe = QuantRecipe(quantized_modules=tuple(sorted(named)))
    base = ModelFolder(tmp_path, str(tmp_path))
    config = Sources(None, base, None, recipe, "given", False, ()).bnb_config()
    assert ("llm_int8_skip_modules" in config) == bool(left_out)
    loaded = load_causal_model(tmp_path, dtype="bfloat16", device=torch.device("cpu"), bnb_config=config, quantized=True)
    assert set(recipe_of(loaded).quantized_modules) == named
