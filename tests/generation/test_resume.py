"""No row is lost: a run killed at any moment and resumed leaves the bytes of one that was never killed."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from lora_merge.engines import prompts as engine_prompts
from lora_merge.errors import UserError
from lora_merge.generation.api import generate_gated
from lora_merge.generation.errors import GenerationError
from lora_merge.generation.options import EngineOptions, GateOptions, GenerateOptions
from lora_merge.generation.record import quarantine_path, read_record, record_path
from lora_merge.generation.shards import Shard
from tests.generation.builders import make_prompts, read_rows, write_lines
from tests.generation.fakes import FakeEngine, open_fake

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def runner():
    """Asks :mod:`tests.generation.killed_run` for runs."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "tests.generation.killed_run"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT, env=environment
    ) as process:

        def ask(model, prompts, out, *, kill_at=0, resume=False, shard="1/1", chunk_size=9):
            task = {"kill_at": kill_at, "resume": resume, "shard": shard, "chunk_size": chunk_size}
            task |= {"model": str(model), "prompts": str(prompts), "out": str(out)}
            process.stdin.write(json.dumps(task) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield ask
        process.stdin.close()


@pytest.fixture(scope="module")
def whole(runner, pristine, tmp_path_factory):
    """An uninterrupted run of 40 prompts and 2 bad rows in chunks of 9: its output and the moments it passed."""
    folder = tmp_path_factory.mktemp("whole")
    rows = make_prompts(40)
    rows[20:20] = [b"{", {"id": "p3", "prompt": "a twin"}]
    prompts = write_lines(folder / "prompts.jsonl", rows)
    answer = runner(pristine, prompts, folder / "r.jsonl")
    assert answer["status"] == 0, answer
    return prompts, folder / "r.jsonl", answer["moments"]


def same_as_whole(out, whole):
    _, expected, _ = whole
    record, wanted = read_record(out), read_record(expected)
    return (
        out.read_bytes() == expected.read_bytes()
        and quarantine_path(out).read_bytes() == quarantine_path(expected).read_bytes()
        and record.result["counts"] == wanted.result["counts"]
        and record.result["sha256"] == wanted.result["sha256"]
    )


def test_a_kill_at_any_moment_loses_nothing(runner, pristine, whole, tmp_path):
    prompts, _, moments = whole
    stages = Counter(moments)
    assert len(moments) >= 40
    assert stages["before score"] == stages["after score"] == 5
    assert stages["half a write"] >= 5 and stages["before generate"] == 5 and stages["before fsync"] >= 8
    for moment in range(1, len(moments) + 1):
        out = tmp_path / f"{moment}.jsonl"
        killed = runner(pristine, prompts, out, kill_at=moment)
        assert killed["status"] == -9, (moment, killed)
        rows = out.read_bytes().count(b"\n") if out.exists() else 0
        whole_chunks = 5 if rows == 40 else rows // 9
        resumed = runner(pristine, prompts, out, resume=True)
        assert resumed["status"] == 0, (moments[moment - 1], resumed)
        assert same_as_whole(out, whole), moments[moment - 1]
        assert Counter(resumed["moments"])["before score"] == 5 - whole_chunks, moments[moment - 1]


def test_a_run_that_is_killed_again_and_again_gets_there(runner, pristine, whole, tmp_path):
    """Each attempt dies at its 25th moment, which is enough for a chunk at a time; cutting off is killed as well."""
    prompts, _, _ = whole
    out = tmp_path / "r.jsonl"
    attempts = 0
    while (answer := runner(pristine, prompts, out, kill_at=25, resume=True))["status"] == -9:
        attempts += 1
        assert attempts < 40
    assert answer["status"] == 0 and attempts >= 2
    assert same_as_whole(out, whole)


def test_a_kill_while_cutting_off_a_torn_chunk(runner, pristine, whole, tmp_path):
    prompts, expected, moments = whole
    torn = moments.index("half a write", moments.index("half a write") + 1) + 1
    for what in ("before ftruncate", "after ftruncate"):
        out = tmp_path / f"{what}.jsonl"
        assert runner(pristine, prompts, out, kill_at=torn)["status"] == -9
        assert not out.read_bytes().endswith(b"\n") and len(out.read_bytes()) > 0
        seen = resumed_moments(runner, pristine, prompts, out, tmp_path)
        assert runner(pristine, prompts, out, kill_at=seen.index(what) + 1, resume=True)["status"] == -9
        assert runner(pristine, prompts, out, resume=True)["status"] == 0
        assert out.read_bytes() == expected.read_bytes()


def resumed_moments(runner, model, prompts, out, folder):
    """The moments of resuming a copy of ``out``."""
    copy = folder / f"copy-{out.name}"
    copy.write_bytes(out.read_bytes())
    record_path(copy).write_bytes(record_path(out).read_bytes())
    return runner(model, prompts, copy, resume=True)["moments"]


def test_a_killed_shard_is_resumed_too(runner, pristine, whole, tmp_path):
    prompts, _, _ = whole
    out, never = tmp_path / "killed.jsonl", tmp_path / "never.jsonl"
    moments = runner(pristine, prompts, never, shard="2/2")["moments"]
    assert runner(pristine, prompts, out, shard="2/2", kill_at=len(moments) // 2)["status"] == -9
    assert runner(pristine, prompts, out, shard="2/2", resume=True)["status"] == 0
    assert out.read_bytes() == never.read_bytes()


# What resuming refuses


def run(checkpoint, prompts, out, *, open_engine=open_fake, say=lambda text: None, threshold=0.5, resume=False, **options):
    settings = GenerateOptions(threshold, resume=resume, **{"chunk_size": 9, **options})
    return generate_gated(checkpoint, prompts, out, settings, open_engine=open_engine, say=say)


class Dying(FakeEngine):
    """Fails at its third chunk."""

    def score(self, prompts, labels, *, progress):
        if len(self.scored) >= 18:
            raise RuntimeError("power cut")
        return super().score(prompts, labels, progress=progress)


@pytest.fixture
def half(checkpoint, prompts, tmp_path):
    """Two chunks of five."""
    out = tmp_path / "r.jsonl"
    with pytest.raises(RuntimeError, match="power cut"):
        run(checkpoint, prompts, out, open_engine=lambda model, settled: Dying())
    assert len(read_rows(out)) == 18
    assert not read_record(out).is_complete
    return out


def must_not_load(model, settled):
    raise AssertionError("a model was loaded")


def refused(checkpoint, prompts, out, match, **options):
    before = out.read_bytes()
    with pytest.raises(UserError, match=match):
        run(checkpoint, prompts, out, resume=True, **{"open_engine": must_not_load, **options})
    assert out.read_bytes() == before


def test_only_what_is_missing_is_done(checkpoint, prompts, half):
    engine, said = FakeEngine(), []
    result = run(checkpoint, prompts, half, resume=True, open_engine=lambda model, settled: engine, say=said.append)
    assert engine.scored == [f"p{n}" for n in range(18, 40)]
    assert result.record.result["resumed_rows"] == 18
    assert f"resuming {half}: 18 of 40 rows are whole" in said
    never = run(checkpoint, prompts, half.with_name("never.jsonl"))
    assert half.read_bytes() == never.out.read_bytes()


def test_a_finished_run_loads_nothing_and_stays_as_it_is(checkpoint, prompts, tmp_path):
    out = tmp_path / "r.jsonl"
    first = run(checkpoint, prompts, out)
    again = run(checkpoint, prompts, out, resume=True, open_engine=must_not_load)
    assert again.record.result == first.record.result


def test_results_that_were_changed_after_the_end_are_not_taken_for_it(checkpoint, prompts, tmp_path):
    """One probability: as many rows, the same ids."""
    out = tmp_path / "r.jsonl"
    run(checkpoint, prompts, out)
    rows = read_rows(out)
    rows[2]["skip_probability"] = 0.125
    write_lines(out, rows)
    refused(checkpoint, prompts, out, r"was changed after its run had ended \(SHA-256 [0-9a-f]{12}…, the record has")


def test_resuming_nothing_is_starting(checkpoint, prompts, tmp_path):
    assert run(checkpoint, prompts, tmp_path / "r.jsonl", resume=True).record.result["resumed_rows"] == 0


def test_without_resume_results_are_safe(checkpoint, prompts, half):
    with pytest.raises(GenerationError, match="add --resume"):
        run(checkpoint, prompts, half, open_engine=must_not_load)
    assert len(read_rows(half)) == 18


def test_another_model(checkpoint, prompts, half):
    config = checkpoint / "config.json"
    config.write_text(config.read_text() + " ")
    ungated = GateOptions(allow_ungated=True)
    refused(checkpoint, prompts, half, r"model\.root was", gate=ungated, engine=EngineOptions("hf", "float32"))


def test_other_prompts(checkpoint, prompts, half):
    rows = make_prompts(40)
    rows[39]["dish"] = "탕"
    write_lines(prompts, rows)
    refused(checkpoint, prompts, half, r"prompts\.sha256 was")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"threshold": 0.4}, "skip_threshold was 0.5 and is 0.4"),
        ({"max_tokens": 63}, "max_tokens was 64 and is 63"),
        ({"write_all": True}, "write_all was false and is true"),
        ({"text_key": "body"}, "text_key"),
        ({"chunk_size": 8}, "chunk_size was 9 and is 8"),
        ({"engine": EngineOptions(batch_size=4)}, "engine_options.write_batch_size was null and is 4"),
    ],
)
def test_other_settings(checkpoint, prompts, half, change, name):
    refused(checkpoint, prompts, half, name, **change)


