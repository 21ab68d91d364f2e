"""What is taken in and what is set aside."""

from __future__ import annotations

import hashlib
import itertools
import json
from contextlib import closing

import pytest

from lora_merge.engines.errors import EngineError
from lora_merge.engines.prompts import Prompt, encode, read_prompts
from lora_merge.generation.errors import GenerationError
from lora_merge.generation.files import PendingFile, scan
from lora_merge.generation.intake import EvenSample, take_in
from lora_merge.generation.shards import Shard
from lora_merge.generation.spool import PromptSpool, spool_line
from tests.engines.builders import make_tokenizer
from tests.generation.builders import make_prompts, read_rows, write_lines

PREFILL = '{"decision": "'


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def take(path, tokenizer, tmp_path, *, scanned=None, shard=None, chunk_size=8, max_length=60, vocabulary=None, **rest):
    spool = PromptSpool(tmp_path)
    with closing(PendingFile(tmp_path / "aside.jsonl")) as aside:
        intake = take_in(
            scanned or scan(path),
            tokenizer,
            spool=spool,
            aside=aside,
            prefill=PREFILL,
            max_length=max_length,
            vocabulary=vocabulary,
            chunk_size=chunk_size,
            shard=shard or Shard(),
            **rest,
        )
        intake.set_aside()
        return intake


def spooled(intake):
    return [prompt for chunk in intake.spool.chunks(8) for prompt in chunk]


BAD = [
    (b'{"id": "p1", "prompt": "again"}', "duplicate id"),
    (b'{"prompt": "no id"}', "no id"),
    (b'{"id": "x1", "prompt": "cut', "broken JSON"),
    (b"", "empty"),
    (b'{"id": "x2", "prompt": "   "}', "prompt is empty"),
    (b'{"id": "x3", "prompt": "' + b"leek " * 200 + b'"}', "the model has room for 60"),
    (b'{"id": "x4", "prompt": "\xff"}', "not UTF-8"),
    (b'{"id": "x5", "prompt": "a", "price": 1e999}', "1e999 is too large for a number"),
    (b'{"id": "x6", "prompt_token_ids": [2, 99999]}', "another tokenizer's"),
    (b'{"id": "x7", "text": "leek"}', "found none, only 'id', 'text'; expected exactly one of"),
    (b'{"id": "x9", "price": 1.5, "messages": [{"role": "user", "content": "' + b"leek " * 200 + b'"}]}', "room for 60"),
    (b'"x8"', "expected an object"),
]


def test_good_rows_are_the_tokenizers_and_bad_ones_are_set_aside_with_reasons(tokenizer, tmp_path):
    """Oracle: the strict reader of the engines room on the good rows alone."""
    good = make_prompts(30)
    rows = [*good[:10], *[line for line, _ in BAD], *good[10:]]
    path = write_lines(tmp_path / "prompts.jsonl", rows)
    steps = []
    intake = take(path, tokenizer, tmp_path, progress=steps.append)
    assert spooled(intake) == read_prompts(str(write_lines(tmp_path / "good.jsonl", good)), tokenizer, prefill=PREFILL)
    assert [prompt.line for prompt in spooled(intake)] == [*range(1, 11), *range(23, 43)]
    aside = read_rows(tmp_path / "aside.jsonl")
    assert [row["line"] for row in aside] == list(range(11, 23))
    for row, (line, reason) in zip(aside, BAD, strict=True):
        assert reason in row["reason"], line
        assert set(row) == {"line", "reason", "id", "text"}
        assert row["text"] == line.decode("utf-8", errors="backslashreplace")
    assert (intake.facts.rows, intake.facts.accepted, intake.facts.quarantined) == (42, 30, 12)
    assert intake.quarantined == 12
    assert sum(trouble.lines for trouble in intake.troubles) == 12
    assert sum(steps) == 42
    assert intake.facts.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_reasons_of_one_trouble_are_counted_together(tokenizer, tmp_path):
    long = [{"id": f"x{n}", "prompt": "leek " * (100 + n)} for n in range(3)]
    twins = [{"id": "p1", "prompt": "a"}, {"id": "p2", "prompt": "b"}]
    intake = take(write_lines(tmp_path / "p.jsonl", [*make_prompts(9), *long, *twins]), tokenizer, tmp_path)
    assert [str(trouble) for trouble in intake.troubles] == [
        f"line 10 and 2 more: it has {len(encode(tokenizer, 'leek ' * 100 + PREFILL)) + 1} tokens; the model has room for 60",
        "line 13 and 1 more: duplicate id 'p1': an earlier line has it",
    ]


