"""Adapters that were trained with more or fewer tokens than the base has.

Oracle: the model in training itself, which resized its base with Transformers and got its adapter from PEFT: its own logits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from lora_merge.engines.errors import EngineError
from lora_merge.engines.loading import load_adapter, load_causal_model
from tests.engines.builders import make_model

CPU = torch.device("cpu")
BNB = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": torch.bfloat16,
}
KINDS: dict[str, dict[str, Any]] = {
    "projections only": {},
    "embedding and head saved": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "embedding saved": {"modules_to_save": ["embed_tokens"]},
    "saved and tied": {"modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
    "token rows": {"trainable_token_indices": [5, 390, 400]},
    "embedding adapted": {"target_modules": ["q_proj", "embed_tokens"]},
}
TIED = [(kind, True) for kind in KINDS]
# PEFT does not save the head beside an adapted embedding, and untied ones are not kept tied.
UNTIED = [(kind, False) for kind in KINDS if kind not in ("embedding adapted", "saved and tied")]


def trained(folder: Path, kind: str, size: int, *, architecture: str = "llama", tied: bool = False, **saving: Any) -> Any:
    """A base of 420 tokens in ``folder``, and the model that was trained on it in 4 bit with ``size``, saved beside it."""
    layers = {} if architecture == "gemma3" else {"num_hidden_layers": 1}
    make_model(architecture, tie_word_embeddings=tied, **layers).to(torch.bfloat16).save_pretrained(folder / "base")
    base = AutoModelForCausalLM.from_pretrained(
        folder / "base", quantization_config=BitsAndBytesConfig(**BNB), dtype=torch.bfloat16, device_map={"": "cpu"}
    )
    base.resize_token_embeddings(size)
    torch.manual_seed(1)
    settings = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    model = get_peft_model(base, LoraConfig(**{**settings, **KINDS[kind]}))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "modules_to_save" in name or "delta" in name:
                weight.add_(torch.randn_like(weight) * 0.1)
    model.save_pretrained(folder / "adapter", **saving)
    return model.train()


def loaded(folder: Path, *, quantized: bool = True) -> Any:
    base = load_causal_model(
        folder / "base", dtype="bfloat16", device=CPU, bnb_config=BNB if quantized else None, quantized=quantized
    )
    return load_adapter(base, folder / "adapter")


def logits(model: Any) -> torch.Tensor:
    """(2, 5, tokens); in training mode, in which bitsandbytes calculates alike on all processors. Nothing is dropped out."""
    last = model.config.vocab_size - 1
    with torch.no_grad():
        return model.train()(torch.tensor([[2, 5, 6, 390, last], [2, last, 400, 8, 9]])).logits.float()


@pytest.mark.parametrize("size", [425, 410], ids=["more tokens", "fewer tokens"])
@pytest.mark.parametrize(("kind", "tied"), TIED + UNTIED)
def test_a_resized_vocabulary_loads_as_it_was_trained(kind: str, tied: bool, size: int, tmp_path: Path) -> None:
    model = trained(tmp_path, kind, size, tied=tied)
    found = loaded(tmp_path)
    assert found.config.vocab_size == size
    assert torch.equal(logits(found), logits(model))
    inner, live = found.get_base_model(), model.get_base_model()
    if kind == "projections only":
        assert (inner.get_output_embeddings().weight is inner.get_input_embeddings().weight) is tied
    assert inner.config.tie_word_embeddings == live.config.tie_word_embeddings


@pytest.mark.parametrize("kind", ["projections only", "token rows"])
def test_gemma_s_scaled_embedding_stays_what_it_is(kind: str, tmp_path: Path) -> None:
    model = trained(tmp_path, kind, 425, architecture="gemma3", tied=True)
    assert torch.equal(logits(loaded(tmp_path)), logits(model))


@pytest.mark.parametrize("kind", KINDS)
def test_one_saved_as_bin_loads_alike(kind: str, tmp_path: Path) -> None:
    model = trained(tmp_path, kind, 425, tied=True, safe_serialization=False)
    assert not (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    assert torch.equal(logits(loaded(tmp_path)), logits(model))


def test_the_base_in_16_bit_is_resized_too(tmp_path: Path) -> None:
    """Oracle of the embedding: the tensor in the file."""
    trained(tmp_path, "projections only", 425)
    found = loaded(tmp_path, quantized=False).get_base_model()
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert torch.equal(found.get_input_embeddings().weight, stored["base_model.model.model.embed_tokens.weight"])
    assert torch.equal(found.get_output_embeddings().weight, stored["base_model.model.lm_head.weight"])


def test_a_head_that_was_resized_and_not_saved_is_lost(tmp_path: Path) -> None:
    """As PEFT saves it where the embedding is adapted and not tied: its rows for new tokens are nowhere."""
    trained(tmp_path, "embedding adapted", 425)
    with pytest.raises(EngineError, match=r"vocabulary of 425 tokens, the base has 420, and the lm_head of that training is not"):
        loaded(tmp_path)


def test_sizes_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    trained(tmp_path, "projections only", 425)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.lm_head.weight"
    save_file({**tensors, name: tensors[name][:424].contiguous()}, file)
    with pytest.raises(EngineError, match="stores vocabularies of 424 and 425 tokens; expected one"):
        loaded(tmp_path)


def test_an_embedding_that_finds_no_place_is_refused(tmp_path: Path) -> None:
    """Under the name of another class of the model PEFT leaves it out without a word, and the rows stay a mean."""
    trained(tmp_path, "projections only", 425)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    moved = tensors.pop("base_model.model.model.embed_tokens.weight")
    save_file({**tensors, "base_model.model.model.language_model.embed_tokens.weight": moved}, file)
    with pytest.raises(EngineError, match=r"language_model\.embed_tokens\.weight has no place in the model"):
        loaded(tmp_path)


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    trained(tmp_path, "projections only", 420, safe_serialization=False)
    (tmp_path / "adapter" / "adapter_model.bin").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(EngineError, match="does not load on LlamaForCausalLM"):
        loaded(tmp_path)
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"no")
    with pytest.raises(EngineError, match="does not load on LlamaForCausalLM"):
        loaded(tmp_path)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quantized", [False, True])
def test_a_bare_base_gets_rows_for_tokens_that_were_added(quantized: bool, tied: bool, tmp_path: Path) -> None:
    """Oracle: the mean over the rows that it has."""
    make_model("llama", tie_word_embeddings=tied).to(torch.bfloat16).save_pretrained(tmp_path)
    arguments = {"dtype": "bfloat16", "device": CPU, "bnb_config": BNB if quantized else None, "quantized": quantized}
    before = load_causal_model(tmp_path, **arguments, least_vocabulary=419)
    after = load_causal_model(tmp_path, **arguments, least_vocabulary=423)
    for first, second in (
        (before.get_input_embeddings().weight, after.get_input_embeddings().weight),
        (before.get_output_embeddings().weight, after.get_output_embeddings().weight),
    ):
        assert (first.shape, second.shape) == ((420, 64), (423, 64))
        assert torch.equal(second[:420], first)
        assert torch.equal(second[420:], first.float().mean(dim=0).bfloat16().expand(3, 64))
    assert (after.get_input_embeddings().weight is after.get_output_embeddings().weight) is tied


def test_a_head_in_4_bit_has_no_rows_to_add_to(tmp_path: Path) -> None:
    make_model("llama", tie_word_embeddings=False).save_pretrained(tmp_path)
    everything = {**BNB, "llm_int8_skip_modules": []}
    arguments: Any = {"dtype": "bfloat16", "device": CPU, "bnb_config": everything, "quantized": True}
    assert load_causal_model(tmp_path, **arguments).get_submodule("lm_head").weight.dtype == torch.uint8
    with pytest.raises(EngineError, match="lm_head is quantized, so that its vocabulary cannot become one of 421 tokens"):
        load_causal_model(tmp_path, **arguments, least_vocabulary=421)
