"""Measures one arm on a live engine: deciding, writing, and what was computed for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lora_merge.console import Progress
from lora_merge.engines.labels import DecisionLabels
from lora_merge.engines.prompts import Prompt
from lora_merge.engines.protocol import Completion, Engine, GenerationLimits
from lora_merge.generation.bench.arms import Task, WriteList
from lora_merge.generation.bench.progress import Teller, tell_nobody

WARM_UP_PROMPTS = 32
Clock = Callable[[], float]


@dataclass
class Work:
    """What an arm did; see :class:`~lora_merge.generation.bench.arms.ArmResult`."""

    seconds: dict[str, float] = field(default_factory=dict)
    decisions: list[str] = field(default_factory=list)
    skip_probabilities: list[float] | None = None
    texts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    written_tokens: int = 0
    computed: dict[str, int] | None = None

    @property
    def work_seconds(self) -> float:
        """The time of all its phases."""
        return sum(self.seconds.values())

    def count(self, engine: Engine) -> None:
        """Add what the engine computed in its last call of ``generate``, where it tells."""
        counts = getattr(engine, "token_counts", None)
        if counts is not None:
            before = self.computed or {}
            self.computed = {name: before.get(name, 0) + value for name, value in asdict(counts).items()}


class Bench:
    """One engine, the prompts and the task; ``tell`` hears how far the work is."""

    def __init__(
        self,
        engine: Engine,
        task: Task,
        prompts: Sequence[Prompt],
        clock: Clock = time.perf_counter,
        tell: Teller = tell_nobody,
    ) -> None:
        self._engine = engine
        self._task = task
        self._prompts = prompts
        self._labels = DecisionLabels.from_json(task.labels)
        self._clock = clock
        self._tell = tell

    def warm_up(self) -> float:
        """Run both kinds of call once on prompts of the same lengths that share nothing with the real ones; returns seconds."""
        step = max(len(self._prompts) // WARM_UP_PROMPTS, 1)
        strangers = [
            Prompt(f"warm-up {index}", (prompt.token_ids[0], *prompt.token_ids[:0:-1]))
            for index, prompt in enumerate(self._prompts[::step][:WARM_UP_PROMPTS])
        ]
        started = self._clock()
        self._engine.score(strangers, self._labels)
        self._engine.generate(strangers, GenerationLimits(min(self._task.max_tokens, 8)))
        return self._clock() - started

    def work(self) -> Work:
        """The whole work of the arm."""
        return self._one_shot() if self._task.mode == "one-shot" else self._two_phase()

    def write_again(self, indices: Sequence[int]) -> tuple[float, dict[int, tuple[int, ...]]]:
        """Write the texts of ``indices`` again, after everything has been decided; returns seconds and token ids."""
        if not indices:
            return 0.0, {}
        seconds, completions = self._write([self._continued(index) for index in indices], "writing again")
        return seconds, {index: text.token_ids for index, text in zip(indices, completions, strict=True)}

    def threshold_before_and_after(self, listed: WriteList, work: Work) -> dict[str, float] | None:
        """Seconds in which ``work`` wrote the whole list, and those to write only what the threshold keeps of it, in the same
        chunks; None without a threshold.

        ``same``: share of the kept texts that are the same either way.
        """
        if listed.kept is None:
            return None
        seconds, same = 0.0, 0
        for start in range(0, len(self._prompts), self._task.chunk_size):
            kept = [index for index in listed.kept if start <= index < start + self._task.chunk_size]
            took, texts = self.write_again(kept)
            seconds += took
            same += sum(work.texts[index] == ids for index, ids in texts.items())
        return {"all": work.seconds["write"], "kept": seconds, "same": same / len(listed.kept) if listed.kept else 1.0}

    def repeated(self) -> list[Work]:
        """The whole work of the arm, as often as the task says; prompts are new to the engine each time."""
        works = [self.work()]
        for _ in range(1, self._task.repeats):
            if hasattr(self._engine, "forget"):
                self._engine.forget()
            works.append(self.work())
        return works

    def _two_phase(self) -> Work:
        probabilities: list[float] = []
        work = Work(seconds={"decide": 0.0, "write": 0.0}, skip_probabilities=probabilities)
        listed = None if self._task.write_list is None else set(self._task.write_list.indices)
        for start in range(0, len(self._prompts), self._task.chunk_size):
            chunk = self._prompts[start : start + self._task.chunk_size]
            progress = self._tell("deciding", len(chunk))
            seconds, scores = self._timed(self._engine.score, chunk, self._labels, progress=progress)
            work.seconds["decide"] += seconds
            work.decisions += [score.decision for score in scores]
            probabilities += [score.skip_probability for score in scores]
            wanted = [
                start + offset
                for offset, score in enumerate(scores)
                if (score.decision == "write" if listed is None else start + offset in listed)
            ]
            continued = [self._continued(index) for index in wanted]
            if not continued:
                continue
            seconds, completions = self._write(continued, "writing")
            work.seconds["write"] += seconds
            work.count(self._engine)
            work.texts.update((index, text.token_ids) for index, text in zip(wanted, completions, strict=True))
        work.written_tokens = len(self._prompts) + sum(map(len, work.texts.values()))
        return work

    def _one_shot(self) -> Work:
        limits = GenerationLimits(1 + self._task.max_tokens)
        work = Work()
        progress = self._tell("answering", len(self._prompts))
        seconds, answers = self._timed(self._engine.generate, self._prompts, limits, progress=progress)
        work.seconds["one_shot"] = seconds
        work.count(self._engine)
        work.decisions = [self._labels.decision_of(answer.token_ids[0]) for answer in answers]
        listed = set(self._task.write_list.indices) if self._task.write_list else set(range(len(answers)))
        work.texts = {
            index: answer.token_ids[1:]
            for index, answer in enumerate(answers)
            if index in listed and work.decisions[index] == "write"
        }
        work.written_tokens = sum(len(answer.token_ids) for answer in answers)
        return work

    def _write(self, continued: Sequence[Prompt], phase: str) -> tuple[float, list[Completion]]:
        limits, progress = GenerationLimits(self._task.max_tokens), self._tell(phase, len(continued))
        return self._timed(self._engine.generate, continued, limits, progress=progress)

    def _continued(self, index: int) -> Prompt:
        prompt = self._prompts[index]
        return Prompt(prompt.id, (*prompt.token_ids, self._labels.write.token_id))

    def _timed(self, call: Callable[..., Any], *arguments: Any, progress: Progress) -> tuple[float, Any]:
        started = self._clock()
        result = call(*arguments, progress=progress)
        return self._clock() - started, result


def median(works: Sequence[Work]) -> Work:
    """The one that took the median time, of an even number the slower of the two in the middle."""
    return sorted(works, key=lambda work: work.work_seconds)[len(works) // 2]


def make_write_list(
    decisions: Sequence[str],
    skip_probabilities: Sequence[float] | None,
    texts: Mapping[int, Sequence[int]],
    threshold: float | None,
) -> WriteList:
    """The list that the first arm fixes: its write decisions, and which of them the threshold keeps."""
    indices = tuple(index for index, decision in enumerate(decisions) if decision == "write")
    kept = None
    if threshold is not None and skip_probabilities is not None:
        kept = tuple(index for index in indices if skip_probabilities[index] <= threshold)
    return WriteList(indices, kept, tuple(len(texts[index]) for index in indices))
