"""The noise floor of bitsandbytes' kernels: the reference against its dequantized base with the unmerged adapter.

Oracle: the same model loaded in 16 bit, its linear weights replaced by bitsandbytes' own dequantization, with PEFT's adapter on
top and a plain forward.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bitsandbytes.functional
import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from lora_merge.engines.labels import resolve_labels
from lora_merge.engines.prompts import rows_from_mappings, tokenize
from lora_merge.engines.transformers_engine import TransformersEngine
from tests.engines.builders import make_model, make_tokenizer
from tests.verification.tiny_qlora import PREFILL, make_prompt_rows
from verification.dequantized import dequantized_floor, score_dequantized
from verification.measurement import DEQUANTIZED

PROMPTS = tokenize(rows_from_mappings(make_prompt_rows(60)), make_tokenizer(), prefill=PREFILL)
LABELS = resolve_labels(make_tokenizer(), PROMPTS, prefill=PREFILL, skip="skip", write="write")


def load(trained: Path) -> Any:
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16
    )
    base = AutoModelForCausalLM.from_pretrained(
        trained / "base", quantization_config=config, dtype=torch.bfloat16, device_map={"": "cpu"}
    )
    return PeftModel.from_pretrained(base, trained / "adapter")


def skip_probabilities(scores: Any) -> np.ndarray:
    return np.array([score.skip_probability for score in scores])


def test_it_is_the_dequantized_base_with_the_adapter(trained: Path) -> None:
    found = score_dequantized(load(trained), PROMPTS, LABELS, batch_size=32)
    assert found is not None
    plain = AutoModelForCausalLM.from_pretrained(trained / "base", dtype=torch.bfloat16)
    for name, module in plain.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            codes, state = bitsandbytes.functional.quantize_4bit(module.weight.data, quant_type="nf4", compress_statistics=True)
            module.weight.data = bitsandbytes.functional.dequantize_4bit(codes, state)
    model = PeftModel.from_pretrained(plain, trained / "adapter").eval()
    for prompt, score in zip(PROMPTS[:20], found, strict=False):
        with torch.no_grad():
            log_p = model(torch.tensor([prompt.token_ids])).logits[0, -1].double().log_softmax(-1)
        odds = float((log_p[LABELS.skip.token_id] - log_p[LABELS.write.token_id]).exp())
        # The batch has another shape here, and bfloat16 has three digits.
        assert score.skip_probability == pytest.approx(odds / (1 + odds), abs=0.02)


def test_the_model_is_afterwards_as_it_was(trained: Path) -> None:
    first, second = load(trained), load(trained)
    score_dequantized(first, PROMPTS, LABELS, batch_size=32)
    scores = [TransformersEngine.from_model(model).score(PROMPTS, LABELS) for model in (first, second)]
    assert scores[0] == scores[1]
    assert not any("forward" in vars(module) for module in first.modules())


def test_an_error_leaves_the_model_as_it_was(trained: Path) -> None:
    model = load(trained)

    def stop(advance: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score_dequantized(model, PROMPTS, LABELS, batch_size=32, progress=stop)
    assert not any("forward" in vars(module) for module in model.modules())


def test_the_floor_is_between_the_same_prompts(trained: Path) -> None:
    model = load(trained)
    dequantized = score_dequantized(model, PROMPTS[10:40], LABELS, batch_size=32)
    reference = TransformersEngine.from_model(model).score(PROMPTS, LABELS)
    floor = dequantized_floor(reference, dequantized)
    assert floor is not None
    assert (floor.source, floor.prompts) == (DEQUANTIZED, 30)
    gap = np.abs(skip_probabilities(reference)[10:40] - skip_probabilities(dequantized))
    assert floor.mean_abs_delta == pytest.approx(gap.mean())
    assert floor.max_abs_delta == pytest.approx(gap.max())
    assert floor.mean_abs_delta < 0.02  # arithmetic, not another function


def test_without_4_bit_layers_there_is_no_floor() -> None:
    assert score_dequantized(make_model("llama"), PROMPTS, LABELS, batch_size=32) is None
    assert dequantized_floor([], None) is None


def test_repacked_weights_are_not_read(trained: Path) -> None:
    """What bitsandbytes does on CPUs with AVX512-BF16 at the first forward; their bytes mean something else then."""
    model = load(trained)
    layer = next(module for module in model.modules() if isinstance(module, bitsandbytes.nn.Linear4bit))
    layer.weight.quant_state.packing_format_for_cpu = True
    assert score_dequantized(model, PROMPTS, LABELS, batch_size=32) is None


def test_a_forward_that_goes_around_its_layers_has_no_floor(trained: Path) -> None:
    """As Unsloth's kernels do: what was scored then is the reference itself."""
    model = load(trained)
    plain = make_model("llama", num_hidden_layers=2, tie_word_embeddings=False)
    model.get_base_model().forward = plain.forward
    assert score_dequantized(model, PROMPTS, LABELS, batch_size=32) is None
