"""A real QLoRA run in a few seconds: a tiny random Llama, quantized by bitsandbytes on the CPU, and an adapter trained on it.

The decision depends on the first word of the prompt, with a probability of its own for each word, so that the skip probability
takes every value and small changes of the weights show.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from lora_merge.merging.recipes import record_recipe
from tests.engines.builders import WORDS, make_model, make_tokenizer
from verification.reference import record_reference

PREFILL = '{"decision": "'
FORM = "{} and {} with {}"
STEPS = 200
PROMPTS = 400


def make_prompt_rows(count: int = PROMPTS, seed: int = 0, form: str = FORM) -> list[dict[str, Any]]:
    """Three words a prompt, put into ``form``; the first decides, and stands in a field of its own."""
    rng = random.Random(seed)
    rows = []
    for index in range(count):
        first, second, third = rng.choices(WORDS, k=3)
        expected = "skip" if _skip_share(first) > 0.5 else "write"
        rows.append({"id": f"p{index}", "prompt": form.format(first, second, third), "expected": expected, "first": first})
    return rows


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train(folder: Path) -> None:
    """Leave ``base``, ``adapter`` with its recorded recipe, ``prompts.jsonl`` and ``reference.jsonl`` in ``folder``."""
    leave(folder, *train_model(folder))


def leave(folder: Path, model: Any, tokenizer: Any, *, safetensors: bool = True) -> None:
    """``adapter`` in ``folder`` and what a training run leaves beside it."""
    model.save_pretrained(folder / "adapter", safe_serialization=safetensors)
    tokenizer.save_pretrained(folder / "adapter")
    record_recipe(model, folder / "adapter")
    record_reference(model, tokenizer, folder / "prompts.jsonl", folder / "reference.jsonl", adapter_dir=folder / "adapter")


def train_model(
    folder: Path,
    *,
    lora: Mapping[str, Any] | None = None,
    added: Sequence[str] = (),
    form: str = FORM,
    tied: bool = False,
    steps: int = STEPS,
) -> tuple[Any, Any]:
    """Leave ``base`` and ``prompts.jsonl`` in ``folder``; returns model and tokenizer at the end of training, in training mode.

    ``lora``: settings of the adapter other than the usual. ``added``: tokens that training adds to the vocabulary, whose base has
    as many rows as tokens then. ``form``: of the prompts.
    """
    rng, tokenizer, rows = random.Random(0), make_tokenizer(), make_prompt_rows(form=form)
    write_rows(folder / "prompts.jsonl", rows)
    rows_of_base = {"vocab_size": len(tokenizer)} if added else {}
    model = make_model("llama", num_hidden_layers=2, tie_word_embeddings=tied, **rows_of_base).to(torch.bfloat16)
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16
    )
    quantized = AutoModelForCausalLM.from_pretrained(
        folder / "base", quantization_config=quantization, dtype=torch.bfloat16, device_map={"": "cpu"}
    )
    if added:
        tokenizer.add_tokens(list(added))
        quantized.resize_token_embeddings(len(tokenizer))
    torch.manual_seed(0)
    usual = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    model = get_peft_model(quantized, LoraConfig(**{**usual, **(lora or {})})).train()
    optimizer = torch.optim.Adam([weight for weight in model.parameters() if weight.requires_grad], lr=5e-3)
    skip, write = (tokenizer(PREFILL + word, add_special_tokens=False)["input_ids"][-1] for word in ("skip", "write"))
    by_length: dict[int, list[tuple[list[int], float]]] = {}
    for row in rows:
        ids = [tokenizer.bos_token_id, *tokenizer(row["prompt"] + PREFILL, add_special_tokens=False)["input_ids"]]
        by_length.setdefault(len(ids), []).append((ids, _skip_share(row["first"])))
    for _ in range(steps):
        length = rng.choices(list(by_length), weights=[len(group) for group in by_length.values()])[0]
        batch = rng.sample(by_length[length], min(16, len(by_length[length])))
        wanted = torch.tensor([share for _, share in batch])
        log_p = model(input_ids=torch.tensor([ids for ids, _ in batch])).logits[:, -1].float().log_softmax(-1)
        loss = -(wanted * log_p[:, skip] + (1 - wanted) * log_p[:, write]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, tokenizer


def _skip_share(first: str) -> float:
    return (WORDS.index(first) + 0.5) / len(WORDS)
