"""The command line: what it prints, where, and what it leaves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings

import pytest
from click.testing import CliRunner

import lora_merge
from lora_merge.merging.cli import main
from lora_merge.merging.manifest import read_manifest
from lora_merge.merging.recipes import RECIPE_FILE
from tests.merging.oracle import load_folder
from tests.tiny import save_tiny_adapter, save_tiny_base


def run(*arguments: object):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_dry_run_prints_the_plan_and_writes_nothing(bases, adapters, tmp_path):
    result = run(
        "--base",
        bases("llama"),
        "--adapter",
        adapters("llama"),
        "--out",
        tmp_path / "out",
        "--from-4bit",
        "--dry-run",
        "--format",
        "json",
    )
    assert result.exit_code == 0
    plan = json.loads(result.stdout)
    assert plan["method"] == "from-4bit" and plan["recipe"]["assumed"] is True and plan["memory_bytes"] > 0
    assert plan["obstacles"] == []
    assert list(tmp_path.iterdir()) == []
    human = run(
        "--base", bases("llama"), "--adapter", adapters("llama"), "--out", tmp_path / "out", "--from-4bit", "--dry-run"
    ).stdout
    assert (
        "model.layers.0.mlp.up_proj.weight [128, 64] bfloat16" in human and "assumed" in human and "nothing was written" in human
    )


def test_dry_run_says_what_the_merge_would_refuse(bases, adapters, tmp_path, monkeypatch):
    """Oracle: the merge itself, which says the same as its error; and the room that it asks for, on a disk with just that."""
    base, adapter = bases("llama"), adapters("llama")
    out, file = tmp_path / "out", tmp_path / "file"
    file.write_text("a file")
    out.mkdir()
    (out / "precious").write_text("data")

    def both(*rest: object):
        arguments = ("--base", base, "--adapter", adapter, "--quiet", *rest)
        return run(*arguments, "--dry-run", "--format", "json"), run(*arguments)

    for target, message in ((out, "--overwrite"), (file, "is no folder"), (file / "out", f"{file} is a file"), (base, "base")):
        dry, real = both("--out", target)
        assert (dry.exit_code, real.exit_code) == (1, 1), target
        (obstacle,) = json.loads(dry.stdout)["obstacles"] if target != base else json.loads(dry.stdout)["obstacles"][:1]
        assert real.stderr == f"error: {obstacle}\n" and message in obstacle
        assert f"warning: this merge would be refused: {obstacle}\n" in dry.stderr
    dry = both("--out", out, "--overwrite")[0]
    assert ["merge_manifest.json" in obstacle for obstacle in json.loads(dry.stdout)["obstacles"]] == [True]

    needed = json.loads(dry.stdout)["disk_bytes"]
    assert needed == json.loads(dry.stdout)["output_bytes"] + 1_048_576
    for free, refused in ((needed, False), (needed - 1, True)):
        monkeypatch.setattr(shutil, "disk_usage", lambda folder, free=free: shutil._ntuple_diskusage(free, 0, free))
        dry, real = both("--out", tmp_path / f"disk-{refused}")
        assert ([f"needs {needed:,} bytes" in entry for entry in json.loads(dry.stdout)["obstacles"]]) == [True] * refused
        assert real.exit_code == dry.exit_code == refused
    monkeypatch.undo()

    monkeypatch.setattr(os, "access", lambda folder, mode: False)
    dry, real = both("--out", tmp_path / "fresh")
    assert real.stderr == f"error: {json.loads(dry.stdout)['obstacles'][0]}\n" and "no permission to write" in real.stderr


def test_assumed_recipe_is_said_and_a_recorded_one_is_used(bases, adapters, tmp_path):
    arguments = (
        "--base",
        bases("llama"),
        "--adapter",
        adapters("llama", lora_alpha=9),
        "--from-4bit",
        "--format",
        "json",
        "--quiet",
    )
    result = run(*arguments, "--out", tmp_path / "assumed")
    assert "assumed" in result.stderr
    adapter = adapters("llama", lora_alpha=9)
    record = {
        "format": "lora-merge/quantization-recipe",
        "version": 1,
        "recipe": {"quant_type": "fp4", "double_quant": False, "block_size": 128, "quant_dtype": "float16"},
    }
    (adapter / RECIPE_FILE).write_text(json.dumps(record))
    result = run(*arguments, "--out", tmp_path / "recorded")
    assert result.stderr == ""
    recipe = json.loads(result.stdout)["manifest"]["recipe"]
    assert (recipe["quant_type"], recipe["block_size"], recipe["assumed"]) == ("fp4", 128, False)
    assert recipe["origins"]["quant_type"] == RECIPE_FILE
    result = run(*arguments, "--out", tmp_path / "flag", "--quant-type", "nf4")
    recipe = json.loads(result.stdout)["manifest"]["recipe"]
    assert (recipe["quant_type"], recipe["block_size"]) == ("nf4", 128), "a flag comes before the record, setting by setting"
    assert result.stderr == "warning: quant_type is given as nf4, but the record beside the adapter says fp4\n"
    assert run(*arguments, "--out", tmp_path / "same", "--quant-type", "fp4").stderr == ""


def test_what_the_command_line_says_once_python_warns_of_once(bases, adapters, tmp_path):
    """Both take it from one place; the library's warning names the caller's own line."""
    base, adapter = bases("llama"), adapters("llama")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lora_merge.merge(base, adapter, tmp_path / "python", lora_merge.MergeOptions(from_4bit=True))
    assert [(type(warning.message), warning.filename) for warning in caught] == [(UserWarning, __file__)]
    said = run("--base", base, "--adapter", adapter, "--out", tmp_path / "command", "--from-4bit", "--quiet").stderr
    assert said == f"warning: {caught[0].message}\n" and "recipe is assumed" in said


@pytest.mark.parametrize("source", ["record", "README.md", None])
def test_a_qlora_adapter_on_its_way_into_the_original_weights(source, bases, adapters, tmp_path):
    """The mistake that the project is about is said, where something beside the adapter tells of 4-bit training."""
    adapter = tmp_path / "adapter"
    shutil.copytree(adapters("llama"), adapter)
    (adapter / "README.md").unlink(missing_ok=True)
    if source == "record":
        record = {"format": "lora-merge/quantization-recipe", "version": 1, "recipe": {"quant_type": "nf4", "double_quant": True}}
        (adapter / RECIPE_FILE).write_text(json.dumps(record))
    elif source:
        (adapter / source).write_text(
            "The following `bitsandbytes` quantization config was used during training:\n"
            "- load_in_4bit: True\n- bnb_4bit_quant_type: nf4\n- bnb_4bit_use_double_quant: True\n"
            "- bnb_4bit_compute_dtype: bfloat16\n"
        )
    result = run("--base", bases("llama"), "--adapter", adapter, "--out", tmp_path / "out", "--quiet")
    assert result.exit_code == 0
    if source is None:
        assert result.stderr == ""
    else:
        assert len(result.stderr.splitlines()) == 1 and "was trained on a 4-bit base (NF4, double quantization" in result.stderr
        assert "add --from-4bit" in result.stderr


def test_bitsandbytes_config_file(bases, adapters, tmp_path):
    import transformers

    config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    (tmp_path / "bnb.json").write_text(json.dumps(config.to_dict()))
    result = run(
        "--base",
        bases("llama"),
        "--adapter",
        adapters("llama"),
        "--out",
        tmp_path / "out",
        "--from-4bit",
        "--quant-config",
        tmp_path / "bnb.json",
        "--format",
        "json",
        "--quiet",
    )
    recipe = json.loads(result.stdout)["manifest"]["recipe"]
    assert (recipe["quant_type"], recipe["double_quant"], recipe["origins"]["quant_type"]) == ("nf4", True, "bnb.json")


def test_overwrite_replaces_an_earlier_merge(bases, adapters, tmp_path):
    arguments = ("--base", bases("llama"), "--adapter", adapters("llama"), "--out", tmp_path / "out", "--quiet")
    assert run(*arguments).exit_code == 0
    before = load_folder(tmp_path / "out")
    assert run(*arguments, "--from-4bit").exit_code == 1
    assert run(*arguments, "--from-4bit", "--overwrite").exit_code == 0
    after = load_folder(tmp_path / "out")
    assert any((after[name] != before[name]).any() for name in before)
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "the replaced folder is gone"


def test_two_runs_into_one_folder(bases, adapters, tmp_path):
    """A run that finds a living one's hidden folder yields; a dead one's is removed."""
    import fcntl

    hidden = tmp_path / ".out.partial-other"
    hidden.mkdir()
    descriptor = os.open(hidden, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    arguments = ("--base", bases("llama"), "--adapter", adapters("llama"), "--out", tmp_path / "out", "--quiet")
    result = run(*arguments)
    assert result.exit_code == 1 and "another run" in result.stderr and hidden.is_dir() and not (tmp_path / "out").exists()
    os.close(descriptor)
    assert run(*arguments).exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def _heed_interrupts() -> None:
    """A shell's background jobs ignore SIGINT and hand that down; the process under test must not inherit it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_leaves_nothing(number, tmp_path):
    """A signal to a real process while it writes 120 MB: exit 130, one line, and not even a hidden folder."""
    base = save_tiny_base(tmp_path / "base", hidden_size=1024, intermediate_size=4096, num_hidden_layers=4)
    adapter = save_tiny_adapter(tmp_path / "adapter", base)
    results = tmp_path / "results"
    results.mkdir()
    command = [sys.executable, "-m", "lora_merge.merging", "--from-4bit", "--quiet", "--jobs", "1"]
    command += ["--base", str(base), "--adapter", str(adapter), "--out", str(results / "out")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=_heed_interrupts)
    while process.poll() is None and not list(results.glob(".out.partial-*/*.safetensors")):
        time.sleep(0.01)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert errors.splitlines()[-1].startswith("error: interrupted"), errors
    assert list(results.iterdir()) == []


