"""The results file: locked, appended whole, repaired."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time

import pytest

from lora_merge.generation.errors import GenerationError
from lora_merge.generation.rows import KEYS, Tally, encode_row
from lora_merge.generation.sink import Sink

IDS = [[f"p{chunk}-{row}" for row in range(3)] for chunk in range(4)]


def line(id: str) -> bytes:
    values = (id, "write", 0.25, 0.9, True, "글", "ok", None, "stop", 5, 3, True, {})
    return encode_row(dict(zip(KEYS, values, strict=True)))


def whole(chunks: int) -> bytes:
    return b"".join(line(id) for ids in IDS[:chunks] for id in ids)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results.jsonl"


def test_chunks_are_appended_and_synced(path, monkeypatch):
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(path.stat().st_size), real(descriptor)))
    sink = Sink.open(path, resume=False)
    synced.clear()
    for ids in IDS[:2]:
        sink.append([line(id) for id in ids])
    sink.close()
    assert path.read_bytes() == whole(2)
    assert synced == [len(whole(1)), len(whole(2))]


def test_two_runs_on_one_file_exclude_each_other(path):
    first = Sink.open(path, resume=False)
    for resume in (False, True):
        with pytest.raises(GenerationError, match="another run is writing it"):
            Sink.open(path, resume=resume)
    first.append([line("a")])
    first.close()
    Sink.open(path, resume=True).close()


def test_another_process_is_excluded_too_and_its_death_unlocks(path):
    code = (
        "import sys, time; from pathlib import Path; from lora_merge.generation.sink import Sink\n"
        "sink = Sink.open(Path(sys.argv[1]), resume=False); sink.append([b'x\\n']); print('locked', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(GenerationError, match="another run is writing it"):
            Sink.open(path, resume=True)
        holder.send_signal(signal.SIGKILL)
    Sink.open(path, resume=True).close()


def test_a_forked_worker_that_outlives_its_run_keeps_no_lock(path):
    sink = Sink.open(path, resume=False)
    sink.append([line("a")])
    ready, say = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(say, b"x")
        time.sleep(60)
        os._exit(0)
    try:
        os.read(ready, 1)
        sink.close()
        Sink.open(path, resume=True).close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_results_are_never_overwritten(path):
    path.write_bytes(b"precious\n")
    with pytest.raises(GenerationError, match="holds results already; add --resume"):
        Sink.open(path, resume=False)
    assert path.read_bytes() == b"precious\n"


def test_a_run_that_wrote_nothing_leaves_no_file_and_takes_over_an_empty_one(path):
    path.touch()
    Sink.open(path, resume=False).close()
    assert not path.exists()
    sink = Sink.open(path, resume=False)
    sink.is_finished = True  # a shard without prompts
    sink.close()
    assert path.exists()


@pytest.mark.parametrize(
    ("place", "problem"), [("nowhere/r.jsonl", "No such file"), (".", "directory"), ("pipe", "no regular file")]
)
def test_what_is_no_file_is_refused(tmp_path, place, problem):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(GenerationError, match=problem):
        Sink.open(tmp_path / place, resume=False)


START, END, ROW = len(whole(2)), len(whole(3)), len(line(IDS[2][0]))


@pytest.mark.parametrize("size", [START, START + 1, START + ROW - 1, START + ROW, END - 1, END])
def test_a_torn_chunk_is_cut_off_and_whole_ones_stay(path, size):
    path.write_bytes(whole(3)[:size])
    sink = Sink.open(path, resume=True)
    tally = Tally()
    kept = 3 if size == len(whole(3)) else 2
    assert sink.restore(IDS, tally) == kept
    assert tally.rows == 3 * kept
    assert path.read_bytes() == whole(kept)
    sink.append([line(id) for id in IDS[kept]])
    sink.close()
    assert path.read_bytes() == whole(kept + 1)


@pytest.mark.parametrize("tail", [b"\0" * 500, b'{"id": "p2-0"}\n', b"half a row", b"\xff\xfe\n"])
def test_a_tail_that_is_no_row_is_cut_off(path, tail):
    """After a power failure a file can be longer than what reached the disk."""
    path.write_bytes(whole(2) + tail)
    sink = Sink.open(path, resume=True)
    assert sink.restore(IDS, Tally()) == 2
    sink.close()
    assert path.read_bytes() == whole(2)


def test_a_change_in_the_middle_is_refused_and_left_alone(path):
    content = whole(3).replace(b"p1-1", b"p1-X")
    path.write_bytes(content)
    with pytest.raises(GenerationError, match="among lines 4 to 6 there is one that is not the row"):
        Sink.open(path, resume=True).restore(IDS, Tally())
    assert path.read_bytes() == content


def test_more_rows_than_prompts_are_refused(path):
    path.write_bytes(whole(4) + line("one more"))
    with pytest.raises(GenerationError, match="line 13 is one too many"):
        Sink.open(path, resume=True).restore(IDS, Tally())


def test_a_full_disk_leaves_the_file_as_it_was(path, monkeypatch):
    sink = Sink.open(path, resume=False)
    sink.append([line(id) for id in IDS[0]])
    real = os.pwrite

    def full(descriptor, data, offset):
        real(descriptor, data[:7], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(GenerationError, match="the disk is full; the rows before are safe"):
        sink.append([line(id) for id in IDS[1]])
    assert path.read_bytes() == whole(1)
    monkeypatch.setattr(os, "pwrite", real)
    sink.append([line(id) for id in IDS[1]])
    sink.close()
    assert path.read_bytes() == whole(2)


def test_a_short_write_is_continued(path, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: real(descriptor, data[:5], offset))
    sink = Sink.open(path, resume=False)
    sink.append([line(id) for id in IDS[0]])
    sink.close()
    assert path.read_bytes() == whole(1)
