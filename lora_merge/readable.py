"""Names as text that every reader can hold.

A path may hold bytes that are no UTF-8; Python keeps each as half of a surrogate pair, which no UTF-8 file, no XML and no strict
JSON reader takes. In everything that is written or printed such a byte stands as ``\\xe9``. What other people's files say may
hold control characters, which could clear a terminal and write a verdict of their own on it: :func:`printable`.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping
from typing import Any

ESCAPED = "lora_merge.escaped"
"""Error handler of ``str.encode`` and of text streams that writes it so."""
_LINE_BREAK = re.compile("[ \t]*[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]\\s*|\t")
_CONTROL = re.compile("[\0-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ufffe\uffff]")
"""Those of a terminal, those that turn the direction of writing, and what XML has no way to hold."""


def readable(value: Any) -> Any:
    """``value``, a string or whatever JSON can hold of them, with only characters in it."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", ESCAPED).decode("utf-8")
    if isinstance(value, Mapping):
        return {readable(name): readable(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [readable(entry) for entry in value]
    return value


def printable(text: str) -> str:
    """``text`` as one line that no reader takes for anything but text: a line break with the space around it is one space, a
    control character is written out (``\\u001b``).
    """
    return _CONTROL.sub(lambda found: _escaped(ord(found[0])), _LINE_BREAK.sub(" ", readable(text)))


def json_text(value: Any, **how: Any) -> str:
    """``json.dumps`` of ``value`` as :func:`readable` has it. ``how``: the arguments of ``json.dumps``."""
    text = json.dumps(value, **how)
    return text if text.isascii() and "\\ud" not in text else json.dumps(readable(value), **how)


def _escape(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_escaped(ord(character)) for character in error.object[error.start : error.end]), error.end


def _escaped(code: int) -> str:
    """From U+DC80 to U+DCFF it stands for a byte of a path, as os.fsdecode has it."""
    if 0xDC80 <= code <= 0xDCFF:
        return f"\\x{code - 0xDC00:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


codecs.register_error(ESCAPED, _escape)
