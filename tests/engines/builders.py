"""Tiny random models and a tokenizer of our own making, so that every test here runs offline."""

from __future__ import annotations

import random

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

WORDS = [
    "apple",
    "leek",
    "tofu",
    "kimchi",
    "rice",
    "soup",
    "stew",
    "pear",
    "salt",
    "plum",
    "mint",
    "corn",
    "crab",
    "squid",
    "egg",
    "beef",
]
INSTRUCTION = "Decide whether the pair needs a text and then write it in one short sentence. "
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<turn>{{ message['role'] }}\n{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>model\n{% endif %}"
)


def make_tokenizer(answers: tuple[str, ...] = ("skip", "write"), *, bos: bool = True, size: int = 420) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that knows ``answers`` as single tokens, with a BOS template or without any BOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<pad>", "<eos>", "<bos>"] if bos else ["<pad>", "<eos>"]
    corpus = [f'{{"decision": "{answer}"}}' for answer in answers] * 50 + [f"{INSTRUCTION}{word}" for word in WORDS] * 3
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=specials, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    names = {"pad_token": "<pad>", "eos_token": "<eos>"}
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
        names["bos_token"] = "<bos>"
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    if bos:
        fast.chat_template = TEMPLATE
    return fast


def make_model(kind: str, **changes: object) -> torch.nn.Module:
    """A random float32 model with grouped-query attention; Gemma 3 with two sliding layers out of three, window 12."""
    common = {
        "vocab_size": 420,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "tie_word_embeddings": True,
        **changes,
    }
    torch.manual_seed(11)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**common)).eval()
    if kind == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**common)).eval()
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    config = Gemma3TextConfig(**{"sliding_window": 12, **common}, head_dim=32, layer_types=layers, query_pre_attn_scalar=32)
    model = Gemma3ForCausalLM(config).eval()
    with torch.no_grad():  # scaled and tied, the embedding would repeat the last token for ever
        model.model.embed_tokens.weight.mul_(0.25)
    return model


def make_rows(count: int = 24, seed: int = 3) -> list[dict[str, object]]:
    """Prompts of one instruction and of varied length."""
    source = random.Random(seed)
    return [
        {"id": f"p{index}", "prompt": INSTRUCTION + " and ".join(source.choices(WORDS, k=source.randint(1, 5))), "dish": "soup"}
        for index in range(count)
    ]
