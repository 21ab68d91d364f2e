"""Writing with Transformers. Oracle: ``model.generate`` in float32, one prompt at a time, every sampling field off."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig, LlamaForCausalLM

from lora_merge.engines.errors import EngineError
from lora_merge.engines.greedy import TokenCounts
from lora_merge.engines.prompts import Prompt
from lora_merge.engines.protocol import GenerationLimits
from lora_merge.engines.transformers_engine import TransformersEngine
from tests.engines.builders import make_model, make_tokenizer

LENGTH = 20


def oracle(model, prompt, stop_ids, length=LENGTH):
    ids = torch.tensor([prompt.token_ids])
    config = GenerationConfig(
        do_sample=False, max_new_tokens=length, eos_token_id=list(stop_ids), pad_token_id=0, repetition_penalty=1.0
    )
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return tuple(output[0, ids.shape[1] :].tolist())


@pytest.fixture(scope="module")
def stops(model, prompts):
    """Ids that end some of the texts early, at different places, and leave others to run to the limit."""
    texts = [oracle(model, prompt, [1]) for prompt in prompts]
    counts: dict[int, int] = {}
    for text in texts:
        for token in set(text[3:]):
            counts[token] = counts.get(token, 0) + 1
    chosen = tuple(sorted(counts, key=lambda token: (abs(counts[token] - 6), token))[:2])
    reasons = [bool(set(text) & set(chosen)) for text in texts]
    assert 0 < sum(reasons) < len(texts)
    return chosen


@pytest.mark.parametrize("share_prefix", [False, True])
@pytest.mark.parametrize("batch", [1, 7, 128])
def test_texts_are_those_of_generate(model, prompts, tokenizer, stops, share_prefix, batch):
    engine = TransformersEngine.from_model(model, tokenizer, write_batch_size=batch, share_prefix=share_prefix)
    steps = []
    completions = engine.generate(prompts, GenerationLimits(LENGTH, stops), progress=steps.append)
    assert sum(steps) == len(prompts)
    for prompt, completion in zip(prompts, completions, strict=True):
        expected = oracle(model, prompt, [1, *stops])
        assert completion.id == prompt.id
        assert completion.token_ids == expected
        assert completion.finish_reason == ("stop" if expected[-1] in {1, *stops} else "length")


def test_the_counts_are_those_of_the_work(prompts, tokenizer):
    """Oracle: lengths counted by hand. One batch without sharing: every row is filled up to the longest prompt."""
    model = make_model("llama")
    engine = TransformersEngine.from_model(model, tokenizer)
    completions = engine.generate(prompts, GenerationLimits(8))
    lengths = [len(prompt.token_ids) for prompt in prompts]
    counts = engine.token_counts
    assert counts.prompt == sum(lengths)
    assert counts.padding == max(lengths) * len(lengths) - sum(lengths)
    assert counts.new == sum(len(completion.token_ids) - 1 for completion in completions)
    assert counts.waiting == 0 and counts.shared == 0


def test_rows_that_end_leave_and_those_that_wait_are_counted(model, prompts, tokenizer, stops):
    engine = TransformersEngine.from_model(model, tokenizer, share_prefix=False)
    completions = engine.generate(prompts, GenerationLimits(LENGTH, stops))
    counts = engine.token_counts
    assert counts.new == sum(len(completion.token_ids) - 1 for completion in completions)
    longest = max(len(completion.token_ids) for completion in completions) - 1
    without_leaving = longest * len(prompts) - counts.new
    assert counts.waiting <= 0.125 * (counts.new + counts.waiting) < without_leaving


def test_the_shared_part_is_computed_once(prompts, tokenizer):
    from lora_merge.engines.batching import common_prefix_length

    shared = common_prefix_length(prompts)
    engine = TransformersEngine.from_model(make_model("llama"), tokenizer, write_batch_size=5, share_prefix=True)
    engine.generate(prompts, GenerationLimits(2))
    assert engine.token_counts.shared == shared
    assert engine.token_counts.prompt == sum(len(prompt.token_ids) - shared for prompt in prompts)


def test_a_wasted_share_is_padding_and_waiting_over_all():
    assert TokenCounts(prompt=4, shared=2, new=2, padding=1, waiting=1).wasted_share == 0.2
    assert TokenCounts().wasted_share == 0.0


def test_a_generation_config_is_not_applied(gemma_folder, prompts, tokenizer):
    """The checkpoint asks for repetition_penalty 1.7, which Transformers applies even when greedy."""
    engine = TransformersEngine.from_checkpoint(gemma_folder, device="cpu")
    model = make_model("gemma3")
    for prompt, completion in zip(prompts[:4], engine.generate(prompts[:4], GenerationLimits(LENGTH)), strict=True):
        assert completion.token_ids == oracle(model, prompt, [1, 106])


def test_of_equal_logits_the_first_wins(prompts, tokenizer):
    """Every logit is the same in a model whose last layer is zero, and in bfloat16 ties are common. Oracle: ``generate``."""
    model = make_model("llama", tie_word_embeddings=False).to(torch.bfloat16)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    (completion,) = TransformersEngine.from_model(model, tokenizer).generate(prompts[:1], GenerationLimits(3))
    assert completion.token_ids == oracle(model, prompts[0], [1], 3) == (0, 0, 0)


def test_the_fast_way_to_the_likeliest_token_is_argmax():
    """Oracle: argmax, on numbers cut off so that each row holds hundreds of equal largest ones."""
    logits = torch.randn(16, 50_000, generator=torch.Generator().manual_seed(5)).clamp(max=2).to(torch.bfloat16)
    assert int((logits == logits.amax(dim=-1, keepdim=True)).sum()) > 1600
    assert torch.equal(logits.max(dim=-1).indices, logits.argmax(dim=-1))


class Renamed(LlamaForCausalLM):
    """As transformers 5.24 and later have it: the cache is called ``cache``, on the way in and out."""

    def forward(self, input_ids, attention_mask=None, position_ids=None, cache=None, use_cache=None, logits_to_keep=0):
        given = {"attention_mask": attention_mask, "position_ids": position_ids, "use_cache": use_cache}
        name = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
        output = super().forward(input_ids, logits_to_keep=logits_to_keep, **given, **{name: cache})
        return SimpleNamespace(logits=output.logits, cache=getattr(output, name))


@pytest.mark.parametrize("share_prefix", [False, True])
def test_a_cache_by_its_new_name(prompts, tokenizer, share_prefix):
    """Oracle: the same weights under the class's own names."""
    model = make_model("llama")
    renamed = Renamed(model.config)
    renamed.load_state_dict(model.state_dict())
    texts = [
        TransformersEngine.from_model(one, tokenizer, write_batch_size=7, share_prefix=share_prefix).generate(
            prompts, GenerationLimits(LENGTH)
        )
        for one in (model, renamed)
    ]
    assert texts[0] == texts[1]


