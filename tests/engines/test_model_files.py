"""What a checkpoint's small files tell. Oracle: the configurations of transformers' own classes."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
)

from lora_merge.engines.model_files import sliding_window, vocabulary_rows


@pytest.mark.parametrize(
    ("config", "window"),
    [
        (Gemma3TextConfig(sliding_window=512), 512),
        (Gemma3Config(text_config={"sliding_window": 1024}), 1024),
        (Gemma2Config(), 4096),
        (Qwen2Config(use_sliding_window=True, sliding_window=99, max_window_layers=3), 99),
        (Qwen2Config(), None),
        (MistralConfig(sliding_window=4096), None),  # all layers have it
        (LlamaConfig(), None),
    ],
)
@pytest.mark.parametrize("said", [True, False])
def test_the_window_of_models_with_layers_of_both_kinds(config, window, said, tmp_path):
    """Also where config.json leaves out which layers have one, as those of Gemma 2 and 3 did."""
    content = config.to_dict()
    for part in (content, content.get("text_config", {})):
        if not said:
            part.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert sliding_window(tmp_path) == window


def test_no_configuration_has_no_window(tmp_path):
    assert sliding_window(tmp_path) is None
    (tmp_path / "config.json").write_text('{"model_type": "nobody knows"}')
    assert sliding_window(tmp_path) is None


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 300}
MODELS = [
    LlamaConfig(**SMALL, intermediate_size=32, num_key_value_heads=1),
    Gemma3TextConfig(**SMALL, intermediate_size=32, num_key_value_heads=1, head_dim=16),
    GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=300),
    BloomConfig(hidden_size=32, n_layer=2, n_head=2, vocab_size=300),
    FalconConfig(**SMALL),
    GPTNeoXConfig(**SMALL, intermediate_size=32),
]


@pytest.mark.parametrize("config", MODELS, ids=lambda config: config.model_type)
@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_the_rows_of_a_vocabulary_are_those_of_the_embedding(config, shard, tmp_path):
    """Also where config.json has lost the number. Oracle: the model's own embedding."""
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path, max_shard_size=shard)
    rows = model.get_input_embeddings().weight.shape[0]
    assert vocabulary_rows(tmp_path) == rows == 300
    (tmp_path / "config.json").write_text("{}")
    assert vocabulary_rows(tmp_path) == rows


def test_the_rows_of_a_model_with_a_text_model_inside(tmp_path):
    text = {**SMALL, "intermediate_size": 32, "num_key_value_heads": 1, "head_dim": 16}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 28}
    model = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config={**vision, "patch_size": 14}))
    model.save_pretrained(tmp_path)
    assert vocabulary_rows(tmp_path) == model.get_input_embeddings().weight.shape[0] == 300


def test_without_one_embedding_the_configuration_says_how_many_rows(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 7, "text_config": {"vocab_size": 300}}))
    assert vocabulary_rows(tmp_path) == 300
    save_file(
        {"talker.embed_tokens.weight": torch.zeros(5, 2), "a.embed_tokens.weight": torch.zeros(9, 2)}, tmp_path / "m.safetensors"
    )
    assert vocabulary_rows(tmp_path) == 300
    (tmp_path / "m.safetensors").write_bytes(b"broken")
    assert vocabulary_rows(tmp_path) == 300
    (tmp_path / "config.json").write_text('{"vocab_size": 7}')
    assert vocabulary_rows(tmp_path) == 7
    (tmp_path / "config.json").write_text("{}")
    assert vocabulary_rows(tmp_path) is None
