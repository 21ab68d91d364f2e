"""The rows of a results file (docs/generation-format.md): one JSON object a line, always with the same keys in the same order."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lora_merge.engines.prompts import Prompt
from lora_merge.engines.protocol import Completion
from lora_merge.engines.scores import DecisionScore
from lora_merge.generation.answers import Answer
from verification.preconditions import USUAL_LABEL_MASS

KEYS = (
    "id",
    "decision",
    "skip_probability",
    "label_mass",
    "kept",
    "text",
    "text_status",
    "raw",
    "finish_reason",
    "prompt_tokens",
    "text_tokens",
    "gated",
    "fields",
)


def result_row(
    prompt: Prompt, score: DecisionScore, kept: bool, completion: Completion | None, answer: Answer | None, gated: bool
) -> dict[str, Any]:
    """One row. ``completion`` and ``answer`` are None where nothing was written.

    What passes through from the prompt file stands under ``fields``, so that no field of the user's can hide one of ours.
    """
    values = (
        prompt.id,
        score.decision,
        score.skip_probability,
        score.label_mass,
        kept,
        answer.text if answer else None,
        answer.status if answer else None,
        answer.raw if answer else None,
        completion.finish_reason if completion else None,
        len(prompt.token_ids),
        len(completion.token_ids) if completion else 0,
        gated,
        dict(prompt.fields),
    )
    return dict(zip(KEYS, values, strict=True))


def encode_row(row: Mapping[str, Any]) -> bytes:
    """``row`` as one line of UTF-8 JSON, line feed included; NaN and infinities raise ValueError."""
    return json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(", ", ": ")).encode("utf-8") + b"\n"


@dataclass
class Tally:
    """Counts over rows, added up as they are written or read back."""

    rows: int = 0
    kept: int = 0
    written: int = 0
    prompt_tokens: int = 0
    text_tokens: int = 0
    label_mass: float = 0.0
    decisions: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)

    def add(self, row: Mapping[str, Any]) -> None:
        """Count one row."""
        self.rows += 1
        self.kept += row["kept"]
        self.prompt_tokens += row["prompt_tokens"]
        self.label_mass += row["label_mass"]
        self.decisions[row["decision"]] += 1
        if row["text_status"] is not None:
            self.written += 1
            self.text_tokens += row["text_tokens"]
            self.statuses[row["text_status"]] += 1
            self.finish_reasons[row["finish_reason"]] += 1

    @property
    def doubt_of_decisions(self) -> str | None:
        """Why these prompts do not seem to be of the certified kind, in one sentence; None where nothing says so."""
        mean = self.label_mass / self.rows if self.rows else 1.0
        if mean >= USUAL_LABEL_MASS:
            return None
        return (
            f"the two labels hold {mean:.3f} of the probability on average of {self.rows:,} prompts so far, usual is "
            f"{USUAL_LABEL_MASS:g} or more: the model expects something else there; compare prompts, chat template and prefill "
            "with those that it was verified on"
        )

    @property
    def doubt_of_texts(self) -> str | None:
        """Why most texts are of no use, in one sentence; None where they are not."""
        useless = self.statuses["broken"] + self.statuses["missing"]
        if 2 * useless <= self.written:
            return None
        cut = self.finish_reasons["length"]
        return (
            f"{useless:,} of {self.written:,} texts are no JSON with the text key ({cut:,} were cut off at the limit); "
            "see --text-key and --max-tokens"
        )

    def to_json(self) -> dict[str, Any]:
        """Every count by name; ``mean_label_mass`` is null without rows."""
        return {
            "rows": self.rows,
            "skip": self.decisions["skip"],
            "write": self.decisions["write"],
            "other": self.decisions["other"],
            "kept": self.kept,
            "above_threshold": self.decisions["write"] - self.kept,
            "written": self.written,
            "text_status": {status: self.statuses[status] for status in ("ok", "trailing", "broken", "missing")},
            "finish_reason": {reason: self.finish_reasons[reason] for reason in ("stop", "length")},
            "prompt_tokens": self.prompt_tokens,
            "text_tokens": self.text_tokens,
            "mean_label_mass": self.label_mass / self.rows if self.rows else None,
        }
