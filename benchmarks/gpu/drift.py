"""How far each way to merge moves the skip probability from the QLoRA reference, in Transformers and in vLLM, on a GPU.

    python benchmarks/gpu/drift.py --base models/gemma-3-270m --work drift --json drift.json

Merges the example's adapter into the original weights and through the 4-bit base (bfloat16 and float32), scores every held-out
prompt with each of them, with PEFT's own merge into the 4-bit weights, and in float32 arithmetic, and compares with the reference
that training recorded on CUDA. ``--engines hf`` leaves vLLM out.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "grocery"
PREFILL = '{"decision": "'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--engines", default="hf,vllm")
    parser.add_argument("--num-prompts", type=int)
    options = parser.parse_args()

    from lora_merge import MergeOptions, merge
    from lora_merge.engines.model_files import library_versions
    from verification.reference import read_reference

    adapter = EXAMPLE / "adapter"
    folders = {}
    for name, settings in {
        "naive": MergeOptions(overwrite=True),
        "from-4bit": MergeOptions(from_4bit=True, overwrite=True),
        "from-4bit float32": MergeOptions(from_4bit=True, dtype="float32", overwrite=True),
    }.items():
        folders[name] = options.work / name.replace(" ", "-")
        start = time.perf_counter()
        merge(options.base, adapter, folders[name], settings)
        print(f"merged {name} in {time.perf_counter() - start:.1f} s", flush=True)

    recorded = read_reference(EXAMPLE / "reference.jsonl")
    scorer = Scorer(folders["from-4bit"], options.num_prompts)
    reference = scorer.arrays([score for score in recorded.scores if score.id in scorer.ids])
    arms: dict[str, Any] = {}
    truth = scorer.score(lambda: scorer.transformers(folders["from-4bit float32"], "float32"))
    arms["reference | truth (float32 arithmetic)"] = compare(reference, truth)
    for name in ("naive", "from-4bit"):
        found = scorer.score(lambda name=name: scorer.transformers(folders[name], "float32"))
        arms[f"{name}, float32 arithmetic | truth"] = compare(found, truth)
    bf16 = {}
    for name in ("naive", "from-4bit"):
        bf16[name] = scorer.score(lambda name=name: scorer.transformers(folders[name], "bfloat16"))
        arms[f"{name}, Transformers bfloat16 | reference"] = compare(bf16[name], reference)
    found = scorer.score(lambda: scorer.transformers(folders["from-4bit float32"], "bfloat16"))
    arms["from-4bit float32 cast by Transformers to bfloat16 | reference"] = compare(found, reference)
    for batch in (8, 1):
        found = scorer.score(lambda batch=batch: scorer.transformers(folders["from-4bit"], "bfloat16", batch))
        arms[f"from-4bit, Transformers bfloat16, batch {batch} | batch 32"] = compare(found, bf16["from-4bit"])
    found = scorer.score(lambda: scorer.merged_by_peft(options.base, adapter))
    arms["PEFT's merge into 4 bit | reference"] = compare(found, reference)
    live = scorer.score(lambda: scorer.quantized(options.base, adapter))
    arms["reference, live again | recorded"] = compare(live, reference)
    if "vllm" in options.engines:
        for name in ("naive", "from-4bit"):
            found = scorer.score(lambda name=name: scorer.vllm(folders[name]))
            arms[f"{name}, vLLM bfloat16 | reference"] = compare(found, reference)
            arms[f"{name}, vLLM | Transformers"] = compare(found, bf16[name])

    import torch

    result = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": dict(library_versions("torch", "transformers", "peft", "bitsandbytes", "vllm")),
        "prompts": len(scorer.prompts),
        "reference_noise_floor": recorded.header.get("noise_floor"),
        "arms": arms,
    }
    options.json.write_text(json.dumps(result, indent=2) + "\n")
    for name, numbers in arms.items():
        print(
            f"{name:<70} mean {numbers['mean']:.4f}  p99 {numbers['p99']:.4f}  max {numbers['max']:.4f}  flips {numbers['flips']}"
        )


class Scorer:
    """The prompts and labels, and the engines to score them with, one in memory at a time."""

    def __init__(self, tokenizer_folder: Path, count: int | None) -> None:
        from lora_merge.engines.labels import resolve_labels
        from lora_merge.engines.model_files import load_tokenizer
        from lora_merge.engines.prompts import read_prompts

        tokenizer = load_tokenizer(tokenizer_folder)
        self.prompts = read_prompts(EXAMPLE / "heldout.jsonl", tokenizer, prefill=PREFILL)[:count]
        self.labels = resolve_labels(tokenizer, self.prompts, prefill=PREFILL)
        self.ids = {prompt.id for prompt in self.prompts}

    def score(self, make_engine: Callable[[], Any]) -> dict[str, np.ndarray]:
        start = time.perf_counter()
        engine = make_engine()
        loaded = time.perf_counter()
        scores = engine.score(self.prompts, self.labels)
        engine.close()
        print(f"  loaded in {loaded - start:.1f} s, scored in {time.perf_counter() - loaded:.1f} s", flush=True)
        return self.arrays(scores)

    def arrays(self, scores: Any) -> dict[str, np.ndarray]:
        by_id = {score.id: score for score in scores}
        ordered = [by_id[prompt.id] for prompt in self.prompts]
        return {
            "skip": np.array([score.skip_probability for score in ordered]),
            "mass": np.array([score.label_mass for score in ordered]),
            "decision": np.array([score.decision for score in ordered]),
        }

    def transformers(self, folder: Path, dtype: str, batch: int = 32) -> Any:
        from lora_merge.engines.transformers_engine import TransformersEngine

        return TransformersEngine.from_checkpoint(folder, dtype=dtype, batch_size=batch, share_prefix=False)

    def vllm(self, folder: Path) -> Any:
        from lora_merge.engines.vllm_engine import VllmEngine

        return VllmEngine(folder, dtype="bfloat16", max_model_len=1024, gpu_memory_utilization=0.5)

    def quantized(self, base: Path, adapter: Path) -> Any:
        from lora_merge.engines.transformers_engine import TransformersEngine
        from lora_merge.merging.recipes import read_recipe

        recipe = read_recipe(adapter)
        assert recipe is not None
        return TransformersEngine.from_quantized(base, adapter, recipe.bnb_config())

    def merged_by_peft(self, base: Path, adapter: Path) -> Any:
        import torch
        from peft import PeftModel
        from transformers import AutoModelForCausalLM, BitsAndBytesConfig

        from lora_merge.engines.transformers_engine import TransformersEngine
        from lora_merge.merging.recipes import read_recipe

        recipe = read_recipe(adapter)
        assert recipe is not None
        model = AutoModelForCausalLM.from_pretrained(
            base, dtype=torch.bfloat16, quantization_config=BitsAndBytesConfig(**recipe.bnb_config()), device_map="auto"
        )
        return TransformersEngine.from_model(PeftModel.from_pretrained(model, adapter).merge_and_unload())


def compare(found: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> dict[str, float | int]:
    delta = found["skip"] - other["skip"]
    size = np.abs(delta)
    return {
        "mean": float(size.mean()),
        "p99": float(np.quantile(size, 0.99)),
        "max": float(size.max()),
        "bias": float(delta.mean()),
        "flips": int((found["decision"] != other["decision"]).sum()),
        "least_label_mass": float(found["mass"].min()),
        "mean_label_mass": float(found["mass"].mean()),
    }


if __name__ == "__main__":
    main()