def test_shards_share_out_good_and_bad_rows_without_rest(tokenizer, tmp_path):
    rows = make_prompts(50)
    for place in (0, 7, 20, 33, 53):
        rows.insert(place, {"id": f"bad{place}", "prompt": ""})
    path = write_lines(tmp_path / "p.jsonl", rows)
    whole = take(path, tokenizer, tmp_path)
    parts = []
    for index in (1, 2, 3):
        folder = tmp_path / str(index)
        folder.mkdir()
        parts.append((take(path, tokenizer, folder, shard=Shard(index, 3)), folder / "aside.jsonl"))
    assert {part.facts for part, _ in parts} == {whole.facts}
    ids = [prompt.id for part, _ in parts for prompt in spooled(part)]
    assert sorted(ids) == sorted(prompt.id for prompt in spooled(whole))
    assert [prompt.id for prompt in spooled(parts[1][0])][:8] == [prompt.id for prompt in spooled(whole)][8:16]
    lines = [row["line"] for _, aside in parts if aside.exists() for row in read_rows(aside)]
    assert sorted(lines) == [row["line"] for row in read_rows(tmp_path / "aside.jsonl")]
    assert sum(part.quarantined for part, _ in parts) == 5


def test_another_tokenization_of_the_same_bytes_is_another_digest(tokenizer, tmp_path):
    path = write_lines(tmp_path / "p.jsonl", make_prompts(5))
    one = take(path, tokenizer, tmp_path).facts
    other = take(path, make_tokenizer(size=300), tmp_path).facts
    assert one.sha256 == other.sha256
    assert one.tokens_sha256 != other.tokens_sha256


def test_an_old_quarantine_goes_when_nothing_is_bad(tokenizer, tmp_path):
    (tmp_path / "aside.jsonl").write_text("old")
    take(write_lines(tmp_path / "p.jsonl", make_prompts(3)), tokenizer, tmp_path)
    assert not (tmp_path / "aside.jsonl").exists()


