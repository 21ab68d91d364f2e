"""The one root of every error that a user is meant to read.

Each room derives its own class from :class:`UserError`; the command line turns it into one line on standard error and the
exit code that the class carries. Anything else that reaches the top is a defect of ours and keeps its traceback. The
functions say what is wrong with a path, in the same words everywhere.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INCONCLUSIVE = 3
EXIT_INTERRUPTED = 130


class UserError(Exception):
    """A problem that the user can act on.

    The message is a single sentence or two: the thing that is wrong by name, what was found, what was expected and what to do.
    """

    exit_code: ClassVar[int] = EXIT_FAILED


def no_file(path: str | os.PathLike[str], expected: str) -> str | None:
    """Why ``path`` is no file to read, in one sentence with what was ``expected``; None where it is one."""
    found = Path(path)
    if found.is_file():
        return None
    what = "is a folder" if found.is_dir() else "is no regular file" if found.exists() else "no such file"
    return f"{path}: {what}; expected {expected}"


def no_folder(path: str | os.PathLike[str], expected: str) -> str | None:
    """Why ``path`` is no folder, in one sentence with what was ``expected``; None where it is one."""
    if Path(path).is_dir():
        return None
    return f"{path}: {'is a file' if Path(path).exists() else 'no such folder'}; expected {expected}"
