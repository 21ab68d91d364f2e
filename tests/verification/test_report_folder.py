"""The report folder on a disk that has no room: nothing half-written stays, and what was there before is as it was."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from tests.verification.builders import ordinary
from verification import report_folder
from verification.certificate import write_certificate
from verification.drift_file import write_measurements
from verification.errors import VerificationError
from verification.limits import Limits
from verification.verdict import could_not_measure, judge


@contextlib.contextmanager
def full_disk(room: int = 100) -> Iterator[None]:
    """No file can grow beyond ``room`` bytes: the system refuses the rest of a write, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path) -> None:
    measured = ordinary(30)
    verdict = judge(measured, Limits())
    with full_disk(), pytest.raises(VerificationError, match="cannot be written"):
        report_folder.write(tmp_path, verdict, measured, None)
    assert list(tmp_path.iterdir()) == []


def test_a_verdict_replaces_what_an_earlier_run_left_and_nothing_else(tmp_path: Path) -> None:
    """Every file of a run is known for one; a CI's own report of the same name is not taken away, and nothing beside it."""
    measured = ordinary()
    report, nothing = tmp_path / "report", could_not_measure("measurement", "no such file", Limits())
    report_folder.make(report)
    (report / "notes.txt").write_text("of somebody else")
    for key in (None, _key(tmp_path / "gate.key")):
        report_folder.write(report, judge(measured, Limits()), measured, key)
        assert {path.name for path in report.iterdir()} == {*report_folder.FILES, "notes.txt"}
        assert ("payloadType" in (report / "gate.intoto.json").read_text()) is (key is not None)
        report_folder.make(report)
        assert {path.name for path in report.iterdir()} == {*report_folder.FILES, "notes.txt"}, "nothing replaces it yet"
    report_folder.write(report, nothing, None, None)
    assert sorted(path.name for path in report.iterdir()) == ["drift.json", "junit.xml", "notes.txt"]
    report_folder.write(report, judge(measured, Limits()), measured, None)
    for name in report_folder.FILES:
        ours = (report / name).read_bytes()
        (report / name).write_text('<testsuite name="pytest"/> or {"drift": 5}')
        with pytest.raises(VerificationError, match=f"its {name} is not of an earlier run and would be replaced"):
            report_folder.make(report)
        (report / name).write_bytes(ours)
        assert {path.name for path in report.iterdir()} >= {*report_folder.FILES}, "all or nothing"


def test_a_certificate_never_stands_beside_what_another_run_measured(tmp_path: Path) -> None:
    """Not even where the new report cannot be written: the room is enough for no measurement."""
    measured = ordinary()
    report_folder.write(tmp_path, judge(measured, Limits()), measured, None)
    assert (tmp_path / "gate.intoto.json").exists()
    with full_disk(), pytest.raises(VerificationError, match="cannot be written"):
        report_folder.write(tmp_path, judge(measured, Limits(max_abs_delta=1e-6)), measured, None)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_takes_no_file_is_found_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")  # what a folder without the right to write does; root has every right

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(VerificationError, match="cannot be used: Permission denied; choose another --report"):
        report_folder.make(tmp_path / "report")


def _key(path: Path) -> Path:
    path.write_bytes(Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return path


@pytest.mark.parametrize(
    "write",
    [
        lambda path: write_measurements(ordinary(30), path),
        lambda path: write_certificate({"a statement": "x" * 1000}, path, None),
    ],
)
def test_what_was_there_stays_as_it_was(write: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("from before")
    with full_disk(), pytest.raises(OSError, match="File too large"):
        write(tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "from before"
