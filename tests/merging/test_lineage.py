"""Is this the base that the adapter was trained on, and is the adapter not in it already?"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from lora_merge.merging.cli import main


def run(*arguments: object):
    return CliRunner().invoke(main, [str(argument) for argument in (*arguments, "--quiet")])


def named(adapter: Path, base: str | None) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": base}))


@pytest.fixture
def adapter(adapters, tmp_path) -> Path:
    return Path(shutil.copytree(adapters("llama"), tmp_path / "adapter"))


def test_an_adapter_is_not_added_twice(bases, adapter, adapters, tmp_path):
    """Not after it was saved again either; another adapter may go on top, which is said."""
    once = tmp_path / "once"
    assert run("--base", bases("llama"), "--adapter", adapter, "--out", once).exit_code == 0
    named_again = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(dict(reversed(named_again.items()))))
    for rest in ((), ("--dry-run",), ("--from-4bit",)):
        again = run("--base", once, "--adapter", adapter, "--out", tmp_path / "twice", *rest)
        assert again.exit_code == 1 and len(again.stderr.splitlines()) == 1
        assert f"base {once}: holds adapter {adapter} already, by its merge_manifest.json" in again.stderr
    assert not (tmp_path / "twice").exists()
    other = Path(shutil.copytree(adapters("llama", r=2), tmp_path / "other"))
    named(other, str(once))
    done = run("--base", once, "--adapter", other, "--out", tmp_path / "stacked")
    assert done.exit_code == 0
    assert f"warning: base {once} is a merge itself, of {adapter} into {bases('llama')}" in done.stderr


def test_one_adapter_is_given_once(bases, adapter, tmp_path):
    beside = tmp_path / "link"
    beside.symlink_to(adapter)
    done = run("--base", bases("llama"), "--adapter", adapter, "--adapter", beside, "--out", tmp_path / "out")
    assert done.exit_code == 1 and f"error: adapter {beside}: was given twice" in done.stderr


@pytest.mark.parametrize("name", ["{base}", "someone/{last}", "/elsewhere/{last}", "unsloth/{last}-unsloth-bnb-4bit", None])
def test_a_base_of_the_same_name_is_not_mentioned(name, bases, adapter, tmp_path):
    base = bases("llama")
    named(adapter, name and name.format(base=base, last=base.name))
    done = run("--base", base, "--adapter", adapter, "--out", tmp_path / "out")
    assert done.exit_code == 0 and "another name" not in done.stderr


def test_a_base_of_another_name_is(bases, adapter, tmp_path, monkeypatch):
    named(adapter, "meta-llama/Llama-3-8B")
    done = run("--base", bases("llama"), "--adapter", adapter, "--out", tmp_path / "out")
    assert done.exit_code == 0
    assert (
        f"warning: {adapter} was trained on meta-llama/Llama-3-8B by its configuration, and base {bases('llama')} has"
        in done.stderr
    )
    named(adapter, f"x/{bases('llama').name}")
    monkeypatch.chdir(bases("llama"))  # the folder's name counts, however it is called
    assert "another name" not in run("--base", ".", "--adapter", adapter, "--out", tmp_path / "here").stderr
