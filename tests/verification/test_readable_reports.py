"""Paths with bytes that are no UTF-8, and folders that are no checkpoint: reports stand, and refusals are one line.

Oracles: expat reads the XML, UTF-8 holds every file, and strict_loads takes JSON of characters only.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn
from xml.etree import ElementTree

import pytest

from lora_merge.merging.digests import root_digest
from tests.verification.builders import SETTLED, ordinary
from verification import report, report_folder
from verification.api import judge_again
from verification.certificate import make_statement, read_statement, write_certificate
from verification.checks import Check, Outcome
from verification.errors import VerificationError
from verification.gate import check_certificate
from verification.limits import Limits
from verification.measurement import Measurements
from verification.merged_files import folder_files
from verification.strict_json import strict_loads
from verification.verdict import could_not_measure, judge

CAFE = os.fsdecode(b"caf\xe9")
WRITTEN = r"caf\xe9"


def _of_cafe() -> Measurements:
    """With the path in every place that a path can come to."""
    source = ordinary()
    about = source.conditions
    recipe = {"quant_type": "nf4", "origins": {"quant_type": f"/{CAFE}/adapter_config.json"}}
    return dataclasses.replace(
        source,
        conditions=dataclasses.replace(
            about,
            prompts={**about.prompts, "source": f"{CAFE}.jsonl"},
            arms={**about.arms, "merged": {**about.arms["merged"], "settings": {"model": f"/{CAFE}/merged"}}},
            recipe=recipe,
            findings=(*SETTLED, Check("base-identity", Outcome.WARNED, f"the base here is /{CAFE}/base")),
        ),
    )


def test_every_report_holds_characters_only(tmp_path: Path) -> None:
    measured = _of_cafe()
    verdict = judge(measured, Limits())
    report_folder.write(tmp_path, verdict, measured, None)
    assert {path.name for path in tmp_path.iterdir()} == {*report_folder.FILES}
    for path in tmp_path.iterdir():
        assert WRITTEN in path.read_text(encoding="utf-8").replace(r"\\", "\\"), path
        if path.suffix == ".json":
            strict_loads(path.read_bytes(), path.name)
    statement, _ = read_statement(tmp_path / "gate.intoto.json")
    assert statement.bound["engine"]["settings"] == {"model": f"/{WRITTEN}/merged"}
    again = judge_again(tmp_path / "drift.jsonl", Limits(), tmp_path)
    assert again.outcome is verdict.outcome is Outcome.WARNED
    assert again.reasons == (f"base-identity: the base here is /{WRITTEN}/base",)
    assert read_statement(tmp_path / "gate.intoto.json")[0] == statement


def test_junit_is_xml_whatever_a_name_holds() -> None:
    verdict = could_not_measure("measurement", f"{CAFE} \x00\x1b[31m\uffff 가게\n: no such file", Limits())
    (error,) = ElementTree.fromstring(report_folder.junit(verdict).encode("utf-8")).iter("error")
    assert error.get("message") == rf"{WRITTEN} \u0000\u001b[31m\uffff 가게 : no such file"


def test_what_a_stranger_s_file_says_is_text_on_the_screen(tmp_path: Path) -> None:
    """A name that clears the screen and writes a verdict of its own on it."""
    name = "x\x1b[2J\x1b[H\x1b[32mPASSED: the merged checkpoint decides as its QLoRA reference did\x1b[0m\n\x01 base2"
    measured = ordinary()
    findings = (*SETTLED, Check("base-identity", Outcome.INCONCLUSIVE, f"the adapter names the base {name}"))
    rows = [dataclasses.replace(row, fields={name: index < 20}) for index, row in enumerate(measured.rows)]
    moved = [dataclasses.replace(row.scores["merged"], log_p_skip=row.scores["merged"].log_p_skip - 1) for row in rows[:20]]
    rows[:20] = [
        dataclasses.replace(row, scores={**row.scores, "merged": new}) for row, new in zip(rows[:20], moved, strict=True)
    ]
    about = dataclasses.replace(measured.conditions, findings=findings)
    verdict = judge(dataclasses.replace(measured, conditions=about, rows=tuple(rows)), Limits())
    lines = [line for line, _ in report.render(verdict)]
    assert all(line.isprintable() for line in lines)
    assert sum(line.startswith("  drifts most") and "PASSED" in line for line in lines) == 1
    assert not any(line.startswith("PASSED") for line in lines)
    text = report_folder.junit(verdict)
    assert "base2" in text and all(line.isprintable() for line in text.splitlines())
    ElementTree.fromstring(text.encode("utf-8"))


def test_the_commands_say_it_in_one_line(tmp_path: Path) -> None:
    """In processes of their own, whose streams refuse what UTF-8 cannot hold."""
    strict = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    for module, *words in (
        ("verification.cli", "--merged", "MODEL", "--prompts", "p.jsonl"),
        ("verification.cli", "judge", "MODEL"),
        ("verification.audit_cli", "--merged", "MODEL"),
        ("lora_merge.generation.cli", "check", "--model", "MODEL"),
    ):
        given = [str(tmp_path / CAFE) if word == "MODEL" else word for word in words]
        command = [sys.executable, "-c", f"from {module} import main; main()", *given]
        done = subprocess.run(command, capture_output=True, env=strict)
        said = (done.stdout + done.stderr).decode("utf-8")
        assert done.returncode == (1 if "generation" in module else 3)
        assert rf"{tmp_path}/{WRITTEN}: " in said and "Traceback" not in said


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "merged"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / CAFE).write_text("of any kind")
    return folder


def test_a_file_whose_name_is_no_text_is_certified(checkpoint: Path) -> None:
    files = folder_files(checkpoint)
    assert set(files) == {"config.json", WRITTEN}
    about = dataclasses.replace(ordinary().conditions, merged_files=files, merged_root=root_digest(files))
    statement = make_statement(judge(ordinary(), Limits()), about, "ab" * 32)
    certificate = checkpoint.with_name("gate.intoto.json")
    write_certificate(statement, certificate, None)
    assert check_certificate(checkpoint, certificate).outcome is Outcome.PASSED
    (checkpoint / CAFE).write_text("of another kind")
    with pytest.raises(VerificationError, match="was changed since it was certified"):
        check_certificate(checkpoint, certificate)


def test_two_names_that_are_written_alike_are_refused(checkpoint: Path) -> None:
    (checkpoint / WRITTEN).write_text("another file")
    with pytest.raises(VerificationError, match="two of its files have names that are written alike; rename one"):
        folder_files(checkpoint)


def test_what_is_no_checkpoint_is_not_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    def walked(*_: object) -> NoReturn:
        raise AssertionError("walked")

    monkeypatch.setattr(os, "scandir", walked)
    with pytest.raises(VerificationError, match=r"^/: holds no config\.json; expected a merged checkpoint"):
        folder_files("/")


def test_what_cannot_be_looked_at_is_one_line(checkpoint: Path) -> None:
    (checkpoint / "link").symlink_to("x" * 300)  # longer than any name may be
    with pytest.raises(VerificationError, match=r"link: cannot be read: File name too long$"):
        folder_files(checkpoint)
