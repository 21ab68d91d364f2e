"""The whole story on a real model: merge both ways, measure both, refuse one, certify the other, write texts with it.

    python examples/grocery/demo.py

Gemma 3 270M with the adapter of this folder, against the reference that was recorded on CUDA at the end of training. Every step
is one of the project's own commands, shown as it is run; the table at the end is read from the reports they leave.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BIN = Path(sys.executable).parent
ADAPTER, REFERENCE, HELDOUT = HERE / "adapter", HERE / "reference.jsonl", HERE / "heldout.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=ROOT / "demo", help="folder for the merged checkpoints, reports and results")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "gemma-3-270m")
    parser.add_argument("--prompts", type=int, default=300, help="held-out prompts to score")
    parser.add_argument("--live", type=int, default=20, help="prompts to score live through bitsandbytes as well")
    parser.add_argument("--texts", type=int, default=48, help="prompts for the generation step")
    parser.add_argument("--max-delta", default="0.02")
    options = parser.parse_args()
    started = time.perf_counter()
    work: Path = options.work
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    naive, merged = work / "naive", work / "from-4bit"
    missing = "Transformers (vLLM is not installed: pip install 'lora-merge[vllm]')"
    engine = "vLLM" if importlib.util.find_spec("vllm") else missing

    say("1. Fetch the base model and merge the adapter both ways")
    run([sys.executable, HERE / "fetch_model.py", "--out", options.model], expect=0)
    common = ["--base", options.model, "--adapter", ADAPTER, "--quiet"]
    run(["lora-merge", *common, "--out", naive], expect=0)
    run(["lora-merge", *common, "--out", merged, "--from-4bit"], expect=0)

    say(f"2. Score both against the reference recorded on CUDA, in {engine}; in float32 arithmetic too (--split)")
    verify = ["--prompts", HELDOUT, "--reference", REFERENCE, "--max-delta", options.max_delta]
    verify += ["--num-prompts", options.prompts, "--split", "--quiet"]
    run(["verify-skip-drift", "--merged", naive, *verify, "--no-control"], expect=1)
    run(["verify-skip-drift", "--merged", merged, *verify], expect=0)

    say(f"3. The same with a live reference of {options.live} prompts: too few for a verdict, and it says so")
    live = ["--prompts", HELDOUT, "--max-delta", options.max_delta, "--num-prompts", options.live, "--engine", "hf"]
    live += ["--no-control", "--quiet", "--report", work / "live-report"]
    run(["verify-skip-drift", "--merged", merged, *live], expect=3)

    say("4. Write texts with the certified checkpoint; the refused one may not")
    sample = work / "prompts.jsonl"
    sample.write_text("".join(HELDOUT.read_text(encoding="utf-8").splitlines(keepends=True)[: options.texts]), encoding="utf-8")
    generate = ["--prompts", sample, "--skip-threshold", "0.5", "--quiet"]
    run(["gated-generate", "--model", merged, *generate, "--out", work / "texts.jsonl"], expect=0)
    run(["gated-generate", "--model", naive, *generate, "--out", work / "denied.jsonl"], expect=1)

    reports = {"naive": read_report(naive), "from-4bit": read_report(merged)}
    print()
    print_texts(work / "texts.jsonl")
    print()
    print_table(reports, read_live(work / "live-report"), options.prompts)
    print(f"\nfinished in {(time.perf_counter() - started) / 60:.1f} minutes; everything lies in {work}")
    print("The base was recovered from a Q4_K_M GGUF, so these numbers are of that base and not of Google's original weights.")


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


def run(command: list[Any], expect: int) -> None:
    """Run one of the project's commands, show it, and stop the demo where its exit code is not the expected one."""
    words = [str(word) for word in command]
    shown = [Path(word).relative_to(ROOT).as_posix() if word.startswith(f"{ROOT}/") else word for word in words]
    print(f"\n$ {shlex.join(['python' if words[0] == sys.executable else shown[0], *shown[1:]])}", flush=True)
    if words[0] != sys.executable:
        words[0] = str(BIN / words[0])
    start = time.perf_counter()
    code = subprocess.run(words, check=False).returncode
    print(f"  (exit code {code}, {time.perf_counter() - start:.0f} s)", flush=True)
    if code != expect:
        raise SystemExit(f"the demo expected exit code {expect} here, found {code}")


def read_report(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder.with_name(f"{folder.name}-report") / "drift.json").read_text())
    return report


def read_live(folder: Path) -> float | None:
    numbers = json.loads((folder / "drift.json").read_text())["numbers"]
    return numbers["drift"]["mean_abs_delta"] if numbers else None


def print_texts(results: Path) -> None:
    print("Some of the texts:")
    rows = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    for row in [row for row in rows if row.get("text")][:3]:
        print(f"  {row['id']}: skip probability {row['skip_probability']:.3f}: {row['text']}")


def print_table(reports: dict[str, dict[str, Any]], live: float | None, prompts: int) -> None:
    rows: list[tuple[str, ...]] = [(f"{prompts} held-out prompts", *reports, "naive / from-4bit")]
    for name, path in (
        ("mean |Δ skip probability|", ("drift", "mean_abs_delta")),
        ("  95 % upper bound", ("drift", "mean_abs_delta_upper")),
        ("  99th percentile", ("drift", "p99_abs_delta")),
        ("  maximum", ("drift", "max_abs_delta")),
        ("mean |Δ|, float32 both sides", ("split", "merge_drift", "mean_abs_delta")),
    ):
        values = [lookup(report["numbers"], path) for report in reports.values()]
        rows.append((name, *(f"{value:.4f}" for value in values), f"{values[0] / values[1]:.1f}"))
    flips = [str(report["numbers"]["drift"]["argmax_flips"]) for report in reports.values()]
    rows.append(("decision flips", *flips, ""))
    rows.append(("verdict", *(report["outcome"] for report in reports.values()), ""))
    rows.append(("generation", "denied", "allowed", ""))
    if live is not None:
        rows.append(("mean |Δ| to a live reference on this CPU", "", f"{live:.4f}", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for number, row in enumerate(rows):
        print(row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)), sep="  ")
        if number == 0:
            print("-" * (sum(widths) + 6))


def lookup(numbers: dict[str, Any], path: tuple[str, ...]) -> float:
    value: Any = numbers
    for key in path:
        value = value[key]
    return float(value)


if __name__ == "__main__":
    main()
