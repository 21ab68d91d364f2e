"""The errors of this room."""

from __future__ import annotations

from collections.abc import Sequence
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