def test_one_token_and_no_tokenizer(prompts, tokenizer):
    model = make_model("llama")
    completions = TransformersEngine.from_model(model, tokenizer).generate(prompts[:2], GenerationLimits(1))
    assert [len(completion.token_ids) for completion in completions] == [1, 1]
    with pytest.raises(EngineError, match="needs a tokenizer"):
        TransformersEngine.from_model(model).generate(prompts, GenerationLimits(1))
    with pytest.raises(EngineError, match="at least 1"):
        GenerationLimits(0)


def made_up(name, *ids):
    return Prompt(name, tuple(ids))


def test_one_long_prompt_neither_pads_the_short_ones_nor_takes_their_shared_beginning():
    """Oracle: ``generate``, and counts by hand. The long prompt outgrows the window of 64, so it shares with no other."""
    model = make_model("gemma3", sliding_window=64)
    beginning = tuple(range(20, 40))
    short = [made_up(f"short {row}", *beginning, *range(50 + row, 56 + row + row % 2)) for row in range(24)]
    long = made_up("long", *beginning, *(60 + index % 300 for index in range(180)))
    engine = TransformersEngine.from_model(model, make_tokenizer(), share_prefix=True)
    mixed = [*short[:10], long, *short[10:]]
    completions = engine.generate(mixed, GenerationLimits(4))
    assert [completion.id for completion in completions] == [prompt.id for prompt in mixed]
    for prompt, completion in zip(mixed, completions, strict=True):
        assert completion.token_ids == oracle(model, prompt, [1], 4)
    counts = engine.token_counts
    assert counts.shared == 20
    assert counts.padding == 12
    assert counts.prompt == 12 * 6 + 12 * 7 + 180
