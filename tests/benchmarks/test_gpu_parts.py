"""The driver of the GPU measurements: parts that can be stopped and go on. No GPU is needed; the parts here are small scripts."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

GPU = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts import each other as siblings."""
    monkeypatch.syspath_prepend(str(GPU))
    for name in ("run", "store", "drift"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_what_was_measured_is_not_measured_again(gpu, tmp_path):
    from store import Results, is_complete

    file, calls = tmp_path / "part.json", []

    def work(name, error=None):
        calls.append(name)
        if error:
            raise error
        return {"seconds": 1.5}

    first = Results(file, {"prompts": 10})
    assert first.measure("a", lambda: work("a")) == {"seconds": 1.5}
    assert first.measure("b", lambda: work("b", ValueError("no card"))) is None
    with pytest.raises(SystemExit, match="failed: b"):
        first.finish()
    assert not is_complete(file)
    assert json.loads(file.read_text())["failed"] == {"b": "ValueError: no card"}

    second = Results(file, {"prompts": 10})
    assert second.measure("a", lambda: work("a")) == {"seconds": 1.5}
    second.measure("b", lambda: work("b"))
    second.finish()
    assert calls == ["a", "b", "b"]
    assert is_complete(file)
    with pytest.raises(SystemExit, match="remove it"):
        Results(file, {"prompts": 20})


PART = """
import json, sys, time
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
open(options["--json"] + ".calls", "a").write("x")
if "--hang" in options:
    time.sleep(600)
if "--bad" in options:
    sys.exit("broken")
open(options["--json"], "w").write(json.dumps({"complete": True}))
"""


def test_parts_end_at_their_limit_and_do_not_stop_the_others(gpu, tmp_path, monkeypatch):
    import run

    (tmp_path / "part.py").write_text(PART)
    script = str(tmp_path / "part.py")  # an absolute path wins over the folder of the scripts
    parts = {
        "hangs": run.Part(script, ("--hang", "1"), base=False),
        "breaks": run.Part(script, ("--bad", "1"), base=False),
        "works": run.Part(script, base=False, alone=True),
    }
    monkeypatch.setattr(run, "PARTS", parts)
    arguments = ["run.py", "--base", "b", "--work", str(tmp_path / "w"), "--results", str(tmp_path / "r"), "--limit", "3"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--parts", "hangs,breaks,works", "--at-once", "2"])
    for _ in range(2):
        start = time.perf_counter()
        with pytest.raises(SystemExit) as done:
            run.main()
        assert done.value.code == 1
        assert time.perf_counter() - start < 60
    calls = {name: (tmp_path / "r" / f"{name}.json.calls").read_text() for name in parts}
    assert calls == {"hangs": "xx", "breaks": "xx", "works": "x"}
    assert "broken" in (tmp_path / "w" / "logs" / "breaks.log").read_text()


def test_comparison_of_two_arms(gpu):
    """Oracle: the numbers written out."""
    import numpy as np
    from drift import compare

    def arm(skip, decision):
        return {"ids": np.array(["a", "b"]), "skip": np.array(skip), "mass": np.array([1.0, 0.9]), "decision": np.array(decision)}

    found = compare(arm([0.5, 0.2], ["skip", "write"]), arm([0.4, 0.5], ["skip", "skip"]))
    assert found["mean"] == pytest.approx(0.2)
    assert found["bias"] == pytest.approx(-0.1)
    assert found["max"] == pytest.approx(0.3)
    assert found["flips"] == 1
    assert found["upper"] > found["mean"]
    assert (found["percentiles"][0], found["percentiles"][100]) == (pytest.approx(0.1), pytest.approx(0.3))


def test_a_page_without_results_says_so(tmp_path):
    (tmp_path / "results").mkdir()
    command = [sys.executable, GPU / "report.py", "--results", tmp_path / "results", "--out", tmp_path / "docs"]
    subprocess.run(command, check=True)
    page = (tmp_path / "docs" / "gpu.md").read_text()
    assert page.count("Not measured yet.") >= 6
    assert "{" not in page