def test_another_shard(checkpoint, prompts, half):
    from lora_merge.generation.shards import Shard

    refused(checkpoint, prompts, half, "shard was", shard=Shard(1, 2))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"shard": Shard(2, 2)}, "shard was"),
        ({"shard": Shard(1, 2), "chunk_size": 7}, "chunk_size"),
        ({"shard": Shard(1, 2), "repaired": True}, "prompts.accepted was 40 and is 41"),
    ],
)
def test_a_refusal_leaves_the_quarantine_alone(checkpoint, tmp_path, options, name):
    """A line that was repaired since is nowhere else."""
    rows = make_prompts(40)
    for place in (3, 25):
        rows.insert(place, b"{")
    prompts, out = write_lines(tmp_path / "p.jsonl", rows), tmp_path / "r.jsonl"
    settings = {"chunk_size": 8, "max_quarantine": 0.1}
    run(checkpoint, prompts, out, shard=Shard(1, 2), **settings)
    before = quarantine_path(out).read_bytes()
    assert [json.loads(line)["line"] for line in before.splitlines()] == [4]
    if options.pop("repaired", False):
        rows[3] = {"id": "mended", "prompt": "tofu"}
        write_lines(prompts, rows)
    refused(checkpoint, prompts, out, name, **{**settings, **options})
    assert quarantine_path(out).read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith((".", "r."))) == [
        "r.jsonl",
        "r.jsonl.quarantine.jsonl",
        "r.jsonl.run.json",
    ]


