"""The arms of a comparison, the tasks of their processes, and what those processes measured."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from lora_merge.engines.opening import EngineKind

Mode = Literal["one-shot", "two-phase"]


@dataclass(frozen=True)
class Arm:
    """One way to do the work.

    ``one-shot`` lets the model write decision and text of every prompt in one go; ``two-phase`` decides all of them by one token
    and then writes the texts that are wanted.
    """

    engine: EngineKind
    mode: Mode

    @property
    def name(self) -> str:
        """Such as ``vllm-two-phase``."""
        return f"{self.engine}-{self.mode}"

    @property
    def title(self) -> str:
        """Such as ``vLLM two-phase``."""
        return f"{'vLLM' if self.engine == 'vllm' else 'Transformers'} {self.mode}"


ARMS = (Arm("hf", "two-phase"), Arm("vllm", "two-phase"), Arm("hf", "one-shot"), Arm("vllm", "one-shot"))
"""In the order they run: the first one's decisions fix the list of prompts to write for all."""


@dataclass(frozen=True)
class WriteList:
    """The prompts to write, the same for every arm.

    Attributes:
        indices: positions among the prompts, ascending.
        kept: those of them whose skip probability is at most the threshold; None when no threshold was given.
        lengths: tokens of each text, as the arm that fixed the list wrote it.
    """

    indices: tuple[int, ...]
    kept: tuple[int, ...] | None
    lengths: tuple[int, ...]

    def quantiles(self, count: int) -> list[list[int]]:
        """The list cut into ``count`` groups of equal size by text length, the shortest texts first."""
        order = [index for _, index in sorted(zip(self.lengths, self.indices, strict=True))]
        bounds = [round(part * len(order) / count) for part in range(count + 1)]
        return [order[start:end] for start, end in itertools.pairwise(bounds)]

    def spread(self, count: int | None) -> WriteList:
        """``count`` of the list, evenly spread over it; all of it where it has no more."""
        size = len(self.indices)
        if count is None or count >= size:
            return self
        chosen = [part * size // count for part in range(count)]
        return WriteList(tuple(self.indices[place] for place in chosen), None, tuple(self.lengths[place] for place in chosen))


@dataclass(frozen=True)
class Task:
    """What one process measures. Two equal tasks have equal digests, so that a finished one need not be repeated.

    Attributes:
        part: ``arm``, ``sweep`` (our Transformers engine at one generation batch) or ``stock`` (``model.generate`` at one).
        engine, mode: the arm; ``hf`` for the other parts.
        model: the checkpoint's folder.
        model_root: the root digest of its files.
        prompts_file: the token ids, one JSON list a line.
        prompts_sha256: of that file.
        labels: ids of the skip and the write token.
        max_tokens: most tokens after the decision token.
        dtype, device: as for the engines.
        engine_options: further arguments of the engine.
        chunk_size: prompts that are decided and then written at a time; of no effect on one-shot.
        write_list: None for the arm that fixes it.
        threshold: skip probability up to which a text is kept; None for no such comparison.
        quantiles: groups by text length to time apart; 0 for none.
        batch_size: of a sweep; 0 for an arm.
        repeats: how often the work of an arm is done.
    """

    part: Literal["arm", "sweep", "stock"]
    engine: EngineKind
    mode: Mode
    model: str
    model_root: str
    prompts_file: str
    prompts_sha256: str
    labels: Mapping[str, Mapping[str, Any]]
    max_tokens: int
    dtype: str
    device: str
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    chunk_size: int = 8192
    write_list: WriteList | None = None
    threshold: float | None = None
    quantiles: int = 0
    batch_size: int = 0
    repeats: int = 1

    @property
    def name(self) -> str:
        """File name of the results."""
        return f"{self.engine}-{self.mode}" if self.part == "arm" else f"{self.part}-{self.batch_size}"

    @property
    def digest(self) -> str:
        """SHA-256 over everything but where the files lie."""
        content = {name: value for name, value in asdict(self).items() if name not in ("model", "prompts_file")}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Every attribute by name."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Task:
        """The inverse of :meth:`to_json`."""
        values = dict(value)
        if values["write_list"] is not None:
            listed = values["write_list"]
            kept = None if listed["kept"] is None else tuple(listed["kept"])
            values["write_list"] = WriteList(tuple(listed["indices"]), kept, tuple(listed["lengths"]))
        return cls(**values)


@dataclass(frozen=True)
class ArmResult:
    """What one arm did and how long it took.

    Attributes:
        seconds: ``import``, ``load`` and ``warm_up``, and of the work ``decide`` and ``write``, or ``one_shot``; these and
            what follows are of the repetition that took the median time.
        work_seconds_of_repeats: of each repetition.
        decisions: of every prompt: ``skip``, ``write`` or ``other``.
        skip_probabilities: of every prompt; None for one-shot, which sees no probabilities.
        texts: position -> token ids after the decision token, of every prompt on the list that this arm wrote.
        prompt_tokens: of all prompts.
        written_tokens: everything generated, decision tokens included.
        computed: tokens through the model by purpose, waste included; None where the engine does not tell.
        memory: ``host_peak`` and where there is a GPU ``device_peak``, in bytes; from Transformers on a GPU also
            ``allocated_peak``, what torch had handed out at most.
        kv: ``bytes_per_token``, ``tokens`` that fit, and ``prompts`` at once: of the longest, with their texts. For vLLM what its
            cache holds, for Transformers what the memory does that is free beside the loaded model. None where nobody tells.
        quantile_seconds: time to write each group of the list by text length.
        kept_seconds: ``kept`` and ``all``: time to write the kept prompts alone, and all on the list; ``same``: share of the kept
            texts that come out the same either way. None without a threshold.
        engine: what the engine says of itself.
        other_load: share of the machine's processor time that went to other processes meanwhile, in [0, 1]; None where the system
            does not tell.
    """

    seconds: Mapping[str, float]
    work_seconds_of_repeats: Sequence[float]
    decisions: Sequence[str]
    skip_probabilities: Sequence[float] | None
    texts: Mapping[int, Sequence[int]]
    prompt_tokens: int
    written_tokens: int
    computed: Mapping[str, int] | None
    memory: Mapping[str, int | None]
    kv: Mapping[str, float | None] | None
    quantile_seconds: Sequence[float]
    kept_seconds: Mapping[str, float] | None
    engine: Mapping[str, Any]
    other_load: float | None = None

    @property
    def work_seconds(self) -> float:
        """The work itself, without loading and warming up."""
        return sum(self.seconds.get(name, 0.0) for name in ("decide", "write", "one_shot"))

    @property
    def start_seconds(self) -> float:
        """Everything before the work."""
        return sum(self.seconds.get(name, 0.0) for name in ("import", "load", "warm_up"))

    def to_json(self) -> dict[str, Any]:
        """Every attribute by name; the keys of ``texts`` become strings."""
        return {**asdict(self), "texts": {str(index): list(ids) for index, ids in self.texts.items()}}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ArmResult:
        """The inverse of :meth:`to_json`."""
        return cls(**{**value, "texts": {int(index): tuple(ids) for index, ids in value["texts"].items()}})
