"""What the command lines share."""

from __future__ import annotations

import os
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from lora_merge.console import reports_errors


def test_a_place_where_one_may_not_look_is_one_line():
    @click.command()
    @reports_errors
    def command() -> None:
        raise PermissionError(13, "Permission denied", "/root/secret/base/config.json")

    result = CliRunner().invoke(command)
    assert result.exit_code == 1
    assert result.stderr == "error: /root/secret/base/config.json: Permission denied; ask for access or name another\n"


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
