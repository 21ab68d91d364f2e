"""Attention of one new token behind a mask. Oracles: torch's own attention in float64, and Transformers with ``sdpa``.

On CUDA as well where there is a card.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from lora_merge.engines import grouped_attention, live_model
from lora_merge.engines.grouped_attention import grouped_steps, masked_step
from lora_merge.engines.protocol import GenerationLimits
from lora_merge.engines.transformers_engine import TransformersEngine
from tests.engines.builders import make_model

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (8, 4), (3, 3)])
@pytest.mark.parametrize("additive", [False, True])
def test_a_step_is_attention_over_what_the_mask_shows(device, dtype, heads, kv_heads, additive):
    """Oracle: float64, keys and values repeated for each query head, from the same rounded numbers."""
    rows, tokens, size = 5, 23, 16
    query = numbers(rows, heads, 1, size, seed=1).to(dtype)
    key, value = (numbers(rows, kv_heads, tokens, size, seed=seed).to(dtype) for seed in (2, 3))
    mask = torch.arange(tokens)[None, None, None] >= torch.tensor([0, 1, 7, 21, 22])[:, None, None, None]
    repeated = (part.double().repeat_interleave(heads // kv_heads, dim=1) for part in (key, value))
    expected = torch.nn.functional.scaled_dot_product_attention(query.double(), *repeated, attn_mask=mask, scale=0.7)
    if additive:
        mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    found = masked_step(*(part.to(device) for part in (query, key, value, mask)), 0.7)
    assert found.dtype == dtype
    torch.testing.assert_close(found.cpu().double(), expected, rtol=0, atol=TOLERANCE[dtype] * float(expected.abs().max()))


@pytest.fixture
def steps(monkeypatch):
    """The number of query heads of every step that was taken here."""
    seen = []

    def watched(query, *arguments):
        seen.append(query.shape[1])
        return masked_step(query, *arguments)

    monkeypatch.setattr(grouped_attention, "masked_step", watched)
    return seen


def wrapped(module, query, key, value, attention_mask, **settings):
    return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)


@pytest.fixture
def everywhere(monkeypatch):
    """The engine takes it on every device, as it does on CUDA."""

    @contextlib.contextmanager
    def with_steps(device):
        with grouped_steps():
            yield

    monkeypatch.setattr(live_model, "_attention_on", with_steps)


def engine_of(architecture, tokenizer, device, share_prefix=True):
    model = make_model(architecture).to(device)
    assert model.config._attn_implementation == "sdpa"
    return TransformersEngine.from_model(model, tokenizer, write_batch_size=7, share_prefix=share_prefix)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("share_prefix", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3"])
def test_texts_and_scores_are_those_of_sdpa(
    steps, everywhere, prompts, labels, tokenizer, architecture, share_prefix, device, monkeypatch
):
    """Oracle: Transformers' ``sdpa`` on the same model, float32."""
    limits = GenerationLimits(20)
    engine = engine_of(architecture, tokenizer, device, share_prefix)
    texts = engine.generate(prompts, limits)
    taken = len(steps)
    scores = engine.score(prompts, labels)
    assert taken > 0 and len(steps) == taken  # scoring has no masks
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", wrapped)  # somebody's own, which stays
    assert texts == engine.generate(prompts, limits)
    assert scores == engine.score(prompts, labels)
    assert len(steps) == taken


@pytest.mark.parametrize("device", DEVICES)
def test_the_engine_takes_it_on_cuda_only(steps, prompts, tokenizer, device):
    engine_of("llama", tokenizer, device).generate(prompts, GenerationLimits(4))
    assert bool(steps) == (device == "cuda")


def test_transformers_own_is_back_afterwards_whatever_happens():
    with pytest.raises(ZeroDivisionError), grouped_steps():
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not sdpa_attention_forward
        raise ZeroDivisionError
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
    AttentionInterface.register("sdpa", wrapped)  # nothing hides what somebody registers later
    try:
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is wrapped
    finally:
        AttentionInterface.register("sdpa", sdpa_attention_forward)


@pytest.mark.parametrize(
    "more", [{"dropout": 0.5}, {"position_bias": torch.ones(5, 4, 1, 9)}, {"cache": type("PagedAttentionCache", (), {})()}]
)
def test_what_does_more_is_left_to_transformers(monkeypatch, more):
    """Oracle: what Transformers' own function was called with."""
    seen = []
    monkeypatch.setattr("transformers.integrations.sdpa_attention.sdpa_attention_forward", lambda *a, **k: seen.append((a, k)))
    monkeypatch.setattr(grouped_attention, "masked_step", None)
    parts = [torch.zeros(5, 4, 1, 8), torch.zeros(5, 2, 9, 8), torch.zeros(5, 2, 9, 8), torch.ones(5, 1, 1, 9, dtype=torch.bool)]
    grouped_attention._attention(torch.nn.Identity(), *parts, scaling=0.3, **more)
    assert seen[0][0][1:] == tuple(parts) and seen[0][1] == {"scaling": 0.3, **more}


@pytest.mark.parametrize("tokens, masked", [(2, True), (1, False)])
def test_so_is_what_is_no_masked_step(monkeypatch, tokens, masked):
    """Oracle: Transformers' own function."""
    monkeypatch.setattr(grouped_attention, "masked_step", None)
    query = numbers(3, 4, tokens, 8, seed=1).float()
    key, value = (numbers(3, 2, 9, 8, seed=seed).float() for seed in (2, 3))
    mask = torch.ones(3, 1, tokens, 9, dtype=torch.bool) if masked else None
    module = make_model("llama").model.layers[0].self_attn
    found, expected = (
        function(module, query, key, value, mask, scaling=0.3)[0]
        for function in (grouped_attention._attention, sdpa_attention_forward)
    )
    assert torch.equal(found, expected)
