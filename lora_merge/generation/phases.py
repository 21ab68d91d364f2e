"""How far each phase of a run is, how fast it goes and how long it will still take.

Deciding and writing take turns, so a phase's rate is measured against the time that the phase itself has run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

Clock = Callable[[], float]


class Phase:
    """One phase: units done, units to do, seconds run.

    ``total`` is None while nobody can say. ``before`` units were done by an earlier process and do not count for the rate.
    """

    def __init__(self, name: str, unit: str, changed: Callable[[Phase], None], clock: Clock) -> None:
        self.name = name
        self.unit = unit
        self.total: float | None = None
        self.before = 0.0
        self.done = 0.0
        self._changed = changed
        self._clock = clock
        self._finished_seconds = 0.0
        self._since: float | None = None

    def expect(self, total: float, before: float = 0.0) -> None:
        """Say how many units there are, and how many of them are already done."""
        self.total = total
        self.before = before
        self.done = max(self.done, before)
        self._changed(self)

    @contextlib.contextmanager
    def running(self) -> Iterator[Phase]:
        """The clock of this phase runs in this block."""
        self._since = self._clock()
        self._changed(self)
        try:
            yield self
        finally:
            self._finished_seconds = self.seconds
            self._since = None
            self._changed(self)

    def advance(self, advance: float) -> None:
        """``advance`` more units are done; a :class:`~lora_merge.console.Progress`."""
        self.done += advance
        self._changed(self)

    @property
    def is_running(self) -> bool:
        """Whether its clock runs."""
        return self._since is not None

    @property
    def seconds(self) -> float:
        """How long the phase has run in this process."""
        return self._finished_seconds + (self._clock() - self._since if self._since is not None else 0.0)

    @property
    def rate(self) -> float | None:
        """Units a second in this process; None before there is one."""
        done = self.done - self.before
        return done / self.seconds if done > 0 and self.seconds > 0 else None

    @property
    def seconds_left(self) -> float | None:
        """At this rate; None while the rate or the total is not known."""
        if self.rate is None or self.total is None:
            return None
        return max(self.total - self.done, 0.0) / self.rate


class Phases:
    """The phases of one run, in order; ``changed`` is called with a phase whenever one moves."""

    def __init__(self, changed: Callable[[Phase], None] = lambda phase: None, clock: Clock = time.monotonic) -> None:
        self.check = Phase("checking the certificate", "bytes", changed, clock)
        self.tokenize = Phase("tokenizing", "prompts", changed, clock)
        self.restore = Phase("reading earlier results", "prompts", changed, clock)
        self.load = Phase("loading the model", "models", changed, clock)
        self.decide = Phase("deciding", "prompts", changed, clock)
        self.write = Phase("writing", "texts", changed, clock)
        self.save = Phase("saving", "rows", changed, clock)

    def all(self) -> tuple[Phase, ...]:
        """Every phase, in order."""
        return (self.check, self.tokenize, self.restore, self.load, self.decide, self.write, self.save)

    def to_json(self) -> dict[str, Any]:
        """Seconds and rate of each phase of this process, for a summary."""
        names = ("check", "tokenize", "restore", "load", "decide", "write", "save")
        return {
            name: {"seconds": round(phase.seconds, 3), "rate": None if phase.rate is None else round(phase.rate, 3)}
            for name, phase in zip(names, self.all(), strict=True)
        }
