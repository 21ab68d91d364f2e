"""A chat template that writes the date into its prompts, as Llama 3.2's does: a recorded reference holds on another day too."""

from __future__ import annotations

import datetime
import json
import shutil
from pathlib import Path
from typing import Any

import click.testing
import pytest

from lora_merge.merging.api import MergeOptions, merge
from tests.verification.tiny_qlora import PREFILL, make_prompt_rows, write_rows
from verification.certificate import read_statement
from verification.cli import main
from verification.drift_file import read_measurements
from verification.errors import VerificationError
from verification.reference import read_reference

TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %} {{ strftime_now('%d %b %Y') }} "


@pytest.fixture
def dated(trained: Path, tmp_path: Path) -> Path:
    """Base, adapter and merged checkpoint with that template, and prompts that are conversations."""
    for name in ("base", "adapter"):
        shutil.copytree(trained / name, tmp_path / name)
        (tmp_path / name / "chat_template.jinja").write_text(TEMPLATE)
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged", MergeOptions(from_4bit=True))
    rows = [{"id": row["id"], "messages": [{"role": "user", "content": row["prompt"]}]} for row in make_prompt_rows()]
    write_rows(tmp_path / "prompts.jsonl", rows)
    return tmp_path


def _verify(place: Path, *arguments: object) -> dict[str, Any]:
    given = ("--merged", place / "merged", "--prompts", place / "prompts.jsonl", "--prefill", PREFILL, *arguments)
    words = [
        str(word) for word in (*given, "--engine", "hf", "--device", "cpu", "--format", "json", "--quiet", "--max-delta", 0.2)
    ]
    verdict: dict[str, Any] = json.loads(click.testing.CliRunner().invoke(main, words, catch_exceptions=False).stdout)
    return verdict


def test_a_reference_holds_on_another_day(dated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = dated / "reference.jsonl"
    monkeypatch.setattr("verification.prepare.today", lambda: datetime.date(2026, 1, 31))
    live = _verify(dated, "--record-reference", reference)
    assert live["numbers"]["prompts"]["date"] == read_reference(reference).date == "2026-01-31"
    monkeypatch.setattr("verification.prepare.today", lambda: datetime.date(2026, 2, 1))
    later = _verify(dated, "--reference", reference)
    assert later["numbers"]["prompts"] == live["numbers"]["prompts"]
    report = dated / "merged-report"
    assert read_measurements(report / "drift.jsonl").conditions.prompts["date"] == "2026-01-31"
    if (report / "gate.intoto.json").exists():
        assert read_statement(report / "gate.intoto.json")[0].bound["prompts"]["date"] == "2026-01-31"

    header, *rows = reference.read_text().splitlines(keepends=True)
    said = json.loads(header)
    del said["date"]  # as one from before it was kept
    reference.write_text(json.dumps(said) + "\n" + "".join(rows))
    (reason,) = _verify(dated, "--reference", reference)["reasons"]
    assert (
        "differ from those of the reference: the chat template writes the date into its prompts, and the reference does not"
        in reason
    )
    reference.write_text(json.dumps({**said, "date": "31 Jan"}) + "\n" + "".join(rows))
    with pytest.raises(VerificationError, match=r'line 1: date is "31 Jan", expected a day such as 2026-11-30'):
        read_reference(reference)
