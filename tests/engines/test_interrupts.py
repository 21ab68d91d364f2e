"""Interrupts that get through what swallows them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import pytest

from lora_merge.engines import interrupts
from lora_merge.engines.interrupts import lasting_interrupts


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(interrupts, "EVERY", 0.05)


def swallow(rounds):
    """Like a library that takes interrupts for something else."""
    for _ in range(rounds):
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(20)


@pytest.fixture(autouse=True)
def heard():
    """A shell's background jobs ignore SIGINT, and hand that down."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def interrupted():
    """A moment later this process gets SIGINT."""
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    yield
    timer.join()


@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.usefixtures("interrupted")
def test_an_interrupt_that_is_swallowed_comes_again(rounds):
    started, before = time.monotonic(), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), lasting_interrupts():
        swallow(rounds)
        time.sleep(20)
    assert time.monotonic() - started < 15
    assert signal.getsignal(signal.SIGINT) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    time.sleep(0.12)  # nothing comes after the block


@pytest.mark.usefixtures("interrupted")
def test_one_that_is_swallowed_to_the_end_of_the_block_is_raised_there():
    reached = []
    with pytest.raises(KeyboardInterrupt), lasting_interrupts():
        swallow(1)
        reached.append(True)
    assert reached == [True]


def test_without_an_interrupt_nothing_happens():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
    with lasting_interrupts():
        assert signal.getsignal(signal.SIGTERM) == before[signal.SIGTERM]  # nobody handles it here
    assert {number: signal.getsignal(number) for number in before} == before


def test_a_timer_of_the_caller_goes_on():
    seen = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: seen.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with lasting_interrupts():
            time.sleep(0.2)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert seen == [signal.SIGALRM]


def test_in_another_thread_the_block_just_runs():
    done = []

    def work():
        with lasting_interrupts():
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]
