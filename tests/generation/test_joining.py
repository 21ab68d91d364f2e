"""Shards joined are the whole run, byte for byte; anything missing, twice or changed is refused."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from lora_merge.generation.api import generate_gated
from lora_merge.generation.errors import GenerationError
from lora_merge.generation.joining import join_results
from lora_merge.generation.options import GenerateOptions
from lora_merge.generation.record import quarantine_path, read_record, record_path
from lora_merge.generation.shards import Shard
from tests.generation.builders import make_prompts, read_rows, write_lines
from tests.generation.fakes import FakeEngine, open_fake


@pytest.fixture
def mixed(tmp_path):
    """40 good rows and 3 bad ones."""
    rows = make_prompts(40)
    for place in (3, 25, 42):
        rows.insert(place, b"{")
    return write_lines(tmp_path / "mixed.jsonl", rows)


def run(checkpoint, prompts, out, *, shard="1/1", open_engine=open_fake, threshold=0.5, chunk_size=6, **options):
    settings = GenerateOptions(
        threshold, shard=Shard.parse(shard), chunk_size=chunk_size, max_quarantine=0.1, max_tokens=8, **options
    )
    rest = {} if open_engine is None else {"open_engine": open_engine}
    return generate_gated(checkpoint, prompts, out, settings, **rest)


def shards(checkpoint, prompts, folder, count, **options):
    return [
        run(checkpoint, prompts, folder / f"{index}.jsonl", shard=f"{index}/{count}", **options).out
        for index in range(1, count + 1)
    ]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 9])
def test_joined_is_whole(checkpoint, mixed, tmp_path, count):
    """40 prompts in chunks of 6 are 7 chunks, so of 9 shards two are empty."""
    whole = run(checkpoint, mixed, tmp_path / "whole.jsonl")
    parts = shards(checkpoint, mixed, tmp_path, count)
    joined = join_results(parts[::-1], tmp_path / "joined.jsonl")
    assert joined.out.read_bytes() == whole.out.read_bytes()
    assert joined.quarantine.read_bytes() == whole.quarantine.read_bytes()
    result, wanted = joined.record.result, whole.record.result
    assert {name: result[name] for name in ("counts", "sha256", "quarantine_sha256", "input_rows", "quarantined")} == {
        name: wanted[name] for name in ("counts", "sha256", "quarantine_sha256", "input_rows", "quarantined")
    }
    assert [part["file"] for part in result["joined"]] == [str(part) for part in parts]
    assert read_record(joined.out) == joined.record


def test_joined_is_whole_on_a_real_model(pristine, prompts, tmp_path):
    """Every chunk is computed in the same company, so even rounding is the same."""
    whole = run(pristine, prompts, tmp_path / "whole.jsonl", open_engine=None)
    parts = shards(pristine, prompts, tmp_path, 3, open_engine=None)
    joined = join_results(parts, tmp_path / "joined.jsonl")
    assert joined.out.read_bytes() == whole.out.read_bytes()
    assert any(row["text_tokens"] for row in read_rows(joined.out))


@pytest.fixture
def parts(checkpoint, mixed, tmp_path):
    return shards(checkpoint, mixed, tmp_path, 3)


def refused(parts, tmp_path, match):
    with pytest.raises(GenerationError, match=match):
        join_results(parts, tmp_path / "joined.jsonl")
    assert not list(tmp_path.glob("*joined*"))


def test_a_missing_shard(parts, tmp_path):
    refused(parts[:1] + parts[2:], tmp_path, "shard 2/3 is missing")
    refused(parts[1:2], tmp_path, "shard 1/3, 3/3 is missing")
    refused([], tmp_path, "no results file was given")


def test_a_shard_given_twice(parts, tmp_path):
    refused([*parts, parts[1]], tmp_path, "is shard 2/3, and so is")


def test_a_shard_and_an_undivided_run(checkpoint, mixed, parts, tmp_path):
    whole = run(checkpoint, mixed, tmp_path / "whole.jsonl").out
    refused([whole, parts[0]], tmp_path, r"is shard 1/3, but .*whole\.jsonl is shard 1/1; expected the shards of one division")


def test_a_shard_that_is_not_finished(checkpoint, mixed, parts, tmp_path):
    class Dying(FakeEngine):
        def score(self, prompts, labels, *, progress):
            if self.scored:
                raise RuntimeError("power cut")
            return super().score(prompts, labels, progress=progress)

    out = tmp_path / "half.jsonl"
    with pytest.raises(RuntimeError):
        run(checkpoint, mixed, out, shard="2/3", open_engine=lambda *_: Dying())
    refused([parts[0], out, parts[2]], tmp_path, "shard 2/3 has not come to its end; finish it with --resume")


def test_a_shard_that_was_changed(parts, tmp_path):
    parts[1].write_bytes(parts[1].read_bytes()[:-1] + b" ")
    refused(parts, tmp_path, "is not what shard 2/3 wrote")


@pytest.mark.parametrize("change", [lambda rows: b"", lambda rows: rows.replace(b"broken", b"Broken")])
def test_a_quarantine_that_was_changed(change, parts, tmp_path):
    aside = next(quarantine_path(part) for part in parts if quarantine_path(part).exists())
    aside.write_bytes(change(aside.read_bytes()))
    refused(parts, tmp_path, "jsonl: is not what shard ./3 set aside")


def test_a_shard_of_another_run(checkpoint, mixed, parts, tmp_path):
    other = run(checkpoint, mixed, tmp_path / "other.jsonl", shard="2/3", threshold=0.4).out
    refused([parts[0], other, parts[2]], tmp_path, "settings.skip_threshold is 0.4, there 0.5")
    other = run(checkpoint, mixed, tmp_path / "count.jsonl", shard="2/4").out
    refused([parts[0], other, parts[2]], tmp_path, "number of shards is 4, there 3")
    lines = mixed.read_bytes().replace("국".encode(), "탕".encode(), 1)
    mixed.write_bytes(lines)
    other = run(checkpoint, mixed, tmp_path / "prompts.jsonl", shard="2/3").out
    refused([parts[0], other, parts[2]], tmp_path, "prompts.sha256 is .*, there ")


@pytest.mark.parametrize(
    ("part", "change", "match"),
    [
        ("model", {"root": "0" * 64}, "model.root is "),
        ("engine", {"versions": {"fake": "2"}}, r"engine\.versions\.fake is \"2\", there \"1\""),
        ("gate", {"gated": False}, "gated is false, there true"),
    ],
)
def test_a_shard_made_in_another_way(parts, tmp_path, part, change, match):
    record = json.loads(record_path(parts[1]).read_text())
    record[part] |= change
    record_path(parts[1]).write_text(json.dumps(record))
    refused(parts, tmp_path, match)


def test_rows_that_overlap(parts, tmp_path):
    """Two shards that hold the same rows, each with an honest record of its file."""
    import hashlib

    first, second = parts[0].read_bytes().splitlines(keepends=True), parts[1].read_bytes().splitlines(keepends=True)
    content = b"".join([first[0], *second[1:]])
    parts[1].write_bytes(content)
    record = json.loads(record_path(parts[1]).read_text())
    record["result"]["sha256"] = hashlib.sha256(content).hexdigest()
    record_path(parts[1]).write_text(json.dumps(record))
    refused(parts, tmp_path, "prompt 'p0' is there twice")


@pytest.mark.parametrize("failing", ["joined.jsonl", "joined.jsonl.quarantine.jsonl", "joined.jsonl.run.json"])
def test_a_join_that_cannot_be_written_leaves_nothing(failing, parts, tmp_path, monkeypatch):
    """So that the same command can be given again."""
    real = os.replace

    def full(source, target):
        if Path(target).name == failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "replace", full)
    refused(parts, tmp_path, f"{failing}: cannot be written: No space left on device")
    monkeypatch.undo()
    assert join_results(parts, tmp_path / "joined.jsonl").out.exists()


def test_nothing_is_overwritten(parts, tmp_path):
    (tmp_path / "joined.jsonl").write_text("precious")
    with pytest.raises(GenerationError, match="exists already"):
        join_results(parts, tmp_path / "joined.jsonl")
    assert (tmp_path / "joined.jsonl").read_text() == "precious"
