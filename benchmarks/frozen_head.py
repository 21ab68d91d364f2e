"""What a frozen head costs a model that is asked for its last position only, as it comes and as ``LiveModel.reading`` has it.

    python benchmarks/frozen_head.py --model models/gemma-3-270m --json docs/results/frozen_head.json

Both ways in one process, in turn, after a forward that is not counted, on the same ids, with every weight frozen as under PEFT;
then the same comparison with weights that are not. Prints the ratio of the medians and whether the logits are the same bits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=25)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    from transformers import AutoModelForCausalLM

    from lora_merge.engines.live_model import LiveModel
    from lora_merge.engines.model_files import library_versions

    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).eval()
    live = LiveModel(model)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, live.vocabulary or 100, (options.rows, options.tokens), generator=generator)
    found: dict[str, Any] = {}
    for name, trains in (("frozen", False), ("not frozen", True)):
        model.requires_grad_(trains)
        seconds: dict[str, list[float]] = {"alone": [], "reading": []}
        with live.reading():
            live.last_logits(ids[:, :2])
        for _ in range(options.rounds):
            with torch.no_grad():
                alone, taken = timed(lambda: model(input_ids=ids, logits_to_keep=1).logits[:, -1])
            seconds["alone"].append(taken)
            with live.reading():
                here, taken = timed(lambda: live.last_logits(ids)[0])
            seconds["reading"].append(taken)
            same = torch.equal(alone, here)
        medians = {way: statistics.median(times) for way, times in seconds.items()}
        ratio = medians["alone"] / medians["reading"]
        found[name] = {"seconds": seconds, "ratio": ratio, "same_bits": same}
        print(f"{name}: {medians['alone']:.2f} s alone, {medians['reading']:.2f} s here, {ratio:.1f} times, same bits: {same}")
    if options.json:
        setting = {"rows": options.rows, "tokens": options.tokens, "threads": torch.get_num_threads()}
        versions = dict(library_versions("torch", "transformers"))
        options.json.write_text(json.dumps({**setting, "versions": versions, "found": found}, indent=2) + "\n")


def timed(forward: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float]:
    """What ``forward`` gives, and the seconds that it takes."""
    start = time.perf_counter()
    logits = forward()
    return logits, time.perf_counter() - start


if __name__ == "__main__":
    main()
