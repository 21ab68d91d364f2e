"""A run of many synthetic prompts in a process of its own, so that its peak memory is its own.

``python -m tests.generation.scale_run MODEL FOLDER COUNT`` makes a run of a tenth of COUNT prompts, then one of COUNT, each
failing half way and resumed, and prints the peak memory after each and the rows a second.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from lora_merge.generation.api import generate_gated
from lora_merge.generation.options import GenerateOptions
from tests.generation.fakes import FakeEngine

CHUNK = 4096
BLURB = "국물이 진하고 " * 32


class Forgetful(FakeEngine):
    """Keeps no lists of what it did, and fails once it has scored ``limit`` prompts."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.left = limit

    def score(self, prompts, labels, *, progress):
        if self.left <= 0:
            raise RuntimeError("power cut")
        scores = super().score(prompts, labels, progress=progress)
        self.left -= len(prompts)
        self.scored.clear()
        return scores

    def generate(self, prompts, limits, *, progress):
        completions = super().generate(prompts, limits, progress=progress)
        self.written.clear()
        return completions


def write_prompts(path: Path, count: int) -> None:
    with open(path, "w", encoding="utf-8") as file:
        for number in range(count):
            row = {"id": f"pair-{number:08}", "prompt": f"leek and tofu number {number}", "blurb": f"{BLURB}{number}"}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def peak_bytes() -> int:
    """The most memory this process has had resident."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def generate(model: str, folder: Path, count: int, limit: int, resume: bool) -> None:
    options = GenerateOptions(0.5, chunk_size=CHUNK, resume=resume)
    prompts, out = folder / f"{count}.jsonl", folder / f"{count}.out.jsonl"
    generate_gated(model, prompts, out, options, open_engine=lambda *_: Forgetful(limit))


def interrupted(model: str, folder: Path, count: int) -> None:
    try:
        generate(model, folder, count, count // 2, resume=False)
    except RuntimeError:
        generate(model, folder, count, count, resume=True)


def main() -> None:
    model, folder, count = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    for size in (count // 10, count):
        write_prompts(folder / f"{size}.jsonl", size)
    interrupted(model, folder, count // 10)
    small = peak_bytes()
    started = time.perf_counter()
    interrupted(model, folder, count)
    seconds = time.perf_counter() - started
    print(json.dumps({"small": small, "large": peak_bytes(), "seconds": seconds, "rows_per_second": count / seconds}))


if __name__ == "__main__":
    main()
