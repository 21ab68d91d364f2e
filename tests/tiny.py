"""Tiny random models and adapters, made offline in a second: the architectures the project is tested on.

Everything is real except the size: transformers builds and saves the models, PEFT builds and saves the adapters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

VOCABULARY = 160
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def tiny_config(architecture: str, **changes: Any) -> transformers.PretrainedConfig:
    """``llama`` (head of its own), ``qwen2`` (biases on q, k, v), ``gemma3`` (tied head, windows) or ``qwen3_moe`` (experts)."""
    settings = {**_COMMON, **changes}
    if architecture == "llama":
        return transformers.LlamaConfig(**settings, tie_word_embeddings=False)
    if architecture == "qwen2":
        return transformers.Qwen2Config(**settings, tie_word_embeddings=False)
    if architecture == "gemma3":
        return transformers.Gemma3TextConfig(**{"head_dim": 16, "sliding_window": 16, **settings}, tie_word_embeddings=True)
    if architecture == "qwen3_moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        return transformers.Qwen3MoeConfig(**{"head_dim": 16, **experts, **settings}, tie_word_embeddings=False)
    raise ValueError(architecture)


def save_tiny_base(
    folder: Path,
    architecture: str = "llama",
    dtype: torch.dtype = torch.bfloat16,
    shard_size: str | None = None,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """Save a random base checkpoint; with ``shard_size`` (such as ``"60KB"``) in several files.

    ``changes`` go to the configuration.
    """
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(tiny_config(architecture, **changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Weights large enough that logits differ visibly, biases that are not zero.
            if parameter.ndim > 1:
                parameter.normal_(0, 0.08)
            elif "bias" in name:
                parameter.normal_(0, 0.5)
    model.to(dtype).save_pretrained(folder, **({"max_shard_size": shard_size} if shard_size else {}))
    return folder


def save_tiny_adapter(folder: Path, base: Path, seed: int = 1, dtype: torch.dtype = torch.float32, **settings: Any) -> Path:
    """Save a PEFT LoRA adapter of ``base`` with random halves, on all linear layers of the decoder unless told otherwise."""
    torch.manual_seed(seed)
    model = adapted_model(base, **settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.1)
    model.to(dtype).save_pretrained(folder)
    return folder


def adapted_model(base: Path, **settings: Any) -> PeftModel:
    """The base in float32 with a fresh adapter on it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    options = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **settings}
    return get_peft_model(model, LoraConfig(**options))
