"""Models whose parts transformers calls otherwise than its files do, and headless models under headed ones. Oracle: the live
model."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from lora_merge.merging.api import MergeOptions, merge
from lora_merge.merging.architecture import Architecture
from lora_merge.merging.checkpoint import read_checkpoint
from lora_merge.merging.errors import MergeError
from lora_merge.merging.folders import ModelFolder
from lora_merge.merging.modules import quantized_tensors
from lora_merge.merging.names import NameMap
from lora_merge.merging.quantization import QuantRecipe
from lora_merge.merging.renames import ClassNames
from tests.merging.kinds import PIXELS, TEXT, TOKENS, Kind, train
from tests.merging.live import assert_merge_is_live, save_class
from tests.merging.oracle import load_folder

SIZE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
PATCHES = {"image_size": 28, "patch_size": 14, "num_labels": 5}
GRANITE = {"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False}


def _vit() -> Any:
    return transformers.ViTForImageClassification(transformers.ViTConfig(**SIZE, **PATCHES))


def _dinov2() -> Any:
    size = {name: value for name, value in SIZE.items() if name != "intermediate_size"}
    return transformers.Dinov2ForImageClassification(transformers.Dinov2Config(**size, **PATCHES))


def _neox() -> Any:
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(vocab_size=160, **SIZE, max_position_embeddings=64))


def _granite() -> Any:
    return transformers.GraniteMoeForCausalLM(transformers.GraniteMoeConfig(**TEXT, **GRANITE))


RENAMED = {
    "vit": (_vit, {"target_modules": ["q_proj", "fc1"]}, {"pixel_values": PIXELS}),
    "vit-saved": (
        _vit,
        {"target_modules": ["q_proj"], "modules_to_save": ["classifier", "layernorm_after"]},
        {"pixel_values": PIXELS},
    ),
    "dinov2": (_dinov2, {"target_modules": ["q_proj", "fc1"]}, {"pixel_values": PIXELS}),
    "neox-head": (_neox, {"target_modules": ["query_key_value", "lm_head"]}, TOKENS),
    "granite-experts": (
        _granite,
        {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
        TOKENS,
    ),
}


@pytest.mark.parametrize("case", RENAMED)
def test_adapters_with_the_names_of_the_class(case, tmp_path):
    make, settings, inputs = RENAMED[case]
    model = make()
    base = save_class(tmp_path / "base", model)
    live = train(type(model).from_pretrained(base, dtype=torch.float32), Kind(settings))
    live.save_pretrained(tmp_path / "adapter")
    out = assert_merge_is_live(base, tmp_path / "adapter", live, type(model), tmp_path / "out", inputs)
    assert load_folder(out).keys() == load_folder(base).keys(), "the base keeps its own names"


def test_an_adapter_with_the_names_of_the_files(tmp_path):
    """As transformers 4 trained it. Oracle: the same adapter under the class's names."""
    base = save_class(tmp_path / "base", _vit())
    live = transformers.ViTForImageClassification.from_pretrained(base, dtype=torch.float32)
    train(live, Kind({"target_modules": ["q_proj"]})).save_pretrained(tmp_path / "new")
    shutil.copytree(tmp_path / "new", tmp_path / "old")
    file = tmp_path / "old" / "adapter_model.safetensors"
    old = {
        name.replace("vit.layers.", "vit.encoder.layer.").replace("attention.q_proj", "attention.attention.query"): tensor
        for name, tensor in load_file(file).items()
    }
    assert not old.keys() & load_file(file).keys()
    save_file(old, file)
    config = tmp_path / "old" / "adapter_config.json"
    config.write_text(config.read_text().replace("q_proj", "query"))
    one, other = (load_folder(merge(base, tmp_path / name, tmp_path / f"out-{name}").out) for name in ("new", "old"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_renamed_module_that_is_missing_in_one_layer(tmp_path):
    base = save_class(tmp_path / "base", _vit())
    live = transformers.ViTForImageClassification.from_pretrained(base, dtype=torch.float32)
    train(live, Kind({"target_modules": ["q_proj"]})).save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if "layers.1." not in name}, file)
    with pytest.raises(MergeError, match=r"vit\.layers\.1\.attention\.q_proj.*incomplete"):
        merge(base, tmp_path / "adapter", tmp_path / "out")


BERT = transformers.BertConfig(vocab_size=160, **SIZE)


@pytest.mark.parametrize(
    ("stored", "trained"),
    [
        (transformers.BertModel, transformers.BertForMaskedLM),
        (transformers.BertForMaskedLM, transformers.BertModel),
        (transformers.BertForMaskedLM, transformers.BertForTokenClassification),
    ],
)
def test_headless_and_headed_classes(stored, trained, tmp_path):
    """The hidden states of the class that the base was saved with, under an adapter of another class."""
    base = save_class(tmp_path / "base", stored(BERT))
    live = train(trained.from_pretrained(base, dtype=torch.float32), Kind({"target_modules": ["query", "value"]}))
    live.save_pretrained(tmp_path / "adapter")
    out = merge(base, tmp_path / "adapter", tmp_path / "out", MergeOptions(dtype="float32")).out
    body = live.get_base_model()
    with torch.no_grad():
        expected = getattr(body, "bert", body)(TOKENS).last_hidden_state
        found, bare = (
            transformers.BertModel.from_pretrained(folder, dtype=torch.float32).eval()(TOKENS).last_hidden_state
            for folder in (out, base)
        )
    assert (found - expected).abs().max() < 2e-4 * expected.abs().max()
    assert (bare - expected).abs().max() > 1e-2 * expected.abs().max()


def test_quantized_layers_are_found_under_the_names_of_the_files(tmp_path):
    """Oracle: the 4-bit layers of a real 4-bit load."""
    folder = save_class(tmp_path / "base", _vit())
    base = read_checkpoint(ModelFolder(folder, "base"))
    found = quantized_tensors(base, QuantRecipe(), Architecture(base))
    config = transformers.BitsAndBytesConfig(load_in_4bit=True)
    loaded = transformers.ViTForImageClassification.from_pretrained(folder, quantization_config=config)
    layers = [name for name, module in loaded.named_modules() if type(module).__name__ == "Linear4bit"]
    assert len(found) == len(layers) > 11
    assert "vit.layers.1.attention.q_proj" in layers and "vit.encoder.layer.1.attention.attention.query.weight" in found


def test_a_tensor_that_the_class_converts_has_no_other_name(tmp_path):
    """Single experts become rows of one tensor: no renaming. And a class that cannot be built explains nothing."""
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**TEXT, num_local_experts=4, num_experts_per_tok=2))
    folder = ModelFolder(save_class(tmp_path / "base", model), "base")
    base = read_checkpoint(folder)
    names = ClassNames(Architecture(base))
    assert names.of("model.layers.0.block_sparse_moe.experts.0.w1.weight") is None
    assert names.of("model.layers.0.block_sparse_moe.gate.weight") == "model.layers.0.mlp.gate.weight"
    assert names.of("model.layers.7.self_attn.q_proj.weight") is None
    config = tmp_path / "base" / "config.json"
    config.write_text(config.read_text().replace('"mixtral"', '"no such model"'))
    broken = NameMap.of(base.tensors, ClassNames(Architecture(read_checkpoint(folder))))
    assert broken.find("norm_of_another.weight") is None
    assert broken.find("model.norm.weight") == "model.norm.weight"