def test_a_quarantine_that_was_removed_comes_back(checkpoint, tmp_path):
    prompts, out = (
        write_lines(tmp_path / "p.jsonl", [*make_prompts(20), b"{", {"id": "last", "prompt": "a"}]),
        tmp_path / "r.jsonl",
    )
    run(checkpoint, prompts, out, max_quarantine=0.1)
    before = quarantine_path(out).read_bytes()
    quarantine_path(out).unlink()
    run(checkpoint, prompts, out, resume=True, max_quarantine=0.1)
    assert quarantine_path(out).read_bytes() == before


def test_a_finished_shard_without_prompts_is_of_its_run_too(checkpoint, tmp_path):
    """Its results are empty and whole."""
    prompts, out = write_lines(tmp_path / "p.jsonl", make_prompts(10)), tmp_path / "r.jsonl"
    settings = {"chunk_size": 5, "shard": Shard(3, 3)}
    run(checkpoint, prompts, out, **settings)
    before = record_path(out).read_bytes()
    refused(checkpoint, prompts, out, "settings.max_tokens was 64 and is 5", **settings, max_tokens=5)
    assert run(checkpoint, prompts, out, resume=True, open_engine=must_not_load, **settings).done_before
    assert (out.read_bytes(), record_path(out).read_bytes()) == (b"", before)


