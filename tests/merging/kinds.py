"""Tiny bases of many architectures and PEFT adapters of every kind on them, with the live model's answers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

from tests.tiny import VOCABULARY, tiny_config

TEXT: dict[str, Any] = {
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
TOKENS = torch.arange(2, 42).reshape(2, 20)
PIXELS = torch.linspace(-1, 1, 2 * 3 * 28 * 28).reshape(2, 3, 28, 28)
# Four places for the picture in the middle of the text.
_WITH_IMAGE = TOKENS.clone()
_WITH_IMAGE[:, 5:9] = VOCABULARY - 1
IMAGE_PROMPT = {"input_ids": _WITH_IMAGE, "pixel_values": PIXELS, "token_type_ids": (_WITH_IMAGE == VOCABULARY - 1).long()}


def _config(architecture: str) -> transformers.PretrainedConfig:
    if architecture in ("llama", "qwen2", "gemma3"):
        return tiny_config(architecture)
    if architecture == "phi3":
        return transformers.Phi3Config(**TEXT, tie_word_embeddings=False)
    if architecture == "mixtral":
        return transformers.MixtralConfig(**TEXT, num_local_experts=4, num_experts_per_tok=2)
    if architecture == "qwen3_moe":
        return transformers.Qwen3MoeConfig(
            **TEXT, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, tie_word_embeddings=False
        )
    if architecture == "gpt_oss":
        return transformers.GptOssConfig(
            **{**TEXT, "intermediate_size": 64}, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=16
        )
    if architecture == "gpt2":
        return transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=64, n_layer=2, n_head=4)
    if architecture == "gemma3_vlm":
        vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28}
        return transformers.Gemma3Config(
            text_config={**TEXT, "head_dim": 16, "sliding_window": 16},
            vision_config={**vision, "patch_size": 14},
            mm_tokens_per_image=4,
            image_token_index=VOCABULARY - 1,
            boi_token_index=VOCABULARY - 2,
            eoi_token_index=VOCABULARY - 3,
        )
    if architecture == "resnet":
        return transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=5)
    if architecture == "wav2vec2":
        return transformers.Wav2Vec2Config(
            vocab_size=20, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, conv_dim=(8, 16),
            conv_stride=(2, 2), conv_kernel=(5, 3), num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2,
            feat_extract_norm="layer", conv_bias=True,
        )  # fmt: skip
    if architecture == "videomae":
        return transformers.VideoMAEConfig(
            image_size=8, patch_size=4, num_frames=4, tubelet_size=2, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=64, num_labels=5,
        )  # fmt: skip
    if architecture == "siglip":
        return transformers.SiglipVisionConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
        )
    raise ValueError(architecture)


MODEL_CLASSES: dict[str, Any] = {
    "gemma3_vlm": transformers.Gemma3ForConditionalGeneration,
    "resnet": transformers.ResNetForImageClassification,
    "wav2vec2": transformers.Wav2Vec2ForCTC,
    "videomae": transformers.VideoMAEForVideoClassification,
    "siglip": transformers.SiglipVisionModel,
}


def model_class(architecture: str) -> Any:
    return MODEL_CLASSES.get(architecture, transformers.AutoModelForCausalLM)


def give_weight(model: Any) -> None:
    """Random parameters of a size at which each matters."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.08)
            elif "bias" in name:
                parameter.normal_(0, 0.3)


def save_base(folder: Path, architecture: str, dtype: torch.dtype = torch.bfloat16, **saving: Any) -> Path:
    """Save a random base whose every parameter matters: no zero biases, no norms of exactly one."""
    torch.manual_seed(0)
    chosen = model_class(architecture)
    config = _config(architecture)
    model = chosen(config) if architecture in MODEL_CLASSES else chosen.from_config(config)
    give_weight(model)
    model.to(dtype).save_pretrained(folder, **saving)
    return folder


def load(folder: Path, architecture: str, dtype: torch.dtype | None = torch.float32) -> Any:
    return model_class(architecture).from_pretrained(folder, **({"dtype": dtype} if dtype else {})).eval()


def answer(model: Any, architecture: str) -> torch.Tensor:
    """What the model makes of a fixed input, float32."""
    with torch.no_grad():
        if architecture in ("resnet", "siglip"):
            result = model(pixel_values=PIXELS)
            return result.logits if hasattr(result, "logits") else result.pooler_output
        if architecture == "videomae":
            return model(pixel_values=torch.linspace(-1, 1, 2 * 4 * 3 * 8 * 8).reshape(2, 4, 3, 8, 8)).logits
        if architecture == "wav2vec2":
            return model(torch.sin(torch.linspace(0, 60, 2 * 100)).reshape(2, 100)).logits
        if architecture == "gemma3_vlm":
            return model(**IMAGE_PROMPT).logits
        return model(TOKENS).logits


@dataclass(frozen=True)
class Kind:
    """One kind of adapter: the settings of its LoraConfig and what is done to the model before and after PEFT wraps it."""

    settings: dict[str, Any]
    before: Callable[[Any], Any] | None = None
    trained: tuple[str, ...] = ("lora_", "modules_to_save", "trainable_tokens", "bias")
    scale: float = 0.1
    extra: dict[str, Any] = field(default_factory=dict)


def train(model: Any, kind: Kind, seed: int = 1) -> PeftModel:
    """Wrap ``model`` and move every trainable parameter, as training would."""
    torch.manual_seed(seed)
    if kind.before is not None:
        kind.before(model)
    wrapped = get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 6, **copy.deepcopy(kind.settings)}))
    moved = 0
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if not parameter.requires_grad:
                continue
            moved += 1
            if "lora_magnitude" in name:
                parameter.mul_(torch.rand_like(parameter) + 0.5)
            elif "lora_" in name:
                parameter.normal_(0, kind.scale)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    assert moved, "an adapter that trains nothing"
    return wrapped.eval()
