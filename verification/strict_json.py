"""JSON as certificates and measurements need it: one way to write a value, and no way to read an ambiguous one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lora_merge.readable import json_text
from verification.errors import VerificationError


def canonical(value: Any) -> str:
    """``value`` as JSON with sorted keys, no spaces and ASCII only; NaN and infinities raise ValueError.

    What is no character is escaped as everywhere (:mod:`lora_merge.readable`).
    """
    return json_text(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def strict_loads(text: str | bytes, what: str) -> Any:
    """Parse ``text``; twin keys, NaN, infinities and half a surrogate pair, which is no character, are errors.

    ``what`` names it in the :class:`VerificationError`.
    """
    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        value = json.loads(decoded, object_pairs_hook=_without_twins, parse_constant=_refuse)
        if "\\u" in decoded:
            _expect_characters(value)
    except (ValueError, RecursionError) as error:
        raise VerificationError(f"{what}: is not valid JSON: {error}") from error
    return value


def expect_keys(value: Any, required: set[str], what: str, optional: frozenset[str] = frozenset()) -> Mapping[str, Any]:
    """``value`` when it is an object with all of ``required`` and nothing beyond ``optional``; else
    :class:`VerificationError`.
    """
    if not isinstance(value, Mapping):
        raise VerificationError(f"{what}: is a JSON {type(value).__name__}, expected an object")
    missing, unknown = sorted(required - set(value)), sorted(set(value) - required - optional)
    if missing or unknown:
        found = [f"{missing[0]!r} is missing"] if missing else []
        found += [f"{unknown[0]!r} is not known"] if unknown else []
        raise VerificationError(f"{what}: {' and '.join(found)}; was it written by another version?")
    return value


def _expect_characters(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("it holds half of a surrogate pair, which is no character") from None


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return value


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
