"""Reading prompt files: every line becomes a row or a reason, and nothing is dropped."""

from __future__ import annotations

import json

import pytest

from lora_merge.engines.errors import EngineError
from lora_merge.engines.prompt_file import BadRow, PromptRow, iter_prompt_rows, read_prompt_rows, rows_from_mappings

GOOD = '{"id": "a", "prompt": "leek and tofu", "dish": "soup", "grey": false}'


def write(tmp_path, *lines: str | bytes):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"".join((line.encode() if isinstance(line, str) else line) + b"\n" for line in lines))
    return path


def test_a_row_keeps_its_fields_and_line(tmp_path):
    row = read_prompt_rows(write(tmp_path, GOOD))[0]
    assert row == PromptRow("a", prompt="leek and tofu", fields={"dish": "soup", "grey": False}, line=1)


def test_every_source_is_read(tmp_path):
    messages = [{"role": "user", "content": "leek"}]
    rows = read_prompt_rows(
        write(
            tmp_path,
            json.dumps({"id": "m", "messages": messages}),
            json.dumps({"id": "t", "prompt_token_ids": [2, 5], "prompt": None}),
        )
    )
    assert rows[0].messages == tuple(messages)
    assert rows[1].prompt_token_ids == (2, 5)


def test_an_integer_id_becomes_its_decimal_string_and_collides_with_it(tmp_path):
    found = list(iter_prompt_rows(write(tmp_path, '{"id": 7, "prompt": "x"}', '{"id": "7", "prompt": "y"}')))
    assert found[0].id == "7"
    assert isinstance(found[1], BadRow) and "duplicate id '7'" in found[1].reason


def test_a_byte_order_mark_and_carriage_returns_are_no_content(tmp_path):
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode() + b"\r\n" + GOOD.replace('"a"', '"b"').encode())
    assert [row.id for row in read_prompt_rows(path)] == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("", "empty"),
        ('{"id": "b", "prompt": "x"', "broken JSON"),
        ("[1, 2]", "JSON array"),
        ('{"prompt": "x"}', "no id"),
        ('{"id": "", "prompt": "x"}', "id ''"),
        ('{"id": 1.5, "prompt": "x"}', "id 1.5"),
        ('{"id": true, "prompt": "x"}', "id True"),
        (GOOD, "duplicate id 'a'"),
        ('{"id": "b"}', "found none"),
        ('{"id": "b", "prompt": "x", "prompt_token_ids": [1]}', "found prompt and prompt_token_ids"),
        ('{"id": "b", "prompt": "  "}', "prompt is empty"),
        ('{"id": "b", "prompt": 3}', "prompt is a JSON number"),
        ('{"id": "b", "messages": []}', "messages is empty"),
        ('{"id": "b", "messages": [{"role": "user"}]}', "message 1"),
        ('{"id": "b", "messages": [{"role": "assistant", "content": "x"}]}', "the assistant's"),
        ('{"id": "b", "prompt_token_ids": []}', "prompt_token_ids is empty"),
        ('{"id": "b", "prompt_token_ids": [1, -2]}', "-2"),
        ('{"id": "b", "prompt_token_ids": [1, true]}', "True"),
        ('{"id": "b", "id": "c", "prompt": "x"}', "key 'id' occurs twice"),
        ('{"id": "b", "prompt": "x", "score": NaN}', "NaN"),
        ('{"id": "b", "prompt": "\\ud800"}', "surrogate"),
        ("[" * 100_000, "nested too deeply"),
        (b'{"id": "b", "prompt": "\xff"}', "not UTF-8"),
    ],
)
def test_a_bad_line_has_its_reason_and_the_lines_around_it_survive(tmp_path, line, reason):
    path = write(tmp_path, GOOD, line, '{"id": "z", "prompt": "after"}')
    found = list(iter_prompt_rows(path))
    assert [type(row) for row in found] == [PromptRow, BadRow, PromptRow]
    assert reason in found[1].reason and found[1].line == 2
    with pytest.raises(EngineError, match="line 2"):
        read_prompt_rows(path)


def test_a_bad_row_keeps_the_raw_line_for_the_quarantine(tmp_path):
    found = list(iter_prompt_rows(write(tmp_path, b'{"id": "b", "prompt": "\xff"}')))
    assert found[0].text == '{"id": "b", "prompt": "\\xff"}'


def test_empty_lines_end_a_file_and_are_bad_rows_before_another(tmp_path):
    path = write(tmp_path, GOOD, "", " ", GOOD.replace('"a"', '"b"'))
    path.write_bytes(path.read_bytes() + b"\n\r\n  \n")
    found = list(iter_prompt_rows(path))
    assert [(row.line, isinstance(row, BadRow)) for row in found] == [(1, False), (2, True), (3, True), (4, False)]


def test_a_missing_or_empty_file_is_an_error(tmp_path):
    with pytest.raises(EngineError, match="No such file"):
        read_prompt_rows(tmp_path / "absent.jsonl")
    with pytest.raises(EngineError, match="no rows"):
        read_prompt_rows(write(tmp_path))


def test_rows_in_memory_follow_the_same_rules():
    assert rows_from_mappings([{"id": 1, "prompt": "x", "k": 2}])[0].fields == {"k": 2}
    with pytest.raises(EngineError, match=r"line 2.*duplicate"):
        rows_from_mappings([{"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"}])
