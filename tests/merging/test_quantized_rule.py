"""Which modules a 4-bit load quantizes, on classes whose last layer is tied, nested or of a kind of its own.

Oracle: the layers that bitsandbytes has replaced in a model which transformers itself loaded in 4 bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lora_merge.merging.architecture import Architecture
from lora_merge.merging.checkpoint import read_checkpoint
from lora_merge.merging.folders import ModelFolder
from lora_merge.merging.modules import quantized_tensors
from lora_merge.merging.quantization import QuantRecipe
from tests.merging.kinds import TEXT

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


def opt() -> Any:
    settings = {"vocab_size": 160, "hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.OPTForCausalLM(transformers.OPTConfig(**settings, max_position_embeddings=64, word_embed_proj_dim=64))


@pytest.mark.parametrize("make", [gemma4, gemma3n, opt])
def test_quantized_are_the_layers_that_a_4bit_load_quantizes(make: Any, tmp_path: Path) -> None:
    model = make().to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    live = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16, quantization_config=config)
    expected = {f"{name}.weight" for name, module in live.named_modules() if type(module).__name__ == "Linear4bit"}
    base = read_checkpoint(ModelFolder(tmp_path, str(tmp_path)))
    assert set(quantized_tensors(base, QuantRecipe(), Architecture(base))) == expected
    assert expected
