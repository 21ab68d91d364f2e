"""Faults in real processes on real file systems: every one ends in a clean error and no half result.

Asserted for each: the exit code, a single line of error, no folder at OUT (or the old one untouched), and nothing hidden left
beside it, or, after a kill, nothing that the next run does not remove.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import nn

from lora_merge.merging import api, output_file, recipes, safetensors_file, staging, writer
from lora_merge.merging.errors import MergeError
from tests.tiny import save_tiny_adapter, save_tiny_base

SHARDS = 4


@dataclass
class Ground:
    """A base in four shards of 30 MB, an adapter of it, and a folder of results."""

    base: Path
    adapter: Path
    results: Path

    @property
    def out(self) -> Path:
        return self.results / "out"

    def command(self, *extra: str) -> list[str]:
        merge = [sys.executable, "-m", "lora_merge.merging", "--quiet", "--jobs", "1", *extra]
        return [*merge, "--base", str(self.base), "--adapter", str(self.adapter), "--out", str(self.out)]

    def start(self, *extra: str, limit: int | None = None) -> subprocess.Popen[str]:
        def limited() -> None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it, and hand that down
            if limit is not None:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write then fails with EFBIG
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        return subprocess.Popen(self.command(*extra), **pipes, preexec_fn=limited)

    def hidden_bytes(self) -> int:
        """Bytes in the hidden folder so far; -1 before it exists."""
        sizes = [file.stat().st_size for file in self.results.glob(".out.partial-*/*")]
        return sum(sizes) if sizes else -1

    def assert_clean(self, process: subprocess.Popen[str], code: int = 1, named: str = "") -> None:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == code, f"exit {process.returncode}: {errors}"
        lines = [line for line in errors.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and "Traceback" not in errors, errors
        assert named in lines[0], lines[0]
        assert [path.name for path in self.results.iterdir() if path.name.startswith(".out")] == [], "a hidden folder was left"


@pytest.fixture(scope="session")
def big(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("faults")
    base = save_tiny_base(root / "base", hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, shard_size="34MB")
    assert len(list(base.glob("*.safetensors"))) == SHARDS
    return base, save_tiny_adapter(root / "adapter", base)


@pytest.fixture
def ground(big: tuple[Path, Path], tmp_path: Path) -> Ground:
    """Private copies, since faults change them."""
    place = Ground(tmp_path / "base", tmp_path / "adapter", tmp_path / "results")
    shutil.copytree(big[0], place.base)
    shutil.copytree(big[1], place.adapter)
    place.results.mkdir()
    return place


def paused_at(ground: Ground, process: subprocess.Popen[str], size: int) -> None:
    """Stop the process once the hidden folder holds ``size`` bytes."""
    while process.poll() is None and ground.hidden_bytes() < size:
        time.sleep(0.0005)
    assert process.poll() is None, f"ended before the fault: {process.communicate()}"
    process.send_signal(signal.SIGSTOP)


MB = 1 << 20


@pytest.mark.parametrize(
    ("number", "at"),
    [
        (signal.SIGINT, 0),
        (signal.SIGTERM, 5 * MB),
        (signal.SIGINT, 31 * MB),
        (signal.SIGTERM, 62 * MB),
        (signal.SIGINT, 110 * MB),
    ],
)
def test_signals_while_writing(ground, at, number):
    process = ground.start()
    paused_at(ground, process, at)
    process.send_signal(number)
    process.send_signal(signal.SIGCONT)
    ground.assert_clean(process, code=130, named="interrupted")
    assert not ground.out.exists()


@pytest.mark.parametrize("at", [0, 1 * MB, 45 * MB, 90 * MB, 112 * MB])
def test_kill_leaves_nothing_that_looks_finished(ground, at):
    process = ground.start()
    paused_at(ground, process, at)
    process.kill()
    process.wait()
    assert not ground.out.exists()
    assert all(path.name.startswith(".out.partial-") for path in ground.results.iterdir())
    assert subprocess.run(ground.command(), capture_output=True, check=False).returncode == 0
    assert [path.name for path in ground.results.iterdir()] == ["out"]


@pytest.mark.parametrize("limit", [0, 100, 4096, 100_000, 1 * MB, 10 * MB, 29 * MB])
def test_file_that_cannot_grow(ground, limit):
    """The system refuses to let a file grow past ``limit``: in a header, in the first tensor, in the last one."""
    ground.assert_clean(ground.start(limit=limit), named="File too large")
    assert not ground.out.exists()


# Files in the order of their creation: the hidden folder, four shards, then the small ones and the manifest at the end.
@pytest.mark.parametrize("inodes", [2, 3, 4, 5, 6, 7, 8, 9, 10])
def test_file_system_without_room_for_another_file(ground, inodes):
    """A small tmpfs with so many inodes: creating the next file fails although there is room for its bytes."""
    ground.results = ground.results / "small"
    ground.results.mkdir()
    with mounted(ground.results, f"size=400m,nr_inodes={inodes}"):
        ground.assert_clean(ground.start(), named="No space left on device")
        assert not ground.out.exists()


@pytest.mark.parametrize("size", ["8m", "100m", "118m"])
def test_disk_that_is_too_small_is_noticed_before_the_first_byte(ground, size):
    ground.results = ground.results / "small"
    ground.results.mkdir()
    with mounted(ground.results, f"size={size}"):
        ground.assert_clean(ground.start(), named="free")
        assert list(ground.results.iterdir()) == []


@pytest.mark.parametrize("at", [0, 20 * MB, 50 * MB, 80 * MB])
def test_disk_that_fills_up_meanwhile(ground, at):
    ground.results = ground.results / "small"
    ground.results.mkdir()
    with mounted(ground.results, "size=140m"):
        process = ground.start()
        paused_at(ground, process, at)
        with (
            (ground.results / "somebody else's").open("wb", buffering=0) as file,
            pytest.raises(OSError, match="No space left on device"),
        ):
            while file.write(b"\0" * 65536):
                pass
        process.send_signal(signal.SIGCONT)
        ground.assert_clean(process, named="No space left on device")
        assert not ground.out.exists()


class mounted:
    """A tmpfs at ``place`` while the context lasts."""

    def __init__(self, place: Path, options: str) -> None:
        self.place, self.options = place, options

    def __enter__(self) -> None:
        subprocess.run(["mount", "-t", "tmpfs", "-o", self.options, "tmpfs", self.place], check=True)

    def __exit__(self, *exception: object) -> None:
        subprocess.run(["umount", "-l", self.place], check=True)


def shard(folder: Path, number: int) -> Path:
    return sorted(folder.glob("*.safetensors"))[number]


CHANGES: dict[str, tuple[Callable[[Ground], object], str]] = {
    "a shard being read is cut short": (lambda g: os.truncate(shard(g.base, 1), 20 * MB), "model-00002"),
    "a shard still to be read is cut short": (lambda g: os.truncate(shard(g.base, 3), 1 * MB), "model-00004"),
    "a shard being read is replaced": (
        lambda g: shutil.copy(shard(g.base, 0), g.base / "x").replace(shard(g.base, 1)),
        "model-00002",
    ),
    "a shard being read is removed": (lambda g: shard(g.base, 1).unlink(), "model-00002"),
    "a shard still to be read is removed": (lambda g: shard(g.base, 2).unlink(), "model-00003"),
    "a shard being read is written to": (lambda g: shard(g.base, 1).open("r+b").write(b"\x08"), "model-00002"),
    "a finished shard is written to": (lambda g: shard(g.base, 0).open("r+b").write(b"\x08"), "model-00001"),
    "the base's configuration is removed": (lambda g: (g.base / "config.json").unlink(), "config.json"),
    "the adapter is written to": (lambda g: (g.adapter / "adapter_model.safetensors").open("r+b").write(b"\x08"), "adapter"),
    "the adapter is removed": (lambda g: (g.adapter / "adapter_model.safetensors").unlink(), "adapter_model.safetensors"),
    "somebody else's folder appears at OUT": (lambda g: (g.out / "theirs").mkdir(parents=True), "out"),
    "a file appears at OUT": (lambda g: g.out.write_text("theirs"), "out"),
    "the hidden folder is removed": (lambda g: shutil.rmtree(next(g.results.glob(".out.partial-*"))), "model-0000"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_world_that_changes_meanwhile(ground, change):
    act, named = CHANGES[change]
    process = ground.start()
    paused_at(ground, process, 40 * MB)  # in the second of four shards
    act(ground)
    process.send_signal(signal.SIGCONT)
    ground.assert_clean(process, named=named)
    assert not (ground.out / "merge_manifest.json").exists()
    if "OUT" in change:
        assert ground.out.read_text() == "theirs" if ground.out.is_file() else (ground.out / "theirs").is_dir()


def _replace(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


PLACES: dict[str, Callable[[Ground], object]] = {
    "a shard is a named pipe": lambda g: _replace(shard(g.base, 1), os.mkfifo),
    "a shard is a folder": lambda g: _replace(shard(g.base, 1), Path.mkdir),
    "a shard is a dangling link": lambda g: _replace(shard(g.base, 1), lambda path: path.symlink_to("nowhere")),
    "a shard is an endless device": lambda g: _replace(shard(g.base, 1), lambda path: path.symlink_to("/dev/zero")),
    "a side file is a named pipe": lambda g: os.mkfifo(g.base / "tokenizer.json"),
    "the folder of OUT is a file": lambda g: (shutil.rmtree(g.results), g.results.write_text(""), None)[2],
    "OUT is a link": lambda g: g.out.symlink_to(g.results),
}


@pytest.mark.parametrize("place", PLACES)
def test_things_that_are_not_what_they_should_be(ground, place):
    PLACES[place](ground)
    before = sorted(path.name for path in ground.results.iterdir()) if ground.results.is_dir() else None
    process = ground.start()
    _, errors = process.communicate(timeout=60)
    if place == "a side file is a named pipe":
        assert process.returncode == 0, "a pipe is no file of the model, and nothing waits for it"
        return
    assert process.returncode == 1 and errors.startswith("error: ") and len(errors.splitlines()) == 1, errors
    assert before is None or sorted(path.name for path in ground.results.iterdir()) == before


def test_an_earlier_result_survives_every_failure(ground):
    """--overwrite replaces at the very end, so that a failing run leaves the old folder as it was."""
    subprocess.run(ground.command(), check=True, capture_output=True)
    before = {path.name: path.stat().st_ino for path in ground.out.iterdir()}
    process = ground.start("--overwrite", limit=10 * MB)
    ground.assert_clean(process, named="File too large")
    process = ground.start("--overwrite")
    paused_at(ground, process, 60 * MB)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    ground.assert_clean(process, code=130)
    process = ground.start("--overwrite")
    paused_at(ground, process, 60 * MB)
    process.kill()
    process.wait()
    assert {path.name: path.stat().st_ino for path in ground.out.iterdir()} == before


@pytest.mark.parametrize("overwrite", [False, True])
def test_two_merges_into_one_folder(ground, overwrite):
    """The second says that the first is at work, whether it may overwrite or not; the first one's result stands."""
    extra = ("--overwrite",) if overwrite else ()
    first = ground.start(*extra)
    paused_at(ground, first, 10 * MB)
    second = subprocess.run(ground.command(*extra), capture_output=True, text=True, check=False)
    assert second.returncode == 1 and "another run" in second.stderr, second.stderr
    first.send_signal(signal.SIGCONT)
    assert first.wait(timeout=120) == 0
    first.communicate()
    assert [path.name for path in ground.results.iterdir()] == ["out"]


