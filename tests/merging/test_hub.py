"""Bases and adapters by hub id, from a hub cache laid out as huggingface_hub lays it out; nothing is fetched."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lora_merge.merging.api import merge
from lora_merge.merging.errors import MergeError
from lora_merge.merging.manifest import read_manifest
from tests.merging.oracle import assert_same_bits, load_folder

FIRST, SECOND = "1" * 40, "2" * 40


def into_cache(cache: Path, hub_id: str, folder: Path, commit: str, reference: str) -> None:
    """Lay ``folder`` into ``cache`` as one commit of ``hub_id``: blobs, and a snapshot of links to them."""
    root = cache / f"models--{hub_id.replace('/', '--')}"
    snapshot = root / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (root / "blobs").mkdir(exist_ok=True)
    for file in folder.iterdir():
        blob = root / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    (root / "refs").mkdir(exist_ok=True)
    (root / "refs" / reference).write_text(commit)


@pytest.fixture
def cache(tmp_path, bases, adapters) -> Path:
    cache = tmp_path / "cache"
    into_cache(cache, "someone/base", bases("llama", True), FIRST, "main")
    into_cache(cache, "someone/base", bases("qwen2", True), SECOND, "experiment")
    into_cache(cache, "someone/adapter", adapters("llama"), FIRST, "main")
    return cache


def run(cache: Path, out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "lora_merge.merging", "--out", str(out), "--quiet", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_hub_ids_are_resolved_to_commits_and_links_are_followed(cache, tmp_path, bases):
    done = run(cache, tmp_path / "out", "--base", "someone/base", "--adapter", "someone/adapter")
    assert done.returncode == 0, done.stderr
    manifest = read_manifest(tmp_path / "out")
    assert (manifest.base.source, manifest.base.commit, manifest.base.path) == ("someone/base", FIRST, None)
    assert (manifest.adapter.source, manifest.adapter.commit) == ("someone/adapter", FIRST)
    assert manifest.base.location == ("someone/base", FIRST)
    merged = load_folder(tmp_path / "out")
    name = "model.embed_tokens.weight"
    assert_same_bits(merged[name], load_folder(bases("llama", True))[name], name)
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())


def test_a_revision_is_what_is_merged(cache, tmp_path):
    """The other revision is another architecture of the same shapes, told apart by its biases."""
    done = run(cache, tmp_path / "out", "--base", "someone/base", "--adapter", "someone/adapter", "--revision", "experiment")
    assert done.returncode == 0, done.stderr
    assert read_manifest(tmp_path / "out").base.commit == SECOND
    assert "model.layers.0.self_attn.q_proj.bias" in load_folder(tmp_path / "out")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--base", "someone/unknown", "--adapter", "someone/adapter"],
        ["--base", "someone/base", "--adapter", "someone/adapter", "--revision", "nowhere"],
        ["--base", "no such/folder at all", "--adapter", "someone/adapter"],
    ],
)
def test_what_is_not_there_is_one_line(cache, tmp_path, arguments):
    done = run(cache, tmp_path / "out", *arguments)
    assert done.returncode == 1 and not (tmp_path / "out").exists()
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("error: base "), done.stderr


@pytest.mark.parametrize("where", ["base", "adapter"])
@pytest.mark.parametrize("name", ["tokenizer.json", "special_tokens_map.json"])
def test_a_link_to_a_file_of_the_machine_is_not_published(where, name, bases, adapters, tmp_path):
    """A folder from somewhere else whose tokenizer is a link to a secret: nothing of it reaches the output."""
    folders = {"base": tmp_path / "base", "adapter": tmp_path / "adapter"}
    shutil.copytree(bases("llama"), folders["base"])
    shutil.copytree(adapters("llama"), folders["adapter"])
    (tmp_path / "secret").write_text("token")
    (folders[where] / name).unlink(missing_ok=True)
    (folders[where] / name).symlink_to(tmp_path / "secret")
    with pytest.raises(MergeError, match=rf"{name}: is a link to .*secret, outside its folder"):
        merge(folders["base"], folders["adapter"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("where", ["base", "adapter"])
@pytest.mark.parametrize("target", ["nowhere", "tokenizer.json"])
def test_a_broken_link_is_no_missing_file(where, target, bases, adapters, tmp_path):
    """A tokenizer that is a link to nothing, or to itself: a checkpoint without its tokenizer is not what was asked for."""
    folders = {"base": tmp_path / "base", "adapter": tmp_path / "adapter"}
    shutil.copytree(bases("llama"), folders["base"])
    shutil.copytree(adapters("llama"), folders["adapter"])
    (folders[where] / "tokenizer.json").unlink(missing_ok=True)
    (folders[where] / "tokenizer.json").symlink_to(target)
    with pytest.raises(MergeError, match=rf"tokenizer\.json: is a broken link to {target}; put the file itself there"):
        merge(folders["base"], folders["adapter"], tmp_path / "out")


def test_links_that_are_followed(cache, bases, adapters, tmp_path):
    """Inside the folder, into a hub cache, and weights on another disk."""
    base = tmp_path / "base"
    shutil.copytree(bases("llama"), base)
    (base / "notes.txt").write_text("notes")
    (base / "same.txt").symlink_to("notes.txt")
    blob = next(path for path in (cache / "models--someone--base" / "snapshots" / FIRST).iterdir() if path.name == "config.json")
    (base / "generation.json").symlink_to(blob.resolve())
    (base / "model.safetensors").rename(tmp_path / "elsewhere")
    (base / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    out = merge(base, adapters("llama"), tmp_path / "out").out
    assert (out / "same.txt").read_text() == "notes" and (out / "generation.json").read_bytes() == blob.read_bytes()
    assert not any(path.is_symlink() for path in out.iterdir())
