"""Records the QLoRA reference of the held-out prompts and says how good it is, and how far it moves by itself.

    python examples/grocery/evaluate.py --base models/gemma-3-270m --adapter examples/grocery/adapter \\
        --reference reference.jsonl --results evaluation.json

The reference is the 4-bit base with the adapter as it is shipped. It is recorded twice in one batch shape, which must agree bit
for bit, and scored in other shapes. The base without the adapter stands beside it as a control.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pairs import PREFILL

from lora_merge.engines.labels import DecisionLabels, resolve_labels
from lora_merge.engines.loading import load_adapter, load_causal_model, resolve_device
from lora_merge.engines.model_files import library_versions, load_tokenizer
from lora_merge.engines.prompts import Prompt, read_prompts
from lora_merge.engines.protocol import GenerationLimits
from lora_merge.engines.scores import DecisionScore
from lora_merge.engines.transformers_engine import TransformersEngine, device_name
from lora_merge.merging.recipes import read_recipe
from verification.reference import record_reference

HERE = Path(__file__).parent
BATCH = 32
OTHER_BATCHES = (128, 8)
TEXTS = 256


def quality(prompts: Sequence[Prompt], scores: Sequence[DecisionScore]) -> dict[str, Any]:
    """Decisions against the rule outside and inside the grey zone, and the label mass.

    In the grey zone labels are drawn, so no model can reach 1; ``best_possible`` is what one that knew every probability would.
    """
    pairs = list(zip(prompts, scores, strict=True))
    clear = [(prompt, score) for prompt, score in pairs if not prompt.fields["grey"]]
    grey = [(prompt, score) for prompt, score in pairs if prompt.fields["grey"]]
    mass = np.array([score.label_mass for score in scores])
    skip = np.array([score.skip_probability for score in scores])
    chances = [prompt.fields["write_probability"] for prompt, _ in grey]
    return {
        "prompts": len(scores),
        "accuracy": _accuracy(clear),
        "accuracy_on_write": _accuracy([pair for pair in clear if pair[0].fields["expected"] == "write"]),
        "accuracy_on_skip": _accuracy([pair for pair in clear if pair[0].fields["expected"] == "skip"]),
        "grey": {
            "prompts": len(grey),
            "accuracy": _accuracy(grey),
            "best_possible": float(np.mean([max(chance, 1 - chance) for chance in chances])),
            "distance": float(
                np.mean([abs(1 - s.skip_probability - chance) for (_, s), chance in zip(grey, chances, strict=True)])
            ),
        },
        "decisions": dict(Counter(score.decision for score in scores)),
        "label_mass": {"min": float(mass.min()), "p1": float(np.percentile(mass, 1)), "mean": float(mass.mean())},
        "skip_probability": {
            "histogram_of_tenths": np.histogram(skip, bins=10, range=(0, 1))[0].tolist(),
            "share_between_0.05_and_0.95": float(((skip > 0.05) & (skip < 0.95)).mean()),
        },
    }


def _accuracy(pairs: Sequence[tuple[Prompt, DecisionScore]]) -> float:
    return sum(score.decision == prompt.fields["expected"] for prompt, score in pairs) / len(pairs)


def movement(one: Sequence[DecisionScore], other: Sequence[DecisionScore]) -> dict[str, Any]:
    """How far the skip probability moves from ``one`` to ``other``, the same prompts in the same order."""
    delta = np.array([b.skip_probability - a.skip_probability for a, b in zip(one, other, strict=True)])
    size = np.abs(delta)
    return {
        "mean_abs_delta": float(size.mean()),
        "p99_abs_delta": float(np.percentile(size, 99)),
        "max_abs_delta": float(size.max()),
        "flips": sum(a.decision != b.decision for a, b in zip(one, other, strict=True)),
        "bit_equal": all((a.log_p_skip, a.log_p_write) == (b.log_p_skip, b.log_p_write) for a, b in zip(one, other, strict=True)),
    }


def written_texts(engine: TransformersEngine, prompts: Sequence[Prompt], labels: DecisionLabels) -> dict[str, Any]:
    """Lets the model write after ``write`` and reads the result as JSON."""
    opened = [replace(prompt, token_ids=(*prompt.token_ids, labels.write.token_id)) for prompt in prompts]
    completions = engine.generate(opened, GenerationLimits(max_new_tokens=80))
    texts = [_text_of(PREFILL + labels.write.text + completion.text) for completion in completions]
    good = [text for text in texts if text is not None]
    if not good:
        return {"prompts": len(texts), "valid_json": 0}
    lengths = [len(ids) for ids in engine.tokenizer(good, add_special_tokens=False)["input_ids"]]  # type: ignore[misc]
    return {
        "prompts": len(texts),
        "valid_json": len(good),
        "tokens": {"min": min(lengths), "mean": float(np.mean(lengths)), "max": max(lengths)},
        "examples": good[:5],
    }


def _text_of(answer: str) -> str | None:
    try:
        value = json.loads(answer)
    except ValueError:
        return None
    return value["text"] if isinstance(value, Mapping) and isinstance(value.get("text"), str) else None


class Stopwatch:
    """Seconds by name, each since the one before."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name], self._last = round(now - self._last, 2), now


