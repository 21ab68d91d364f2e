"""The end of a run in a few lines for a person."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lora_merge.generation.display import duration
from lora_merge.generation.run import GenerateResult


def summary_lines(result: GenerateResult) -> Iterator[str]:
    """What was decided, what was written, what it took."""
    ended: dict[str, Any] = dict(result.record.result or {})
    counts = ended["counts"]
    gated = "gated" if result.record.gate["gated"] else "NOT GATED"
    part = "" if result.record.shard.count == 1 else f", shard {result.record.shard}"
    yield f"{result.out}: {counts['rows']:,} rows ({gated}{part})"
    yield (
        f"  decided   {counts['skip']:,} skip, {counts['write']:,} write, {counts['other']:,} other"
        + ("" if counts["mean_label_mass"] is None else f"; mean label mass {counts['mean_label_mass']:.4f}")
    )
    yield f"  kept      {counts['kept']:,}; {counts['above_threshold']:,} write decisions were above the skip threshold"
    yield f"  written   {counts['written']:,} texts, {counts['text_tokens']:,} tokens{_flaws(counts)}"
    if ended["quarantined"]:
        yield f"  set aside {ended['quarantined']:,} of {ended['input_rows']:,} rows, see {result.quarantine}"
    if result.done_before:
        yield "  resumed   nothing was left to do, and nothing was loaded"
        return
    if ended["resumed_rows"]:
        yield f"  resumed   {ended['resumed_rows']:,} rows were there already"
    phases = [_time(name, phase) for name, phase in ended["phases"].items() if phase["seconds"] >= 0.05]
    if phases:
        yield f"  took      {', '.join(phases)}"


def _flaws(counts: dict[str, Any]) -> str:
    status, reason = counts["text_status"], counts["finish_reason"]
    flaws = [
        f"{count:,} {what}"
        for count, what in (
            (status["broken"], "with broken JSON"),
            (status["missing"], "without the text key"),
            (status["trailing"], "with more behind the JSON"),
            (reason["length"], "cut off at the limit"),
        )
        if count
    ]
    return f" ({', '.join(flaws)})" if flaws else ""


def _time(name: str, phase: dict[str, Any]) -> str:
    seconds, rate = phase["seconds"], phase["rate"]
    shown = f"{name} {seconds:.1f} s" if seconds < 60 else f"{name} {duration(seconds)}"
    return f"{shown} ({rate:,.1f}/s)" if rate is not None and name in ("tokenize", "decide", "write") else shown
