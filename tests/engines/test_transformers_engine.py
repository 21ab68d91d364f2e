"""Scoring with Transformers. Oracle: a plain forward of one prompt at a time, log-softmax in float64."""

from __future__ import annotations

import copy
import json
import math
import os
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model

from lora_merge.engines.errors import EngineError, NonFiniteScore
from lora_merge.engines.labels import DecisionLabels, Label
from lora_merge.engines.loading import load_adapter, load_causal_model
from lora_merge.engines.prompts import Prompt
from lora_merge.engines.protocol import Engine, GenerationLimits
from lora_merge.engines.transformers_engine import TransformersEngine
from tests.engines.builders import make_model

BNB = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}


def oracle(model, prompt, labels):
    with torch.no_grad():
        logits = model(torch.tensor([prompt.token_ids])).logits[0, -1].double()
    log_p = torch.log_softmax(logits, dim=-1)
    return log_p[labels.skip.token_id].item(), log_p[labels.write.token_id].item(), int(logits.argmax())


@pytest.mark.parametrize("share_prefix", [False, True])
@pytest.mark.parametrize("batch_size", [1, 5, 32])
def test_scores_are_those_of_a_plain_forward(model, prompts, labels, share_prefix, batch_size):
    engine = TransformersEngine.from_model(model, batch_size=batch_size, share_prefix=share_prefix)
    steps = []
    scores = engine.score(prompts, labels, progress=steps.append)
    assert engine.share_prefix is share_prefix
    assert [score.id for score in scores] == [prompt.id for prompt in prompts]
    assert sum(steps) == len(prompts)
    for prompt, score in zip(prompts, scores, strict=True):
        skip, write, argmax = oracle(model, prompt, labels)
        assert score.log_p_skip == pytest.approx(skip, abs=1e-4)
        assert score.log_p_write == pytest.approx(write, abs=1e-4)
        assert score.argmax == argmax


def test_a_shared_prefix_longer_than_the_window_is_exact(prompts, labels):
    """The shared ids alone outgrow Gemma 3's window here, so the cache has already dropped places when it is lent."""
    model = make_model("gemma3")
    engine = TransformersEngine.from_model(model, share_prefix=True)
    assert engine.score(prompts, labels)[0].log_p_skip == pytest.approx(oracle(model, prompts[0], labels)[0], abs=1e-4)
    from lora_merge.engines.batching import common_prefix_length

    assert common_prefix_length(prompts) > model.config.sliding_window


def test_one_odd_prompt_does_not_end_sharing(prompts, labels, tokenizer, monkeypatch):
    from lora_merge.engines.live_model import LiveModel
    from lora_merge.engines.prompts import Prompt

    computed = []
    forward = LiveModel.last_logits
    monkeypatch.setattr(
        LiveModel, "last_logits", lambda self, ids, **rest: computed.append(ids.numel()) or forward(self, ids, **rest)
    )
    model = make_model("llama")
    odd = Prompt("odd", (2, 9, 8, 7))
    scores = TransformersEngine.from_model(model, share_prefix=True).score([odd, *prompts], labels)
    assert scores[0].log_p_skip == pytest.approx(oracle(model, odd, labels)[0], abs=1e-4)
    assert sum(computed) < 0.7 * sum(len(prompt.token_ids) for prompt in prompts)


def test_the_same_shape_is_bit_equal(model, prompts, labels):
    engine = TransformersEngine.from_model(model)
    assert engine.score(prompts, labels) == engine.score(prompts, labels)


def test_a_live_model_is_left_as_it_was(prompts, labels):
    """Oracle: the same model put into evaluation mode by hand; dropout would move every number."""
    model = get_peft_model(
        make_model("llama"), LoraConfig(target_modules=["q_proj", "v_proj"], lora_dropout=0.5, init_lora_weights=False)
    )
    model.eval()
    expected = oracle(model, prompts[0], labels)[0]
    model.train()
    frozen = model.get_base_model().model.layers[0]
    frozen.eval()
    modes = {name: module.training for name, module in model.named_modules()}
    gradients = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    score = TransformersEngine.from_model(model).score(prompts[:3], labels)[0]
    assert score.log_p_skip == pytest.approx(expected, abs=1e-4)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == gradients
    assert torch.is_grad_enabled()


def test_modes_return_also_after_an_error(prompts, labels):
    model = make_model("llama").train()
    outside = DecisionLabels(labels.skip, Label("write", 10_000))
    with pytest.raises(EngineError, match="token 10000; the model has 420"):
        TransformersEngine.from_model(model).score(prompts, outside)
    assert model.training


def test_a_prompt_of_another_tokenizer_is_refused_in_one_line(model, tokenizer, prompts, labels):
    """Its ids have no embedding: an IndexError, and on CUDA an assertion that ends the process."""
    engine = TransformersEngine.from_model(model, tokenizer)
    strange = [*prompts, Prompt("strange", (2, 420, 5))]
    for work in (lambda: engine.score(strange, labels), lambda: engine.generate(strange, GenerationLimits(2))):
        with pytest.raises(EngineError, match=r"prompt 'strange' has token 420; the model has 420, counted from 0"):
            work()


