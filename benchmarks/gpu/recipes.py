"""Other quantization recipes from end to end on a GPU: train, record the reference, merge rightly and wrongly, judge.

    python benchmarks/gpu/recipes.py --recipe fp4 --base models/gemma-3-270m --work recipes --json recipe-fp4.json
    python benchmarks/gpu/recipes.py --recipe dora --base models/gemma-3-270m --work recipes --json recipe-dora.json

``fp4``: FP4 without double quantization, LoRA of rank 8. ``dora``: NF4 without double quantization, DoRA of rank 16. Trained
with the example's script for one epoch. The merge by the recorded recipe has to pass verify-skip-drift; the merges into the
original weights and by other recipes have to be caught, and by which checks is recorded.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from store import Results

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "grocery"
sys.path.insert(0, str(EXAMPLE))
MAX_DELTA = 0.02


@dataclass(frozen=True)
class Recipe:
    """``wrong``: settings of merges by other recipes, by name."""

    quant_type: str
    double_quant: bool
    rank: int
    dora: bool
    wrong: dict[str, dict[str, Any]]


NF4_DOUBLE = {"quant_type": "nf4", "double_quant": True}
FP4 = {"quant_type": "fp4", "double_quant": False}
RECIPES = {
    "fp4": Recipe("fp4", False, 8, False, {"NF4, double quantization": NF4_DOUBLE}),
    "dora": Recipe("nf4", False, 16, True, {"NF4, double quantization": NF4_DOUBLE, "FP4": FP4}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=RECIPES, required=True)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--examples", type=int, help="training rows; the default is all 14,000")
    parser.add_argument("--num-prompts", type=int, help="held-out prompts; the default is all 3,200")
    parser.add_argument("--smoke", action="store_true", help="a few steps, to see that everything runs")
    options = parser.parse_args()

    recipe = RECIPES[options.recipe]
    work: Path = options.work / options.recipe
    work.mkdir(parents=True, exist_ok=True)
    # The reference, the adapter and the merge have to name one base, so it gets its name whatever its folder is called.
    base = work / "gemma-3-270m"
    if not base.exists():
        base.symlink_to(options.base.resolve(), target_is_directory=True)
    settings = {"recipe": options.recipe, "examples": options.examples, "prompts": options.num_prompts, "smoke": options.smoke}
    results = Results(options.json, settings)
    adapter, prompts = work / "adapter", work / "heldout.jsonl"
    rows = (EXAMPLE / "heldout.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    prompts.write_text("".join(rows[: options.num_prompts]), encoding="utf-8")
    trained = results.measure("training", lambda: train(base, adapter, recipe, options))
    if trained is not None:
        results.measure("reference", lambda: record(base, adapter, prompts, work / "reference.jsonl"))
    if "reference" in results.measured:
        merges: dict[str, dict[str, Any]] = {"right": {"from_4bit": True}, "naive": {}}
        merges |= {f"wrong: {name}": {"from_4bit": True, "recipe": settings} for name, settings in recipe.wrong.items()}
        for name, merging in merges.items():
            results.measure(name, lambda name=name, merging=merging: judge(base, adapter, prompts, work, name, merging))
    results.finish()


def train(base: Path, adapter: Path, recipe: Recipe, options: argparse.Namespace) -> dict[str, Any]:
    """The example's training on a base that is quantized by ``recipe``."""
    import torch
    import train_qlora
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from lora_merge.engines.model_files import load_tokenizer

    settings = train_qlora.SMOKE if options.smoke else replace(train_qlora.Settings(), epochs=1, examples=options.examples)
    settings = replace(settings, rank=recipe.rank, alpha=recipe.rank)
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=recipe.quant_type,
        bnb_4bit_use_double_quant=recipe.double_quant,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    quantized = AutoModelForCausalLM.from_pretrained(
        base,
        quantization_config=quantization,
        dtype=torch.bfloat16,
        device_map={"": device},
        attn_implementation="eager",
    )
    torch.manual_seed(settings.seed)
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules="all-linear",
        use_dora=recipe.dora,
    )
    model = get_peft_model(quantized, lora)
    start = time.perf_counter()
    history = train_qlora.train(model, load_tokenizer(base), settings)
    seconds = time.perf_counter() - start
    shutil.rmtree(adapter, ignore_errors=True)
    train_qlora.save(model, base, adapter, settings, history, seconds)
    del model, quantized
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    settings_of_lora = {"rank": settings.rank, "alpha": settings.alpha, "dora": recipe.dora}
    return {
        "recipe": {"quant_type": recipe.quant_type, "double_quant": recipe.double_quant, **settings_of_lora},
        "history": history,
        "seconds": seconds,
    }


def record(base: Path, adapter: Path, prompts: Path, reference: Path) -> dict[str, Any]:
    """The reference of the adapter as it was saved, with its noise floors."""
    from train_qlora import PREFILL

    from lora_merge.engines.loading import load_adapter, load_causal_model, resolve_device
    from lora_merge.engines.model_files import load_tokenizer
    from lora_merge.merging.recipes import read_recipe
    from verification.reference import record_reference

    recipe = read_recipe(adapter)
    assert recipe is not None
    device = resolve_device("auto")
    quantized = load_causal_model(base, dtype="bfloat16", device=device, bnb_config=recipe.bnb_config(), quantized=True)
    model: Any = load_adapter(quantized, adapter)
    recorded = record_reference(model, load_tokenizer(base), prompts, reference, adapter_dir=adapter, prefill=PREFILL)
    floors = {name: floor.to_json() for name, floor in recorded.noise_floors.items() if floor is not None}
    return {"recipe": recipe.describe(), "noise_floors": floors}


def judge(base: Path, adapter: Path, prompts: Path, work: Path, name: str, merging: dict[str, Any]) -> dict[str, Any]:
    """Merge, verify with the product's own function, and take from its verdict what the results need."""
    from lora_merge import MergeOptions, merge
    from verification.api import VerifyOptions, verify_skip_drift
    from verification.arms import EngineOptions
    from verification.checks import Outcome, worst
    from verification.limits import Limits
    from verification.measure import MeasureOptions
    from verification.sources import SourceOptions

    start = time.perf_counter()
    merged = merge(base, adapter, work / re.sub(r"\W+", "-", name), MergeOptions(overwrite=True, **merging)).out
    seconds = {"merge": time.perf_counter() - start}
    start = time.perf_counter()
    sources = SourceOptions(base=str(base), adapter=str(adapter))
    measuring = MeasureOptions(reference=work / "reference.jsonl", sources=sources, engine=EngineOptions(engine="hf"))
    verdict = verify_skip_drift(merged, prompts, VerifyOptions(Limits(max_delta=MAX_DELTA), measuring))
    seconds["verify"] = time.perf_counter() - start
    numbers = verdict.numbers
    drift_only = [check for check in verdict.checks if check.name not in ("weights", "recipe-agreement")]
    return {
        "outcome": verdict.outcome.value,
        "outcome_of_drift_alone": worst(drift_only).value if drift_only else Outcome.INCONCLUSIVE.value,
        "reasons": list(verdict.reasons),
        "checks": {check.name: check.outcome.value for check in verdict.checks},
        "drift": {key: value for key, value in numbers["drift"].items() if isinstance(value, int | float)} if numbers else None,
        "label_mass": numbers.get("label_mass"),
        "accuracy": numbers.get("accuracy"),
        "control": numbers["control"]["mean_abs_delta"] if numbers and numbers.get("control") else None,
        "seconds": seconds,
    }


if __name__ == "__main__":
    main()
