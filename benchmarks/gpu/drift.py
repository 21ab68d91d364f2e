"""How far each way to merge moves the skip probability from the QLoRA reference, in Transformers and in vLLM, on a GPU.

    python benchmarks/gpu/drift.py --base models/gemma-3-270m --work drift --json drift.json

Merges the example's adapter into the original weights and through the 4-bit base (bfloat16 and float32), lets PEFT merge into the
4-bit weights, scores every held-out prompt with each of them in both engines, in bfloat16 and in float32 arithmetic, and compares
with the reference that training recorded on CUDA. Every arm has a process of its own and is stored as it is scored, so a killed
run goes on where it was. ``--engines hf`` leaves vLLM out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from store import Results

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "grocery"
ADAPTER = EXAMPLE / "adapter"
PREFILL = '{"decision": "'
SMALL_BATCH = 8
MERGES: dict[str, dict[str, Any]] = {
    "naive": {},
    "from-4bit": {"from_4bit": True},
    "from-4bit-float32": {"from_4bit": True, "dtype": "float32"},
}
PEFT_4BIT = "peft-4bit"


@dataclass(frozen=True)
class Arm:
    """One loaded model. ``folder``: of :data:`MERGES`, or None for the 4-bit base with its unmerged adapter.

    ``small`` scores once more, :data:`SMALL_BATCH` prompts at a time, under the arm's name with that added.
    """

    name: str
    engine: str
    folder: str | None
    dtype: str = "bfloat16"
    small: bool = False
    adapter: bool = True


ARMS = (
    Arm("reference", "hf", None, small=True),
    Arm("from-4bit", "hf", "from-4bit", small=True),
    Arm("naive", "hf", "naive"),
    Arm("truth", "hf", "from-4bit-float32", "float32"),
    Arm("from-4bit in float32", "hf", "from-4bit", "float32"),
    Arm("naive in float32", "hf", "naive", "float32"),
    Arm("from-4bit-float32 cast", "hf", "from-4bit-float32"),
    Arm("peft-4bit", "hf", PEFT_4BIT),
    Arm("bare base", "hf", None, adapter=False),
    Arm("from-4bit", "vllm", "from-4bit", small=True),
    Arm("naive", "vllm", "naive"),
    Arm("from-4bit-float32 cast", "vllm", "from-4bit-float32"),
    Arm("truth", "vllm", "from-4bit-float32", "float32"),
    Arm("from-4bit in float32", "vllm", "from-4bit", "float32"),
    Arm("naive in float32", "vllm", "naive", "float32"),
    Arm("peft-4bit", "vllm", PEFT_4BIT),
)
# (engine, name) of what is compared with what; "recorded" is the reference of the training run.
RECORDED = ("recorded", "reference")
DEQUANTIZED = "dequantized reference"
SMALL = f", {SMALL_BATCH} at a time"
COMPARISONS = (
    (("hf", "reference"), RECORDED),
    (("hf", f"reference{SMALL}"), ("hf", "reference")),
    (("hf", DEQUANTIZED), RECORDED),
    (RECORDED, ("hf", "truth")),
    (("hf", "bare base"), RECORDED),
    *(
        pair
        for engine in ("hf", "vllm")
        for pair in (
            ((engine, f"from-4bit{SMALL}"), (engine, "from-4bit")),
            ((engine, "from-4bit"), RECORDED),
            ((engine, "from-4bit-float32 cast"), RECORDED),
            ((engine, "naive"), RECORDED),
            ((engine, "peft-4bit"), RECORDED),
            ((engine, "from-4bit in float32"), (engine, "truth")),
            ((engine, "naive in float32"), (engine, "truth")),
        )
    ),
    (("vllm", "truth"), ("hf", "truth")),
    (("vllm", "from-4bit"), ("hf", "from-4bit")),
    (("vllm", "naive"), ("hf", "naive")),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--engines", default="hf,vllm")
    parser.add_argument("--match", default="", help="only the arms whose 'engine: name' this regular expression finds")
    parser.add_argument("--num-prompts", type=int)
    parser.add_argument("--vllm-lanes", type=int, default=2, help="vLLM arms at a time, beside one Transformers arm")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # a child process: merge, or score this arm
    options = parser.parse_args()
    if options.only == "merge":
        make_merges(options.base, options.work)
    elif options.only:
        score_arm(ARMS[int(options.only)], options)
    else:
        run(options)


def run(options: argparse.Namespace) -> None:
    """Every arm that is not scored yet, Transformers and vLLM side by side, then the comparisons."""
    engines = options.engines.split(",")
    results = Results(options.json, {"prompts": options.num_prompts, "engines": engines})
    lock = threading.Lock()

    def child(name: str, only: str) -> None:
        with lock:
            if name in results.measured:
                return
        start = time.perf_counter()
        command = [sys.executable, __file__, "--only", only, "--base", options.base, "--work", options.work]
        command += ["--json", options.json] + (["--num-prompts", str(options.num_prompts)] if options.num_prompts else [])
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        print(f"== {name}\n{done.stdout}{done.stderr[-6000:]}", flush=True)
        with lock:
            facts = options.work / f"{only}.json"
            if done.returncode == 0:
                results.put(name, json.loads(facts.read_text()) if facts.is_file() else None, time.perf_counter() - start)
                results.note("comparisons", comparisons(options))
            else:
                results.fail(name, last_error(done.stderr))

    options.work.mkdir(parents=True, exist_ok=True)
    child("merges", "merge")
    arms = [(f"{arm.engine}: {arm.name}", str(place)) for place, arm in enumerate(ARMS) if arm.engine in engines]
    arms = [arm for arm in arms if re.search(options.match, arm[0])]
    vllm = [arm for arm in arms if arm[0].startswith("vllm")]
    lanes = [[arm for arm in arms if not arm[0].startswith("vllm")]]
    lanes += [vllm[start :: options.vllm_lanes] for start in range(options.vllm_lanes)]
    threads = [threading.Thread(target=lambda lane=lane: [child(*arm) for arm in lane]) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.note("comparisons", comparisons(options))
    for row in comparisons(options):
        print(f"{row['what']:>45} | {row['against']:<25} mean {row['mean']:.5f}  p99 {row['p99']:.4f}  flips {row['flips']}")
    results.finish()


def last_error(stderr: str) -> str:
    """The last line that names an error and what follows it, for the results; the whole of it is in the log."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    places = [place for place, line in enumerate(lines) if re.match(r"[\w.]*Error\b", line)]
    return " ".join(lines[places[-1] :] if places else lines[-1:])[:1000] or "it said nothing"


