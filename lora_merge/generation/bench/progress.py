"""How far the process of an arm is, told through a small file: its standard output belongs to the libraries."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path

from lora_merge.console import Progress, no_progress

Teller = Callable[[str, int], Progress]
"""Begins a phase: its name and its number of units; returns what to call as they are done."""

SAY_SECONDS = 20.0
"""Seconds between two lines about one process."""
_WRITE_SECONDS = 1.0


def tell_nobody(phase: str, total: int) -> Progress:
    """The :data:`Teller` that tells nobody."""
    return no_progress


class ProgressFile:
    """Writes phase and count to ``path``, at most once a second, so that measuring is not disturbed."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._next = 0.0

    def phase(self, name: str, total: int) -> Progress:
        """A :data:`Teller`."""
        done = 0.0
        self._next = self._clock()

        def tell(advance: float) -> None:
            nonlocal done
            done += advance
            if self._clock() >= self._next:
                self._next = self._clock() + _WRITE_SECONDS
                self._path.write_text(json.dumps([name, done, total]), encoding="ascii")

        tell(0)
        return tell


class ProgressLines:
    """Reads such a file and says a line of it now and then."""

    def __init__(self, path: Path, name: str, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._name = name
        self._say = say
        self._clock = clock
        self._next = clock() + SAY_SECONDS
        path.unlink(missing_ok=True)

    def look(self) -> None:
        """Say how far the process is, if a line is due."""
        now = self._clock()
        if now < self._next:
            return
        self._next = now + SAY_SECONDS
        with contextlib.suppress(OSError, ValueError):  # not begun, or just being written
            phase, done, total = json.loads(self._path.read_text(encoding="ascii"))
            self._say(f"{self._name}: {phase}, {done:,.0f} of {total:,}")
