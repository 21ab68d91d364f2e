"""Any class of transformers as a tiny base, and a merge held against the live, unmerged PEFT model on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from lora_merge.merging.api import MergeOptions, merge
from tests.merging.kinds import TOKENS, give_weight


def save_class(folder: Path, model: Any) -> Path:
    """Save ``model`` in bfloat16 with weights that all matter, as ``kinds.save_base`` does."""
    torch.manual_seed(0)
    give_weight(model)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def logits(model: Any, inputs: Any = TOKENS) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**inputs).logits if isinstance(inputs, dict) else model.eval()(inputs).logits


def assert_merge_is_live(base: Path, adapter: Path, live: PeftModel, chosen: Any, out: Path, inputs: Any = TOKENS) -> Path:
    """Merge in float32, load with the class ``chosen`` and compare logits to 2e-4 of the largest. The adapter has to matter."""
    expected = logits(live, inputs)
    merged = merge(base, adapter, out, MergeOptions(dtype="float32")).out
    found = logits(chosen.from_pretrained(merged), inputs)
    bare = logits(chosen.from_pretrained(base, dtype=torch.float32), inputs)
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < 2e-4 * expected.abs().max()
    assert bare.shape != expected.shape or (bare - expected).abs().max() > 1e-2 * expected.abs().max()
    return merged
