"""Decision probabilities in Transformers: ours against lm-evaluation-harness, on one loaded model, alternating in one run.

    pip install lm_eval==0.4.13   # next to lora-merge, in an environment that may change
    python benchmarks/scoring.py --model demo/from-4bit --prompts examples/grocery/heldout.jsonl

Ours is the engine that ``verify-skip-drift --engine hf`` scores with: the beginning that all prompts share is computed once, and
logits of the last position only. The harness gets two loglikelihood requests a prompt, one for each label, at batch sizes 1, 8
and 32; its best one counts. It is given our token ids, through ``HFLM._loglikelihood_tokens``, which its own ``loglikelihood``
calls after tokenizing: the same BOS and the same prompts on both sides, and tokenizing is timed on neither. Both sides call one
model object, so weights, dtype, attention and threads are the same too. Loading and one batch of warming up are not timed.
Run it on an idle machine, or with ``--threads 1``: threads that wait for a busy core are what is measured otherwise.

Exits with 1 when, in float32, any probability of a label or any skip probability differs by more than --tolerance.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

PREFILL = '{"decision": "'
OURS, UNSHARED = "ours", "ours, no shared prefix"
LogProbabilities = list[tuple[float, float]]
"""Of skip and write, in nats, a prompt."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--num-prompts", type=int, default=96)
    parser.add_argument("--batch-sizes", default="1,8,32", help="of the harness")
    parser.add_argument("--dtypes", default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--tolerance", type=float, default=1e-3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    from lora_merge.console import quiet_libraries

    quiet_libraries()
    from lora_merge.engines.batching import common_prefix_length
    from lora_merge.engines.labels import resolve_labels
    from lora_merge.engines.model_files import library_versions, load_tokenizer
    from lora_merge.engines.prompts import read_prompts

    torch.set_num_threads(options.threads)
    tokenizer = load_tokenizer(options.model)
    prompts = read_prompts(options.prompts, tokenizer, prefill=PREFILL)[: options.num_prompts]
    labels = resolve_labels(tokenizer, prompts, prefill=PREFILL)
    lengths = [len(prompt.token_ids) for prompt in prompts]
    shared = common_prefix_length(prompts)
    print(
        f"{len(prompts)} prompts of {min(lengths)} to {max(lengths)} tokens, the first {shared} shared; "
        f"{options.threads} threads, {options.rounds} rounds"
    )
    results = []
    for dtype in options.dtypes.split(","):
        arms = make_arms(options.model, dtype, tokenizer, labels, [int(size) for size in options.batch_sizes.split(",")])
        seconds, found = alternate(arms, prompts, options.rounds)
        results.append({"dtype": dtype, **compare(seconds, found, len(prompts))})
        show(results[-1])
    if options.json:
        about = {
            "prompts": len(prompts),
            "tokens": sum(lengths),
            "shared_prefix": shared,
            "threads": options.threads,
            "rounds": options.rounds,
            "versions": dict(library_versions("torch", "transformers", "lm_eval")),
        }
        options.json.write_text(json.dumps({**about, "results": results}, indent=2) + "\n")
    apart = [result for result in results if result["dtype"] == "float32" and result["largest_difference"] > options.tolerance]
    if apart:
        raise SystemExit(f"probabilities differ by {apart[0]['largest_difference']:.2g}; expected at most {options.tolerance:g}")


def make_arms(
    folder: Path, dtype: str, tokenizer: Any, labels: Any, batch_sizes: Sequence[int]
) -> dict[str, tuple[int, Callable[[Any], LogProbabilities]]]:
    """Batch size and scoring function of each arm; all call one model."""
    from lora_merge.engines.loading import load_causal_model
    from lora_merge.engines.transformers_engine import TransformersEngine

    try:
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise SystemExit(f"lm-evaluation-harness is missing ({error}); run: pip install lm_eval") from error
    model = load_causal_model(folder, dtype=dtype, device=torch.device("cpu")).eval()
    arms: dict[str, tuple[int, Callable[[Any], LogProbabilities]]] = {}
    for name, share in ((OURS, True), (UNSHARED, False)):
        engine = TransformersEngine.from_model(model, tokenizer, share_prefix=share)
        arms[name] = engine.batch_size, lambda prompts, engine=engine: ours(engine, prompts, labels)
    for size in batch_sizes:
        harness = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=size)
        arms[f"lm_eval, batch {size}"] = size, lambda prompts, harness=harness: theirs(harness, prompts, labels)
    return arms


def ours(engine: Any, prompts: Any, labels: Any) -> LogProbabilities:
    return [(score.log_p_skip, score.log_p_write) for score in engine.score(prompts, labels)]


def theirs(harness: Any, prompts: Any, labels: Any) -> LogProbabilities:
    """Two requests a prompt; the harness itself sees that they share a context and runs the model once for both."""
    tokens = labels.skip.token_id, labels.write.token_id
    requests = [((prompt.id, str(token)), list(prompt.token_ids), [token]) for prompt in prompts for token in tokens]
    answers = [log_p for log_p, _ in harness._loglikelihood_tokens(requests, disable_tqdm=True)]
    return list(zip(answers[::2], answers[1::2], strict=True))


def alternate(
    arms: dict[str, tuple[int, Callable[[Any], LogProbabilities]]], prompts: Any, rounds: int
) -> tuple[dict[str, list[float]], dict[str, LogProbabilities]]:
    """Seconds of every round and the answers of the last, by arm; one batch each first."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    found: dict[str, LogProbabilities] = {}
    for size, arm in arms.values():
        arm(prompts[:size])
    for _ in range(rounds):
        for name, (_, arm) in arms.items():
            start = time.perf_counter()
            found[name] = arm(prompts)
            seconds[name].append(time.perf_counter() - start)
    return seconds, found


def compare(seconds: dict[str, list[float]], found: dict[str, LogProbabilities], prompts: int) -> dict[str, Any]:
    """Medians, the ratio to the harness at its best batch size, and how far the answers lie from ours."""
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    best = min((name for name in medians if name not in (OURS, UNSHARED)), key=medians.__getitem__)
    arms = {
        name: {
            "median_s": medians[name],
            "seconds": seconds[name],
            "prompts_per_s": prompts / medians[name],
            "largest_difference": max(map(difference, found[OURS], found[name])),
        }
        for name in medians
    }
    return {
        "arms": arms,
        "best": best,
        "ratio": medians[best] / medians[OURS],
        "largest_difference": max(arm["largest_difference"] for arm in arms.values()),
    }


def difference(first: tuple[float, float], second: tuple[float, float]) -> float:
    """The largest of |Δ P(skip)|, |Δ P(write)| and |Δ skip probability| of one prompt."""
    (skip, write), (other_skip, other_write) = [tuple(map(math.exp, pair)) for pair in (first, second)]
    among_labels = abs(skip / (skip + write) - other_skip / (other_skip + other_write))
    return max(abs(skip - other_skip), abs(write - other_write), among_labels)


def show(result: dict[str, Any]) -> None:
    print(f"{result['dtype']}:")
    for name, arm in result["arms"].items():
        times = f"{arm['median_s']:7.1f} s  {arm['prompts_per_s']:6.1f} prompts/s"
        print(f"  {name:<24}{times}   max |Δ probability| {arm['largest_difference']:.1e}")
    print(f"  ours is {result['ratio']:.1f} times as fast as {result['best']}", flush=True)


if __name__ == "__main__":
    main()
