"""Names that are no text: written in one way wherever they stand. Oracle: os.fsdecode makes them, UTF-8 holds the result."""

from __future__ import annotations

import json
import os

import pytest

from lora_merge.readable import ESCAPED, json_text, printable, readable

CAFE = os.fsdecode(b"caf\xe9")


@pytest.mark.parametrize(
    ("name", "written"),
    [
        (CAFE, r"caf\xe9"),
        (os.fsdecode(b"\x80\xff"), r"\x80\xff"),
        (os.fsdecode("café 가게 🍲".encode()), "café 가게 🍲"),
        ("\ud800", r"\ud800"),
        (r"caf\xe9", r"caf\xe9"),
    ],
)
def test_bytes_that_are_no_text_are_escaped(name: str, written: str) -> None:
    assert readable(name) == written == name.encode("utf-8", ESCAPED).decode("utf-8")


def test_a_stream_of_another_encoding_escapes_as_python_does() -> None:
    text = "é 가 🍲"
    assert text.encode("ascii", ESCAPED) == text.encode("ascii", "backslashreplace").replace(rb"\xe9", rb"\u00e9")


@pytest.mark.parametrize("how", [{}, {"ensure_ascii": False}, {"indent": 2, "sort_keys": True}])
def test_json_holds_characters_only(how: dict[str, object]) -> None:
    value = {CAFE: [CAFE, 1, None, {"가": (CAFE, True)}], "plain": "🍲"}
    text = json_text(value, **how)
    text.encode("utf-8")
    assert json.loads(text) == {r"caf\xe9": [r"caf\xe9", 1, None, {"가": [r"caf\xe9", True]}], "plain": "🍲"}


def test_json_of_characters_is_as_it_was() -> None:
    value = {"가게": ["🍲", 0.1, None], "a": "\\udce9"}
    for how in ({"indent": 2}, {"ensure_ascii": False}):
        assert json_text(value, **how) == json.dumps(value, **how)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("x\x1b[2J\x1b[H\x1b[32mPASSED\x1b[0m", r"x\u001b[2J\u001b[H\u001b[32mPASSED\u001b[0m"),
        ("base\r\n  PASSED: all is well\n", "base PASSED: all is well "),
        ("a\u2028b\x85c\td", "a b c d"),
        ("\x00\x07\x7f\x9b2J\ufffe", r"\u0000\u0007\u007f\u009b2J\ufffe"),
        ("gpj.\u202eexe\u2066", r"gpj.\u202eexe\u2066"),
        ("  PASSED       control  0.02 가게 🍲", "  PASSED       control  0.02 가게 🍲"),
        (CAFE + "\x1b", r"caf\xe9\u001b"),
    ],
)
def test_no_control_character_is_printed(text: str, shown: str) -> None:
    assert printable(text) == shown and shown.isprintable()
