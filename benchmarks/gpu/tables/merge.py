"""Seconds and memory of each way to merge, against a copy."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from tables.common import NOT_MEASURED, failures, picture, table


def pieces(parts: dict[str, Any], out: Path) -> dict[str, str]:
    part = parts.get("merge")
    rounds = [found for name, found in (part or {}).get("measured", {}).items() if name.startswith("round")]
    if part is None or not rounds:
        return {"merge": NOT_MEASURED + "\n\n" + failures(part)}
    from benchmarks.merge import ARMS

    runs: dict[str, list[dict[str, Any]]] = {}
    for found in rounds:
        for run in found["runs"]:
            runs.setdefault(run["arm"], []).append(run)
    copy = statistics.median(run["seconds"] for run in runs["copy"]) if "copy" in runs else None
    rows, bars = [], []
    for arm, found in runs.items():
        seconds = [run["seconds"] for run in found]
        median = statistics.median(seconds)
        bars.append((arm, median))
        ratio = f"{median / copy:.2f}" if copy else "–"
        device = max((run.get("device_bytes") or 0 for run in found), default=0)
        host = max(run["peak_bytes"] for run in found)
        sizes = [f"{host / 2**30:.2f} GiB", f"{device / 2**30:.2f} GiB" if device else "–"]
        name, _, device_name = arm.partition("@")
        title = ARMS.get(name, name) + (f" on {device_name.upper()}" if device_name else "")
        rows.append([title, f"{median:.1f}", f"{min(seconds):.1f} to {max(seconds):.1f}", ratio, *sizes])
    draw(bars, copy, out / "gpu-merge.png")
    heads = ["what", "median, s", "range", "times the copy", "host memory (VmHWM)", "device memory"]
    shape = part["settings"]["shape"]
    text = f"A Gemma 3 checkpoint of the {shape} shape, {len(rounds)} rounds, every arm once a round. Raw numbers: "
    text += "[gpu-merge.json](gpu-merge.json)."
    stopped = dict.fromkeys(found["stopped"] for found in rounds if "stopped" in found)
    text += "".join(f" Not every arm ran: {reason}." for reason in stopped)
    console = f"```console\n{rounds[0]['command']}\n```"
    return {
        "merge": "\n\n".join(
            [text, console, table(heads, rows), "![Seconds of each way to merge](gpu-merge.png)", failures(part)]
        )
    }


def draw(bars: list[tuple[str, float]], copy: float | None, file: Path) -> None:
    pyplot, figure, axes = picture(height=0.5 + 0.45 * len(bars))
    shown = axes.barh([arm for arm, _ in bars], [seconds for _, seconds in bars], color="#4477aa")
    axes.bar_label(shown, fmt=" %.1f s")
    axes.invert_yaxis()
    axes.margins(x=0.12)
    if copy:
        axes.axvline(1.5 * copy, color="black", linewidth=0.8, linestyle="--", label="1.5 times the copy")
        axes.legend()
    axes.set_xlabel("seconds until the result is on the disk")
    figure.savefig(file, dpi=130)
    pyplot.close(figure)
