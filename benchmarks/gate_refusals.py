"""The gate on a real model: every known way to get a merge or its measurement wrong, and what the gate says to it.

    python benchmarks/gate_refusals.py --merged demo/from-4bit --json gate.json

Each case breaks one thing in a copy of the example's merged checkpoint (or merges anew, through the wrong recipe or base), runs
the command that a user would run, and holds its exit code and its reason against what they have to be. A right merge comes first:
a gate that refuses everything proves nothing. The layer cases put the weights of a merge without the adapter, or with twice the
adapter, into one decoder layer at a time, then into one matrix at a time.

Exits with 1 when any case came out otherwise. ``--only WORD`` and ``--skip WORD`` run the cases whose name has the word or does
not, and leave the others as they are in the JSON file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "grocery"
ADAPTER, REFERENCE, HELDOUT = EXAMPLE / "adapter", EXAMPLE / "reference.jsonl", EXAMPLE / "heldout.jsonl"
BIN = Path(sys.executable).parent
PREFILL = '{"decision": "'
WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Case:
    """``make`` prepares the case in an empty folder and gives the command's arguments. ``check`` is what has to decide, with
    ``reason`` as part of what it says. ``most_floors``: how many times the noise floor the drift may be."""

    name: str
    make: Callable[[Path], list[Any]]
    exit_code: int
    check: str
    reason: str
    engine: str = "hf"
    most_floors: float | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--merged", type=Path, default=ROOT / "demo" / "from-4bit", help="the example, merged with --from-4bit")
    parser.add_argument("--base", type=Path, default=ROOT / "models" / "gemma-3-270m")
    parser.add_argument("--only", default="", metavar="WORD")
    parser.add_argument("--skip", default=[], nargs="+", metavar="WORD")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    merged, base = options.merged.resolve(), options.base.resolve()
    partly = (options.only or options.skip) and options.json and options.json.is_file()
    named = {result["case"]: result for result in (json.loads(options.json.read_text(encoding="utf-8")) if partly else [])}
    results: list[dict[str, Any]] = []

    def wanted(name: str) -> bool:
        return options.only in name and not any(word in name for word in options.skip)

    def keep(result: dict[str, Any]) -> None:
        results.append(result)
        named[result["case"]] = result
        if options.json:
            options.json.write_text(json.dumps(list(named.values()), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    with tempfile.TemporaryDirectory(prefix="gate-", dir=merged.parent) as place:
        work = Path(place)
        for number, case in enumerate(cases(merged, base)):
            if wanted(case.name):
                folder = work / str(number)
                folder.mkdir()
                keep(run_case(case, folder))
                shutil.rmtree(folder)
        for unit in ("layer", "matrix"):
            for mistake, factor in (("omitted", 0.0), ("doubled", 2.0)):
                if wanted(name := f"one {unit} {mistake}"):
                    keep(run_layers(name, unit, mistake, factor, merged, base, work))
    wrong = [result["case"] for result in results if not result["as_expected"]]
    print(f"{len(results)} cases, {len(results) - len(wrong)} as they have to be")
    if wrong:
        raise SystemExit(f"not as expected: {', '.join(wrong)}")


def cases(merged: Path, base: Path) -> Iterable[Case]:
    """All but the layers. The argument lists are those of verify-skip-drift."""
    recorded = ["--reference", REFERENCE]
    few, some, enough = (["--num-prompts", size] for size in (20, 40, 300))

    def changed_tokenizer(first: str, second: str) -> Callable[[Path], list[Any]]:
        def make(folder: Path) -> list[Any]:
            copy = clone(merged, folder / "merged")
            tokenizer = json.loads((copy / "tokenizer.json").read_text(encoding="utf-8"))
            ids = tokenizer["model"]["vocab"]
            ids[first], ids[second] = ids[second], ids[first]
            (copy / "tokenizer.json").unlink()
            (copy / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
            return ["--merged", copy, "--prompts", HELDOUT, *recorded, *few]

        return make

    def changed_prompts(change: Callable[[list[int]], list[int]], most: int | None = None) -> Callable[[Path], list[Any]]:
        return lambda folder: ["--merged", merged, "--prompts", with_ids(merged, folder, change, most), *recorded, *few]

    def changed_weights(change: Callable[[dict[str, torch.Tensor]], None], *more: Any) -> Callable[[Path], list[Any]]:
        def make(folder: Path) -> list[Any]:
            copy = clone(merged, folder / "merged")
            rewrite(copy / WEIGHTS, change)
            return ["--merged", copy, "--prompts", HELDOUT, *recorded, *more]

        return make

    def adapter_of_another_model(folder: Path) -> list[Any]:
        out = merge(base, scaled_adapter(folder / "adapter", -1.0), folder / "merged", "--from-4bit")
        return ["--merged", out, "--prompts", HELDOUT, *recorded, *few]

    def adapter_without_manifest(folder: Path) -> list[Any]:
        arguments = adapter_of_another_model(folder)
        (folder / "merged" / "merge_manifest.json").unlink()
        return [*arguments[:-2], *some]

    def adapter_for_another_base(folder: Path) -> list[Any]:
        adapter = scaled_adapter(folder / "adapter", 1.0, base_model_name_or_path="google/gemma-3-270m-it")
        out = merge(base, adapter, folder / "merged", "--from-4bit")
        return ["--merged", out, "--prompts", HELDOUT, *few]

    def recipe_wrong_in_both(folder: Path) -> list[Any]:
        out = merge(base, ADAPTER, folder / "merged", "--from-4bit", "--quant-type", "fp4")
        return ["--merged", out, "--prompts", HELDOUT, "--quant-type", "fp4", *few]

    def base_wrong_in_both(name: str, *more: Any) -> Callable[[Path], list[Any]]:
        def make(folder: Path) -> list[Any]:
            other = clone(base, folder / name)
            rewrite(other / WEIGHTS, disturb)
            out = merge(other, ADAPTER, folder / "merged", "--from-4bit")
            return ["--merged", out, "--prompts", HELDOUT, *more]

        return make

    def plain(folder: Path, *more: Any, checkpoint: Path = merged) -> list[Any]:
        return ["--merged", checkpoint, "--prompts", HELDOUT, *recorded, *more]

    def naive(folder: Path) -> list[Any]:
        return plain(folder, *enough, checkpoint=merge(base, ADAPTER, folder / "merged"))

    def edited_embedding(folder: Path) -> list[Any]:
        copy = clone(merged, folder / "merged")
        rewrite(copy / WEIGHTS, edit_one_row)
        (copy / "merge_manifest.json").unlink()
        return ["--merged", copy, "--base", base, "--adapter", ADAPTER, "--prompts", HELDOUT, *recorded, *enough]

    for engine, name in (("hf", "Transformers"), ("vllm", "vLLM")):
        settled = "the limit is 0.02"
        yield Case(f"right merge, {name}", lambda folder: plain(folder, *enough), 0, "mean-delta", settled, engine, 1.5)
        yield Case(f"merged into the original weights, {name}", naive, 1, "mean-delta", "above the limit", engine)
    yield Case("20 prompts", lambda folder: plain(folder, *few), 3, "mean-delta", "too few for the limit 0.02")
    yield Case("tokenizer swapped: label", changed_tokenizer("skip", "Skip"), 3, "measurement", "another tokenizer")
    yield Case("tokenizer swapped: prompts", changed_tokenizer("상품", "상"), 3, "measurement", "of 3200 prompts differ")
    yield Case("doubled BOS", changed_prompts(lambda ids: [ids[0], *ids]), 3, "measurement", "found 2 BOS tokens")
    yield Case("BOS lost", changed_prompts(lambda ids: ids[1:]), 3, "measurement", "found 0 BOS tokens")
    yield Case("prompts cut on the right", changed_prompts(lambda ids: ids[:-2]), 3, "measurement", "expected the prefill")
    yield Case("prompts cut on the left", changed_prompts(lambda ids: [ids[0], *ids[9:]]), 3, "measurement", "prompts differ")
    long = changed_prompts(lambda ids: ids + ids[1:] * 500, most=1)
    yield Case("one prompt longer than the model", long, 3, "measurement", "the model has room for 32767")
    yield Case("a NaN weight", changed_weights(put_nan, *few), 3, "measurement", "A weight is NaN or infinite")
    yield Case(
        "label mass lost", changed_weights(prefer_a_third_token, "--no-audit", *enough), 1, "label-mass-loss", "above the limit"
    )
    yield Case("one row of the embedding edited, no manifest", edited_embedding, 1, "weights", "some values are others")
    yield Case("adapter of another model", adapter_of_another_model, 3, "adapter-identity", "have different adapters")
    yield Case("adapter of another model, no manifest", adapter_without_manifest, 1, "mean-delta", "above the limit")
    yield Case("adapter trained on another base", adapter_for_another_base, 3, "base-identity", "different names")
    yield Case("wrong recipe in both arms", recipe_wrong_in_both, 3, "recipe-agreement", "says quant_type nf4")
    yield Case("wrong base in both arms", base_wrong_in_both("another-model", *few), 3, "base-identity", "different names")
    same_name = base_wrong_in_both("gemma-3-270m", *recorded, *enough)
    yield Case("wrong base of the right name, recorded reference", same_name, 1, "mean-delta", "above the limit")


def run_case(case: Case, folder: Path) -> dict[str, Any]:
    """The verdict of one case, printed as a line of the table."""
    arguments = [
        *case.make(folder),
        "--engine",
        case.engine,
        *([] if case.exit_code == 0 else ["--no-control"]),
        "--report",
        folder / "report",
        "--format",
        "json",
        "--quiet",
    ]
    start = time.perf_counter()
    done = subprocess.run(["verify-skip-drift", *map(str, arguments)], executable=BIN / "verify-skip-drift", capture_output=True)
    seconds = time.perf_counter() - start
    if done.returncode not in (0, 1, 3) or not done.stdout:
        raise SystemExit(f"{case.name}: exit code {done.returncode}: {done.stderr.decode()[-2000:]}")
    verdict = json.loads(done.stdout)
    decided = [check for check in verdict["checks"] if check["name"] == case.check]
    expected = {0: "PASSED", 1: "FAILED", 3: "INCONCLUSIVE"}[case.exit_code]
    reason = next((check["detail"] for check in decided if check["outcome"] == expected and case.reason in check["detail"]), None)
    compared = against_floor(verdict["numbers"])
    as_expected = done.returncode == case.exit_code and reason is not None
    if case.most_floors is not None:
        as_expected &= compared is not None and compared["times_the_floor"] <= case.most_floors
    shown = f"{case.check}: {reason}" if reason else "; ".join(verdict["reasons"])
    result = {
        "case": case.name,
        "command": "verify-skip-drift " + " ".join(sayable(str(word), folder) for word in arguments),
        "exit_code": done.returncode,
        "outcome": verdict["outcome"],
        "reason": sayable(shown, folder),
        "all_reasons": [sayable(text, folder) for text in verdict["reasons"]],
        "drift": compared,
        "seconds": round(seconds, 1),
        "as_expected": as_expected,
    }
    show(result)
    return result


def against_floor(numbers: dict[str, Any]) -> dict[str, Any] | None:
    """The drift beside the largest noise floor; None where nothing was measured."""
    if not numbers:
        return None
    mean, floor = numbers["drift"]["mean_abs_delta"], max(numbers["noise_floors"], key=lambda entry: entry["mean_abs_delta"])
    names = ("prompts", "mean_abs_delta", "mean_abs_delta_upper", "max_abs_delta", "argmax_flips")
    return {
        **{name: numbers["drift"][name] for name in names},
        "noise_floor": floor["mean_abs_delta"],
        "noise_floor_source": floor["source"],
        "times_the_floor": mean / floor["mean_abs_delta"],
    }


def run_layers(name: str, unit: str, mistake: str, factor: float, merged: Path, base: Path, work: Path) -> dict[str, Any]:
    """``verify-merge`` on the right checkpoint with the adapter omitted or doubled in one unit after the other."""
    import click.testing

    from verification.audit_cli import main as verify_merge

    adapter = scaled_adapter(work / "adapter", factor)
    wrong = merge(base, adapter, work / "wrong", "--from-4bit")
    copy = clone(merged, work / "merged")
    (copy / WEIGHTS).unlink()
    shutil.copyfile(merged / WEIGHTS, copy / WEIGHTS)
    with safe_open(merged / WEIGHTS, "pt") as file:
        adapted = sorted((name for name in file.keys() if name.endswith("_proj.weight")), key=natural)  # noqa: SIM118
    groups: dict[str, list[str]] = {}
    for tensor in adapted:
        groups.setdefault(".".join(tensor.split(".")[:3]) if unit == "layer" else tensor, []).append(tensor)
    start, unexpected, distances = time.perf_counter(), [], []
    for group, tensors in groups.items():
        for tensor in tensors:
            transplant(wrong / WEIGHTS, copy / WEIGHTS, tensor)
        answer = click.testing.CliRunner().invoke(verify_merge, ["--merged", str(copy), "--format", "json", "--quiet"])
        found = [
            entry
            for entry in json.loads(answer.stdout)["tensors"]
            if entry["history"] not in ("as planned", "as planned, rounded twice")
        ]
        named = {(entry["name"], entry["history"]) for entry in found}
        if answer.exit_code != 1 or named != {(tensor, f"adapter {mistake}") for tensor in tensors}:
            unexpected.append(group)
        distances += [entry["distance"] for entry in found]
        for tensor in tensors:
            transplant(merged / WEIGHTS, copy / WEIGHTS, tensor)
    reason = (
        f"weights: {len(groups) - len(unexpected)} of {len(groups)} refused, each time just the wrong {unit} called "
        f"'adapter {mistake}', at distances {min(distances):.3f} to {max(distances):.3f}"
    )
    result = {
        "case": f"{name}, each of {len(groups)} in turn",
        "command": "verify-merge --merged merged --format json --quiet",
        "exit_code": 1,
        "outcome": "FAILED",
        "reason": reason,
        "all_reasons": [f"not as expected: {group}" for group in unexpected],
        "seconds": round((time.perf_counter() - start) / len(groups), 1),
        "as_expected": not unexpected,
    }
    for folder in (adapter, wrong, copy):
        shutil.rmtree(folder)
    show(result)
    return result


def show(result: dict[str, Any]) -> None:
    mark = "" if result["as_expected"] else "UNEXPECTED "
    print(f"| {mark}{result['case']} | {result['exit_code']} | {result['reason']} | {result['seconds']} s |", flush=True)


def clone(source: Path, target: Path) -> Path:
    """A copy of a folder that costs no space, because its files are links; unlink a file before writing it anew."""
    target.mkdir()
    for path in source.iterdir():
        os.link(path, target / path.name)
    return target


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors of a linked file in place, by ``change``, and only here."""
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    path.unlink()
    save_file(tensors, path, metadata={"format": "pt"})


