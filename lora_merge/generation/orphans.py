"""Ends what a killed run leaves behind: an engine's worker that outlives its run would keep the GPU from the run that resumes.

A small process looks twice a second at what this process has started. When this process is gone, however it went, it ends those
that are left. For command lines only: what else a program that calls the library has started is not ours to end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_INTERVAL = 0.5


@contextlib.contextmanager
def no_orphans() -> Iterator[None]:
    """If this process is killed within the block, or the block raises, everything it had started ends with it."""
    command = [sys.executable, "-I", "-S", str(Path(__file__).absolute()), str(os.getpid())]
    quiet = subprocess.DEVNULL
    # A session of its own, so that an interrupt from the keyboard does not end the watch before the watched.
    watch = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
    yield
    # Not reached when the block raises: the watch then stays until this process has ended, and cleans up behind it.
    watch.kill()
    watch.wait()


def end_with_descendants(process: subprocess.Popen[bytes]) -> None:
    """End a process of ours and everything that it has started."""
    for pid in (process.pid, *descendants(process.pid)):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def descendants(pid: int) -> Iterator[int]:
    """The processes that ``pid`` has started, theirs included."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, children.read_text().split()):
                yield child
                yield from descendants(child)


def _birth(pid: int) -> str | None:
    """When a process began, in ticks since boot: with the id it names one process for good."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def _watch(parent: int) -> None:
    known: dict[int, str | None] = {}
    while os.getppid() == parent:
        known = {pid: _birth(pid) for pid in descendants(parent) if pid != os.getpid()}
        time.sleep(_INTERVAL)
    for pid, born in known.items():
        if born is not None and _birth(pid) == born:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    _watch(int(sys.argv[1]))
