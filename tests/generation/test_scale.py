"""Memory does not grow with the number of prompts.

Intake, spool, sink and resuming are the production path; the engine is scripted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
COUNT = 100_000


def test_a_hundred_thousand_prompts_in_constant_memory(pristine, tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "tests.generation.scale_run", str(pristine), str(tmp_path), str(COUNT)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    grown, data = found["large"] - found["small"], (tmp_path / f"{COUNT}.jsonl").stat().st_size
    print(
        f"{COUNT:,} prompts ({data / 1e6:.0f} MB), killed half way and resumed: {found['rows_per_second']:,.0f} rows/s, "
        f"peak {found['large'] / 1e6:.0f} MB, {grown / 1e6:.0f} MB above a tenth of them"
    )
    # The ids are all that is kept of a prompt, to find twins: about 100 bytes each.
    assert data > 60e6
    assert grown < 25e6
    with open(tmp_path / f"{COUNT}.out.jsonl", encoding="utf-8") as file:
        for number, line in enumerate(file):
            assert json.loads(line)["id"] == f"pair-{number:08}"
    assert number == COUNT - 1
    assert not list(tmp_path.glob("*quarantine*"))
