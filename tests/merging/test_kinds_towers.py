"""Adapters of one tower of a two-tower model, trained in the tower's own class. Oracle: PEFT's unmerged model."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

from lora_merge.merging.api import MergeOptions, merge, plan_merge
from lora_merge.merging.errors import MergeError
from tests.merging.oracle import load_folder

WIDTHS = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**WIDTHS, "vocab_size": 96, "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
VISION = {**WIDTHS, "image_size": 16, "patch_size": 8}
INPUTS = {
    "text": {"input_ids": torch.tensor([[0, 5, 17, 60, 2]])},
    "vision": {"pixel_values": torch.linspace(-1, 1, 3 * 16 * 16).reshape(1, 3, 16, 16)},
}


@pytest.fixture(scope="module", params=["Siglip", "CLIP"])
def family(request, tmp_path_factory):
    """The beginning of the classes' names, and a base with both towers, of equal shapes."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp(request.param)
    config = getattr(transformers, f"{request.param}Config")(text_config=TEXT, vision_config=VISION)
    getattr(transformers, f"{request.param}Model")(config).save_pretrained(folder)
    return request.param, folder


def trained(family, tower, out):
    """An adapter with random halves, and what its model answers."""
    name, base = family
    model = getattr(transformers, f"{name}{tower.capitalize()}Model").from_pretrained(base)
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "fc1"]))
    for key, parameter in model.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(out)
    return model.eval()(**INPUTS[tower]).last_hidden_state


@pytest.mark.parametrize("tower", ["text", "vision"])
def test_a_tower_is_found_by_the_class_of_the_training(tower, family, tmp_path):
    expected = trained(family, tower, tmp_path / "adapter")
    merged = merge(family[1], tmp_path / "adapter", tmp_path / "merged", MergeOptions(dtype="float32")).out
    model = getattr(transformers, f"{family[0]}{tower.capitalize()}Model").from_pretrained(merged).eval()
    torch.testing.assert_close(model(**INPUTS[tower]).last_hidden_state, expected, rtol=0, atol=1e-4)
    before, after = load_folder(family[1]), load_folder(merged)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all(name.startswith(f"{tower}_model.") for name in changed)


@pytest.mark.parametrize("tower", ["text", "vision"])
def test_a_recorded_recipe_names_the_layers_of_the_tower(tower, family, tmp_path):
    """As the live model of the tower alone calls them."""
    trained(family, tower, tmp_path / "adapter")
    modules = [f"encoder.layers.{layer}.self_attn.{name}" for layer in range(2) for name in ("q_proj", "k_proj", "v_proj")]
    recipe = {"quant_type": "nf4", "double_quant": False, "block_size": 64, "quant_dtype": "bfloat16"}
    record = {"format": "lora-merge/quantization-recipe", "version": 1, "recipe": {**recipe, "quantized_modules": modules}}
    (tmp_path / "adapter" / "quantization_recipe.json").write_text(json.dumps(record))
    plan = plan_merge(family[1], tmp_path / "adapter", MergeOptions(from_4bit=True))
    trips = {
        tensor.name
        for tensor in plan.tensors
        if tensor.operations and tensor.operations[0].to_json()["operation"] == "round trip"
    }
    assert trips == {f"{tower}_model.{module}.weight" for module in modules}


@pytest.mark.parametrize("mapping", [None, {"base_model_class": "TheirModel"}, {"base_model_class": None}, 5])
def test_a_tower_that_nothing_tells_is_refused(mapping, family, tmp_path):
    """Both have tensors of that name and shape."""
    trained(family, "vision", tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_mapping": mapping}))
    expected = r"it could be text_model\.encoder\..* or vision_model\.encoder\."
    with pytest.raises(MergeError, match=expected):
        merge(family[1], tmp_path / "adapter", tmp_path / "merged")