def make_merges(base: Path, work: Path) -> None:
    """Ours, and PEFT's merge into the 4-bit weights as it saves it."""
    import shutil

    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from lora_merge import MergeOptions, merge
    from lora_merge.merging.recipes import read_recipe

    seconds = {}
    for name, settings in MERGES.items():
        start = time.perf_counter()
        merge(base, ADAPTER, work / name, MergeOptions(overwrite=True, **settings))
        seconds[name] = time.perf_counter() - start
    recipe = read_recipe(ADAPTER)
    assert recipe is not None
    start = time.perf_counter()
    config = BitsAndBytesConfig(**recipe.bnb_config())
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16, quantization_config=config, device_map="auto")
    PeftModel.from_pretrained(model, ADAPTER).merge_and_unload().save_pretrained(work / PEFT_4BIT)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / name, work / PEFT_4BIT / name)
    seconds[PEFT_4BIT] = time.perf_counter() - start
    (work / "merge.json").write_text(json.dumps({"merged_in_seconds": seconds}))


def score_arm(arm: Arm, options: argparse.Namespace) -> None:
    """Load, score, store the scores as arrays and what the engine says of itself."""
    from lora_merge.engines.labels import resolve_labels
    from lora_merge.engines.model_files import load_tokenizer
    from lora_merge.engines.prompts import read_prompts

    tokenizer = load_tokenizer(options.base)
    prompts = read_prompts(EXAMPLE / "heldout.jsonl", tokenizer, prefill=PREFILL)[: options.num_prompts]
    labels = resolve_labels(tokenizer, prompts, prefill=PREFILL)
    start = time.perf_counter()
    engine: Any = open_arm(arm, options)
    loaded = time.perf_counter() - start
    if arm.folder is None and arm.adapter:  # before the first forward, after which a CPU's weights are repacked
        from verification.dequantized import score_dequantized

        dequantized = score_dequantized(engine._live().module, prompts, labels, engine.batch_size)
        if dequantized is not None:
            store(options.work, arm.engine, DEQUANTIZED, dequantized)
    start = time.perf_counter()
    store(options.work, arm.engine, arm.name, engine.score(prompts, labels))
    seconds = {"load": loaded, "score": time.perf_counter() - start}
    if arm.small:
        scores = []
        if arm.engine == "vllm":  # calls of a few prompts, nothing left of the first time in the prefix cache
            engine.forget()
            for place in range(0, len(prompts), SMALL_BATCH):
                scores += engine.score(prompts[place : place + SMALL_BATCH], labels)
        else:
            engine.batch_size = SMALL_BATCH
            scores = engine.score(prompts, labels)
        store(options.work, arm.engine, f"{arm.name}{SMALL}", scores)
    facts = {"seconds": seconds, "engine": engine.describe()}
    engine.close()
    (options.work / f"{options.only}.json").write_text(json.dumps(facts))


