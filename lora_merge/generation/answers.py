"""The text inside the JSON that a model writes.

The model's whole answer is the prefill, the write label and what it wrote after them. A broken answer is marked and kept as it
is: whoever reads the results decides, nothing is dropped here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

TextStatus = Literal["ok", "trailing", "broken", "missing"]


@dataclass(frozen=True)
class Answer:
    """What was found in one answer.

    Attributes:
        status: ``ok``: one JSON object with the text, and nothing after it; ``trailing``: as ``ok``, but the model wrote on
            behind the object; ``broken``: no JSON object can be read; ``missing``: the object has no string under the key.
        text: the text for ``ok`` and ``trailing``, else None.
        raw: the whole answer wherever ``status`` is not ``ok``, else None.
    """

    status: TextStatus
    text: str | None
    raw: str | None


def read_answer(whole: str, key: str = "text") -> Answer:
    """Read the string under ``key`` from ``whole``: prefill, label and completion in one."""
    stripped = whole.lstrip()
    try:
        value, end = json.JSONDecoder(object_pairs_hook=_object_without_twins).raw_decode(stripped)
    except (ValueError, RecursionError):
        return Answer("broken", None, whole)
    if not isinstance(value, dict):
        return Answer("broken", None, whole)
    text = value.get(key)
    if not isinstance(text, str) or not _is_encodable(text):
        return Answer("missing", None, whole)
    if stripped[end:].strip():
        return Answer("trailing", text, whole)
    return Answer("ok", text, None)


def _object_without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key occurs twice")
    return value


def _is_encodable(text: str) -> bool:
    """Whether ``text`` is real characters: an escape can smuggle half of a surrogate pair into JSON, and UTF-8 cannot hold it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
