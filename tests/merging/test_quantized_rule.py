"""Which modules a 4-bit load quantizes, on classes whose last layer is tied, nested or of a kind of its own.

Oracles: the layers that bitsandbytes has replaced in a model which transformers itself loaded in 4 bit; and the live model's
logits on their dequantized values.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lora_merge.merging.api import MergeOptions, merge
from lora_merge.merging.architecture import Architecture
from lora_merge.merging.checkpoint import read_checkpoint
from lora_merge.merging.folders import ModelFolder
from lora_merge.merging.modules import quantized_tensors
from lora_merge.merging.quantization import QuantRecipe
from tests.merging.kinds import TEXT, TOKENS, Kind, train
from tests.merging.live import logits, save_class
from tests.merging.test_kinds_quantized import SINGLE, dequantized
from tests.merging.test_ties import INPUTS, MODELS

VISION = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 14}


def gemma4() -> Any:
    text = {**TEXT, "head_dim": 16, "global_head_dim": 16, "hidden_size_per_layer_input": 64}
    text |= {"vocab_size_per_layer_input": 160, "layer_types": ["sliding_attention", "full_attention"]}
    vision = {**VISION, "num_key_value_heads": 2, "head_dim": 32, "global_head_dim": 32}
    return transformers.Gemma4ForConditionalGeneration(transformers.Gemma4Config(text_config=text, vision_config=vision))


def gemma3n() -> Any:
    text = {**TEXT, "head_dim": 16, "vocab_size_per_layer_input": 160, "hidden_size_per_layer_input": 64, "laurel_rank": 64}
    text |= {"altup_num_inputs": 3, "num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"]}
    text |= {"activation_sparsity_pattern": [0.0, 0.0], "intermediate_size": [128, 128]}
    return transformers.Gemma3nForCausalLM(transformers.Gemma3nTextConfig(**text))


def load_in_4bit(chosen: Any, folder: Path) -> Any:
    config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    return chosen.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=config)


@pytest.mark.parametrize("make", [gemma4, gemma3n, *MODELS.values()], ids=["gemma4", "gemma3n", *MODELS])
def test_quantized_are_the_layers_that_a_4bit_load_quantizes(make: Any, tmp_path: Path) -> None:
    model = make().to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    live = load_in_4bit(type(model), tmp_path)
    expected = {f"{name}.weight" for name, module in live.named_modules() if type(module).__name__ == "Linear4bit"}
    base = read_checkpoint(ModelFolder(tmp_path, str(tmp_path)))
    architecture = Architecture(base)
    in_files = {name if name in base.tensors else architecture.file_name(name) for name in expected}
    assert set(quantized_tensors(base, QuantRecipe(), architecture)) == in_files and len(in_files) == len(expected) > 0


@pytest.mark.parametrize(
    ("family", "targets"), [("opt", ["q_proj", "lm_head"]), ("zamba2", ["q_proj"]), ("gpt2-under-vit", ["attn.c_proj", "wte"])]
)
def test_tied_models_through_4bit(family: str, targets: list[str], tmp_path: Path) -> None:
    """A layer under a vision tower is turned before it is quantized, as GPT-2's own are; what is tied is not quantized."""
    model = MODELS[family]()
    base = save_class(tmp_path / "base", model)
    live = type(model).from_pretrained(base, dtype=torch.float32)
    turned = family == "gpt2-under-vit"
    with torch.no_grad():
        for name, values in dequantized(load_in_4bit(type(model), base)).items():
            live.get_parameter(name).copy_(values.float().T if turned and ".transformer.h." in name else values.float())
    live = train(live, Kind({"target_modules": targets}))
    live.save_pretrained(tmp_path / "adapter")
    if turned:
        # As the quantized model's own adapter says, whose layers are Linear4bit.
        file = tmp_path / "adapter" / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "fan_in_fan_out": False}))
    inputs = INPUTS.get(family, TOKENS)
    expected = logits(live, inputs)
    options = MergeOptions(from_4bit=True, recipe=SINGLE, dtype="float32")
    found = logits(type(model).from_pretrained(merge(base, tmp_path / "adapter", tmp_path / "out", options).out), inputs)
    assert (found - expected).abs().max() < 2e-4 * expected.abs().max()
