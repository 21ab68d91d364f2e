"""The two parts that need a quiet machine and are other programs: ``bench-engines``, and benchmarks/merge.py.

    python benchmarks/gpu/commands.py engines --base models/gemma-3-270m --work work --json engines.json
    python benchmarks/gpu/commands.py engines --widen 4b --base models/gemma-3-270m --work work --json engines-4b.json
    python benchmarks/gpu/commands.py merge --base models/gemma-3-270m --work work --json merge.json

Both go on where they were: bench-engines by its own --resume, the merges by round.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from store import Results

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
GROCERY = ROOT / "examples" / "grocery"
PROMPTS = 10_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["engines", "merge"])
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--num-prompts", type=int, default=PROMPTS)
    parser.add_argument("--more", default="", help="more options of bench-engines or of benchmarks/merge.py, as one string")
    parser.add_argument("--widen", help="engines: the merged checkpoint at the size of this larger model (widen.py)")
    parser.add_argument("--stock", action="store_true", help="engines: time model.generate as well, once the rest is stored")
    parser.add_argument("--shape", default="4b")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    more = shlex.split(options.more)
    if options.part == "engines":
        shape = {"shape": options.widen} if options.widen else {}
        results = Results(options.json, {"prompts": options.num_prompts, "more": options.more, **shape})
        results.measure("engines", lambda: engines(options, more))
        if "engines" in results.measured and options.stock:
            results.measure("with stock", lambda: engines(options, [*more, "--stock"]))
    else:
        results = Results(options.json, {"shape": options.shape, "more": options.more})
        for number in range(1, options.rounds + 1):
            name = f"round {number}"
            results.measure(name, lambda: merges(options.work, options.shape, more))
    results.finish()


def engines(options: argparse.Namespace, more: list[str]) -> dict[str, Any]:
    """Merge, write unseen prompts, compare the engines; the report as bench-engines leaves it, and the command."""
    work, count = options.work, str(options.num_prompts)
    merged, prompts, out = work / "merged", work / "unseen.jsonl", work / "engines"
    if not (merged / "merge_manifest.json").is_file():  # the last file that a merge writes
        run([sys.executable, GROCERY / "pairs.py", "unseen", "--count", count, "--out", prompts])
        command = [sys.executable, "-m", "lora_merge.merging", "--base", options.base, "--adapter", GROCERY / "adapter"]
        run([*command, "--from-4bit", "--out", merged, "--overwrite", "--quiet"])
    if options.widen:
        wide = work / f"merged-{options.widen}"
        if not (wide / "config.json").is_file():  # likewise
            run([sys.executable, HERE / "widen.py", "--model", merged, "--shape", options.widen, "--out", wide])
        merged = wide
    command = [sys.executable, "-m", "lora_merge.generation.bench_cli", "--model", merged, "--prompts", prompts]
    command += ["--num-prompts", count, "--out", out, "--resume", "--no-pictures", *more]
    code = run(command, allowed=(0, 1))
    report: dict[str, Any] = json.loads((out / "engines.json").read_text(encoding="utf-8"))
    shown = shlex.join(["bench-engines", *map(str, command[3:])])
    return {"command": shown, "exit_code": code, "report": report}


def merges(work: Path, shape: str, more: list[str]) -> dict[str, Any]:
    """One round of benchmarks/merge.py, every arm once; where one fails, those before it."""
    file = work / "merge-round.json"
    file.unlink(missing_ok=True)
    command = [sys.executable, ROOT / "benchmarks" / "merge.py", "--shape", shape, "--rounds", "1"]
    command += ["--work", work / "bench-merge", "--json", file, *more]
    code = run(command, allowed=(0, 1))
    if not file.is_file():
        raise RuntimeError("benchmarks/merge.py failed before its first arm was done; its output is in the log")
    found = json.loads(file.read_text(encoding="utf-8"))
    if code:
        found["stopped"] = f"the arm after {found['runs'][-1]['arm']} failed"
    shown = shlex.join(["python", "benchmarks/merge.py", *map(str, command[2:])])
    return {"command": shown, **found}


def run(command: list[Any], allowed: tuple[int, ...] = (0,)) -> int:
    words = [str(word) for word in command]
    print(f"$ {shlex.join(words)}", flush=True)
    start = time.perf_counter()
    code = subprocess.run(words, check=False).returncode
    print(f"  exit code {code}, {time.perf_counter() - start:.1f} s", flush=True)
    if code not in allowed:
        raise RuntimeError(f"{shlex.join(words)[:200]}: exit code {code}; its output is in the log")
    return code


if __name__ == "__main__":
    main()
