"""The other recipes: drift, bound and verdict of each merge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tables.common import NOT_MEASURED, failures, table

WORDS = {"right": "`--from-4bit`, by the recorded recipe", "naive": "into the original weights"}


def pieces(parts: dict[str, Any], out: Path) -> dict[str, str]:
    found = [parts[name] for name in ("recipe-fp4", "recipe-dora") if name in parts]
    return {"recipes": "\n\n".join(map(section, found)) or NOT_MEASURED}


def section(part: dict[str, Any]) -> str:
    measured = part["measured"]
    if "training" not in measured:
        return failures(part)
    recipe, last = measured["training"]["recipe"], measured["training"]["history"][-1]
    kind = f"{'DoRA' if recipe['dora'] else 'LoRA'} of rank {recipe['rank']}"
    double = "double" if recipe["double_quant"] else "single"
    title = f"### {recipe['quant_type'].upper()}, {double} quantization, {kind}"
    lines = [
        title,
        f"Trained {last['steps']} steps in {measured['training']['seconds']:.0f} s; accuracy on pairs that were not trained on, "
        f"grey zone apart, {last['validation_accuracy']:.3f}. {floors(measured)}",
    ]
    rows = [row(name, verdict) for name, verdict in measured.items() if name not in ("training", "reference")]
    heads = ["merge", "mean |Δ|", "95 % bound", "p99", "flips", "verdict", "from the drift alone", "what caught it"]
    return "\n\n".join([*lines, *([table(heads, rows)] if rows else []), failures(part)])


def floors(measured: dict[str, Any]) -> str:
    found = measured.get("reference", {}).get("noise_floors", {})
    shown = [f"{floor['source']}: {floor['mean_abs_delta']:.4f}" for floor in found.values()]
    return f"Noise floors, mean \\|Δ\\|: {'; '.join(shown)}." if shown else ""


def row(name: str, verdict: dict[str, Any]) -> list[str]:
    drift = verdict["drift"] or {}
    numbers = [
        f"{drift[key]:.4f}" if key in drift else "–" for key in ("mean_abs_delta", "mean_abs_delta_upper", "p99_abs_delta")
    ]
    caught = [check for check, outcome in verdict["checks"].items() if outcome in ("FAILED", "INCONCLUSIVE", "WARNED")]
    what = WORDS.get(name, f"`--from-4bit`, by another: {name.removeprefix('wrong: ')}")
    flips = str(drift.get("argmax_flips", "–"))
    return [
        what,
        *numbers,
        flips,
        verdict["outcome"],
        verdict["outcome_of_drift_alone"],
        ", ".join(f"`{it}`" for it in caught) or "–",
    ]
