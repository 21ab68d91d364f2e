"""The errors of this room."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

from lora_merge.errors import EXIT_INCONCLUSIVE, EXIT_INTERRUPTED, UserError

if TYPE_CHECKING:
    from verification.checks import Check


class VerificationError(UserError):
    """A certificate, key or measurement file that cannot be accepted: says which, what was found and what was expected."""


class Inconclusive(UserError):
    """Nothing could be measured, or what was measured says nothing: never a pass, never a certificate.

    ``checks``: what had been checked when it was known that a measurement would say nothing.
    """

    exit_code: ClassVar[int] = EXIT_INCONCLUSIVE

    def __init__(self, message: str, checks: Sequence[Check] = ()) -> None:
        super().__init__(message)
        self.checks = tuple(checks)


class Interrupted(UserError):
    """Somebody stopped the run (Ctrl-C, SIGTERM) before there was a verdict."""

    exit_code: ClassVar[int] = EXIT_INTERRUPTED


@contextlib.contextmanager
def verdict_expected() -> Iterator[None]:
    """Around whatever should end in a verdict: ending without one is inconclusive.

    Exit code 1 says that a merge is wrong, and nobody knows that here, be it the user's mistake or, with its traceback, ours.
    """
    try:
        yield
    except (Inconclusive, Interrupted):
        raise
    except UserError as error:
        raise Inconclusive(str(error)) from error
    except PermissionError as error:
        raise Inconclusive(f"{error.filename}: {error.strerror}; ask for access or name another") from error
    except Exception:
        traceback.print_exc()
        sys.exit(EXIT_INCONCLUSIVE)
