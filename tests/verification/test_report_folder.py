"""The report folder on a disk that has no room: nothing half-written stays, and what was there before is as it was."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

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
