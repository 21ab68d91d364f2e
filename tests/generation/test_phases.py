"""Rates and times left, by a clock that the test holds."""

from __future__ import annotations

import pytest

from lora_merge.generation.display import LogLines, duration, phase_line, shown_phases
from lora_merge.generation.phases import Phases


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_rate_counts_only_the_time_that_the_phase_itself_ran():
    clock = Clock()
    phases = Phases(clock=clock)
    phases.decide.expect(100, before=40)
    assert (phases.decide.rate, phases.decide.seconds_left) == (None, None)
    with phases.decide.running():
        clock.now += 2
        phases.decide.advance(10)
    clock.now += 50  # another phase's turn
    with phases.decide.running():
        clock.now += 3
        phases.decide.advance(10)
        assert phases.decide.seconds == 5
    assert phases.decide.done == 60
    assert phases.decide.rate == 4.0  # what was done before does not count
    assert phases.decide.seconds_left == 10.0
    assert phases.to_json()["decide"] == {"seconds": 5.0, "rate": 4.0}
    assert phases.to_json()["write"] == {"seconds": 0.0, "rate": None}


def test_a_phase_that_fails_stops_its_clock():
    clock = Clock()
    phases = Phases(clock=clock)
    with pytest.raises(ValueError), phases.load.running():
        clock.now += 1
        raise ValueError
    clock.now += 9
    assert phases.load.seconds == 1
    assert not phases.load.is_running


def test_a_log_gets_a_line_now_and_then():
    clock, said = Clock(), []
    phases = Phases(LogLines(said.append, interval=30, clock=clock).changed, clock)
    phases.decide.expect(1000)
    with phases.decide.running():
        for _ in range(70):
            clock.now += 1
            phases.decide.advance(2)
    assert said == [
        "deciding: 60 of 1,000 prompts, 2.0/s, 7:50 left",
        "deciding: 120 of 1,000 prompts, 2.0/s, 7:20 left",
    ]


def test_what_is_not_known_is_not_said():
    phases = Phases()
    assert phase_line(phases.write) == "writing: 0 texts"


@pytest.mark.parametrize(("seconds", "shown"), [(0, "0:00"), (59.6, "1:00"), (161, "2:41"), (3761, "1:02:41")])
def test_durations(seconds, shown):
    assert duration(seconds) == shown


def test_bars_follow_the_phases_on_a_terminal(monkeypatch, capsys):
    import sys

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with shown_phases() as phases:
        phases.decide.expect(10)
        with phases.decide.running():
            phases.decide.advance(4)
        with phases.decide.running():
            phases.decide.advance(6)
    assert phases.decide.done == 10


def test_quiet_is_silent(capsys):
    with shown_phases(quiet=True) as phases, phases.decide.running():
        phases.decide.advance(4)
    assert capsys.readouterr().err == ""
