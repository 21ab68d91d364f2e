"""How fast the Transformers engine writes texts, batch size by batch size, in one process: against ``model.generate``, or
against itself with batches that are filled whatever the lengths.

    python benchmarks/write_batches.py --model demo/from-4bit --prompts examples/grocery/heldout.jsonl --batches 32,128
    ... --batches 128 --joined 8
    ... --batches 128 --joined 1,2,3,4

Both write behind the write label of the same prompts, in turn: greedily, with the same end tokens, limit and model
object, sorted by length. ``model.generate`` pads on the left and keeps a row in its batch until the last one has ended.
``--joined`` makes prompts of unequal length, of so many prompts in one: with one number the first is long and all others are as
they were, with several the prompts take turns. Then the other way is this engine without a bound on the fill of a batch.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

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
    parser.add_argument("--joined", help="how many prompts make one: a number for the first, or several in turn")
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
    if options.joined:
        prompts = joined(prompts, [int(number) for number in options.joined.split(",")])
    engine = TransformersEngine.from_checkpoint(options.model)
    limits = GenerationLimits(options.max_tokens)
    engine.generate(prompts[-4:], GenerationLimits(4))  # warm

    def ours() -> int:
        return sum(len(completion.token_ids) for completion in engine.generate(prompts, limits))

    def filled() -> int:
        with patch("lora_merge.engines.transformers_engine.batch_cost", lambda *_: sys.maxsize):
            return ours()

    def theirs() -> int:
        return stock(engine, prompts, engine.write_batch_size, options.max_tokens)

    key, name, other = ("filled", "batches filled", filled) if options.joined else ("stock", "model.generate", theirs)
    rows = []
    for batch in map(int, options.batches.split(",")):
        engine.write_batch_size = batch
        row = {"batch": batch, **timed(ours), "wasted": round(engine.token_counts.wasted_share, 4)}
        against = timed(other)
        row |= {f"{key}_{what}": value for what, value in against.items()}
        row |= {"filled_wasted": round(engine.token_counts.wasted_share, 4)} if options.joined else {}
        row |= {"did_not_fit": True} if engine.write_fit is not None else {}
        rows.append(row)
        print(
            f"batch {batch:>4}: {row['seconds']:6.1f} s for {row['tokens']:,} tokens, "
            f"{name} {against['seconds']:6.1f} s for {against['tokens']:,}"
            + (" (a batch did not fit and was halved: no comparison)" if "did_not_fit" in row else ""),
            flush=True,
        )
    used = [sum(row[name] for row in rows) for name in (f"{key}_processor_seconds", "processor_seconds")]
    print(f"of the processors, all batch sizes together: {used[0]:.1f} s over {used[1]:.1f} s, {used[0] / used[1]:.2f} times")
    best = min(row[f"{key}_seconds"] for row in rows) / min(row["seconds"] for row in rows)
    print(f"{len(prompts)} texts, {torch.get_num_threads()} threads: {best:.2f} times, best batch size of each")
    if options.json:
        result = {
            "texts": len(prompts),
            "prompt_tokens": sum(len(prompt.token_ids) for prompt in prompts),
            "longest": max(len(prompt.token_ids) for prompt in prompts),
            "max_tokens": options.max_tokens,
            "joined": options.joined,
            "threads": torch.get_num_threads(),
            "versions": dict(library_versions("torch", "transformers")),
        }
        options.json.write_text(json.dumps({**result, "rows": rows}, indent=2) + "\n")


def timed(write: Callable[[], int]) -> dict[str, float]:
    """Seconds that ``write`` takes, those of all processors together too, and how many tokens it wrote."""
    start, used = time.perf_counter(), time.process_time()
    tokens = write()
    return {"seconds": time.perf_counter() - start, "processor_seconds": time.process_time() - used, "tokens": tokens}


def joined(prompts: Sequence[Prompt], numbers: Sequence[int]) -> list[Prompt]:
    """``prompts``, each with others before it: ``numbers`` in turn say how many make one; a single number, the first alone."""
    from lora_merge.engines.prompts import Prompt

    made = []
    for row, prompt in enumerate(prompts):
        number = numbers[row % len(numbers)] if len(numbers) > 1 or row == 0 else 1
        before = [prompts[(row + 1 + more) % len(prompts)].token_ids[1:-1] for more in range(number - 1)]
        made.append(Prompt(prompt.id, (prompt.token_ids[0], *(token for ids in before for token in ids), *prompt.token_ids[1:])))
    return made


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
