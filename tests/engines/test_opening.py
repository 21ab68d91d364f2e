"""Which engine opens."""

from __future__ import annotations

import pytest

from lora_merge.engines import opening
from lora_merge.engines.errors import EngineError
from lora_merge.engines.opening import open_engine
from lora_merge.engines.transformers_engine import TransformersEngine


def test_vllm_that_is_missing_is_an_error_that_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setattr(opening, "vllm_is_installed", lambda: False)
    with pytest.raises(EngineError, match=r"pip install 'lora-merge\[vllm\]'"):
        open_engine("vllm", tmp_path)


def test_auto_falls_back_to_transformers(monkeypatch, gemma_folder):
    monkeypatch.setattr(opening, "vllm_is_installed", lambda: False)
    engine = open_engine("auto", gemma_folder, device="cpu", hf_options={"batch_size": 4}, vllm_options={"max_model_len": 64})
    assert isinstance(engine, TransformersEngine) and engine.batch_size == 4


def test_auto_prefers_vllm(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(opening, "vllm_is_installed", lambda: True)
    monkeypatch.setattr("lora_merge.engines.vllm_engine.VllmEngine", lambda path, **options: asked.append((path, options)))
    open_engine("auto", tmp_path, dtype="bfloat16", vllm_options={"max_model_len": 64})
    assert asked == [(tmp_path, {"dtype": "bfloat16", "max_model_len": 64})]


def test_hf_is_taken_even_when_vllm_is_there(gemma_folder):
    assert isinstance(open_engine("hf", gemma_folder, device="cpu"), TransformersEngine)


def test_an_unknown_kind_is_an_error(tmp_path):
    with pytest.raises(EngineError, match="'tensorrt' is unknown"):
        open_engine("tensorrt", tmp_path)  # type: ignore[arg-type]
