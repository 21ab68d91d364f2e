"""Fixtures of the engine tests; what they are made of is in builders.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lora_merge.engines.labels import resolve_labels
from lora_merge.engines.prompts import rows_from_mappings, tokenize
from tests.engines.builders import make_model, make_rows, make_tokenizer


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session", params=["llama", "qwen2", "gemma3"])
def model(request):
    return make_model(request.param)


@pytest.fixture(scope="session")
def prompts(tokenizer):
    return tokenize(rows_from_mappings(make_rows()), tokenizer)


@pytest.fixture(scope="session")
def labels(tokenizer, prompts):
    return resolve_labels(tokenizer, prompts)


@pytest.fixture(scope="session")
def gemma_folder(tmp_path_factory, tokenizer) -> Path:
    """A float32 Gemma 3 checkpoint on disk, tokenizer included."""
    folder = tmp_path_factory.mktemp("gemma3")
    model = make_model("gemma3")
    model.generation_config.repetition_penalty = 1.7
    model.generation_config.eos_token_id = [1, 106]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
