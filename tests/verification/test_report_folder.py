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
from verification.verdict import judge


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


def test_a_run_replaces_what_an_earlier_one_left_and_nothing_else(tmp_path: Path) -> None:
    """Every file of a run is known for one; a CI's own report of the same name is not taken away, and nothing beside it."""
    measured = ordinary()
    (tmp_path / "notes.txt").write_text("of somebody else")
    report_folder.write(tmp_path, judge(measured, Limits()), measured, None)
    assert {path.name for path in tmp_path.iterdir()} == {*report_folder.FILES, "notes.txt"}
    report_folder.clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    report_folder.write(tmp_path, judge(measured, Limits()), measured, _key(tmp_path / "gate.key"))
    assert "payloadType" in (tmp_path / "gate.intoto.json").read_text()
    report_folder.clear(tmp_path)
    assert not (tmp_path / "gate.intoto.json").exists()
    report_folder.write(tmp_path, judge(measured, Limits()), measured, None)
    for name in report_folder.FILES:
        ours = (tmp_path / name).read_bytes()
        (tmp_path / name).write_text('<testsuite name="pytest"/> or {"drift": 5}')
        with pytest.raises(VerificationError, match=f"its {name} is not of an earlier run and would be replaced"):
            report_folder.clear(tmp_path)
        (tmp_path / name).write_bytes(ours)
        assert {path.name for path in tmp_path.iterdir()} >= {*report_folder.FILES}, "all or nothing"


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
