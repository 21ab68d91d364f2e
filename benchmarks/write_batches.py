"""How fast the Transformers engine writes texts against ``model.generate``, batch size by batch size, in one process.

    python benchmarks/write_batches.py --model demo/from-4bit --prompts examples/grocery/heldout.jsonl --batches 32,128

Both write behind the write label of the same prompts, in turn: greedily, with the same end tokens, limit and model
object, sorted by length. ``model.generate`` pads on the left and keeps a row in its batch until the last one has ended.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from lora_merge.engines.prompts import Prompt
    from lora_merge.engines.transformers_engine import TransformersEngine

PREFILL = '{"decision": "'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--num-prompts", type=int, default=128)
    parser.add_argument("--batches", default="32,128")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    from lora_merge.console import quiet_libraries

    quiet_libraries()
    from lora_merge.engines.labels import resolve_labels
    from lora_merge.engines.model_files import library_versions, load_tokenizer
    from lora_merge.engines.prompts import Prompt, read_prompts
    from lora_merge.engines.protocol import GenerationLimits
    from lora_merge.engines.transformers_engine import TransformersEngine

    tokenizer = load_tokenizer(options.model)
    decided = read_prompts(options.prompts, tokenizer, prefill=PREFILL)[: options.num_prompts]
    write = resolve_labels(tokenizer, decided, prefill=PREFILL).write.token_id
    prompts = [Prompt(prompt.id, (*prompt.token_ids, write)) for prompt in decided]
    engine = TransformersEngine.from_checkpoint(options.model)
    limits = GenerationLimits(options.max_tokens)
    engine.generate(prompts[:4], GenerationLimits(4))  # warm
    rows = []
    for batch in map(int, options.batches.split(",")):
        engine.write_batch_size = batch
        start = time.perf_counter()
        ours = sum(len(completion.token_ids) for completion in engine.generate(prompts, limits))
        middle = time.perf_counter()
        theirs = stock(engine, prompts, batch, options.max_tokens)
        seconds = middle - start, time.perf_counter() - middle
        rows.append({"batch": batch, "seconds": seconds[0], "tokens": ours, "stock_seconds": seconds[1], "stock_tokens": theirs})
        print(f"batch {batch:>4}: {seconds[0]:6.1f} s for {ours:,} tokens, model.generate {seconds[1]:6.1f} s for {theirs:,}")
    best = min(row["stock_seconds"] for row in rows) / min(row["seconds"] for row in rows)
    print(f"{len(prompts)} texts, {torch.get_num_threads()} threads: {best:.2f} times, best batch size of each")
    if options.json:
        result = {
            "texts": len(prompts),
            "threads": torch.get_num_threads(),
            "versions": dict(library_versions("torch", "transformers")),
        }
        options.json.write_text(json.dumps({**result, "rows": rows}, indent=2) + "\n")


@torch.inference_mode()
def stock(engine: TransformersEngine, prompts: list[Prompt], batch: int, max_tokens: int) -> int:
    """Write with ``model.generate``; how many tokens came out, end tokens included."""
    model, ends = engine._model.module, list(engine._end_ids)
    longest_first = sorted(prompts, key=lambda prompt: -len(prompt.token_ids))
    total = 0
    for first in range(0, len(longest_first), batch):
        rows = [list(prompt.token_ids) for prompt in longest_first[first : first + batch]]
        width = max(map(len, rows))
        ids = torch.tensor([[ends[0]] * (width - len(row)) + row for row in rows], device=model.device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=model.device)
        settings = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0, "eos_token_id": ends, "pad_token_id": ends[0]}
        written = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=max_tokens, **settings)[:, width:]
        for row in written.tolist():
            total += next((place + 1 for place, token in enumerate(row) if token in ends), len(row))
    return total


if __name__ == "__main__":
    main()
