"""Models whose cache is more than keys and values, or counts places otherwise.

Oracle: Transformers' forward over the whole text for each token of each prompt, float32.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
import transformers

from lora_merge.engines.errors import EngineError
from lora_merge.engines.labels import resolve_labels
from lora_merge.engines.plain_cache import has_plain_cache, turning_length
from lora_merge.engines.prompts import Prompt, rows_from_mappings, tokenize
from lora_merge.engines.protocol import GenerationLimits
from lora_merge.engines.transformers_engine import TransformersEngine
from tests.engines.builders import make_model, make_rows

SMALL = {
    "vocab_size": 420,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
LINEAR = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MIXED = {"layer_types": ["linear_attention", "full_attention"]}
ORIGINAL = 40
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [2.0 + place for place in range(8)],
    "rope_theta": 10000.0,
    "original_max_position_embeddings": ORIGINAL,
}
MODELS = {
    "Qwen3_5": {**LINEAR, **MIXED},
    "Lfm2": {"layer_types": ["conv", "full_attention"]},
    "GraniteMoeHybrid": {**MIXED, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "num_local_experts": 4},
    "FalconH1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8},
    "Mamba": {},
    "Phi3": {"max_position_embeddings": 512, "original_max_position_embeddings": ORIGINAL, "rope_parameters": LONGROPE},
    "GPTNeo": {"window_size": 32, "attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4},
    "Llama4": {"attention_chunk_size": 32, "num_local_experts": 2, "intermediate_size_mlp": 96, "head_dim": 16},
    "Llama": {},
}


def made(name: str) -> torch.nn.Module:
    config = getattr(transformers, {"Qwen3_5": "Qwen3_5TextConfig", "Llama4": "Llama4TextConfig"}.get(name, f"{name}Config"))
    common = {key: value for key, value in SMALL.items() if key not in MODELS[name]}
    if name == "GPTNeo":
        common = {key: value for key, value in common.items() if not key.startswith("num_")}
    torch.manual_seed(1)
    return getattr(transformers, f"{name}ForCausalLM")(config(**common, **MODELS[name])).eval()


def some_prompts() -> list[Prompt]:
    """Two lengths twice over, with a beginning in common; the longer ones grow past 40 tokens while they are written."""
    draw = random.Random(1)
    lengths = (9, 9, 15, 15, 9, 15)
    rows = [(2, *range(20, 40), *(draw.randrange(60, 400) for _ in range(length))) for length in lengths]
    return [Prompt(str(place), row) for place, row in enumerate(rows)]


def alone(model, prompt, tokens, stops=()):
    """Without a cache. Not generate: that of Phi-3 in transformers 5.19 loses the text where it lets go of the cache."""
    written = []
    while len(written) < tokens and not {*written[-1:]} & {1, *stops}:
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt.token_ids, *written]]), use_cache=False).logits
        written.append(int(logits[0, -1].argmax()))
    return tuple(written)


@pytest.mark.parametrize("name", MODELS)
def test_scores_and_texts_of_a_batch_are_those_of_one_by_one(name, tokenizer):
    model, prompts = made(name), some_prompts()
    labels = resolve_labels(tokenizer, tokenize(rows_from_mappings(make_rows(3)), tokenizer))
    engine = TransformersEngine.from_model(model, tokenizer, share_prefix=True)
    for prompt, score in zip(prompts, engine.score(prompts, labels), strict=True):
        logits = model(torch.tensor([prompt.token_ids])).logits[0, -1].detach()
        assert score.log_p_skip == pytest.approx(float(logits.log_softmax(-1)[labels.skip.token_id]), abs=1e-4)
    stops = tuple({alone(model, prompt, 4)[-1] for prompt in prompts[::2]})  # some rows end early and leave, or wait
    texts = engine.generate(prompts, GenerationLimits(12, stops))
    assert [text.token_ids for text in texts] == [alone(model, prompt, 12, stops) for prompt in prompts]
    assert len({len(text.token_ids) for text in texts}) > 1
    assert engine.describe()["settings"]["share_prefix"] == (name in ("Llama", "Phi3"))


def test_texts_that_do_not_reach_the_turn_share_batches_and_beginnings(tokenizer):
    model, prompts = made("Phi3"), some_prompts()
    engine = TransformersEngine.from_model(model, tokenizer, share_prefix=True)
    assert max(len(prompt.token_ids) for prompt in prompts) == ORIGINAL - 4
    texts = engine.generate(prompts, GenerationLimits(4))
    assert engine.token_counts.shared == 21 and engine.token_counts.padding > 0
    assert [text.token_ids for text in texts] == [alone(model, prompt, 4) for prompt in prompts]
    engine.generate(prompts, GenerationLimits(5))
    assert engine.token_counts.padding == 0


def test_a_text_that_grows_past_the_turn_is_started_again(tokenizer):
    """With its keys rotated as a longer text has them: without, texts differ."""
    model, prompts = made("Phi3"), some_prompts()
    engine = TransformersEngine.from_model(model, tokenizer)
    assert engine._live().turning_length == ORIGINAL + 1
    texts = [text.token_ids for text in engine.generate(prompts, GenerationLimits(12))]
    engine._live().turning_length = None
    assert texts != [text.token_ids for text in engine.generate(prompts, GenerationLimits(12))]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("OpenAIGPTLMHeadModel", transformers.OpenAIGPTConfig(vocab_size=420, n_embd=32, n_layer=2, n_head=2, n_positions=64)),
        (
            "RecurrentGemmaForCausalLM",
            transformers.RecurrentGemmaConfig(**{**SMALL, "num_key_value_heads": 1, "num_hidden_layers": 3, "lru_width": 64}),
        ),
    ],
)
def test_a_model_without_a_cache_is_scored_and_does_not_write(name, settings, tokenizer):
    torch.manual_seed(1)
    model, prompts = getattr(transformers, name)(settings).eval(), some_prompts()
    labels = resolve_labels(tokenizer, tokenize(rows_from_mappings(make_rows(3)), tokenizer))
    engine = TransformersEngine.from_model(model, tokenizer, share_prefix=True)
    for prompt, score in zip(prompts, engine.score(prompts, labels), strict=True):
        logits = model(torch.tensor([prompt.token_ids])).logits[0, -1].detach()
        assert score.log_p_skip == pytest.approx(float(logits.log_softmax(-1)[labels.skip.token_id]), abs=1e-4)
    with pytest.raises(EngineError, match=f"{name} gives back no cache .* write with vLLM"):
        engine.generate(prompts, GenerationLimits(4))


TAKES = {"position_ids": None, "past_key_values": None}


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma3"])
def test_usual_models_have_a_plain_cache(kind):
    assert has_plain_cache(make_model(kind).config, TAKES)
    assert turning_length(make_model(kind).config) is None


@pytest.mark.parametrize(
    ("said", "takes"),
    [
        ({"layer_types": ["full_attention", "linear_attention"]}, TAKES),
        ({"attention_chunk_size": 8192}, TAKES),
        ({"attention_window_size": 2048}, TAKES),
        ({"window_size": 256}, TAKES),
        ({"local_attention": 128}, TAKES),
        ({"type_vocab_size": 2}, TAKES),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, TAKES),
        ({"rope_scaling": {"type": "dynamic"}}, TAKES),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}, "sliding_attention": {"rope_type": "default"}}},
            TAKES,
        ),
        ({}, {"past_key_values": None}),
        ({}, {"position_ids": None, "cache_params": None}),
    ],
)
def test_what_is_unknown_is_not_plain(said, takes):
    assert not has_plain_cache(SimpleNamespace(**said), takes)
    assert has_plain_cache(SimpleNamespace(sliding_window=4096, max_window_layers=28, use_sliding_window=False), TAKES)