def test_an_overflow_is_no_number(prompts, labels):
    model = make_model("llama")
    with torch.no_grad():
        model.model.norm.weight[0] = math.inf
    with pytest.raises(NonFiniteScore, match=repr(min(prompts, key=lambda prompt: len(prompt.token_ids)).id)):
        TransformersEngine.from_model(model).score(prompts, labels)


def test_a_checkpoint_scores_as_the_model_it_was_saved_from(gemma_folder, prompts, labels):
    engine = TransformersEngine.from_checkpoint(gemma_folder, device="cpu")
    assert isinstance(engine, Engine) and engine.share_prefix
    scores = engine.score(prompts, labels)
    model = make_model("gemma3")
    for prompt, score in zip(prompts, scores, strict=True):
        assert score.log_p_write == pytest.approx(oracle(model, prompt, labels)[1], abs=1e-4)
    described = engine.describe()
    assert described["kind"] == "transformers" and described["dtype"] == "float32" and described["device"] == "cpu"
    assert described["settings"]["end_ids"] == [1, 106]
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.score(prompts, labels)


@pytest.fixture(scope="module")
def adapter_folder(tmp_path_factory):
    torch.manual_seed(5)
    model = get_peft_model(
        make_model("gemma3"), LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    )
    folder = tmp_path_factory.mktemp("adapter")
    model.save_pretrained(folder)
    return folder


def test_an_unmerged_adapter_scores_as_its_merge(gemma_folder, adapter_folder, prompts, labels):
    """Oracle: PEFT's own merge, float32."""
    from peft import PeftModel

    merged = PeftModel.from_pretrained(make_model("gemma3"), adapter_folder).merge_and_unload().eval()
    engine = TransformersEngine.from_checkpoint(gemma_folder, adapter=adapter_folder, device="cpu")
    for prompt, score in zip(prompts, engine.score(prompts, labels), strict=True):
        assert score.log_p_skip == pytest.approx(oracle(merged, prompt, labels)[0], abs=1e-3)


def test_an_adapter_of_another_base_is_refused(adapter_folder, tmp_path, tokenizer):
    make_model("qwen2", hidden_size=32).save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(EngineError, match=r"does not load on Qwen2ForCausalLM.*size mismatch"):
        TransformersEngine.from_checkpoint(tmp_path / "other", adapter=adapter_folder, device="cpu")


