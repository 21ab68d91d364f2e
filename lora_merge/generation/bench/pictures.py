"""The pictures of a comparison (matplotlib, installed by the extra ``bench``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_merge.generation.bench.report import TITLES
from lora_merge.generation.errors import GenerationError

_PHASES = {"decide": "#4477aa", "write": "#ee6677", "one_shot": "#aa3377"}
_START = "#cccccc"


def check_matplotlib() -> None:
    """Find out before hours of measuring whether pictures can be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise GenerationError(
            "pictures need matplotlib, which is not installed; run: pip install 'lora-merge[bench]', or give --no-pictures"
        ) from error


def draw(report: Mapping[str, Any], folder: Path) -> list[str]:
    """Draw what ``report`` (see :func:`~lora_merge.generation.bench.report.to_json`) holds; returns the file names."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = []
    for name, painter, wanted in (
        ("times.png", _times, True),
        ("lengths.png", _lengths, bool(report["by_length"])),
        ("break-even.png", _break_even, len(report["arms"]) > 1),
        ("sweep.png", _sweep, any("failed" not in size for size in report["sweep"]["sizes"])),
    ):
        if wanted:
            figure, axes = pyplot.subplots(figsize=(7.5, 4), layout="constrained")
            painter(axes, report)
            figure.savefig(folder / name, dpi=130)
            pyplot.close(figure)
            drawn.append(name)
    return drawn


def _times(axes: Any, report: Mapping[str, Any]) -> None:
    names = list(report["arms"])
    labelled: set[str] = set()
    for row, name in enumerate(names):
        left = 0.0
        for phase, colour in _PHASES.items():
            seconds = report["arms"][name]["seconds"].get(phase)
            if seconds:
                label = None if phase in labelled else phase.replace("_", "-")
                axes.barh(row, seconds, left=left, color=colour, label=label)
                labelled.add(phase)
                left += seconds
        axes.text(left, row, f" {left:,.1f} s", va="center")
    axes.set_yticks(range(len(names)), [TITLES[name] for name in names])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("seconds of work, without loading")
    axes.set_title(f"{report['prompts']['number']:,} prompts, {report['prompts']['to_write']:,} texts")
    axes.figure.legend(loc="outside lower center", ncols=len(labelled))  # inside it would lie on a bar


def _lengths(axes: Any, report: Mapping[str, Any]) -> None:
    groups = report["by_length"]
    bars = axes.bar(range(len(groups)), [group["ratio"] for group in groups], color=_PHASES["write"])
    axes.bar_label(bars, fmt="%.2f")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(groups)), [f"{group['shortest']:g}–{group['longest']:g}" for group in groups])
    axes.set_xlabel("tokens of the text")
    axes.set_ylabel("time of Transformers / time of vLLM")
    axes.set_title("Writing, by text length")


def _break_even(axes: Any, report: Mapping[str, Any]) -> None:
    number = report["prompts"]["number"]
    evens = [entry["break_even"] for entry in report["ratios"] if entry["break_even"]]
    furthest = max([2.0 * number, *(1.3 * even for even in evens if even < 50 * number)])
    for name, arm in report["arms"].items():
        end = arm["start_seconds"] + arm["work_seconds"] / number * furthest
        axes.plot([0, furthest], [arm["start_seconds"], end], label=TITLES[name])
    axes.axvline(number, color=_START, linestyle="--", label="measured")
    axes.set_xlim(0, furthest)
    axes.set_ylim(0)
    axes.set_xlabel("prompts")
    axes.set_ylabel("seconds, loading included")
    axes.set_title("From how many prompts on loading pays")
    axes.legend()


def _sweep(axes: Any, report: Mapping[str, Any]) -> None:
    sizes = [size for size in report["sweep"]["sizes"] if "failed" not in size]
    batches = [size["batch"] for size in sizes]
    axes.plot(batches, [size["seconds"] for size in sizes], "o-", color=_PHASES["write"], label="seconds")
    stock = [size for size in report["stock"]["sizes"] if "failed" not in size]
    if stock:
        seconds = [size["seconds"] for size in stock]
        axes.plot([size["batch"] for size in stock], seconds, "s--", color=_START, label="model.generate, seconds")
    axes.axvline(report["sweep"]["knee"], color="black", linewidth=0.8, linestyle=":", label="knee")
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_ylim(0)
    axes.set_xlabel("generation batch")
    axes.set_ylabel("seconds")
    memory = axes.twinx()
    memory.plot(batches, [size["peak"] / 1e9 for size in sizes], "^-", color=_PHASES["decide"], label="peak memory")
    memory.set_ylim(0, 1.2e-9 * max(size["peak"] for size in sizes))
    memory.set_ylabel("peak memory, GB")
    lines = [*axes.get_lines(), *memory.get_lines()]
    axes.legend(lines, [line.get_label() for line in lines], loc="best")
    axes.set_title("Generation batch of the Transformers engine")
