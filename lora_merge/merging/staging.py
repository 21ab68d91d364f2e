"""A folder that appears complete or not at all.

Everything is written into a hidden sibling of the final folder, which gets its name by one rename at the very end. The hidden
folder is locked while its process lives, and the system drops the lock however the process ends: so the next run can tell a dead
process's leftovers, which it removes, from a running merge, to which it yields.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lora_merge.merging.errors import MergeError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextlib.contextmanager
def staged_folder(out: Path, *, overwrite: bool, marker: str) -> Iterator[Path]:
    """Give a hidden folder to fill; when the body ends well it becomes ``out``, otherwise it is removed.

    Args:
        out: the final folder.
        overwrite: whether a folder at ``out`` may be replaced, provided it holds the file ``marker`` or is empty.

    Raises:
        MergeError: ``out`` is taken, another run is writing it, or the file system refuses.
    """
    check_free(out, overwrite=overwrite, marker=marker)
    prefix = f".{out.name}.partial-"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with _locked(out.parent):
            _remove_leftovers(out, prefix)
            hidden = Path(tempfile.mkdtemp(prefix=prefix, dir=out.parent))
            hidden.chmod(0o755)
            lock = _lock(hidden)
    except OSError as error:
        raise MergeError(f"{out}: cannot be created: {error.strerror or error}") from error
    try:
        yield hidden
        _publish(hidden, out, overwrite=overwrite, marker=marker)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def check_free(out: Path, *, overwrite: bool, marker: str) -> None:
    """Raise :class:`MergeError` unless ``out`` can become the result."""
    try:
        _check_free(out, overwrite=overwrite, marker=marker)
    except OSError as error:  # a name that is too long, a folder that may not be looked into
        raise MergeError(f"{_short(out)}: cannot be created: {error.strerror or error}") from error


def _short(out: Path) -> str:
    text = str(out)
    return text if len(text) <= 200 else f"{text[:100]}...{text[-50:]}"


def _check_free(out: Path, *, overwrite: bool, marker: str) -> None:
    if out.is_symlink():
        raise MergeError(f"{out}: is a symbolic link; give the folder itself")
    place = next(folder for folder in out.parents if folder.exists())
    if not place.is_dir():
        raise MergeError(f"{out}: cannot be created, {place} is a file")
    if not os.access(place, os.W_OK | os.X_OK):
        raise MergeError(f"{out}: cannot be created, there is no permission to write in {place}")
    if not out.exists():
        return
    if not out.is_dir():
        raise MergeError(f"{out}: exists and is no folder")
    if not any(out.iterdir()):
        return
    if not overwrite:
        raise MergeError(f"{out}: exists already; choose another name or pass --overwrite")
    if not (out / marker).is_file():
        raise MergeError(
            f"{out}: holds no {marker}, so it was not written by lora-merge and is not overwritten; remove it yourself"
        )


def _remove_leftovers(out: Path, prefix: str) -> None:
    for leftover in out.parent.glob(f"{prefix}*"):
        lock = _lock(leftover)
        if lock is None:
            raise MergeError(f"{out}: another run is writing it at this moment (in {leftover.name})")
        shutil.rmtree(leftover, ignore_errors=True)
        os.close(lock)


def _lock(folder: Path) -> int | None:
    """An open descriptor that holds the folder's lock, or None where somebody else holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            os.close(descriptor)
            return None
        # A file system without locks: leftovers cannot be told from a running merge by their lock, but nothing else is lost.
    return descriptor


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the parent folder's lock, so that nobody takes a folder just created and not yet locked for a leftover."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _publish(hidden: Path, out: Path, *, overwrite: bool, marker: str) -> None:
    try:
        sync_folder(hidden)
        check_free(out, overwrite=overwrite, marker=marker)
        if out.exists() and any(out.iterdir()):
            _exchange(hidden, out)
        else:
            os.rename(hidden, out)
        sync_folder(out.parent)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise MergeError(f"{out}: appeared while this run was writing; somebody else's result was left alone") from error
        raise MergeError(f"{out}: cannot be put in place: {error.strerror or error}") from error


def _exchange(hidden: Path, out: Path) -> None:
    """Swap the two folders' names in one step, so that ``out`` never goes missing; then ``hidden`` names the old one."""
    library = ctypes.CDLL(None, use_errno=True)
    if hasattr(library, "renameat2"):
        code = library.renameat2(_AT_FDCWD, os.fsencode(hidden), _AT_FDCWD, os.fsencode(out), _RENAME_EXCHANGE)
        if code == 0:
            return
        if ctypes.get_errno() not in (errno.ENOSYS, errno.EINVAL):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    old = hidden.with_name(f"{hidden.name}-replaced")
    os.rename(out, old)
    try:
        os.rename(hidden, out)
    except OSError:
        os.rename(old, out)
        raise
    os.rename(old, hidden)


def sync_folder(folder: Path) -> None:
    """Make the folder's entries durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