def test_a_run_goes_on_with_its_day(checkpoint, tmp_path, monkeypatch):
    """A chat template that writes the date makes other prompts tomorrow."""
    template = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %} {{ strftime_now('%d %b %Y') }} "
    (checkpoint / "chat_template.jinja").write_text(template)
    rows = [{"id": f"p{n}", "messages": [{"role": "user", "content": f"tofu {n}"}]} for n in range(45)]
    prompts, out = write_lines(tmp_path / "p.jsonl", rows), tmp_path / "r.jsonl"
    ungated = {"gate": GateOptions(allow_ungated=True)}
    monkeypatch.setattr(engine_prompts, "today", lambda: datetime.date(2026, 11, 30))
    with pytest.raises(RuntimeError, match="power cut"):
        run(checkpoint, prompts, out, open_engine=lambda model, settled: Dying(), **ungated)
    assert read_record(out).prompts["date"] == "2026-11-30"
    monkeypatch.setattr(engine_prompts, "today", lambda: datetime.date(2026, 12, 1))
    run(checkpoint, prompts, out, resume=True, **ungated)
    assert len(read_rows(out)) == 45
    assert run(checkpoint, prompts, tmp_path / "new.jsonl", **ungated).record.prompts["date"] == "2026-12-01"


def test_gated_after_ungated(checkpoint, prompts, tmp_path):
    out = tmp_path / "r.jsonl"
    options = {"engine": EngineOptions("hf", "float32"), "gate": GateOptions(allow_ungated=True)}
    with pytest.raises(RuntimeError, match="power cut"):
        run(checkpoint, prompts, out, open_engine=lambda model, settled: Dying(), **options)
    refused(checkpoint, prompts, out, "gated was false and is true")


def test_another_engine_version(checkpoint, prompts, half):
    class Newer(FakeEngine):
        def describe(self):
            return {**super().describe(), "versions": {"fake": "2"}}

    refused(checkpoint, prompts, half, r'engine\.versions\.fake was "1" and is "2"', open_engine=lambda model, settled: Newer())


def test_the_chunk_size_of_the_run_is_kept_when_none_is_given(checkpoint, prompts, half):
    assert run(checkpoint, prompts, half, resume=True, chunk_size=None).record.settings["chunk_size"] == 9


def test_a_moved_run_goes_on(checkpoint, prompts, half, tmp_path):
    """Where files lie does not matter; what they hold does."""
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in (half, record_path(half)):
        path.rename(moved / path.name)
    other_prompts = prompts.rename(tmp_path / "same prompts.jsonl")
    assert run(checkpoint, other_prompts, moved / half.name, resume=True).record.result["counts"]["rows"] == 40


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (None, "no such file, so nothing says what r.jsonl was made from"),
        ("{", "cannot be read"),
        ('{"format": "other", "version": 1}', "expected 'lora-merge/generation' version 1"),
        ('{"format": "lora-merge/generation", "version": 2}', "expected 'lora-merge/generation' version 1"),
        ('{"format": "lora-merge/generation", "version": 1}', "a part is missing"),
    ],
)
def test_a_record_that_is_missing_or_foreign(checkpoint, prompts, half, content, match):
    if content is None:
        record_path(half).unlink()
    else:
        record_path(half).write_text(content)
    refused(checkpoint, prompts, half, match)


def test_results_that_were_changed(checkpoint, prompts, half):
    half.write_bytes(half.read_bytes().replace(b'"p4"', b'"q4"', 1))
    refused(checkpoint, prompts, half, "among lines 1 to 9 there is one that is not the row")
