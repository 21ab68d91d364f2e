"""Interrupts that get through libraries which swallow them."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

EVERY = 1.0
"""Seconds after which an interrupt that was swallowed is raised again."""


@contextlib.contextmanager
def lasting_interrupts() -> Iterator[None]:
    """Let an interrupt end the block for certain.

    A :class:`KeyboardInterrupt` that the code inside swallows is raised again every second until the block is left, and once
    more at its end. While vLLM waits for its engine to start, it takes an interrupt for a closed socket: it goes on without the
    engine, which the interrupt has ended, and waits for ever, or as if nobody had asked it to stop.

    Signals are the main thread's; in any other the block runs as it is. The process's timer and SIGALRM are used from the first
    interrupt to the end of the block.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if not interrupted:
            interrupted = True
            before[signal.SIGALRM] = signal.signal(signal.SIGALRM, interrupt)
            signal.setitimer(signal.ITIMER_REAL, EVERY, EVERY)
        raise KeyboardInterrupt

    # A signal that has its usual effect, or none, keeps it: whoever uses the engine decides what ends the process.
    numbers = [number for number in (signal.SIGINT, signal.SIGTERM) if callable(signal.getsignal(number))]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        if interrupted:
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            signal.setitimer(signal.ITIMER_REAL, 0)
        for handled, handler in before.items():
            signal.signal(handled, handler)
    if interrupted:
        raise KeyboardInterrupt
