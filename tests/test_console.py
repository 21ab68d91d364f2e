"""What the command lines share."""

from __future__ import annotations

import click
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
