"""Everything that is measured on a GPU, in parts that can be stopped and go on: one JSON and one log a part.

    python benchmarks/gpu/run.py --base models/gemma-3-270m --work gpu-work --results gpu-results
    python benchmarks/gpu/run.py ... --parts equivalence,drift,models --at-once 3
    python benchmarks/gpu/run.py ... --smoke      everything that can run, in small, also without a GPU

A part whose JSON is complete is skipped; a part that was stopped, or where something failed, measures what is missing. A part
that fails does not stop the others. ``engines``, ``engines-4b`` and ``merge`` are timings: they run alone, after the others.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from store import is_complete

HERE = Path(__file__).resolve().parent
ENGINES = "--repeats 3 --skip-threshold 0.3 --quantiles 0 --sweep 32,64,128,256,1024,2048 --sweep-prompts 2048"
WIDE = "--repeats 3 --arms hf-two-phase,vllm-two-phase --quantiles 0 --sweep 64,256,1024,2048 --sweep-prompts 2048"
MERGES = "--arms copy,naive,naive@cuda,from-4bit,from-4bit@cuda,peft@cuda,dequantize@cuda"
ROWS = ("--examples", "9600")  # training rows: 150 steps


@dataclass(frozen=True)
class Part:
    """A script of this folder with its options, and those it gets under ``--smoke`` instead; alone: nothing else may run."""

    script: str
    options: tuple[str, ...] = ()
    smoke: tuple[str, ...] = ()
    base: bool = True
    alone: bool = False


PARTS = {
    "equivalence": Part("equivalence.py", ("--data", "{results}/bnb_cuda_shapes.safetensors"), ("--layers", "4")),
    "drift": Part("drift.py", (), ("--num-prompts", "16", "--vllm-lanes", "1", "--match", "hf: from-4bit$|hf: naive$")),
    "recipe-fp4": Part("recipes.py", ("--recipe", "fp4", *ROWS), ("--recipe", "fp4", "--num-prompts", "12", "--smoke")),
    "recipe-dora": Part("recipes.py", ("--recipe", "dora", *ROWS), ("--recipe", "dora", "--num-prompts", "12", "--smoke")),
    "models": Part("models.py", (), ("--architectures", "gemma3"), base=False),
    "engines": Part(
        "commands.py",
        ("engines", "--stock", f"--more={ENGINES}"),
        ("engines", "--num-prompts", "24", "--more=--max-tokens 8 --arms hf-two-phase --sweep 8"),
        alone=True,
    ),
    "engines-4b": Part(
        "commands.py",
        ("engines", "--widen", "4b", f"--more={WIDE}"),
        ("engines", "--widen", "270m", "--num-prompts", "24", "--more=--max-tokens 8 --arms hf-two-phase --sweep 8"),
        alone=True,
    ),
    "merge": Part(
        "commands.py",
        ("merge", f"--more={MERGES}"),
        ("merge", "--shape", "270m", "--rounds", "1", "--more=--arms copy,naive,from-4bit"),
        alone=True,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="the folder that examples/grocery/fetch_model.py made")
    parser.add_argument("--work", type=Path, required=True, help="scratch folder on a disk with 30 GB free")
    parser.add_argument("--results", type=Path, required=True, help="folder for one JSON a part")
    parser.add_argument("--parts", default=",".join(PARTS), help="which of: " + ", ".join(PARTS))
    parser.add_argument("--at-once", type=int, default=1, help="parts at a time on the one card, where they allow it")
    parser.add_argument("--limit", type=float, default=480, help="seconds a part may take at most")
    parser.add_argument("--smoke", action="store_true", help="in small, to see that everything runs")
    options = parser.parse_args()
    names = options.parts.split(",")
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        parser.error(f"no part is called {unknown[0]}; expected some of {', '.join(PARTS)}")
    for folder in (options.results, options.work / "logs"):
        folder.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    with ThreadPoolExecutor(options.at_once) as pool:
        codes = list(pool.map(lambda name: run(name, options), [name for name in names if not PARTS[name].alone]))
    codes += [run(name, options) for name in names if PARTS[name].alone]
    print(f"{time.perf_counter() - started:.0f} s in all", flush=True)
    sys.exit(1 if any(codes) else 0)


def run(name: str, options: argparse.Namespace) -> int:
    """One part in a process group of its own, which ends as a whole at the limit; its exit code, 0 where it was complete."""
    part, target = PARTS[name], options.results / f"{name}.json"
    if is_complete(target):
        print(f"{name}: complete", flush=True)
        return 0
    arguments = part.smoke if options.smoke else part.options
    command = [sys.executable, str(HERE / part.script), *(word.format(results=options.results) for word in arguments)]
    command += ["--work", str(options.work / name), "--json", str(target)]
    command += ["--base", str(options.base)] if part.base else []
    log = options.work / "logs" / f"{name}.log"
    start = time.perf_counter()
    with log.open("a", encoding="utf-8") as output:
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, process_group=0)
        try:
            code = child.wait(timeout=options.limit)
            how = "done" if code == 0 else f"FAILED with exit code {code}"
        except subprocess.TimeoutExpired:
            code, how = 124, f"stopped after {options.limit:g} s"
        finally:
            _end(child)
    print(f"{name}: {how}, {time.perf_counter() - start:.0f} s; {log}", flush=True)
    return code


def _end(child: subprocess.Popen[bytes]) -> None:
    """End what is left of the part, the engines' workers too: asked at first, so that it can end its own children."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            break
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=8)
    child.wait()


if __name__ == "__main__":
    main()
