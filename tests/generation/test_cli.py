"""The command line: exit codes, streams, one-line errors."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from lora_merge.generation.cli import main
from lora_merge.generation.settle import CHUNK_WITHOUT_GPU
from tests.generation.builders import make_prompts, read_rows, write_lines
from tests.generation.fakes import FakeEngine
from verification.gate import certificate_path

ROOT = Path(__file__).parents[2]


def call(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def generate(checkpoint, prompts, out, *rest):
    given = ("--model", checkpoint, "--prompts", prompts, "--out", out, "--skip-threshold", 0.4, "--max-tokens", 8)
    return call(*given, *rest)


def test_a_run_from_end_to_end(checkpoint, prompts, tmp_path):
    out = tmp_path / "r.jsonl"
    done = generate(checkpoint, prompts, out)
    assert done.exit_code == 0, done.output
    rows = read_rows(out)
    assert len(rows) == 40
    summary = done.stdout.splitlines()
    assert summary[0] == f"{out}: 40 rows (gated)"
    kept = sum(row["kept"] for row in rows)
    assert any(line.startswith(f"  kept      {kept};") for line in summary)
    assert "certificate" in done.stderr
    assert json.loads((tmp_path / "r.jsonl.run.json").read_text())["settings"]["chunk_size"] == CHUNK_WITHOUT_GPU


def test_resuming_what_is_complete_tells_no_times_of_another_day(checkpoint, prompts, tmp_path):
    out = tmp_path / "r.jsonl"
    first = generate(checkpoint, prompts, out)
    record = json.loads((tmp_path / "r.jsonl.run.json").read_bytes())
    record["result"]["phases"]["load"]["seconds"] = 99.5
    (tmp_path / "r.jsonl.run.json").write_text(json.dumps(record, indent=2) + "\n")
    again = generate(checkpoint, prompts, out, "--resume")
    assert again.exit_code == 0
    counts = [line for line in first.stdout.splitlines() if not line.startswith("  took ")]
    assert again.stdout.splitlines() == [*counts, "  resumed   nothing was left to do, and nothing was loaded"]
    result = json.loads(generate(checkpoint, prompts, out, "--resume", "--format", "json").stdout)
    assert result["done_before"] is True and result["phases"] == record["result"]["phases"]
    assert json.loads((tmp_path / "r.jsonl.run.json").read_bytes()) == record


def test_json_is_alone_on_standard_output_and_quiet_is_quiet(checkpoint, prompts, tmp_path):
    """In a process of its own: the libraries read their log levels when they are first imported."""
    command = [sys.executable, "-m", "lora_merge.generation.cli", "--model", checkpoint, "--prompts", prompts]
    command += ["--out", tmp_path / "r.jsonl", "--skip-threshold", "0.4", "--max-tokens", "8", "--format", "json", "--quiet"]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, cwd=ROOT)
    result = json.loads(done.stdout)
    assert (result["counts"]["rows"], result["gated"], result["quarantined"], result["shard"]) == (40, True, 0, "1/1")
    # A random model has its doubts about decisions and texts; these are warnings, which quiet leaves.
    assert [line.split(" ")[0] for line in done.stderr.splitlines()] == ["warning:", "warning:"]


def test_a_terminal_that_is_gone_and_a_full_disk_behind_standard_output_cost_no_row(checkpoint, prompts, tmp_path):
    command = [sys.executable, "-m", "lora_merge.generation.cli", "--model", checkpoint, "--prompts", prompts]
    command += ["--out", tmp_path / "r.jsonl", "--skip-threshold", "0.4", "--max-tokens", "8", "--chunk-size", "8"]
    reading, writing = os.pipe()
    os.close(reading)
    with open("/dev/full", "wb") as full, open(writing, "wb") as gone:
        done = subprocess.run([str(word) for word in command], stdout=full, stderr=gone, cwd=ROOT)
    assert done.returncode == 1
    assert json.loads((tmp_path / "r.jsonl.run.json").read_bytes())["result"]["counts"]["rows"] == 40
    assert len(read_rows(tmp_path / "r.jsonl")) == 40
    again = generate(checkpoint, prompts, tmp_path / "r.jsonl", "--resume", "--chunk-size", 8)
    assert again.exit_code == 0 and "nothing was left to do" in again.stdout


def test_a_refusal_is_one_line_and_exit_1(checkpoint, prompts, tmp_path):
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    done = generate(checkpoint, prompts, tmp_path / "r.jsonl")
    assert done.exit_code == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("error: ")
    assert "was changed since it was certified" in done.stderr


@pytest.mark.parametrize(
    ("flag", "name", "message"),
    [
        ("--out", "prompts.jsonl", "is the prompt file itself; give another --out"),
        ("--out", "precious.txt", "exists and holds no results of gated-generate (precious.txt.run.json is not beside it)"),
        ("--out", "merged-report", "is a folder; expected the name of a results file"),
        ("--prompts", "merged", "is a folder; expected a JSON Lines prompt file"),
        ("--prompts", "none.jsonl", "no such file; expected a JSON Lines prompt file"),
        ("--model", "prompts.jsonl", "is a file; expected a merged checkpoint"),
        ("--certificate", "merged-report", "is a folder; give the file in it, such as "),
        ("--trusted-key", "none.pub", "no such file; expected an Ed25519 public key in PEM"),
    ],
)
def test_a_file_for_a_folder_and_the_reverse_are_one_line(flag, name, message, checkpoint, prompts, tmp_path):
    (tmp_path / "precious.txt").write_text("precious")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    given = {"--model": checkpoint, "--prompts": prompts, "--out": tmp_path / "r.jsonl", flag: tmp_path / name}
    done = call(*(word for pair in given.items() for word in pair), "--skip-threshold", 0.4)
    assert done.exit_code == 1 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and f"{tmp_path / name}: {message}" in done.stderr
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_results_may_lie_where_the_name_is_no_text(checkpoint, tmp_path):
    """A byte that is no UTF-8 stands in the record, and on the screen, as everywhere."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    prompts, out = write_lines(folder / "prompts.jsonl", make_prompts(4)), folder / "r.jsonl"
    done = generate(checkpoint, prompts, out, "--format", "json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["out"] == rf"{tmp_path}/caf\xe9/r.jsonl"
    record = json.loads((folder / "r.jsonl.run.json").read_text(encoding="utf-8"))
    assert record["prompts"]["path"] == rf"{tmp_path}/caf\xe9/prompts.jsonl"
    again = generate(checkpoint, prompts, out, "--resume")
    assert again.exit_code == 0 and again.stdout.startswith(rf"{tmp_path}/caf\xe9/r.jsonl: 4 rows")


def test_a_folder_that_is_no_checkpoint_is_one_line_and_not_walked(monkeypatch):
    def walked(*_):
        raise AssertionError("walked")

    monkeypatch.setattr(os, "scandir", walked)
    done = call("check", "--model", "/")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == "error: model /: holds no config.json; expected a merged checkpoint, as lora-merge --out makes it\n"


def test_a_file_that_cannot_be_looked_at_is_one_line(checkpoint):
    (checkpoint / "link").symlink_to("x" * 300)  # longer than any name may be
    done = call("check", "--model", checkpoint)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == f"error: {checkpoint / 'link'}: cannot be read: File name too long\n"


def test_a_part_that_is_not_there_is_named(tmp_path):
    done = call("join", tmp_path / "1.jsonl", "--out", tmp_path / "r.jsonl")
    assert (
        done.exit_code == 1
        and done.stderr == f"error: {tmp_path / '1.jsonl'}: no such file; expected the results file of a shard\n"
    )


def test_ungated_is_loud_even_when_quiet(checkpoint, prompts, tmp_path):
    shutil.rmtree(certificate_path(checkpoint).parent)
    arguments = (checkpoint, prompts, tmp_path / "r.jsonl", "--engine", "hf", "--quiet")
    assert generate(*arguments).exit_code == 1
    done = generate(*arguments, "--allow-ungated")
    assert done.exit_code == 0
    assert "warning: NOT GATED" in done.stderr
    assert "(NOT GATED)" in done.stdout
    assert {row["gated"] for row in read_rows(tmp_path / "r.jsonl")} == {False}


def test_shards_and_join(checkpoint, prompts, tmp_path):
    parts = [tmp_path / f"{index}.jsonl" for index in (1, 2)]
    for index, part in enumerate(parts, start=1):
        done = generate(checkpoint, prompts, part, "--shard", f"{index}/2", "--chunk-size", 16)
        assert done.exit_code == 0, done.output
    done = call("join", *parts, "--out", tmp_path / "joined.jsonl", "--format", "json")
    assert json.loads(done.stdout)["counts"]["rows"] == 40
    assert call("join", parts[0], "--out", tmp_path / "half.jsonl").exit_code == 1


def test_rows_set_aside_are_told(checkpoint, tmp_path):
    prompts = write_lines(tmp_path / "p.jsonl", [*make_prompts(8), b"{"])
    done = generate(checkpoint, prompts, tmp_path / "r.jsonl", "--max-quarantine", 0.2)
    assert done.exit_code == 0
    assert "set aside 1 of 9 rows" in done.stdout
    assert f"warning: 1 of 9 rows of {prompts} cannot be used (line 9: broken JSON: " in done.stderr


def test_the_check_for_servers(checkpoint):
    done = call("check", "--model", checkpoint)
    assert done.exit_code == 0 and "may be used" in done.stdout
    shown = json.loads(call("check", "--model", checkpoint, "--format", "json").stdout)
    assert shown["gated"] is True and len(shown["root"]) == 64
    assert (shown["prefill"], shown["engine"]["dtype"], shown["labels"]["skip"]["text"]) == ('{"decision": "', "float32", "skip")
    (checkpoint / "generation_config.json").unlink()
    done = call("check", "--model", checkpoint)
    assert done.exit_code == 1 and done.stdout == "" and "generation_config.json is missing" in done.stderr
    assert call("check", "--model", checkpoint, "--allow-ungated").exit_code == 2  # there is nothing to allow
    shutil.rmtree(certificate_path(checkpoint).parent)
    done = call("check", "--model", checkpoint)
    assert done.exit_code == 1 and "has no certificate at" in done.stderr and "--allow-ungated" not in done.stderr


@pytest.mark.parametrize(("after", "saved"), [(0, 0), (17, 32)])
def test_an_interrupt_says_how_to_go_on(checkpoint, prompts, tmp_path, monkeypatch, after, saved):
    class Stopped(FakeEngine):
        def score(self, prompts, labels, *, progress):
            if len(self.scored) >= after:
                raise KeyboardInterrupt
            return super().score(prompts, labels, progress=progress)

    out = tmp_path / "r.jsonl"
    monkeypatch.setattr("lora_merge.engines.opening.open_engine", lambda *arguments, **options: Stopped())
    done = generate(checkpoint, prompts, out, "--chunk-size", 16, "--quiet")
    assert done.exit_code == 130 and done.stdout == ""
    assert (len(read_rows(out)) if out.exists() else 0) == saved
    expected = f"the rows in {out} are whole and stay: go on with the same command and --resume" if saved else "start again"
    assert len(done.stderr.splitlines()) == 1 and expected in done.stderr
    monkeypatch.setattr("lora_merge.engines.opening.open_engine", lambda *arguments, **options: FakeEngine())
    assert generate(checkpoint, prompts, out, "--chunk-size", 16, "--quiet", "--resume").exit_code == 0
    assert len(read_rows(out)) == 40


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Missing option '--model'"),
        (("--model", "m", "--prompts", "p", "--out", "o"), "Missing option '--skip-threshold'"),
        (("--model", "m", "--prompts", "p", "--out", "o", "--skip-threshold", "1.5"), "1.5 is not in the range"),
        (("--model", "m", "--prompts", "p", "--out", "o", "--skip-threshold", "0.5", "--shard", "5/4"), "expected i/n"),
        (("--model", "m", "check", "--model", "m"), "--model stands before 'check'"),
        (("join", "a.jsonl"), "Missing option '--out'"),
    ],
)
def test_usage_errors_exit_with_2(arguments, message):
    done = call(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr
