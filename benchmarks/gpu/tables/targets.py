"""What the project wants to reach on a GPU, beside what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tables.common import table
from tables.drift import ENGINES

RECORDED = "recorded: reference"


def pieces(parts: dict[str, Any], out: Path) -> dict[str, str]:
    rows = [*drift(parts), *engines(parts), *merges(parts)]
    return {"targets": table(["what", "wanted", "measured", "reached"], rows) if rows else ""}


def row(what: str, wanted: float, measured: float, *, at_most: bool = False) -> list[str]:
    reached = measured <= wanted if at_most else measured >= wanted
    return [
        what,
        f"{'at most' if at_most else 'at least'} {wanted:g}",
        f"{measured:.{3 if measured < 10 else 4}g}",
        "yes" if reached else "**no**",
    ]


def drift(parts: dict[str, Any]) -> Iterator[list[str]]:
    mean = {(found["what"], found["against"]): found["mean"] for found in parts.get("drift", {}).get("comparisons", [])}
    floor = mean.get(("hf: reference, 8 at a time", "hf: reference"))
    for engine in ("hf", "vllm"):
        ours, naive = (mean.get((f"{engine}: {name}", RECORDED)) for name in ("from-4bit", "naive"))
        if ours and naive and floor:
            yield row(
                f"mean |Δ| of `--from-4bit` over the reference's noise floor, {ENGINES[engine]}", 1.5, ours / floor, at_most=True
            )
            yield row(
                f"mean |Δ| of a merge into the original weights over that of `--from-4bit`, {ENGINES[engine]}", 8, naive / ours
            )
        exact, other = (mean.get((f"{engine}: {name} in float32", f"{engine}: truth")) for name in ("from-4bit", "naive"))
        if exact and other:
            yield row(f"the same in float32 arithmetic on both sides, {ENGINES[engine]}", 20, other / exact)


def engines(parts: dict[str, Any]) -> Iterator[list[str]]:
    for name, size in (("engines-4b", "Gemma 3 4B's size"), ("engines", "Gemma 3 270M")):
        measured = parts.get(name, {}).get("measured", {})
        for entry in measured["engines"]["report"]["ratios"] if "engines" in measured else []:
            if (entry["slow"], entry["fast"]) == ("hf-two-phase", "vllm-two-phase"):
                what = f"time of Transformers in batches over time of vLLM, {size}"
                yield row(f"{what}, deciding and writing", 2.6, entry["total"])
                yield row(f"{what}, deciding alone", 1.5, entry["decide"])


def merges(parts: dict[str, Any]) -> Iterator[list[str]]:
    rounds = [found["runs"] for name, found in parts.get("merge", {}).get("measured", {}).items() if name.startswith("round")]
    seconds: dict[str, list[float]] = {}
    for run in (run for runs in rounds for run in runs):
        seconds.setdefault(run["arm"], []).append(run["seconds"])
    if "copy" in seconds:
        copy = statistics.median(seconds["copy"])
        for arm, what in (("from-4bit@cuda", "`--from-4bit --device cuda`"), ("from-4bit", "`--from-4bit --device cpu`")):
            if arm in seconds:
                yield row(
                    f"{what}: time over that of `cp -r` with `sync`", 1.5, statistics.median(seconds[arm]) / copy, at_most=True
                )