def put_nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.9.mlp.up_proj.weight"][0, 0] = float("nan")


def edit_one_row(tensors: dict[str, torch.Tensor]) -> None:
    """The embedding of a token that occurs in no prompt."""
    tensors["model.embed_tokens.weight"][9745] *= 0.5


def prefer_a_third_token(tensors: dict[str, torch.Tensor]) -> None:
    """A token that occurs in no prompt gets the head of both labels and more: their odds stay, their mass goes."""
    vocabulary = json.loads(REFERENCE.open(encoding="utf-8").readline())["labels"]
    embedding = tensors["model.embed_tokens.weight"]
    skip, write = (embedding[vocabulary[name]["token_id"]] for name in ("skip", "write"))
    embedding[9745] = (skip + write) * 0.75  # "none"


def disturb(tensors: dict[str, torch.Tensor]) -> None:
    """Another model of the same shape: every linear weight a tenth off."""
    generator = torch.Generator().manual_seed(0)
    for name in sorted(tensors):
        if name.endswith("_proj.weight"):
            weight = tensors[name]
            noise = torch.randn(weight.shape, generator=generator) * weight.float().std() * 0.1
            tensors[name] = (weight.float() + noise).to(weight.dtype)


def transplant(source: Path, target: Path, name: str) -> None:
    """Copy the bytes of one tensor from ``source`` over those in ``target``; both files have the same header."""
    with source.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        begin, end = json.loads(file.read(length))[name]["data_offsets"]
        file.seek(8 + length + begin)
        data = file.read(end - begin)
    with target.open("r+b") as file:
        file.seek(8 + length + begin)
        file.write(data)


