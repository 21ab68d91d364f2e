"""What every table needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

NOT_MEASURED = "Not measured yet."


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; ``|`` in a cell is escaped."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def failures(part: dict[str, Any] | None) -> str:
    """A list of what could not be measured and why; empty without any."""
    failed = (part or {}).get("failed", {})
    return "\n".join(f"- Not measured: {name}: {reason[:300]}" for name, reason in failed.items())


def picture(width: float = 7.5, height: float = 4.0) -> tuple[Any, Any, Any]:
    """matplotlib's pyplot with a figure and axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(width, height), layout="constrained")
    return pyplot, figure, axes
