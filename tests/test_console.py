"""What the command lines share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import click
import pytest
from click.testing import CliRunner

from lora_merge.console import note, reports_errors, say, warn
from lora_merge.errors import UserError


def test_a_place_where_one_may_not_look_is_one_line():
    @click.command()
    @reports_errors
    def command() -> None:
        raise PermissionError(13, "Permission denied", "/root/secret/base/config.json")

    result = CliRunner().invoke(command)
    assert result.exit_code == 1
    assert result.stderr == "error: /root/secret/base/config.json: Permission denied; ask for access or name another\n"


def test_what_is_said_holds_no_control_character():
    evil = "x\x1b[2J\x1b[32mPASSED\x1b[0m\nPASSED"

    @click.command()
    @reports_errors
    def command() -> None:
        for speak in (say, note, warn):
            speak(evil)
        raise UserError(evil)

    result = CliRunner().invoke(command)
    clean = r"x\u001b[2J\u001b[32mPASSED\u001b[0m PASSED"
    assert result.stdout.splitlines() == [clean]
    assert result.stderr.splitlines() == [clean, f"warning: {clean}", f"error: {clean}"]


@pytest.mark.parametrize("stream", ["out", "err"])
def test_a_path_that_is_no_text_can_be_printed(stream: str) -> None:
    """In a process of its own, whose streams refuse what UTF-8 cannot hold, as they do in most languages' settings."""
    script = (
        "import click, os; from lora_merge.console import reports_errors\n"
        f"command = reports_errors(lambda: click.echo(os.fsdecode(b'caf\\xe9 ') + 'café', err={stream == 'err'}))\n"
        "command()"
    )
    strict = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, env=strict, check=True)
    assert (done.stdout + done.stderr).decode("utf-8").split() == [r"caf\xe9", "café"]


COMMAND = """
import os, sys, time, click
from lora_merge.console import note, progress_bar, reports_errors, warn
from lora_merge.errors import UserError

@click.command()
@click.argument("how")
@reports_errors
def command(how):
    for step in range(2000):
        note(f"step {step}")
        print("a library", file=sys.stderr)
    warn("nearly done")
    if how == "refused":
        raise UserError("not with me")
    if how == "waits":
        open("ready", "w").close()
        time.sleep(60)
    with open("saved.txt", "w") as file:
        file.write(f"saved under number {file.fileno() > 2}")
    click.echo("the result\\n" * 3000)
    sys.exit(3 if how == "inconclusive" else 0)

command()
"""


def command(place, how: str, shell: str = "", **settings) -> subprocess.CompletedProcess[str]:
    """The command above in a process of its own, its streams as the ``shell`` sets them."""
    (place / "command.py").write_text(COMMAND)
    line = f'"$0" command.py {how} {shell}'
    return subprocess.run(["bash", "-c", line, sys.executable], cwd=place, text=True, timeout=60, **settings)


def gone() -> int:
    """The writing end of a pipe that nobody reads any more."""
    reading, writing = os.pipe()
    os.close(reading)
    return writing


@pytest.mark.parametrize("shell", ["2>/dev/full", "2>&-", "gone"])
@pytest.mark.parametrize(("how", "exit_code"), [("done", 0), ("inconclusive", 3), ("refused", 1)])
def test_notes_that_cannot_be_printed_end_nothing(tmp_path, shell, how, exit_code):
    settings = {"stdout": subprocess.PIPE, "stderr": gone() if shell == "gone" else None}
    done = command(tmp_path, how, "" if shell == "gone" else shell, **settings)
    assert done.returncode == exit_code
    assert done.stdout == ("" if how == "refused" else "the result\n" * 3000 + "\n")
    if how != "refused":
        assert (tmp_path / "saved.txt").read_text() == "saved under number True"


@pytest.mark.parametrize(
    ("shell", "reason"),
    [(">/dev/full", "No space left on device"), (">&-", "Bad file descriptor"), ("gone", "Broken pipe")],
)
@pytest.mark.parametrize("how", ["done", "inconclusive"])
def test_a_result_that_cannot_be_printed_is_one_line_after_everything_else(tmp_path, shell, reason, how):
    settings = {"stdout": gone() if shell == "gone" else None, "stderr": subprocess.PIPE}
    done = command(tmp_path, how, "" if shell == "gone" else shell, **settings)
    assert done.returncode == 1
    said = f"error: standard output: {reason}; the result cannot be printed, everything else was done\n"
    assert done.stderr.endswith(f"warning: nearly done\n{said}")
    assert (tmp_path / "saved.txt").read_text() == "saved under number True"


def test_with_both_streams_broken_the_work_is_done_all_the_same(tmp_path):
    assert command(tmp_path, "done", ">/dev/full 2>/dev/full").returncode == 1
    assert (tmp_path / "saved.txt").exists()


def hear_interrupts():
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it, and hand that down


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_gets_through_broken_streams(tmp_path, sent):
    (tmp_path / "command.py").write_text(COMMAND)
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(
            [sys.executable, "command.py", "waits"], cwd=tmp_path, stdout=full, stderr=full, preexec_fn=hear_interrupts
        )
    while not (tmp_path / "ready").exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(sent)
    assert process.wait(20) == 130
    assert not (tmp_path / "saved.txt").exists()


def test_the_streams_are_as_before_afterwards(capsys):
    before = sys.stdout, sys.stderr
    reports_errors(lambda: click.echo("the result"))()
    assert (sys.stdout, sys.stderr) == before
    assert capsys.readouterr().out == "the result\n"
