"""What a killed command had started ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from lora_merge.generation.orphans import end_with_descendants

ROOT = Path(__file__).parents[2]
SLEEPER = "import time; time.sleep(300)"
COMMAND = f"""
import subprocess, sys
from lora_merge.generation.orphans import no_orphans
with no_orphans():
    worker = subprocess.Popen([sys.executable, "-c", {SLEEPER!r}], start_new_session=True)
    print(worker.pid, flush=True)
    if sys.stdin.read() == "fail":
        raise KeyboardInterrupt
print("over", flush=True)
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ends(pid: int) -> bool:
    deadline = time.monotonic() + 20
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not is_running(pid)


def test_a_worker_of_a_killed_command_ends():
    with subprocess.Popen([sys.executable, "-c", COMMAND], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as command:
        worker = int(command.stdout.readline())
        time.sleep(2)
        assert is_running(worker)
        command.send_signal(signal.SIGKILL)
        command.wait()
        assert ends(worker)


def test_a_worker_of_an_interrupted_command_ends():
    quiet = subprocess.DEVNULL
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=quiet, cwd=ROOT
    ) as command:
        worker = int(command.stdout.readline())
        time.sleep(2)
        command.communicate(b"fail")
        assert ends(worker)


def test_a_process_is_ended_with_what_it_started():
    with subprocess.Popen([sys.executable, "-c", COMMAND], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as command:
        worker = int(command.stdout.readline())
        end_with_descendants(command)
        assert command.returncode == -signal.SIGKILL
        assert ends(worker)


def test_after_a_command_that_ends_by_itself_nothing_is_touched():
    with subprocess.Popen([sys.executable, "-c", COMMAND], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as command:
        worker = int(command.stdout.readline())
        time.sleep(1)
        command.stdin.close()
        assert command.stdout.readline() == b"over\n"
        command.wait()
    try:
        time.sleep(1.5)
        assert is_running(worker)
    finally:
        os.kill(worker, signal.SIGKILL)
