"""Options of the command lines that are refused before anything is read."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from lora_merge.generation.bench_cli import main as bench_engines
from lora_merge.generation.cli import main as gated_generate
from verification.cli import main as verify_skip_drift

GENERATE = ("--model", "m", "--prompts", "p", "--out", "o", "--skip-threshold", "0.5")
BENCH = ("--model", "m", "--prompts", "p", "--num-prompts", "1")
VERIFY = ("--merged", "m", "--prompts", "p")


@pytest.mark.parametrize("number", ["nan", "-nan", "inf", "-1", "2"])
@pytest.mark.parametrize(
    ("command", "usual", "options"),
    [
        (gated_generate, GENERATE, ("--max-delta", "--skip-threshold", "--max-quarantine", "--gpu-memory-utilization")),
        (gated_generate, ("check", "--model", "m"), ("--max-delta",)),
        (bench_engines, BENCH, ("--skip-threshold", "--min-agreement", "--max-token-difference", "--gpu-memory-utilization")),
        (verify_skip_drift, VERIFY, ("--max-delta", "--skip-threshold", "--max-flip-rate", "--gpu-memory-utilization")),
    ],
)
def test_what_is_no_share_is_wrong_usage(command, usual, options, number):
    for option in options:
        done = CliRunner().invoke(command, [*usual, option, number])
        assert done.exit_code == 2 and f"Invalid value for '{option}'" in done.stderr, done.output
