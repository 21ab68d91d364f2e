"""vLLM against the unmerged model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tables.common import NOT_MEASURED, failures, table


def pieces(parts: dict[str, Any], out: Path) -> dict[str, str]:
    part = parts.get("models")
    if part is None:
        return {"models": NOT_MEASURED}
    rows = []
    for name, found in part["measured"].items():
        for label, wanted in (("text", False), ("picture", True)):
            prompts = [prompt for prompt in found["prompts"] if (prompt["prompt"] == "picture") is wanted]
            if prompts:
                largest = max(prompt["largest_difference_of_log_probabilities"] for prompt in prompts)
                moved = min(prompt["adapter_moves_log_probability_by"] for prompt in prompts)
                same = sum(prompt["same_greedy_tokens"] for prompt in prompts)
                causal = [prompt.get("largest_difference_with_causal_attention_in_the_picture") for prompt in prompts]
                other = max((value for value in causal if value is not None), default=largest)
                shown = f"{largest:.1e}" + (
                    f" ({other:.1e} with causal attention in the picture)" if other < largest / 10 else ""
                )
                ids = "" if all(prompt["same_prompt_ids"] for prompt in prompts) else " (other prompt ids!)"
                rows.append(
                    [
                        name,
                        f"`{found['engine_class']}`",
                        ", ".join(found["attention"]),
                        f"{label}, {len(prompts)}{ids}",
                        shown,
                        f"{same} of {len(prompts)}",
                        f"{moved:.2f}",
                    ]
                )
    heads = [
        "model",
        "vLLM's class",
        "attention",
        "prompts",
        "largest |Δ log p|",
        "same greedy tokens",
        "the adapter moves log p by",
    ]
    return {"models": "\n\n".join([table(heads, rows), failures(part)])}
