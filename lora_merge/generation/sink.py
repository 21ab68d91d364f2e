"""The results file: appended to and synced chunk by chunk, locked by one run, repaired after a kill.

A chunk's rows go out in one piece, in the order of the prompts, and are synced before the next chunk begins. So after any kill
the file is a number of whole chunks and at most one torn one behind them; resuming cuts that one off and does it again, whole,
which keeps its prompts in the company they would have had.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lora_merge.generation.errors import GenerationError
from lora_merge.generation.files import sync_folder
from lora_merge.generation.rows import KEYS, Tally

_BLOCK = 1 << 20
_OPEN: weakref.WeakSet[Sink] = weakref.WeakSet()


def _release_in_child() -> None:
    """A forked process, such as an engine's worker that outlives a killed run, must not keep the run's lock."""
    for sink in list(_OPEN):
        sink._let_go()


os.register_at_fork(after_in_child=_release_in_child)


class Sink:
    """One run's results file, open and locked. Make one with :meth:`open`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.is_finished = False
        self._descriptor = descriptor
        self._size = os.fstat(descriptor).st_size

    @classmethod
    def open(cls, path: Path, *, resume: bool) -> Sink:
        """Lock the file at ``path``, which is created where there is none.

        Raises:
            GenerationError: another run has it, it holds something and ``resume`` is not given, or it cannot be written.
        """
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise GenerationError(f"{path}: cannot be opened for writing: {error.strerror or error}") from error
        try:
            _check_is_file(path, descriptor)
            _lock(path, descriptor)
            sink = cls(path, descriptor)
            _OPEN.add(sink)
            if sink.holds_rows and not resume:
                raise GenerationError(f"{path}: holds results already; add --resume to go on with them, or give another --out")
            sync_folder(path.parent)
        except BaseException:
            os.close(descriptor)
            raise
        return sink

    @property
    def holds_rows(self) -> bool:
        """Whether anything has been written."""
        return self._size > 0

    def restore(self, chunks: Iterable[Sequence[str]], tally: Tally) -> int:
        """Keep the whole chunks that an earlier process wrote and cut off what is torn behind them.

        ``chunks``: the prompt ids of each chunk of this run, in order. ``tally`` counts the rows that are kept. Returns the
        number of whole chunks.

        Raises:
            GenerationError: the file holds something else than this run's rows.
        """
        whole = offset = number = 0
        with os.fdopen(os.dup(self._descriptor), "rb") as file:
            file.seek(0)
            for ids in chunks:
                lines = [line for _ in ids if (line := file.readline())]
                rows = [row for line, id in zip(lines, ids, strict=False) if (row := _row(line, id)) is not None]
                if len(rows) < len(ids):
                    if file.read(1):
                        raise GenerationError(
                            f"{self.path}: among lines {number + 1} to {number + len(ids)} there is one that is not the row of "
                            "this run's prompt, and more lines follow; the file was changed: give another --out"
                        )
                    break
                for row in rows:
                    tally.add(row)
                number += len(rows)
                whole += 1
                offset += sum(map(len, lines))
            else:
                if file.read(1):
                    raise GenerationError(
                        f"{self.path}: line {number + 1} is one too many, the run has {number} prompts; the file was changed: "
                        "give another --out"
                    )
        if offset < self._size:
            os.ftruncate(self._descriptor, offset)
            os.fsync(self._descriptor)
            self._size = offset
        return whole

    def append(self, lines: Sequence[bytes]) -> None:
        """Write ``lines`` behind what is there, and return when the disk has them.

        Raises:
            GenerationError: the disk did not take them; the file is as it was before.
        """
        data = memoryview(b"".join(lines))
        written = 0
        try:
            while written < len(data):
                written += os.pwrite(self._descriptor, data[written : written + _BLOCK], self._size + written)
            os.fsync(self._descriptor)
        except OSError as error:
            os.ftruncate(self._descriptor, self._size)
            why = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error.strerror or error)
            way_out = "the rows before are safe, go on with --resume" if self.holds_rows else "no row was saved"
            raise GenerationError(f"{self.path}: cannot be written: {why}; {way_out}") from error
        self._size += len(data)

    def close(self) -> None:
        """Unlock. A file that nothing was written to is removed, unless that is the whole result."""
        if self._descriptor < 0:
            return
        if not self.holds_rows and not self.is_finished:
            self.path.unlink(missing_ok=True)
        self._let_go()

    def _let_go(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def _check_is_file(path: Path, descriptor: int) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise GenerationError(f"{path}: is no regular file, so a run on it could not be resumed; give the name of a file")


def _lock(path: Path, descriptor: int) -> None:
    """Take the exclusive lock, which ends with the process, and make sure that the name still means the locked file."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise GenerationError(f"{path}: another run is writing it; wait for it to end, or give another --out") from None
    except OSError as error:
        raise GenerationError(f"{path}: cannot be locked against a second run: {error.strerror or error}") from error
    named = path.stat() if path.exists() else None
    locked = os.fstat(descriptor)
    if named is None or (named.st_dev, named.st_ino) != (locked.st_dev, locked.st_ino):
        raise GenerationError(f"{path}: another run has just given it up; try again")


def _row(line: bytes, id: str) -> dict[str, Any] | None:
    """``line`` as a whole row of the prompt ``id``; None when it is anything else."""
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and tuple(row) == KEYS and row["id"] == id else None
