"""An interrupted verification, as a user or a scheduler interrupts it: one line, exit code 130, no new certificate."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest


def _heed_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it, and hand that down


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["checking: weights", "scoring: QLoRA reference", "scoring: merged checkpoint"])
def test_an_interrupt_is_one_line_and_leaves_the_report_as_it_was(place: Path, number: int, moment: str) -> None:
    """A certificate of an earlier run stays, and vouches for the very bytes that it did; where there is none, none comes."""
    report, earlier = place / "merged-report", '{"_type": "https://in-toto.io/Statement/v1"}'
    report.mkdir()
    if number == signal.SIGINT:
        (report / "gate.intoto.json").write_text(earlier)
    command = [sys.executable, "-c", "from verification.cli import main; main()", "--merged", str(place / "merged")]
    command += ["--prompts", str(place / "prompts.jsonl"), "--engine", "hf", "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, preexec_fn=_heed_interrupts
    )
    assert run.stderr is not None
    assert any(line.startswith(moment) for line in run.stderr)  # it has come this far; what it says next is of the interrupt
    run.send_signal(number)
    stdout, stderr = run.communicate(timeout=120)
    said = [line for line in stderr.splitlines() if not line.startswith(("scoring: ", "checking: "))]
    assert said == ["error: interrupted before there was a verdict: the report is as it was; run it again"]
    assert (run.returncode, stdout) == (130, "")
    assert {path.name: path.read_text() for path in report.iterdir()} == (
        {"gate.intoto.json": earlier} if number == signal.SIGINT else {}
    )