def test_an_adapter_tensor_without_a_place_is_refused(gemma_folder, adapter_folder, tmp_path):
    """A fourth layer's tensor, which PEFT drops without a word."""
    import shutil

    from safetensors.torch import load_file, save_file

    folder = tmp_path / "adapter"
    shutil.copytree(adapter_folder, folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    name = next(name for name in tensors if ".layers.2." in name)
    save_file({**tensors, name.replace(".layers.2.", ".layers.7."): tensors[name].clone()}, folder / "adapter_model.safetensors")
    with pytest.raises(EngineError, match=r"1 of its tensors have no place.*layers.7"):
        TransformersEngine.from_checkpoint(gemma_folder, adapter=folder, device="cpu")


def test_a_missing_adapter_tensor_is_refused(gemma_folder, adapter_folder, tmp_path):
    import shutil

    from safetensors.torch import load_file, save_file

    folder = tmp_path / "adapter"
    shutil.copytree(adapter_folder, folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors.pop(next(name for name in tensors if "lora_B" in name))
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(EngineError, match="missing adapter keys"):
        TransformersEngine.from_checkpoint(gemma_folder, adapter=folder, device="cpu")


def test_the_quantized_reference_is_the_dequantized_model_with_its_adapter(gemma_folder, adapter_folder, prompts, labels):
    """Oracle: weights dequantized by bitsandbytes before any forward, put into a float32 model with the unmerged adapter."""
    import bitsandbytes as bnb
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantized = AutoModelForCausalLM.from_pretrained(
        gemma_folder, quantization_config=BitsAndBytesConfig(**BNB), dtype=torch.bfloat16
    )
    plain = make_model("gemma3").to(torch.bfloat16).float()
    with torch.no_grad():
        for name, module in quantized.named_modules():
            if isinstance(module, bnb.nn.Linear4bit):
                weight = bnb.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
                plain.get_submodule(name).weight.copy_(weight)
    truth = PeftModel.from_pretrained(plain, adapter_folder).eval()
    engine = TransformersEngine.from_quantized(gemma_folder, adapter_folder, BNB, device="cpu")
    assert not engine.share_prefix
    without = TransformersEngine.from_quantized(gemma_folder, None, BNB, device="cpu")
    moved = []
    for prompt, score, bare in zip(prompts, engine.score(prompts, labels), without.score(prompts, labels), strict=True):
        log_p_skip, log_p_write, _ = oracle(truth, prompt, labels)
        p_true = 1 / (1 + math.exp(log_p_write - log_p_skip))
        moved.append((abs(score.skip_probability - p_true), abs(bare.skip_probability - p_true)))
    with_adapter, without_adapter = (sum(column) / len(moved) for column in zip(*moved, strict=True))
    print(with_adapter, without_adapter)
    assert with_adapter < 0.05 < without_adapter


def test_quantization_is_given_exactly_once(gemma_folder):
    with pytest.raises(EngineError, match="exactly one of the two"):
        TransformersEngine.from_quantized(gemma_folder, device="cpu")
    with pytest.raises(EngineError, match=r"is in 8 bit, .* verify with it and --no-control"):
        TransformersEngine.from_quantized(gemma_folder, bnb_config={"load_in_8bit": True}, device="cpu")
    everything = {"load_in_4bit": True, "llm_int8_skip_modules": [".*"]}
    with pytest.raises(EngineError, match="did not load in 4 bit"):
        TransformersEngine.from_quantized(gemma_folder, bnb_config=everything, device="cpu")


def test_what_cannot_be_loaded_says_so(gemma_folder, tmp_path):
    with pytest.raises(EngineError, match="float16 overflows on Gemma 3"):
        TransformersEngine.from_checkpoint(gemma_folder, dtype="float16", device="cpu")
    with pytest.raises(EngineError, match="dtype 'int8'"):
        TransformersEngine.from_checkpoint(gemma_folder, dtype="int8", device="cpu")
    with pytest.raises(EngineError, match="does not load"):
        TransformersEngine.from_checkpoint(tmp_path, device="cpu")
    with pytest.raises(EngineError, match="device 'tpu9'"):
        TransformersEngine.from_checkpoint(gemma_folder, device="tpu9")


@pytest.mark.parametrize("how", ["cut short", "where the name is no text"])
def test_weights_that_the_library_cannot_open_are_refused(how, gemma_folder, tmp_path):
    folder = tmp_path / (os.fsdecode(b"caf\xe9") if "name" in how else "short")
    shutil.copytree(gemma_folder, folder)
    if how == "cut short":
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(EngineError, match="does not load as a causal language model: "):
        load_causal_model(folder, dtype="auto", device=torch.device("cpu"))


@pytest.mark.parametrize("init", ["olora", "pissa"])
def test_an_adapter_of_a_residual_base_does_not_change_it_once_more(init, tmp_path):
    """Oracle: the model as it was trained, float32. PEFT initializes again as it loads."""
    adapted = get_peft_model(make_model("llama"), LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=init))
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.mul_(1.5)
    ids = torch.tensor([[2, 30, 40, 50]])
    expected = adapted.eval()(ids).logits.detach()
    adapted.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["init_lora_weights"] == init
    residual = adapted.unload()
    loaded = load_adapter(copy.deepcopy(residual), tmp_path, base_is_residual=True)
    torch.testing.assert_close(loaded(ids).logits, expected, rtol=0, atol=1e-4)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(load_adapter(residual, tmp_path)(ids).logits, expected, rtol=0, atol=0.1)


@pytest.mark.parametrize("adapted", [False, True])
def test_the_head_gets_its_rows_as_one_matrix(adapted, prompts, labels):
    """Oracle: Transformers alone, which gives it a slice. A head that PEFT wraps gets its input in one piece."""
    model = make_model("llama").requires_grad_(False)
    if adapted:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False)).eval()
    head, seen = model.get_output_embeddings(), []
    head.register_forward_pre_hook(lambda module, given: seen.append((given[0].dim(), given[0].is_contiguous())))
    engine = TransformersEngine.from_model(model)
    scores = engine.score(prompts, labels)
    assert len(head._forward_pre_hooks) == 1 and not head._forward_hooks
    first_hook, seen[:] = list(seen), []
    assert all(dim == 3 for dim, _ in first_hook)  # ours comes after it
    for prompt, score in zip(prompts, scores, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt.token_ids] * 2), logits_to_keep=1).logits[0, -1].double()
        assert score.log_p_skip == pytest.approx(logits.log_softmax(-1)[labels.skip.token_id].item(), abs=1e-5)
    assert not any(in_one_piece for _, in_one_piece in seen)

    model.get_output_embeddings()._forward_pre_hooks.clear()
    given = []
    inner = head.base_layer if adapted else head
    forward = inner.forward
    inner.forward = lambda states: given.append((states.dim(), states.is_contiguous())) or forward(states)
    assert [score.log_p_skip for score in engine.score(prompts, labels)] == [score.log_p_skip for score in scores]
    assert set(given) == {(3, True)} if adapted else {dim for dim, _ in given} == {2}
