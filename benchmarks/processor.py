"""What the merge's two loops do on this processor: the fused kernel by the element, and SHA-256 of two streams.

    python benchmarks/processor.py [--json FILE]

The kernel runs on one thread, 512 rows of 2,560 random bfloat16 weights, rank 16; the least of 15 runs. The streams are hashed by
hashlib on one thread, by hashlib on a thread each, and in turn on one thread (``merging/sha256.py``), 400 MB a stream.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from lora_merge.merging import fused, kernels, sha256
from lora_merge.merging.hash_pair import SideBySide
from lora_merge.merging.manifest import environment
from lora_merge.merging.quantization import level_tables

ROWS, COLUMNS, RANK, BLOCK = 512, 2560, 16, 64
CHUNK, CHUNKS = 1 << 22, 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {"cores": os.cpu_count(), "environment": environment()}
    found["nanoseconds_an_element"] = kernel_times()
    found["gigabytes_a_second"] = hash_rates()
    for what in ("nanoseconds_an_element", "gigabytes_a_second"):
        for name, value in found[what].items():
            print(f"{what.replace('_', ' '):>24}  {name:<44} {value:.2f}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def least_seconds(work: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def kernel_times() -> dict[str, float]:
    """Nanoseconds an element of NF4 round trip, rank-16 update, and both."""
    random = np.random.default_rng(0)
    weights = ((random.standard_normal((ROWS, COLUMNS)).astype(np.float32) * 0.02).view(np.uint32) >> 16).astype(np.uint16)
    values = (weights.astype(np.uint32) << 16).view(np.float32).reshape(-1, BLOCK)
    scales = np.abs(values).max(axis=1)
    levels, bounds = level_tables("nf4")
    left, right = random.standard_normal((ROWS, RANK)) * 0.02, random.standard_normal((RANK, COLUMNS)) * 0.02
    norms = np.sqrt((right * right).sum(axis=0)).astype(np.float32)
    out = np.empty_like(weights)
    times = {}
    arms = {"round trip": (kernels.NF4_TRIP, 0), "update": (kernels.NO_TRIP, RANK), "both": (kernels.NF4_TRIP, RANK)}
    for name, (trip, rank) in arms.items():
        b, a = np.ascontiguousarray(left[:, :rank]), np.ascontiguousarray(right[:rank])
        through = (trip, BLOCK, 1 / scales, scales, levels, bounds)
        run = functools.partial(
            fused.merge_to_bf16, weights, *through, b, a, b.astype(np.float32), a.astype(np.float32), 1.0, norms, out
        )
        run()
        times[name] = least_seconds(run, 15) * 1e9 / weights.size
    return times


def hash_rates() -> dict[str, float]:
    """GB/s of all streams together."""
    first = np.random.default_rng(0).integers(0, 256, CHUNK, dtype=np.uint8).data
    second = np.frombuffer(first, np.uint8)[::-1].copy().data

    def one() -> None:
        digest = hashlib.sha256()
        for _ in range(CHUNKS):
            digest.update(first)

    def pair(kind: Callable[[], Any]) -> Callable[[], None]:
        def both() -> None:
            with closing(kind()) as digests:
                for _ in range(CHUNKS):
                    digests.update(first, second)

        return both

    size = CHUNK * CHUNKS / 1e9
    rates = {"hashlib, one stream": size / least_seconds(one, 2)}
    rates["hashlib, a thread a stream"] = 2 * size / least_seconds(pair(SideBySide), 2)
    if sha256.has_instructions():
        rates["in turn on one thread"] = 2 * size / least_seconds(pair(sha256.Interleaved), 2)
    return rates


if __name__ == "__main__":
    main()
