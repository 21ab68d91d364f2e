"""The shipped adapter, reference and prompts belong together and are as good as docs/results/training.md says.

Oracles: the files' own digests, the tokenizer on the shipped prompts, the rule's labels, and bitsandbytes on the CPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from lora_merge.engines.labels import resolve_labels
from lora_merge.engines.prompts import read_prompts, token_ids_sha256
from lora_merge.engines.transformers_engine import TransformersEngine
from lora_merge.merging.digests import adapter_digests, file_digest
from lora_merge.merging.recipes import read_recipe
from tests.examples.conftest import read_lines
from verification import read_reference
from verification.reference import Reference


@pytest.fixture(scope="module")
def reference(grocery: Path) -> Reference:
    return read_reference(grocery / "reference.jsonl")


@pytest.fixture(scope="module")
def heldout(grocery: Path) -> list[dict[str, Any]]:
    return read_lines(grocery / "heldout.jsonl")


@pytest.fixture(scope="module")
def results(grocery: Path) -> dict[str, Any]:
    text = (grocery.parents[1] / "docs" / "results" / "training.json").read_text(encoding="utf-8")
    return json.loads(text)  # type: ignore[no-any-return]


def test_the_reference_is_of_the_shipped_adapter(grocery: Path, reference: Reference) -> None:
    assert reference.adapter is not None
    assert reference.adapter["files"] == adapter_digests(grocery / "adapter")


def test_the_reference_was_recorded_on_cuda_with_the_recorded_recipe(grocery: Path, reference: Reference) -> None:
    recipe = read_recipe(grocery / "adapter")
    assert recipe is not None and reference.recipe is not None
    settings = ("quant_type", "double_quant", "block_size", "quant_dtype", "skip_modules", "quantized_modules")
    assert [getattr(reference.recipe, name) for name in settings] == [getattr(recipe, name) for name in settings]
    assert (recipe.quant_type, recipe.double_quant, recipe.quant_dtype) == ("nf4", True, "bfloat16")
    assert recipe.quantized_modules is not None and len(recipe.quantized_modules) == 18 * 7
    assert reference.dtypes == {"embedding": "bfloat16", "adapter": "float32", "compute": "bfloat16"}
    assert "NVIDIA" in reference.environment["device"]


def test_the_reference_is_of_the_shipped_prompts_in_their_order(
    grocery: Path, reference: Reference, heldout: list[dict[str, Any]], tokenizer: Any
) -> None:
    assert [score.id for score in reference.scores] == [row["id"] for row in heldout]
    prompts = read_prompts(str(grocery / "heldout.jsonl"), tokenizer)
    assert {prompt.id: token_ids_sha256(prompt) for prompt in prompts} == reference.token_ids_sha256
    assert resolve_labels(tokenizer, prompts) == reference.labels


def test_the_adapter_was_trained_on_the_base_that_is_fetched(grocery: Path, base: Path) -> None:
    record = json.loads((grocery / "adapter" / "training.json").read_text(encoding="utf-8"))
    for name in ("model.safetensors", "tokenizer.json"):
        assert record["base"]["files"][name] == file_digest(base / name)


def test_the_adapter_is_shipped_in_bfloat16_and_on_every_linear_layer(grocery: Path) -> None:
    with safe_open(grocery / "adapter" / "adapter_model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  safe_open is no mapping
    assert len(tensors) == 18 * 7 * 2
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert all(torch.isfinite(tensor).all() and tensor.any() for tensor in tensors.values())


def test_the_reference_follows_the_rule_and_answers_the_question(
    reference: Reference, heldout: list[dict[str, Any]], results: dict[str, Any]
) -> None:
    scored = list(zip(reference.scores, heldout, strict=True))
    clear = [score.decision == row["expected"] for score, row in scored if not row["grey"]]
    accuracy, mass = sum(clear) / len(clear), [score.label_mass for score in reference.scores]
    assert accuracy >= 0.85
    assert min(mass) >= 0.95
    assert results["reference"]["accuracy"] == accuracy
    assert results["reference"]["label_mass"]["min"] == min(mass)
    assert results["base_without_adapter"]["accuracy"] < 0.6


def test_probabilities_are_spread_so_that_drift_can_show(reference: Reference) -> None:
    skip = np.array([score.skip_probability for score in reference.scores])
    assert ((skip > 0.05) & (skip < 0.95)).mean() > 0.5
    assert (skip > 0.9).mean() > 0.2 and (skip < 0.1).mean() > 0.1


@pytest.mark.timeout(1_800)  # a minute on two idle cores
def test_the_cpu_agrees_with_the_recorded_reference(
    grocery: Path, base: Path, reference: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    """100 prompts through bitsandbytes on the CPU. Its kernels round otherwise than CUDA's: a mean of up to 0.02."""
    recipe = read_recipe(grocery / "adapter")
    assert recipe is not None
    engine = TransformersEngine.from_quantized(base, grocery / "adapter", recipe.bnb_config(), device="cpu")
    prompts = read_prompts(str(grocery / "heldout.jsonl"), engine.tokenizer)[::32]
    scores = engine.score(prompts, reference.labels)
    engine.close()
    recorded = {score.id: score for score in reference.scores}
    delta = np.array([abs(score.skip_probability - recorded[score.id].skip_probability) for score in scores])
    flips = sum(score.decision != recorded[score.id].decision for score in scores)
    with capsys.disabled():
        print(f"\nCPU against the recorded reference, {len(delta)} prompts: mean |Δ| {delta.mean():.4f}, ", end="")
        print(f"max {delta.max():.4f}, {flips} flips")
    assert len(delta) == 100
    assert delta.mean() <= 0.02
    assert min(score.label_mass for score in scores) >= 0.95
