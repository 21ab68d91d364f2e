"""DoRA on 4-bit layers: what is scored is the trained function, also where bitsandbytes repacks its weights at inference.

Oracle: the model in training mode, in which nothing is repacked, by a plain forward of one prompt at a time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bitsandbytes.functional
import numpy as np
import pytest
import torch
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from lora_merge.engines.errors import EngineError
from lora_merge.engines.live_model import LiveModel
from lora_merge.engines.prompts import read_prompt_rows, rows_from_mappings, tokenize
from lora_merge.merging.api import MergeOptions, merge
from tests.engines.builders import make_model, make_tokenizer
from tests.verification.test_verify import outcomes, verify
from tests.verification.tiny_qlora import PREFILL, leave, make_prompt_rows, train_model
from verification.reference import read_reference, record_reference

IDS = tokenize(rows_from_mappings(make_prompt_rows(1)), make_tokenizer(), prefill=PREFILL)[0].token_ids


@pytest.fixture(params=["this processor", "one that repacks"])
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second repacks a layer at its first forward in evaluation mode, as CPUs with AVX512-BF16 do, by bitsandbytes' own
    function, and goes on calculating with the weight as it was.
    """
    if request.param == "this processor":
        return

    def forward(layer: Any, values: torch.Tensor) -> torch.Tensor:
        state = layer.weight.quant_state
        if not getattr(state, "packing_format_for_cpu", False):
            layer.plain = bitsandbytes.functional.dequantize_4bit(layer.weight.data.view(-1, 1), state)
            if not layer.training:
                layer.weight.data, layer.weight.quant_state = bitsandbytes.functional._convert_weight_packed_for_cpu(
                    layer.weight.data, state
                )
        return torch.nn.functional.linear(values, layer.plain.to(values.dtype), layer.bias)

    monkeypatch.setattr(Linear4bit, "forward", forward)


def make_live(folder: Path, *, dora: bool = True) -> Any:
    """A 4-bit Llama with a DoRA of random halves, in training mode."""
    make_model("llama", num_hidden_layers=2).to(torch.bfloat16).save_pretrained(folder / "base")
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16
    )
    base = AutoModelForCausalLM.from_pretrained(
        folder / "base", quantization_config=config, dtype=torch.bfloat16, device_map={"": "cpu"}
    )
    torch.manual_seed(3)
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", use_dora=dora))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 0.05)
    return model.train()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([IDS])).logits[0, -1].float()
    return found


@pytest.mark.usefixtures("processor")
def test_a_forward_gives_what_training_gives(tmp_path: Path) -> None:
    model = make_live(tmp_path)
    modes = [module.training for module in model.modules()]
    trained = logits(model)
    live = LiveModel(model)
    for _ in range(2):
        with live.reading():
            found, _ = live.last_logits(live.ids_tensor([IDS]))
        assert torch.equal(found[0].float(), trained)
    assert [module.training for module in model.modules()] == modes


@pytest.mark.usefixtures("processor")
def test_a_model_that_was_repacked_before_is_refused(tmp_path: Path) -> None:
    model, out = make_live(tmp_path), tmp_path / "reference.jsonl"
    model.save_pretrained(tmp_path / "adapter")
    trained = logits(model)
    other = logits(model.eval())  # somebody looks at the model in between
    layer = next(module for module in model.modules() if isinstance(module, Linear4bit))
    if not getattr(layer.weight.quant_state, "packing_format_for_cpu", False):
        return  # this processor does not repack
    assert (other - trained).abs().max() > 0.5 * trained.std()  # the other function
    for adapter in (None, tmp_path / "adapter"):
        with pytest.raises(
            EngineError, match=r"q_proj has DoRA on a 4-bit layer that bitsandbytes has repacked.*load base and ad"
        ):
            record_reference(model, make_tokenizer(), make_prompt_rows(4), out, adapter_dir=adapter)
    assert not out.exists()


@pytest.mark.usefixtures("processor")
def test_without_dora_a_repacked_model_is_recorded(tmp_path: Path) -> None:
    """PEFT reads no 4-bit weight then."""
    model = make_live(tmp_path, dora=False).eval()
    logits(model)
    record_reference(model, make_tokenizer(), make_prompt_rows(4), tmp_path / "reference.jsonl")


def test_a_right_merge_of_a_trained_one_passes_and_a_wrong_one_fails(tmp_path: Path) -> None:
    model, tokenizer = train_model(tmp_path, lora={"use_dora": True}, steps=120)
    skip, write = (tokenizer(PREFILL + word, add_special_tokens=False)["input_ids"][-1] for word in ("skip", "write"))
    said = []
    for prompt in tokenize(read_prompt_rows(tmp_path / "prompts.jsonl"), tokenizer, prefill=PREFILL):
        with torch.no_grad():
            last = model(torch.tensor([prompt.token_ids])).logits[0, -1].double()
        said.append(torch.sigmoid(last[skip] - last[write]).item())
    leave(tmp_path, model, tokenizer)
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged", MergeOptions(from_4bit=True))
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "naive")
    live = verify(tmp_path, "--record-reference", tmp_path / "again.jsonl", reference=False, exit_code=0)
    for name in ("reference.jsonl", "again.jsonl"):
        recorded = np.array([score.skip_probability for score in read_reference(tmp_path / name).scores])
        assert np.abs(recorded - np.array(said)).mean() < 0.01
    for verdict in (live, verify(tmp_path, exit_code=0)):
        assert verdict["outcome"] == "PASSED", verdict["reasons"]
        assert verdict["numbers"]["drift"]["mean_abs_delta"] < 0.01
    wrong = verify(tmp_path, merged="naive", exit_code=1)
    assert outcomes(wrong)["mean-delta"] == "FAILED"
