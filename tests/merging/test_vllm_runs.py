"""A real vLLM engine loads and runs merged checkpoints. Oracle: the unmerged PEFT model in Transformers, float32 in both."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from peft import PeftModel

from lora_merge.merging.api import MergeOptions, merge
from tests.merging.kinds import Kind, train
from tests.merging.live import save_class
from tests.merging.vllm_top import PROMPTS
from tests.tiny import VOCABULARY, save_tiny_adapter, save_tiny_base

# vLLM's attention on a CPU wants heads of at least 32.
HEADS = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


EXPERTS = {"target_modules": ["q_proj", "o_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3", "qwen3_moe"])
def test_vllm_predicts_what_the_unmerged_model_predicts(architecture: str, tmp_path: Path) -> None:
    settings = {**HEADS, **({"head_dim": 32} if architecture in ("gemma3", "qwen3_moe") else {})}
    base = save_tiny_base(tmp_path / "base", architecture, torch.float32, shard_size="300KB", **settings)
    adapter = save_tiny_adapter(tmp_path / "adapter", base, **(EXPERTS if architecture == "qwen3_moe" else {}))
    out = merge(base, adapter, tmp_path / "out", MergeOptions()).out
    unmerged = PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), adapter).eval()
    assert_vllm_predicts(out, unmerged)


def test_vllm_finds_a_head_that_is_tied_no_longer(tmp_path: Path) -> None:
    """OPT's input embedding lies in its decoder, and its files had no head."""
    settings = {"vocab_size": VOCABULARY, "hidden_size": 128, "ffn_dim": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.OPTConfig(**settings, word_embed_proj_dim=128, max_position_embeddings=64)
    base = save_class(tmp_path / "base", transformers.OPTForCausalLM(config))
    live = transformers.OPTForCausalLM.from_pretrained(base, dtype=torch.float32)
    live = train(live, Kind({"target_modules": ["q_proj", "embed_tokens"]}))
    live.save_pretrained(tmp_path / "adapter")
    assert_vllm_predicts(merge(base, tmp_path / "adapter", tmp_path / "out", MergeOptions(dtype="float32")).out, live)


def assert_vllm_predicts(out: Path, unmerged: PeftModel) -> None:
    done = subprocess.run([sys.executable, "-m", "tests.merging.vllm_top", str(out)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    predictions = json.loads(done.stdout.splitlines()[-1])
    for prompt, found in zip(PROMPTS, predictions, strict=True):
        with torch.no_grad():
            expected = unmerged(torch.tensor([prompt])).logits[0, -1].double().log_softmax(-1)
        for token, log_probability in found.items():
            assert log_probability == pytest.approx(expected[int(token)].item(), abs=1e-3)
        assert int(max(found, key=lambda token: found[token])) == int(expected.argmax())
