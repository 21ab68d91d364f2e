"""What the example trains on and how the loss is taken.

Oracles: the tokenizer on whole texts, Transformers' own loss over unpadded sequences, and the schedule written out.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pairs
import pytest
import torch
import train_qlora
from answers import Example, collate, epoch_batches, make_examples
from peft import LoraConfig, get_peft_model
from transformers import Gemma3ForCausalLM, Gemma3TextConfig


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return pairs.rows("train")


def test_recommendations_are_20_to_50_tokens_and_varied(rows: list[dict[str, Any]], tokenizer: Any) -> None:
    texts = [json.loads(row["answer"])["text"] for row in rows if row["expected"] == "write"]
    lengths = [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    assert min(lengths) >= 20 and max(lengths) <= 50
    assert len(set(lengths)) >= 20
    assert len(set(texts)) == len(texts)


def test_prompts_with_prefill_are_60_to_90_tokens(rows: list[dict[str, Any]], tokenizer: Any) -> None:
    lengths = {len(example.prompt_ids) for example in make_examples(rows[:2_000], tokenizer)}
    assert min(lengths) >= 60 and max(lengths) <= 90


def test_an_example_is_the_tokenization_of_the_whole_text_and_eos(rows: list[dict[str, Any]], tokenizer: Any) -> None:
    for row, example in zip(rows[:500], make_examples(rows[:500], tokenizer), strict=True):
        whole = tokenizer(row["prompt"] + row["answer"])["input_ids"]
        assert list(example.prompt_ids + example.answer_ids) == [*whole, tokenizer.eos_token_id]
        assert tokenizer.decode(example.answer_ids[:1]) == row["expected"]


def test_an_answer_that_would_change_the_prompts_ids_is_refused(tokenizer: Any) -> None:
    row = {"id": "seam", "prompt": "x\n", "answer": pairs.PREFILL + '":{}"}'}
    with pytest.raises(ValueError, match="seam: the answer changes the token ids"):
        make_examples([row], tokenizer)


EXAMPLES = [
    Example((2, 5, 6, 7), (11, 12, 13, 1)),
    Example((2, 5, 9), (10, 1)),
    Example((2, 5, 6, 7, 8, 9), (11, 30, 31, 32, 33, 1)),
]


@pytest.fixture(scope="module")
def tiny() -> Any:
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        layer_types=["sliding_attention", "full_attention"],
    )
    model = get_peft_model(Gemma3ForCausalLM(config).float(), LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return model.eval()


def test_the_loss_is_that_of_each_example_alone_and_unpadded(tiny: Any) -> None:
    decision, text = [], []
    for example in EXAMPLES:
        ids = torch.tensor([[*example.prompt_ids, *example.answer_ids]])
        for place in range(len(example.prompt_ids), len(example)):
            labels = torch.full_like(ids, -100)
            labels[0, place] = ids[0, place]
            (decision if place == len(example.prompt_ids) else text).append(tiny(input_ids=ids, labels=labels).loss.item())
    found = train_qlora.batch_losses(tiny, collate(EXAMPLES, pad_id=0))
    expected = (math.fsum(decision) / len(decision), math.fsum(text) / len(text))
    assert [loss.item() for loss in found] == pytest.approx(expected, abs=1e-5)


def test_padding_moves_no_loss_whatever_it_holds(tiny: Any) -> None:
    zeros, ones = (train_qlora.batch_losses(tiny, collate(EXAMPLES, pad_id=pad)) for pad in (0, 63))
    assert torch.equal(torch.stack(zeros), torch.stack(ones))


def test_every_epoch_sees_each_example_once_in_another_order() -> None:
    examples = [Example((2,) * (1 + number % 7), (number, 1)) for number in range(96)]
    first, second = (list(epoch_batches(examples, 8, seed=1, epoch=epoch)) for epoch in (0, 1))
    for batches in (first, second):
        assert sorted(example.answer_ids[0] for batch in batches for example in batch) == list(range(96))
    assert first != second
    assert first == list(epoch_batches(examples, 8, seed=1, epoch=0))


def test_batches_mix_short_and_long_answers() -> None:
    """A batch of one decision only would teach the share of decisions in it, not the rule."""
    examples = [Example((2,) * (60 + number % 5), (11, *(30,) * (40 if number % 2 else 1))) for number in range(1_024)]
    shares = [
        sum(len(example.answer_ids) > 2 for example in batch) / 64 for batch in epoch_batches(examples, 64, seed=1, epoch=0)
    ]
    assert len(shares) == 16
    assert all(0.25 < share < 0.75 for share in shares)  # half, give or take four standard deviations of 1/16


def test_the_learning_rate_warms_up_and_falls_to_zero() -> None:
    settings = train_qlora.Settings(learning_rate=1.0, warmup_share=0.1)
    rates = [train_qlora.learning_rate_at(step, 100, settings) for step in range(100)]
    assert rates[0] == 0.1 and rates[9] == 1.0
    assert rates[55] == pytest.approx(0.5)
    assert rates[99] < 0.001
    assert rates[10:] == sorted(rates[10:], reverse=True)
