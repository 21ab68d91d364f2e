"""The prompt file: JSON Lines in, typed rows out, and a reason for every line that is no prompt.

Each line is one JSON object with an ``id`` (a string, or an integer, which becomes its decimal string; unique in the file)
and exactly one of

- ``prompt``: text; the prefill is appended to it,
- ``messages``: a conversation for the tokenizer's chat template, ending before the assistant's turn; the prefill begins that
  turn,
- ``prompt_token_ids``: the final ids, prefill included.

Every other field passes through to the outputs. An empty line between rows is a bad row, not a pause: in a file of prompts
nothing is dropped silently. Empty lines at the end belong to the end.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_merge.engines.errors import EngineError

SOURCES = ("prompt", "messages", "prompt_token_ids")


@dataclass(frozen=True)
class PromptRow:
    """One well-formed row: an id, exactly one source, and the fields that pass through.

    ``line`` is the row's 1-based line in its file, or its 1-based position when it came from memory; ``text`` the line itself, as
    in :class:`BadRow`.
    """

    id: str
    prompt: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    line: int = 0
    text: str = field(default="", compare=False, repr=False)


@dataclass(frozen=True)
class BadRow:
    """One row that cannot be scored: where it is, why, its id when it has a readable one, and the raw text for a quarantine file.

    Bytes that are not UTF-8 appear in ``text`` as backslash escapes.
    """

    line: int
    reason: str
    id: str | None = None
    text: str = ""


def iter_prompt_rows(path: str | Path, read: Callable[[bytes], object] | None = None) -> Iterator[PromptRow | BadRow]:
    """Every line of ``path`` as a row or as a bad row with its reason, in order and in constant memory but for the ids seen.

    ``read`` is told the bytes of every line, whatever becomes of it.

    Raises :class:`EngineError` when the file cannot be opened.
    """
    try:
        with open(path, "rb") as file:
            yield from _rows_of_lines(file if read is None else _told(file, read))
    except OSError as error:
        raise EngineError(f"prompt file {path}: {error.strerror or error}; give a readable JSON Lines file") from error


def read_prompt_rows(path: str | Path) -> list[PromptRow]:
    """All rows of ``path``; the first bad one raises :class:`EngineError` with its line and reason, and so does an empty file."""
    rows = [_good(row, str(path)) for row in iter_prompt_rows(path)]
    if not rows:
        raise EngineError(f"prompt file {path} holds no rows; expected one JSON object a line")
    return rows


def rows_from_mappings(values: Iterable[Mapping[str, Any]]) -> list[PromptRow]:
    """Rows from dictionaries in memory, under the same rules as a file; the first bad one raises :class:`EngineError`."""
    seen: set[str] = set()
    return [_good(_row(value, line, "", seen), "prompts") for line, value in enumerate(values, start=1)]


def _good(row: PromptRow | BadRow, source: str) -> PromptRow:
    if isinstance(row, BadRow):
        raise EngineError(f"{source} line {row.line}{f' (id {row.id!r})' if row.id else ''}: {row.reason}")
    return row


def _told(lines: Iterable[bytes], read: Callable[[bytes], object]) -> Iterator[bytes]:
    for line in lines:
        read(line)
        yield line


def _rows_of_lines(lines: Iterable[bytes]) -> Iterator[PromptRow | BadRow]:
    seen: set[str] = set()
    empty: list[BadRow] = []
    for number, raw in enumerate(lines, start=1):
        raw = raw.rstrip(b"\r\n")
        if number == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        text = raw.decode("utf-8", errors="backslashreplace")
        if not raw.strip():
            empty.append(BadRow(number, "the line is empty; expected a JSON object", text=text))
            continue
        yield from empty
        empty.clear()
        try:
            value = _parse(raw)
        except ValueError as error:
            array = "a JSON array begins here; expected one JSON object a line"
            yield BadRow(number, array if number == 1 and raw.lstrip().startswith(b"[") else str(error), text=text)
        else:
            yield _row(value, number, text, seen)


def _parse(raw: bytes) -> Any:
    try:
        value = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_object_without_twins,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte {error.start + 1} of the line is 0x{raw[error.start]:02x}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"broken JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("broken JSON: nested too deeply") from None
    if b"\\u" in raw:
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError("broken JSON: it holds half of a surrogate pair, which is no character") from None
    return value


def _object_without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"broken JSON: key {next(name for name in names if names.count(name) > 1)!r} occurs twice in one object")
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"broken JSON: {name} is not a JSON value")


def _finite(number: str) -> float:
    """A number beyond float64 would be read as infinity, which JSON cannot write back."""
    value = float(number)
    if math.isinf(value):
        raise ValueError(f"broken JSON: {number[:40]} is too large for a number")
    return value


def _row(value: Any, line: int, text: str, seen: set[str]) -> PromptRow | BadRow:
    """``value`` as a row, or the reason why not; a good row's id joins ``seen``."""
    if not isinstance(value, Mapping):
        return BadRow(
            line,
            f"the line is a JSON {_json_type(value)}; expected an object",
            text=text,
        )
    row_id = value.get("id")
    if type(row_id) is int:
        row_id = str(row_id)
    if not isinstance(row_id, str) or not row_id:
        found = "no id" if "id" not in value else f"id {row_id!r}"
        return BadRow(line, f"{found}; expected a non-empty string or an integer", text=text)
    if row_id in seen:
        return BadRow(line, f"duplicate id {row_id!r}: an earlier line has it", row_id, text)
    sources = [name for name in SOURCES if value.get(name) is not None]
    if len(sources) != 1:
        found = " and ".join(sources) if sources else f"none, only {', '.join(map(repr, list(value)[:5]))}"
        return BadRow(
            line,
            f"found {found}; expected exactly one of {', '.join(SOURCES)}",
            row_id,
            text,
        )
    source = sources[0]
    reason = _CHECKS[source](value[source])
    if reason:
        return BadRow(line, reason, row_id, text)
    seen.add(row_id)
    fields = {name: item for name, item in value.items() if name != "id" and name not in SOURCES}
    content: Any = value[source] if source == "prompt" else tuple(value[source])
    return PromptRow(row_id, fields=fields, line=line, text=text, **{source: content})


def _check_prompt(prompt: Any) -> str | None:
    if not isinstance(prompt, str):
        return f"prompt is a JSON {_json_type(prompt)}; expected a string"
    return None if prompt.strip() else "prompt is empty"


def _check_messages(messages: Any) -> str | None:
    if not isinstance(messages, (list, tuple)):
        return f"messages is a JSON {_json_type(messages)}; expected a list"
    if not messages:
        return "messages is empty"
    for position, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            return f"message {position} is {message!r}; expected an object with role and content"
    if messages[-1]["role"] == "assistant":
        return "the last message is the assistant's; end before the assistant's turn and put its beginning into the prefill"
    return None


def _check_token_ids(ids: Any) -> str | None:
    if not isinstance(ids, (list, tuple)):
        return f"prompt_token_ids is a JSON {_json_type(ids)}; expected a list of integers"
    if not ids:
        return "prompt_token_ids is empty"
    wrong = next((item for item in ids if type(item) is not int or item < 0), None)
    return None if wrong is None else f"prompt_token_ids holds {wrong!r}; expected integers from 0"


_CHECKS = {
    "prompt": _check_prompt,
    "messages": _check_messages,
    "prompt_token_ids": _check_token_ids,
}


def _json_type(value: Any) -> str:
    names = {
        bool: "boolean",
        int: "number",
        float: "number",
        str: "string",
        list: "array",
        dict: "object",
        type(None): "null",
    }
    return names.get(type(value), type(value).__name__)