def test_leftovers_of_a_killed_run_go_with_the_next(bases, adapters, tmp_path):
    """kill -9 while writing leaves a hidden folder; the next run removes it and finishes."""
    base = save_tiny_base(tmp_path / "base", hidden_size=1024, intermediate_size=4096, num_hidden_layers=4)
    adapter = save_tiny_adapter(tmp_path / "adapter", base)
    results = tmp_path / "results"
    results.mkdir()
    command = [sys.executable, "-m", "lora_merge.merging", "--quiet", "--jobs", "1"]
    command += ["--base", str(base), "--adapter", str(adapter), "--out", str(results / "out")]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while process.poll() is None and not list(results.glob(".out.partial-*/*.safetensors")):
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert [path.name[:13] for path in results.iterdir()] == [".out.partial-"], "a killed run has no result, only a hidden folder"
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert [path.name for path in results.iterdir()] == ["out"]


def test_a_base_whose_folder_is_no_text_is_named_in_manifest_and_card(bases, adapters, tmp_path):
    """A byte that is no UTF-8 stands there as everywhere. Oracle: UTF-8 itself, and the merge of the same base elsewhere."""
    base = tmp_path / os.fsdecode(b"caf\xe9")
    shutil.copytree(bases("llama"), base)
    result = run("--base", base, "--adapter", adapters("llama"), "--out", tmp_path / "out", "--format", "json")
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "out" / "merge_manifest.json").read_text(encoding="utf-8"))
    assert written["base"]["source"] == rf"{tmp_path}/caf\xe9" == json.loads(result.stdout)["manifest"]["base"]["source"]
    assert read_manifest(tmp_path / "out").output["model.safetensors"] == written["output"]["files"]["model.safetensors"]
    (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    run("--base", bases("llama"), "--adapter", adapters("llama"), "--out", tmp_path / "other")
    names = ("model.safetensors", "config.json")
    assert all((tmp_path / "out" / name).read_bytes() == (tmp_path / "other" / name).read_bytes() for name in names)
