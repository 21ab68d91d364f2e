"""Drift: the table, a sentence with the ratios, and the picture of all percentiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tables.common import NOT_MEASURED, failures, picture, table

ENGINES = {"hf": "Transformers", "vllm": "vLLM", "recorded": "–"}
WORDS = {
    "from-4bit": "`--from-4bit`, bf16",
    "naive": "merge into the original weights, bf16",
    "peft-4bit": "PEFT's own merge into the 4-bit weights",
    "from-4bit-float32 cast": "`--from-4bit --dtype float32`, cast to bf16 on loading",
    "from-4bit in float32": "`--from-4bit`, bf16 weights in float32 arithmetic",
    "naive in float32": "original weights in float32 arithmetic",
    "truth": "truth",
    "bare base": "the base without the adapter",
    "reference": "the reference",
    "dequantized reference": "the base dequantized, the adapter unmerged, bf16",
}
BOLD = ("from-4bit", "naive")
CURVES = {
    "hf: naive": ("merged into the original weights", "#ee6677"),
    "hf: peft-4bit": ("PEFT's merge into 4 bit", "#aa3377"),
    "hf: from-4bit": ("--from-4bit", "#228833"),
    "hf: reference, 8 at a time": ("noise floor: the reference, batch 8 against 32", "#bbbbbb"),
}


def pieces(parts: dict[str, Any], out: Path) -> dict[str, str]:
    part = parts.get("drift")
    rows = (part or {}).get("comparisons") or []
    if not rows:
        return {"drift": NOT_MEASURED, "drift_summary": "", "drift_failed": "", "drift_prompts": "The"}
    draw(rows, out / "gpu-drift.png")
    heads = ["what, against what", "engine", "mean |Δ|", "95 % bound", "p99", "max", "flips"]
    shown = []
    for row in rows:
        engine, name = row["what"].split(": ")
        other_engine, other = row["against"].split(": ")
        against = words(other, other_engine, engine)
        mark = "**" if name in BOLD and other_engine == "recorded" else ""
        numbers = [f"{mark}{decimals(row['mean'])}{mark}", *(decimals(row[key]) for key in ("upper", "p99", "max"))]
        what = f"{mark}{words(name, engine, engine)}{mark}, against {against}"
        shown.append([what, ENGINES[engine], *numbers, str(row["flips"])])
    return {
        "drift": table(heads, shown),
        "drift_summary": summary(rows),
        "drift_failed": failures(part),
        "drift_prompts": f"{rows[0]['prompts']:,}",
    }


def words(name: str, engine: str, beside: str) -> str:
    if engine == "recorded":
        return "the recorded reference"
    base = name.removesuffix(", 8 at a time")
    text = WORDS.get(base, base) + (", 8 prompts at a time" if name.endswith("8 at a time") else "")
    return text if engine == beside else f"{text} in {ENGINES[engine]}"


def decimals(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:.4f}" if value >= 0.001 else f"{value:.5f}" if value >= 0.0001 else f"{value:.1e}"


def summary(rows: list[dict[str, Any]]) -> str:
    """The ratios that the gate lives on, for each engine."""
    mean = {(row["what"], row["against"]): row["mean"] for row in rows}
    recorded = "recorded: reference"
    floor = mean.get(("hf: reference, 8 at a time", "hf: reference"))
    lines = []
    for engine in ("hf", "vllm"):
        ours, naive = (mean.get((f"{engine}: {name}", recorded)) for name in ("from-4bit", "naive"))
        if ours is None or naive is None:
            continue
        text = (
            f"- {ENGINES[engine]}: the merge into the original weights lies {naive / ours:.1f} times as far from the reference "
        )
        text += "as the one through the 4-bit base"
        if floor:
            text += f", which lies {ours / floor:.2f} times the noise floor of the reference ({decimals(floor)}) away"
        exact, other = (mean.get((f"{engine}: {name} in float32", f"{engine}: truth")) for name in ("from-4bit", "naive"))
        if exact and other:
            text += f"; in float32 arithmetic on both sides they are {other / exact:.0f} times apart"
        lines.append(text + ".")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    pyplot, figure, axes = picture(height=5.0)
    for row in rows:
        for shown, (label, colour) in CURVES.items():
            if row["what"] == shown and row["against"] in ("recorded: reference", "hf: reference"):
                axes.plot(range(101), [max(value, 1e-6) for value in row["percentiles"]], label=label, color=colour)
            vllm = shown.replace("hf", "vllm")
            if vllm != shown and row["what"] == vllm and row["against"] == "recorded: reference":
                values = [max(value, 1e-6) for value in row["percentiles"]]
                axes.plot(range(101), values, label=f"{label}, vLLM", color=colour, linestyle=":")
    axes.axhline(0.02, color="black", linewidth=0.8, linestyle="--", label="default limit of the mean, 0.02")
    axes.set_yscale("log")
    axes.set_ylim(1e-5, 1)
    axes.set_xlabel("percentile of the prompts")
    axes.set_ylabel("|Δ skip probability|")
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    figure.savefig(file, dpi=130)
    pyplot.close(figure)
