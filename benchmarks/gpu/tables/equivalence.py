"""Elements that differ from CUDA's, of the round trip and of whole merges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tables.common import NOT_MEASURED, failures, table


def pieces(parts: dict[str, Any], out: Path) -> dict[str, str]:
    part = parts.get("equivalence")
    if part is None:
        return {"equivalence": NOT_MEASURED, "merge_equality": NOT_MEASURED}
    rows, merges = [], []
    for name, found in part["measured"].items():
        if " | " in name:
            weights, recipe = name.split(" | ")
            left = f"{found['differ_with_cudas_mean_and_reciprocals']:,}"
            rows.append([weights, recipe, f"{found['differ']:,} of {found['elements']:,}", left])
        elif name.startswith("merge: "):
            differ = f"{found['differ']:,} of {found['elements']:,}"
            largest = f"{found['largest_relative_difference']:.1e}" if found["differ"] else "–"
            merges.append([name.removeprefix("merge: "), differ, str(found["tensors_that_differ"]), largest])
    data = part["measured"].get("test data")
    note = ""
    if data:
        off = {case: count for case, count in data["differ"].items() if count}
        shown = "; ".join(f"{case} {count}" for case, count in off.items())
        equal = len(data["differ"]) - len(off)
        note = (
            f"{len(data['differ'])} more cases in all block sizes from 64 to 4,096, each of {data['elements_each']:,} elements "
        )
        note += f"whose last block is partial: {equal} equal" + (f"; differing elements: {shown}." if off else ".")
    heads = ["weights", "recipe", "elements that differ", "with CUDA's mean and reciprocals"]
    merge_heads = [
        "recipe",
        "elements that differ",
        "tensors that differ",
        "largest relative difference",
    ]
    return {
        "equivalence": "\n\n".join([table(heads, rows), note, failures(part)]),
        "merge_equality": table(merge_heads, merges) if merges else NOT_MEASURED,
    }
