"""The two phases on one chunk: decide all of it, then write what the rule selects; rows come in the order of the prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lora_merge.engines.labels import DecisionLabels
from lora_merge.engines.prompts import Prompt
from lora_merge.engines.protocol import Completion, Engine, GenerationLimits
from lora_merge.generation.answers import Answer, read_answer
from lora_merge.generation.errors import GenerationError
from lora_merge.generation.phases import Phases
from lora_merge.generation.rows import result_row
from lora_merge.generation.selection import Selection


@dataclass(frozen=True)
class Job:
    """What is done with every chunk of a run.

    Attributes:
        labels: the two answers of the decision token.
        prefill: what every prompt ends with; the model's JSON begins with it.
        selection: which prompts get a text.
        limits: of the text, counted after the decision token.
        text_key: key of the text in the model's JSON.
        gated: what the rows say.
    """

    labels: DecisionLabels
    prefill: str
    selection: Selection
    limits: GenerationLimits
    text_key: str
    gated: bool

    def rows(self, engine: Engine, prompts: Sequence[Prompt], phases: Phases) -> list[dict[str, Any]]:
        """Decide and write ``prompts``; one row each, in their order."""
        with phases.decide.running():
            scores = engine.score(prompts, self.labels, progress=phases.decide.advance)
        _check_ids("scores", [score.id for score in scores], prompts)
        chosen = [prompt for prompt, score in zip(prompts, scores, strict=True) if self.selection.writes(score)]
        continued = [self.continued(prompt) for prompt in chosen]
        with phases.write.running():
            completions = engine.generate(continued, self.limits, progress=phases.write.advance) if continued else []
        _check_ids("completions", [completion.id for completion in completions], chosen)
        by_id = {completion.id: completion for completion in completions}
        rows = []
        for prompt, score in zip(prompts, scores, strict=True):
            completion = by_id.get(prompt.id)
            answer = None if completion is None else self._answer(completion)
            rows.append(result_row(prompt, score, self.selection.keeps(score), completion, answer, self.gated))
        return rows

    def _answer(self, completion: Completion) -> Answer:
        return read_answer(self.prefill + self.labels.write.text + completion.text, self.text_key)

    def continued(self, prompt: Prompt) -> Prompt:
        """``prompt`` with the write token behind it: what the text continues."""
        return Prompt(prompt.id, (*prompt.token_ids, self.labels.write.token_id))


def _check_ids(what: str, found: Sequence[str], prompts: Sequence[Prompt]) -> None:
    """An engine that answers for other prompts than it was asked would put texts on the wrong rows."""
    if list(found) != [prompt.id for prompt in prompts]:
        raise GenerationError(
            f"the engine returned {len(found)} {what} for {len(prompts)} prompts, or in another order; nothing was saved"
        )