def evaluate(base: Path, adapter: Path, prompt_file: Path, reference: Path, device: str, limit: int | None) -> dict[str, Any]:
    """Record ``reference`` and measure; see the module."""
    recipe = read_recipe(adapter)
    if recipe is None:
        raise SystemExit(f"{adapter} has no quantization recipe beside it; train_qlora.py records one")
    place, watch = resolve_device(device), Stopwatch()
    tokenizer = load_tokenizer(base)
    quantized = load_causal_model(base, dtype="bfloat16", device=place, bnb_config=recipe.bnb_config(), quantized=True)
    model: Any = load_adapter(quantized, adapter)
    watch.lap("load")
    prompts = read_prompts(str(prompt_file), tokenizer, prefill=PREFILL)[:limit]
    labels = resolve_labels(tokenizer, prompts, prefill=PREFILL)
    watch.lap("tokenize")
    with tempfile.TemporaryDirectory() as scratch:
        again = Path(scratch) / "again.jsonl"
        for name, path in (("record", reference), ("record_again", again)):
            record_reference(model, tokenizer, prompts, path, adapter_dir=adapter, prefill=PREFILL, batch_size=BATCH)
            watch.lap(name)
        files_equal = filecmp.cmp(reference, again, shallow=False)
    scores = TransformersEngine.from_model(model, batch_size=BATCH).score(prompts, labels)
    moves = {}
    for batch in (BATCH, *OTHER_BATCHES):
        moves[f"batch {batch}"] = movement(scores, TransformersEngine.from_model(model, batch_size=batch).score(prompts, labels))
        watch.lap(f"score_batch_{batch}")
    writing = [prompt for prompt, score in zip(prompts, scores, strict=True) if score.decision == "write"][:TEXTS]
    texts = written_texts(TransformersEngine.from_model(model, tokenizer), writing, labels) if writing else None
    watch.lap("write_texts")
    with model.disable_adapter():
        without = TransformersEngine.from_model(model, batch_size=BATCH).score(prompts, labels)
    watch.lap("base_without_adapter")
    return {
        "reference": quality(prompts, scores),
        "base_without_adapter": quality(prompts, without),
        "recorded_twice_bit_equal": files_equal,
        f"movement_from_batch_{BATCH}": moves,
        "texts": texts,
        "seconds": watch.seconds,
        "environment": {
            "device": device_name(place),
            "cuda": torch.version.cuda,
            "versions": library_versions("torch", "transformers", "peft", "bitsandbytes", "tokenizers"),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Record the QLoRA reference of the held-out prompts and measure it.")
    parser.add_argument("--base", type=Path, required=True, help="the folder that fetch_model.py made")
    parser.add_argument("--adapter", type=Path, default=HERE / "adapter")
    parser.add_argument("--prompts", type=Path, default=HERE / "heldout.jsonl")
    parser.add_argument("--reference", type=Path, required=True, help="where the recorded reference goes")
    parser.add_argument("--results", type=Path, required=True, help="where the measurements go, as JSON")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--limit", type=int, help="only so many prompts")
    options = parser.parse_args()
    results = evaluate(options.base, options.adapter, options.prompts, options.reference, options.device, options.limit)
    options.results.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
