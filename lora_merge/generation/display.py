"""Shows the phases of a run on standard error: bars on a terminal, a line now and then in a log."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from lora_merge.console import note
from lora_merge.generation.phases import Phase, Phases

LOG_INTERVAL = 30.0
"""Seconds between two lines of one phase in a log."""
_WORTH_SAYING = 1.0
"""A phase that has not run for so many seconds in all, such as saving, gets no line."""


@contextlib.contextmanager
def shown_phases(*, quiet: bool = False) -> Iterator[Phases]:
    """Phases that are shown while the block runs; not at all when ``quiet``."""
    if quiet:
        yield Phases()
    elif sys.stderr.isatty():
        with _bars() as changed:
            yield Phases(changed)
    else:
        yield Phases(LogLines().changed)


class LogLines:
    """At most one line of a phase every ``interval`` seconds, for terminals that are files."""

    def __init__(
        self,
        say: Callable[[str], None] = note,
        interval: float = LOG_INTERVAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say = say
        self._interval = interval
        self._clock = clock
        self._last: dict[str, float] = {}

    def changed(self, phase: Phase) -> None:
        """A phase moved; say so when its time has come."""
        now = self._clock()
        due = now - self._last.setdefault(phase.name, now) >= self._interval
        if due and phase.is_running and phase.seconds >= _WORTH_SAYING:
            self._last[phase.name] = now
            self._say(phase_line(phase))


def phase_line(phase: Phase) -> str:
    """``deciding: 4,096 of 135,000 prompts, 812/s, 2:41 left``."""
    total = "" if phase.total is None else f" of {phase.total:,.0f}"
    parts = [f"{phase.name}: {phase.done:,.0f}{total} {phase.unit}"]
    if phase.rate is not None:
        parts.append(f"{phase.rate:,.1f}/s")
    if phase.seconds_left is not None:
        parts.append(f"{duration(phase.seconds_left)} left")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """``2:41`` or ``1:02:41``."""
    minutes, whole = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole:02}" if hours else f"{minutes}:{whole:02}"


@contextlib.contextmanager
def _bars() -> Iterator[Callable[[Phase], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[facts]}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, Any] = {}

        def changed(phase: Phase) -> None:
            if phase.name not in tasks:
                if not phase.is_running:
                    return
                tasks[phase.name] = bars.add_task(phase.name, total=phase.total, facts="")
            facts = phase_line(phase).removeprefix(f"{phase.name}: ")
            bars.update(tasks[phase.name], total=phase.total, completed=phase.done, facts=facts)

        yield changed