def open_arm(arm: Arm, options: argparse.Namespace) -> Any:
    import torch

    from lora_merge.engines.transformers_engine import TransformersEngine
    from lora_merge.merging.recipes import read_recipe

    if arm.folder is None:
        recipe = read_recipe(ADAPTER)
        assert recipe is not None
        return TransformersEngine.from_quantized(options.base, ADAPTER if arm.adapter else None, recipe.bnb_config())
    folder = options.work / arm.folder
    if arm.engine == "vllm":
        from lora_merge.engines.vllm_engine import VllmEngine

        if arm.dtype == "float32":
            os.environ["TRITON_F32_DEFAULT"] = "ieee"  # else Triton's attention multiplies float32 in TF32
        # A cache of fixed size: vLLM's own measurement of free memory fails when other processes come and go on the card.
        room = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 4 << 30} if torch.cuda.is_available() else {}
        return VllmEngine(folder, dtype=arm.dtype, max_model_len=1024, **room)
    if arm.folder == PEFT_4BIT:
        return TransformersEngine.from_quantized(folder)
    return TransformersEngine.from_checkpoint(folder, dtype=arm.dtype, share_prefix=False)


def scores_file(work: Path, engine: str, name: str) -> Path:
    return work / f"{engine}-{name.replace(' ', '-').replace(',', '')}.npz"


def store(work: Path, engine: str, name: str, scores: Any) -> None:
    arrays = {
        "ids": np.array([score.id for score in scores]),
        "skip": np.array([score.skip_probability for score in scores]),
        "mass": np.array([score.label_mass for score in scores]),
        "decision": np.array([score.decision for score in scores]),
    }
    np.savez(scores_file(work, engine, name), **arrays)


def load(options: argparse.Namespace, engine: str, name: str) -> dict[str, np.ndarray] | None:
    if engine == "recorded":
        from verification.reference import read_reference

        file = scores_file(options.work, engine, name)
        if not file.is_file():
            scores = read_reference(EXAMPLE / "reference.jsonl").scores
            store(options.work, engine, name, scores[: options.num_prompts])
    try:
        return dict(np.load(scores_file(options.work, engine, name)))
    except OSError:
        return None


def comparisons(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every comparison whose two arms are scored, as JSON-ready numbers."""
    rows = []
    for first, second in COMPARISONS:
        found, other = load(options, *first), load(options, *second)
        if found is not None and other is not None:
            rows.append({"what": ": ".join(first), "against": ": ".join(second), **compare(found, other)})
    return rows


def compare(found: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> dict[str, Any]:
    """Of \\|delta\\| of the skip probability: mean, its 95 % upper bound, and every percentile; flips; label mass."""
    from verification.statistics import mean_upper_bound

    assert found["ids"].tolist() == other["ids"].tolist()
    delta = found["skip"] - other["skip"]
    size = np.abs(delta)
    return {
        "prompts": int(size.size),
        "mean": float(size.mean()),
        "upper": mean_upper_bound(size),
        "p99": float(np.quantile(size, 0.99)),
        "max": float(size.max()),
        "bias": float(delta.mean()),
        "flips": int((found["decision"] != other["decision"]).sum()),
        "least_label_mass": float(found["mass"].min()),
        "mean_label_mass": float(found["mass"].mean()),
        "percentiles": [round(float(value), 7) for value in np.percentile(size, range(101))],
    }


if __name__ == "__main__":
    main()