def test_a_missing_file_and_an_empty_one_are_errors(tokenizer, tmp_path):
    with pytest.raises(GenerationError, match=r"nowhere\.jsonl: cannot be read: No such file"):
        take(tmp_path / "nowhere.jsonl", tokenizer, tmp_path)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(GenerationError, match="holds no rows"):
        take(tmp_path / "empty.jsonl", tokenizer, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["empty.jsonl"]


@pytest.mark.parametrize("ending", [b"\n", b"\n\n", b" \n\r\n", b"\n  "])
def test_empty_lines_at_the_end_are_no_rows(ending, tokenizer, tmp_path):
    path = write_lines(tmp_path / "p.jsonl", make_prompts(3))
    path.write_bytes(path.read_bytes().rstrip(b"\n") + ending)
    facts = take(path, tokenizer, tmp_path).facts
    assert (facts.rows, facts.accepted, facts.quarantined) == (3, 3, 0)
    assert facts.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("after", [make_prompts(4), make_prompts(4)[1:]])
def test_a_file_that_changes_under_the_reader_is_an_error(after, tokenizer, tmp_path):
    path = write_lines(tmp_path / "p.jsonl", make_prompts(3))
    scanned = scan(path)
    write_lines(path, after)
    with pytest.raises(GenerationError, match="changed while it was read"):
        take(path, tokenizer, tmp_path, scanned=scanned)


@pytest.mark.parametrize("content", [b"", b"a", b"a\n", b"a\nb", b"a\n\n", b"\n"])
def test_lines_are_counted_as_a_reader_sees_them(content, tmp_path):
    """Oracle: iterating over the file."""
    path = tmp_path / "f"
    path.write_bytes(content)
    with open(path, "rb") as file:
        assert scan(path).lines == len(list(file))


@pytest.mark.parametrize("count", [0, 1, 63, 128, 1000, 5000])
def test_the_sample_is_spread_over_all(count):
    sample = EvenSample(64)
    for index in range(count):
        sample.add(Prompt(str(index), (1,)))
    taken = [int(prompt.id) for prompt in sample.prompts]
    assert min(count, 64) <= len(taken) <= 128
    assert taken == sorted(set(taken))
    if count > 1:
        gaps = {after - before for before, after in itertools.pairwise(taken)}
        assert len(gaps) == 1
        assert taken[0] == 0 and taken[-1] > count - 1 - max(gaps) - 1


def test_the_spool_gives_back_what_it_got(tmp_path):
    prompts = [Prompt(f"p{n}", tuple(range(n + 1)), {"가": [n, None, "\n"]}, line=n + 5) for n in range(7)]
    with PromptSpool(tmp_path) as spool:
        for prompt in prompts:
            spool.append(spool_line(prompt))
        assert list(tmp_path.iterdir()) == []  # it has no name that a kill could leave behind
        assert len(spool) == 7
        for _ in range(2):
            chunks = list(spool.chunks(3))
            assert [len(chunk) for chunk in chunks] == [3, 3, 1]
            read = [prompt for chunk in chunks for prompt in chunk]
            assert read == prompts
            assert [prompt.line for prompt in read] == [prompt.line for prompt in prompts]
    with pytest.raises(GenerationError, match="cannot be written to"):
        PromptSpool(tmp_path / "nowhere")


def test_a_spool_on_a_full_disk_is_one_line(tmp_path):
    """What is still in the file's buffer is written when it is closed, and fails again: the first error is the one to tell."""
    with pytest.raises(GenerationError, match="the tokenized prompts cannot be stored beside the results"):  # noqa: SIM117
        with PromptSpool(tmp_path) as spool:
            spool._file.close()
            spool._file = open("/dev/full", "wb")  # noqa: SIM115  closed by the spool
            for _ in range(100):
                spool.append(b"x" * 1000)


def test_the_last_of_a_spool_is_written_before_it_is_read(tmp_path):
    """What a full disk does not take is noticed where it can still be said."""
    with pytest.raises(GenerationError, match="cannot be stored beside the results: No space left"):  # noqa: SIM117
        with PromptSpool(tmp_path) as spool:
            spool._file.close()
            spool._file = open("/dev/full", "wb")  # noqa: SIM115  closed by the spool
            spool.append(b"x")
            spool.flush()


def test_a_spooled_line_is_ascii_json(tmp_path):
    line = spool_line(Prompt("가", (1, 2), {"a": "나"}))
    assert line.isascii() and json.loads(line)[0] == "가"


def test_an_unreadable_prompt_file_is_one_line(tmp_path, tokenizer):
    with pytest.raises((GenerationError, EngineError), match="Is a directory"):
        take(tmp_path, tokenizer, tmp_path)


def test_a_prompt_with_a_token_that_the_model_has_no_row_for_is_set_aside_whatever_it_comes_as(tmp_path):
    """A tokenizer that knows one token more than the model: prompts with it are set aside, those with the one before are not."""
    tokenizer = make_tokenizer()
    known = len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    assert tokenizer.convert_tokens_to_ids("<image>") == known
    ready = encode(tokenizer, PREFILL)
    rows = [
        {"id": "text", "prompt": "leek <image> tofu"},
        {"id": "chat", "messages": [{"role": "user", "content": "<image>"}]},
        {"id": "ids", "prompt_token_ids": [2, known, *ready]},
        {"id": "last", "prompt_token_ids": [2, known - 1, *ready]},
        {"id": "none", "prompt": "leek"},
    ]
    path = write_lines(tmp_path / "prompts.jsonl", rows)
    intake = take(path, tokenizer, tmp_path, vocabulary=known)
    assert [prompt.id for prompt in spooled(intake)] == ["last", "none"]
    aside = read_rows(tmp_path / "aside.jsonl")
    assert [(row["id"], row["text"]) for row in aside] == [(row["id"], json.dumps(row)) for row in rows[:3]]
    reason = f"it holds token {known} ('<image>'), which the model has no row for: its embedding has {known}, counted from 0"
    assert {row["reason"] for row in aside} == {reason}
    assert intake.troubles[0].lines == 3
    assert len(spooled(take(path, tokenizer, tmp_path))) == 5


@pytest.mark.parametrize("rows", [b'[\n{"id": "a", "prompt": "leek"},\n{"id": "b", "prompt": "tofu"}\n]\n', b"[1,\n2]\n"])
def test_an_array_is_told_from_json_lines(rows, tokenizer, tmp_path):
    (tmp_path / "p.json").write_bytes(rows)
    with pytest.raises(Exception, match="a JSON array begins here; expected one JSON object a line"):
        read_prompts(str(tmp_path / "p.json"), tokenizer, prefill=PREFILL)
