"""What a checkpoint's small files tell. Oracle: the configurations of transformers' own classes."""

from __future__ import annotations

import json

import pytest
from transformers import Gemma2Config, Gemma3Config, Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen2Config

from lora_merge.engines.model_files import sliding_window


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