def scaled_adapter(target: Path, factor: float, **settings: Any) -> Path:
    """The example's adapter with its effect times ``factor`` and some settings changed."""
    shutil.copytree(ADAPTER, target)
    tensors = load_file(target / "adapter_model.safetensors")
    changed = {name: tensor * factor if "lora_B" in name else tensor for name, tensor in tensors.items()}
    save_file(changed, target / "adapter_model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "adapter_config.json").read_text())
    (target / "adapter_config.json").write_text(json.dumps({**config, **settings}))
    return target


def with_ids(merged: Path, folder: Path, change: Callable[[list[int]], list[int]], most: int | None) -> Path:
    """The held-out prompts as token ids, all changed or the first ``most``."""
    from lora_merge.engines.model_files import load_tokenizer
    from lora_merge.engines.prompts import read_prompts

    prompts = read_prompts(str(HELDOUT), load_tokenizer(merged), prefill=PREFILL)
    ids = [list(prompt.token_ids) for prompt in prompts]
    ids[:most] = map(change, ids[:most])
    rows = [{"id": prompt.id, "prompt_token_ids": row} for prompt, row in zip(prompts, ids, strict=True)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "prompts.jsonl"


def merge(base: Path, adapter: Path, out: Path, *more: str) -> Path:
    command = ["--base", base, "--adapter", adapter, "--out", out, "--quiet", *more]
    done = subprocess.run([str(BIN / "lora-merge"), *map(str, command)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"lora-merge {' '.join(map(str, command))}: exit code {done.returncode}: {done.stderr[-2000:]}")
    return out


def sayable(text: str, folder: Path) -> str:
    """``text`` without the place of this run."""
    return text.replace(f"{folder}/", "").replace(f"{ROOT}/", "")


def natural(name: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


if __name__ == "__main__":
    main()
