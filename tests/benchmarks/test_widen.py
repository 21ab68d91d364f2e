"""A model put into the corner of a larger one: Transformers is the oracle, the logits are those of the small model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.tiny import VOCABULARY, save_tiny_base

GPU = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"


@pytest.fixture
def widening(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(GPU))
    import widen

    return widen


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A tiny Gemma 3 in float32 whose norms scale by something, with windows of 16 and a layer without."""
    kinds = ["sliding_attention", "full_attention"]
    folder = save_tiny_base(tmp_path / "small", "gemma3", torch.float32, num_hidden_layers=2, layer_types=kinds)
    tensors = load_file(folder / "model.safetensors")
    torch.manual_seed(7)
    scaled = {name: torch.randn(t.shape) if "norm" in name else t for name, t in tensors.items()}
    save_file(scaled, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def logits(folder: Path) -> torch.Tensor:
    torch.manual_seed(3)
    ids = torch.randint(3, VOCABULARY, (2, 40))
    with torch.inference_mode():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits


@pytest.mark.parametrize("sizes", [(256, 160, 5, 8, 4, 16), (1024, 128, 3, 8, 8, 16), (64, 192, 2, 4, 2, 16)])
def test_the_wide_model_gives_the_small_models_logits(widening, small, tmp_path, sizes):
    widening.widen(small, tmp_path / "wide", widening.Shape(*sizes))
    found, expected = logits(tmp_path / "wide"), logits(small)
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * float(expected.std()))
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "wide").config
    assert (config.hidden_size, config.num_hidden_layers) == (sizes[0], sizes[2])


@pytest.mark.parametrize(
    "sizes", [(128, 128, 2, 4, 2, 16), (256, 128, 1, 4, 2, 16), (256, 128, 2, 8, 2, 16), (256, 128, 2, 4, 2, 32)]
)
def test_a_shape_that_cannot_hold_the_model_is_refused(widening, small, tmp_path, sizes):
    with pytest.raises(ValueError, match="cannot hold"):
        widening.widen(small, tmp_path / "wide", widening.Shape(*sizes))
    assert not (tmp_path / "wide").exists()
