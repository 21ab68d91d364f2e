"""The one root of every error that a user is meant to read.

Each room derives its own class from :class:`UserError`; the command line turns it into one line on standard error and the
exit code that the class carries. Anything else that reaches the top is a defect of ours and keeps its traceback.
"""

from __future__ import annotations

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