# What no file system gives at will: errors of the disk itself. These, and only these, are put in by hand.
DISK_ERRORS = {
    "reading a tensor": (safetensors_file.os, "preadv", 40),
    "reading the adapter": (safetensors_file.os, "preadv", 3),
    "writing a tensor": (output_file.os, "pwrite", 7),
    "making a file durable": (writer.os, "fsync", 0),
    "making the folder durable": (staging.os, "fsync", SHARDS + 5),
    "giving the folder its name": (staging.os, "rename", 0),
}


@pytest.mark.parametrize("site", DISK_ERRORS)
def test_errors_of_the_disk(ground, site, monkeypatch):
    module, name, after = DISK_ERRORS[site]
    original, calls = getattr(module, name), [0]

    def failing(*arguments: object, **settings: object) -> object:
        calls[0] += 1
        if calls[0] > after:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(*arguments, **settings)

    plan = api.plan_merge(ground.base, ground.adapter)
    monkeypatch.setattr(module, name, failing)
    with pytest.raises(MergeError, match="Input/output error"):
        api.execute(plan, ground.out)
    monkeypatch.undo()
    assert list(ground.results.iterdir()) == []


def test_a_recipe_that_cannot_be_recorded_leaves_nothing_half_written(tmp_path, monkeypatch):
    (tmp_path / "adapter_config.json").write_text("{}")
    monkeypatch.setattr(recipes, "recipe_of", lambda model: recipes.QuantRecipe())
    monkeypatch.setattr(recipes, "sample_live", lambda layers: None)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))  # what is longer does not fit, as on a full disk
    try:
        with pytest.raises(MergeError, match="cannot be written: File too large"):
            recipes.record_recipe(nn.Linear(1, 1), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["adapter_config.json"]
