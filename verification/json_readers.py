"""Readers of JSON values that compose: what each part of a file must be is said once, beside its name.

A :data:`Reader` takes a parsed value and where it stands, and gives back what was read. Anything but what it reads raises
:class:`VerificationError` with the place, what was found there and what was expected.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from lora_merge.errors import UserError
from lora_merge.merging.digests import is_digest
from verification.checks import is_number
from verification.errors import VerificationError
from verification.strict_json import expect_keys

Read = TypeVar("Read")
Reader = Callable[[Any, str], Read]
_LONGEST_SHOWN = 60
"""Characters of a value in a message."""


def refuse(where: str, value: Any, expected: str) -> NoReturn:
    """Raise the :class:`VerificationError` that ``where`` holds ``value`` and not what was ``expected``."""
    shown = json.dumps(value)
    shown = shown if len(shown) <= _LONGEST_SHOWN else f"{shown[:_LONGEST_SHOWN]}..."
    raise VerificationError(f"{where} is {shown}, expected {expected}")


def anything(value: Any, where: str) -> Any:
    """Whatever JSON can say."""
    return value


def text(value: Any, where: str) -> str:
    """A string."""
    return value if isinstance(value, str) else refuse(where, value, "a text")


def filled_text(value: Any, where: str) -> str:
    """A string of at least one character."""
    return value if isinstance(value, str) and value else refuse(where, value, "a text that is not empty")


def flag(value: Any, where: str) -> bool:
    """``true`` or ``false``."""
    return value if isinstance(value, bool) else refuse(where, value, "true or false")


def digest(value: Any, where: str) -> str:
    """A hexadecimal SHA-256."""
    return str(value) if is_digest(value) else refuse(where, value, "a hexadecimal SHA-256")


def day(value: Any, where: str) -> str:
    """A day as ``2026-11-30``."""
    try:
        if isinstance(value, str) and datetime.date.fromisoformat(value).isoformat() == value:
            return value
    except ValueError:
        pass
    refuse(where, value, "a day such as 2026-11-30")


def whole(least: int, most: int | None = None) -> Reader[int]:
    """A whole number in this range, both ends included."""
    expected = f"a whole number from {least}" + ("" if most is None else f" to {most}")

    def read(value: Any, where: str) -> int:
        good = type(value) is int and value >= least and (most is None or value <= most)
        return int(value) if good else refuse(where, value, expected)

    return read


def number(least: float | None, most: float, *, rounding: float = 0.0) -> Reader[float]:
    """A finite number from ``least``, where there is one, to ``most``, which rounding may exceed by ``rounding``."""
    expected = f"a number {'' if least is None else f'from {least:g} '}{'up ' if least is None else ''}to {most:g}"

    def read(value: Any, where: str) -> float:
        good = is_number(value) and (least is None or value >= least) and value <= most + rounding
        return float(value) if good else refuse(where, value, expected)

    return read


def one_of(*choices: str) -> Reader[str]:
    """One of these strings."""

    def read(value: Any, where: str) -> str:
        return value if isinstance(value, str) and value in choices else refuse(where, value, f"one of {', '.join(choices)}")

    return read


def or_null(reader: Reader[Read]) -> Reader[Read | None]:
    """``null``, or what ``reader`` reads."""

    def read(value: Any, where: str) -> Read | None:
        return None if value is None else reader(value, where)

    return read


def listed(reader: Reader[Read]) -> Reader[tuple[Read, ...]]:
    """A list of what ``reader`` reads; messages count its entries from 1."""

    def read(value: Any, where: str) -> tuple[Read, ...]:
        if not isinstance(value, list):
            refuse(where, value, "a list")
        return tuple(reader(entry, f"{where} {index}") for index, entry in enumerate(value, start=1))

    return read


def mapping(reader: Reader[Read], *, filled: bool = False) -> Reader[dict[str, Read]]:
    """An object of any names, each with what ``reader`` reads; ``filled``: with at least one."""

    def read(value: Any, where: str) -> dict[str, Read]:
        if not isinstance(value, Mapping) or (filled and not value):
            refuse(where, value, "an object that is not empty" if filled else "an object")
        return {name: reader(entry, f"{where}: {name}") for name, entry in value.items()}

    return read


def record(required: Mapping[str, Reader[Any]], optional: Mapping[str, Reader[Any]] | None = None) -> Reader[dict[str, Any]]:
    """An object of exactly these names, the ``optional`` ones where they are there."""
    readers = {**required, **(optional or {})}

    def read(value: Any, where: str) -> dict[str, Any]:
        found = expect_keys(value, set(required), where, frozenset(optional or ()))
        return {name: readers[name](entry, f"{where}: {name}") for name, entry in found.items()}

    return read


def via(parse: Callable[[Any], Read]) -> Reader[Read]:
    """What a class reads by itself; its complaint gets the place in front."""

    def read(value: Any, where: str) -> Read:
        try:
            return parse(value)
        except UserError as error:
            raise VerificationError(f"{where}: {error}") from error

    return read
