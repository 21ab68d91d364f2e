"""Folders of a base that belong to the model. Oracle: the base's own bytes, and the digests that verification takes."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from lora_merge.merging.api import merge, plan_merge
from lora_merge.merging.cli import main
from lora_merge.merging.errors import MergeError
from lora_merge.merging.manifest import read_manifest
from verification.checks import Outcome
from verification.merged_files import folder_files, manifest_findings

MODULES = [{"idx": index, "path": path} for index, path in enumerate(["", "1_Pooling", "2_Dense", "3_Normalize"])]


@pytest.fixture
def base(bases: Callable[..., Path], tmp_path: Path) -> Path:
    """As sentence-transformers saves it: the transformer in the folder itself, pooling, a dense layer, a module without files."""
    folder = tmp_path / "base"
    shutil.copytree(bases("llama"), folder)
    (folder / "modules.json").write_text(json.dumps(MODULES))
    files = {
        "1_Pooling/config.json": '{"word_embedding_dimension": 64}',
        "2_Dense/config.json": '{"in_features": 64}',
        "2_Dense/model.safetensors": "weights",
        "2_Dense/pytorch_model.bin": "the same weights",
        "2_Dense/deeper/notes.txt": "notes",
        "2_Dense/.hidden": "x",
        "original/params.json": "{}",
        ".cache/huggingface/x": "x",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "empty").mkdir()
    return folder


TAKEN = ["1_Pooling/config.json", "2_Dense/config.json", "2_Dense/deeper/notes.txt", "2_Dense/model.safetensors"]


def test_modules_are_copied_and_accounted_for(base, adapters, tmp_path):
    """In the plan, on the disk, in the manifest, and for whoever certifies the folder."""
    plan = plan_merge(base, adapters("llama"))
    out = merge(base, adapters("llama"), tmp_path / "out").out
    written = {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert sorted(name for name in written if "/" in name) == TAKEN
    assert all(written[name] == (base / name).read_bytes() for name in TAKEN)
    manifest = written.pop("merge_manifest.json")
    assert read_manifest(out).output == {name: hashlib.sha256(content).hexdigest() for name, content in written.items()}
    assert plan.output_bytes == sum(map(len, written.values())) and len(manifest) < plan.disk_bytes - plan.output_bytes
    assert [check.outcome for check in manifest_findings(out, folder_files(out))] == [Outcome.PASSED]
    (out / "1_Pooling" / "config.json").write_text("{}")
    (check,) = manifest_findings(out, folder_files(out))
    assert check.outcome is Outcome.WARNED and "1_Pooling/config.json" in check.detail
    (out / "2_Dense" / "model.safetensors").write_text("others")
    (check,) = manifest_findings(out, folder_files(out), bit_by_bit=True)  # the audit does not read it
    assert check.outcome is Outcome.FAILED and "2_Dense/model.safetensors" in check.detail


def test_what_is_left_behind_is_named(base, adapters, tmp_path):
    arguments = ["--base", str(base), "--adapter", str(adapters("llama")), "--out", str(tmp_path / "out"), "--dry-run"]
    assert "folders of the base that are left behind: original\n" in CliRunner().invoke(main, arguments).stderr
    assert "left behind" not in CliRunner().invoke(main, [*arguments, "--quiet"]).stderr
    shutil.rmtree(base / "original")
    assert "left behind" not in CliRunner().invoke(main, arguments).stderr


def test_folders_that_no_list_names_stay(base, adapters, tmp_path):
    (base / "modules.json").unlink()
    out = merge(base, adapters("llama"), tmp_path / "out").out
    assert not any(path.is_dir() for path in out.iterdir())


@pytest.mark.parametrize("path", ["../elsewhere", "/etc", "1_Pooling/../../elsewhere"])
def test_a_module_outside_the_base(path, base, adapters, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret").write_text("token")
    (base / "modules.json").write_text(json.dumps([{"path": path}]))
    with pytest.raises(MergeError, match=r"modules\.json: module path .*; expected the name of a folder beside it"):
        merge(base, adapters("llama"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("link", ["1_Pooling", "2_Dense/secret", "2_Dense/deeper"])
def test_links_out_of_the_base(link, base, adapters, tmp_path):
    """The module's folder, a file in it, a folder in it."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "secret").write_text("token")
    shutil.rmtree(base / link, ignore_errors=True)
    (base / link).symlink_to(elsewhere / "secret" if link.endswith("secret") else elsewhere)
    with pytest.raises(MergeError, match=rf"{link}: is a link to .*elsewhere.*outside its folder"):
        merge(base, adapters("llama"), tmp_path / "out")


def test_a_link_to_the_folder_itself_is_no_endless_walk(base, adapters, tmp_path):
    (base / "2_Dense" / "again").symlink_to(".")
    out = merge(base, adapters("llama"), tmp_path / "out").out
    assert not (out / "2_Dense" / "again").exists() and (out / "2_Dense" / "config.json").is_file()


def test_weights_that_could_run_code(base, adapters, tmp_path):
    (base / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(MergeError, match=r"2_Dense/pytorch_model\.bin: the weights of a module .* expected safetensors"):
        merge(base, adapters("llama"), tmp_path / "out")


@pytest.mark.parametrize("content", ["{}", "[1]", '[{"name": "x"}]'])
def test_another_file_of_that_name(content, base, adapters, tmp_path):
    (base / "modules.json").write_text(content)
    out = merge(base, adapters("llama"), tmp_path / "out").out
    assert (out / "modules.json").read_text() == content and not (out / "1_Pooling").exists()


def test_a_module_with_an_impossible_name(base, adapters, tmp_path):
    (base / "modules.json").write_text(json.dumps([{"path": "a" * 5000}]))
    with pytest.raises(MergeError, match=r"modules\.json: a module path that cannot be looked at: File name too long"):
        merge(base, adapters("llama"), tmp_path / "out")


def test_a_list_of_modules_that_is_no_json(base, adapters, tmp_path):
    (base / "modules.json").write_text("[")
    with pytest.raises(MergeError, match=r"modules\.json: the list of modules cannot be read"):
        merge(base, adapters("llama"), tmp_path / "out")
