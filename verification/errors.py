"""The errors of this room."""

from __future__ import annotations

from typing import ClassVar

from lora_merge.errors import EXIT_INCONCLUSIVE, UserError


class VerificationError(UserError):
    """A certificate, key or measurement file that cannot be accepted: says which, what was found and what was expected."""


class Inconclusive(UserError):
    """Nothing could be measured, or what was measured says nothing: never a pass, never a certificate."""

    exit_code: ClassVar[int] = EXIT_INCONCLUSIVE
