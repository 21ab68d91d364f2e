"""Adapters of classifiers, whose ``modules_to_save`` PEFT fills with the heads of every architecture. Oracle: the live model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from lora_merge.merging.api import merge
from lora_merge.merging.errors import MergeError
from tests.merging.kinds import TEXT, TOKENS, Kind, train
from tests.merging.live import assert_merge_is_live, save_class

BERT = transformers.BertConfig(
    vocab_size=160, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, num_labels=3
)
LLAMA = transformers.LlamaConfig(**TEXT, num_labels=3)
CASES = {
    "llama-sequences": (transformers.LlamaForSequenceClassification, LLAMA, "SEQ_CLS", "q_proj"),
    "llama-tokens": (transformers.LlamaForTokenClassification, LLAMA, "TOKEN_CLS", "q_proj"),
    "bert-sequences": (transformers.BertForSequenceClassification, BERT, "SEQ_CLS", "query"),
    "bert-tokens": (transformers.BertForTokenClassification, BERT, "TOKEN_CLS", "query"),
}


def made(case: str, folder: Path) -> tuple[Path, Path, Any, Any]:
    chosen, config, task, target = CASES[case]
    base = save_class(folder / "base", chosen(config))
    live = train(chosen.from_pretrained(base, dtype=torch.float32), Kind({"target_modules": [target], "task_type": task}))
    live.save_pretrained(folder / "adapter")
    return base, folder / "adapter", live, chosen


def without(adapter: Path, part: str) -> None:
    """Take the tensors that have ``part`` in their name out of the adapter."""
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    kept = {name: tensor for name, tensor in tensors.items() if part not in name}
    assert len(kept) < len(tensors)
    save_file(kept, file)


def named(adapter: Path, names: list[str]) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "modules_to_save": names}))


@pytest.mark.parametrize("case", CASES)
def test_classifiers(case, tmp_path):
    base, adapter, live, chosen = made(case, tmp_path)
    assert json.loads((adapter / "adapter_config.json").read_text())["modules_to_save"] == ["classifier", "score"]
    assert_merge_is_live(base, adapter, live, chosen, tmp_path / "out")


@pytest.mark.parametrize(("case", "head"), [("llama-sequences", "score"), ("bert-tokens", "classifier")])
def test_a_head_that_the_base_has_and_the_adapter_lost(case, head, tmp_path):
    base, adapter, _, _ = made(case, tmp_path)
    without(adapter, head)
    named(adapter, [head])
    with pytest.raises(MergeError, match=rf"modules_to_save names '{head}'.*incomplete"):
        merge(base, adapter, tmp_path / "out")
    named(adapter, ["classifier", "score"])
    with pytest.raises(MergeError, match=r"modules_to_save names .*incomplete"):
        merge(base, adapter, tmp_path / "out")


def test_a_classifier_whose_head_has_another_name(tmp_path):
    """BART calls it ``classification_head``, so that PEFT trains no head; the base's stays."""
    config = transformers.BartConfig(
        vocab_size=160, d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=128, decoder_ffn_dim=128, max_position_embeddings=64, num_labels=3, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    chosen = transformers.BartForSequenceClassification
    base = save_class(tmp_path / "base", chosen(config))
    live = train(
        chosen.from_pretrained(base, dtype=torch.float32), Kind({"target_modules": ["q_proj"], "task_type": "SEQ_CLS"}, scale=0.3)
    )
    live.save_pretrained(tmp_path / "adapter")
    ids = TOKENS + 3
    ids[:, -1] = config.eos_token_id
    assert_merge_is_live(base, tmp_path / "adapter", live, chosen, tmp_path / "out", {"input_ids": ids})


def test_the_tied_head_is_a_module_of_the_class(tmp_path):
    """No tensor of the base is called like a tied head; its class still has it, and so the adapter must."""
    config = transformers.Gemma3TextConfig(**TEXT, head_dim=16, sliding_window=16, tie_word_embeddings=True)
    base = save_class(tmp_path / "base", transformers.Gemma3ForCausalLM(config))
    live = transformers.Gemma3ForCausalLM.from_pretrained(base, dtype=torch.float32)
    train(live, Kind({"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]})).save_pretrained(
        tmp_path / "adapter"
    )
    without(tmp_path / "adapter", "lm_head")
    with pytest.raises(MergeError, match=r"modules_to_save names 'lm_head'.*incomplete"):
        merge(base, tmp_path / "adapter", tmp_path / "out")


def test_a_head_on_a_base_without_one(tmp_path):
    """Trained from a causal model's checkpoint: refused with a way out, which the second half goes."""
    causal = save_class(tmp_path / "causal", transformers.LlamaForCausalLM(LLAMA))
    classifier = transformers.AutoModelForSequenceClassification
    torch.manual_seed(5)
    live = classifier.from_pretrained(causal, num_labels=3, dtype=torch.float32)
    train(live, Kind({"target_modules": ["q_proj"], "task_type": "SEQ_CLS"})).save_pretrained(tmp_path / "adapter")
    with pytest.raises(MergeError, match=r"score\.weight.*AutoModelForSequenceClassification .*save_pretrained"):
        merge(causal, tmp_path / "adapter", tmp_path / "out")
    torch.manual_seed(6)
    classifier.from_pretrained(causal, num_labels=3).save_pretrained(tmp_path / "headed")
    assert_merge_is_live(tmp_path / "headed", tmp_path / "adapter", live, classifier, tmp_path / "out")


def test_a_saved_module_that_is_missing_in_one_layer(tmp_path):
    base, adapter, _, _ = made("llama-sequences", tmp_path)
    live = transformers.LlamaForSequenceClassification.from_pretrained(base, dtype=torch.float32)
    kind = Kind({"target_modules": ["q_proj"], "modules_to_save": ["input_layernorm"], "task_type": "SEQ_CLS"})
    adapter = tmp_path / "norms"
    train(live, kind).save_pretrained(adapter)
    merge(base, adapter, tmp_path / "whole")
    without(adapter, "layers.1.input_layernorm")
    with pytest.raises(MergeError, match=r"model\.layers\.1\.input_layernorm.*modules_to_save.*incomplete"):
        merge(base, adapter, tmp_path / "out")
