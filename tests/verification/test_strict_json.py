"""JSON that says one thing only, whatever file it lies in."""

from __future__ import annotations

import pytest

from verification.errors import VerificationError
from verification.strict_json import canonical, strict_loads


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b'{"a": "\\ud800"}', "half of a surrogate pair"),
        (b'{"\\udfff": 1}', "half of a surrogate pair"),
        (b'{"a": "\xed\xa0\x80"}', "can't decode byte 0xed"),
        ('{"a": 1}'.encode("utf-16"), "can't decode byte 0xff"),
        ('{"a": 1, "a": 2}', "a key occurs twice"),
        ("[NaN]", "NaN is not a JSON number"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_what_can_be_read_in_two_ways_is_refused(text: str | bytes, problem: str) -> None:
    with pytest.raises(VerificationError, match=f"^the file: is not valid JSON: .*{problem}"):
        strict_loads(text, "the file")


def test_every_character_comes_back() -> None:
    value = {"가게": "🍲 \\ud800 \u2028 é"}
    assert strict_loads(canonical(value), "it") == value == strict_loads(canonical(value).encode(), "it")
