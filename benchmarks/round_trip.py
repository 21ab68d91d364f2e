"""The 4-bit round trip on the CPU: ours against bitsandbytes', on the same weight, alternating in one run.

    python benchmarks/round_trip.py --rounds 5

Both take a bfloat16 weight to NF4 with double quantization and back; ours is what ``lora-merge --from-4bit`` runs (blocks of rows
in threads), also together with the rank-16 update and the final rounding. Prints medians and ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from lora_merge.merging import kernels
from lora_merge.merging.dtypes import BY_NAME, widen
from lora_merge.merging.operations import BoundLowRank, BoundRoundTrip, LowRank, RoundTrip, in_one_pass
from lora_merge.merging.quantization import QuantRecipe, block_scales

RECIPE = QuantRecipe()
RANK = 16
ROWS = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="10240,2560", help="rows,columns")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows, columns = map(int, options.shape.split(","))
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    weight = (torch.randn(rows, columns) * 0.02).to(torch.bfloat16)
    patterns = weight.view(torch.int16).numpy().view(np.uint16)
    update = (
        np.random.default_rng(0).standard_normal((rows, RANK)) * 0.02,
        np.random.default_rng(1).standard_normal((RANK, columns)),
    )
    with ThreadPoolExecutor(options.threads) as pool:
        arms: dict[str, Callable[[], object]] = {
            "bitsandbytes: quantize_4bit, dequantize_4bit": lambda: library(weight),
            "ours: round trip": lambda: ours(patterns, None, pool),
            "ours: round trip, rank-16 update, rounding": lambda: ours(patterns, update, pool),
        }
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        for arm in arms.values():
            arm()  # compilation and first touch
        for _ in range(options.rounds):
            for name, arm in arms.items():
                start = time.perf_counter()
                arm()
                seconds[name].append(time.perf_counter() - start)
    first = statistics.median(seconds["bitsandbytes: quantize_4bit, dequantize_4bit"])
    print(f"{rows} x {columns} bfloat16, {options.threads} threads, {options.rounds} rounds")
    result = {}
    for name, times in seconds.items():
        median = statistics.median(times)
        result[name] = {"median_s": median, "elements_per_s": weight.numel() / median, "times_bitsandbytes": first / median}
        print(f"  {name:<46} {median * 1e3:8.1f} ms  {weight.numel() / median / 1e6:7.0f} M elements/s  {first / median:5.1f} x")
    if options.json:
        options.json.write_text(
            json.dumps({"shape": [rows, columns], "threads": options.threads, "arms": result}, indent=2) + "\n"
        )


def library(weight: torch.Tensor) -> torch.Tensor:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    packed, state = quantize_4bit(weight, quant_type="nf4", blocksize=64, compress_statistics=True)
    return dequantize_4bit(packed, state)


def ours(patterns: np.ndarray, update: tuple[np.ndarray, np.ndarray] | None, pool: ThreadPoolExecutor) -> np.ndarray:
    """Two passes in blocks of rows, as the writer makes them: block maxima, then everything else."""
    rows, columns = patterns.shape
    absmax = np.empty(rows * columns // 64, np.float32)
    out = np.empty_like(patterns)
    per_row = columns // 64
    starts = range(0, rows, ROWS)

    def survey(start: int) -> None:
        values = widen(patterns[start : start + ROWS], BY_NAME["BF16"])
        part = absmax[start * per_row : start * per_row + values.size // 64]
        kernels.block_absmax(values.reshape(-1).view(np.uint32), 64, part.view(np.uint32))

    list(pool.map(survey, starts))
    scales = block_scales(absmax, RECIPE)
    trip = BoundRoundTrip(RoundTrip(RECIPE), columns, scales, exact=True)
    added = BoundLowRank.of(LowRank(*update, 1.0)) if update is not None else None

    def compute(start: int) -> None:
        stop = min(start + ROWS, rows)
        out[start:stop] = in_one_pass(patterns[start:stop], start, stop, trip, added)

    list(pool.map(compute, starts))
    return out


if __name__ == "__main__":
    main()
