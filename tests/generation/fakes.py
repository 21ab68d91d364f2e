"""A scripted engine for what no model is needed for: order, resuming, memory. What it says depends on the prompt alone."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lora_merge.console import Progress, no_progress
from lora_merge.engines.labels import DecisionLabels
from lora_merge.engines.prompts import Prompt
from lora_merge.engines.protocol import Completion, GenerationLimits
from lora_merge.engines.scores import DecisionScore


def chance(id: str, what: str) -> float:
    """A number in [0, 1) fixed by its arguments."""
    return int.from_bytes(hashlib.sha256(f"{what} {id}".encode()).digest()[:7], "big") / 2**56


class FakeEngine:
    """Decides by a hash of the id: about half write, a tenth ``other``; writes JSON, one text in ten broken."""

    name = "transformers"

    def __init__(self, other_share: float = 0.1) -> None:
        self.other_share = other_share
        self.scored: list[str] = []
        self.written: list[str] = []
        self.is_closed = False

    def score(
        self, prompts: Sequence[Prompt], labels: DecisionLabels, *, progress: Progress = no_progress
    ) -> list[DecisionScore]:
        scores = []
        for prompt in prompts:
            skip = min(max(chance(prompt.id, "skip"), 1e-6), 1 - 1e-6)
            token = labels.skip.token_id if skip > 0.5 else labels.write.token_id
            if chance(prompt.id, "other") < self.other_share:
                token = 0
            log_skip, log_write = math.log(0.98 * skip), math.log(0.98 * (1 - skip))
            scores.append(DecisionScore.from_log_probabilities(prompt.id, log_skip, log_write, token, labels))
            self.scored.append(prompt.id)
        progress(len(prompts))
        return scores

    def generate(
        self, prompts: Sequence[Prompt], limits: GenerationLimits, *, progress: Progress = no_progress
    ) -> list[Completion]:
        completions = []
        for prompt in prompts:
            text = '", "text": ' + json.dumps(f"함께 담아 보세요 {prompt.id}", ensure_ascii=False)
            text += "" if chance(prompt.id, "broken") < 0.1 else "}"
            completions.append(Completion(prompt.id, (7, 8, 1), text, "stop"))
            self.written.append(prompt.id)
        progress(len(prompts))
        return completions

    def describe(self) -> dict[str, Any]:
        return {"kind": "transformers", "versions": {"fake": "1"}, "dtype": "float32", "device": "cpu", "settings": {}}

    def close(self) -> None:
        self.is_closed = True


def open_fake(model: Path, settled: Any) -> FakeEngine:
    return FakeEngine()
