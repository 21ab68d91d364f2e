"""README.md's own code: it runs as it is written there."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.generation.builders import read_rows

README = Path(__file__).parents[2] / "README.md"


def test_the_snippet_of_generate_gated_runs_as_written(checkpoint, prompts, monkeypatch, capsys):
    """On a tiny certified checkpoint, in Transformers."""
    (code,) = (
        block for block in re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.S) if "generate_gated(" in block
    )
    prompts.rename(prompts.with_name("all.jsonl"))
    monkeypatch.chdir(checkpoint.parent)
    exec(compile(code, str(README), "exec"), {"__name__": "__main__"})
    rows = read_rows(Path("results.jsonl"))
    assert len(rows) == 40 and {row["gated"] for row in rows} == {True}
    assert capsys.readouterr().out == f"results.jsonl {sum(row['kept'] for row in rows)}\n"
    assert json.loads(Path("results.jsonl.run.json").read_text())["settings"]["engine"] == "hf"
