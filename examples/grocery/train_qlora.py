"""Trains the example's adapter: QLoRA of Gemma 3 270M on grocery pairs. A few minutes on one data-centre GPU.

    python examples/grocery/fetch_model.py
    python examples/grocery/train_qlora.py --base models/gemma-3-270m --out my-adapter
    python examples/grocery/train_qlora.py --base models/gemma-3-270m --out my-adapter --smoke     a few steps, also without a GPU

The base is quantized to 4 bit (NF4, double quantization, bfloat16 compute) and frozen; LoRA matrices of rank 16 on every linear
layer are trained in float32 on the answers alone. What is written is the adapter in bfloat16, the quantization recipe beside it
(``quantization_recipe.json``, which ``lora-merge --from-4bit`` reads) and ``training.json``: what was trained, how and where.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from answers import Batch, collate, epoch_batches, make_examples
from pairs import PREFILL, SEED, rows
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from lora_merge import record_recipe
from lora_merge.engines.labels import resolve_labels
from lora_merge.engines.model_files import library_versions, load_tokenizer
from lora_merge.engines.prompts import rows_from_mappings, tokenize
from lora_merge.engines.transformers_engine import TransformersEngine, device_name
from lora_merge.merging.digests import folder_digests

BASE_NAME = "google/gemma-3-270m"


@dataclass(frozen=True)
class Settings:
    """Everything that shapes the run."""

    seed: int = SEED
    examples: int | None = None
    epochs: int = 3
    batch_size: int = 64
    learning_rate: float = 1e-3
    warmup_share: float = 0.05
    rank: int = 16
    alpha: int = 16
    #: Weight of the decision token against the mean of all other answer tokens.
    decision_weight: float = 1.0
    clip_norm: float = 1.0
    #: Pairs, neither trained on nor held out, that are scored after every epoch.
    validation: int = 1_000


SMOKE = Settings(examples=32, epochs=1, batch_size=4, validation=10)


def load_base(path: Path, device: torch.device) -> Any:
    """The frozen 4-bit base, what is not quantized in bfloat16."""
    recipe = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    return AutoModelForCausalLM.from_pretrained(
        path, quantization_config=recipe, dtype=torch.bfloat16, device_map={"": device}, attn_implementation="eager"
    )


def add_adapter(base: Any, settings: Settings) -> PeftModel:
    """LoRA on all linear layers, in float32. The norms and the embedding stay in bfloat16, as any later load has them."""
    torch.manual_seed(settings.seed)
    config = LoraConfig(task_type="CAUSAL_LM", r=settings.rank, lora_alpha=settings.alpha, target_modules="all-linear")
    return get_peft_model(base, config)


def batch_losses(model: PeftModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy (nats) of the decision tokens and of the other answer tokens.

    Logits are computed where an answer token is predicted and nowhere else: over 262,144 tokens of vocabulary the rest would take
    most of the memory.
    """
    causal = model.get_base_model()
    hidden = causal.model(input_ids=batch.ids, use_cache=False).last_hidden_state
    logits = causal.lm_head(hidden[batch.positions[:, 0], batch.positions[:, 1]])
    losses = cross_entropy(logits.float(), batch.targets, reduction="none")
    return losses[batch.is_decision].mean(), losses[~batch.is_decision].mean()


def learning_rate_at(step: int, steps: int, settings: Settings) -> float:
    """Linear warm-up, then half a cosine down to zero."""
    warmup = max(1, round(settings.warmup_share * steps))
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


class Validation:
    """Decides pairs that are neither trained on nor held out, and compares with the rule.

    ``accuracy`` is taken outside the grey zone; ``grey_distance`` is the mean distance of P(write) from the rule's in it.
    """

    def __init__(self, tokenizer: Any, settings: Settings) -> None:
        self.rows = rows("validation", settings.validation, settings.seed)
        self.prompts = tokenize(rows_from_mappings(self.rows), tokenizer, prefill=PREFILL)
        self.labels = resolve_labels(tokenizer, self.prompts, prefill=PREFILL)

    def __call__(self, model: PeftModel) -> dict[str, float]:
        scores = TransformersEngine.from_model(model, batch_size=128).score(self.prompts, self.labels)
        scored = list(zip(scores, self.rows, strict=True))
        clear = [score.decision == row["expected"] for score, row in scored if not row["grey"]]
        grey = [abs(1 - score.skip_probability - row["write_probability"]) for score, row in scored if row["grey"]]
        return {
            "accuracy": sum(clear) / len(clear),
            "grey_distance": sum(grey) / len(grey),
            "least_label_mass": min(score.label_mass for score in scores),
        }


def train(model: PeftModel, tokenizer: Any, settings: Settings) -> list[dict[str, float]]:
    """Train in place; returns one line of numbers an epoch and prints it."""
    device = model.get_base_model().get_input_embeddings().weight.device
    examples = make_examples(rows("train", settings.examples, settings.seed), tokenizer)
    validation = Validation(tokenizer, settings)
    steps = settings.epochs * (len(examples) // settings.batch_size)
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=settings.learning_rate, weight_decay=0.0)
    history: list[dict[str, float]] = []
    step, started = 0, time.perf_counter()
    for epoch in range(settings.epochs):
        model.train()
        sums = torch.zeros(2, device=device)
        batches = list(epoch_batches(examples, settings.batch_size, settings.seed, epoch))
        for chosen in batches:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate_at(step, steps, settings)
            with torch.autocast(device.type, torch.bfloat16):
                decision_loss, text_loss = batch_losses(model, collate(chosen, tokenizer.pad_token_id).to(device))
                loss = settings.decision_weight * decision_loss + text_loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, settings.clip_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            sums += torch.stack((decision_loss.detach(), text_loss.detach()))
            step += 1
        decision_mean, text_mean = (sums / len(batches)).tolist()
        line = {"epoch": epoch + 1, "steps": step, "decision_loss": decision_mean, "text_loss": text_mean}
        line |= {f"validation_{name}": value for name, value in validation(model).items()}
        history.append(line | {"seconds": round(time.perf_counter() - started, 1)})
        print(json.dumps(history[-1]), flush=True)
    return history


def save(model: PeftModel, base: Path, out: Path, settings: Settings, history: list[dict[str, float]], seconds: float) -> None:
    """Write the adapter in bfloat16, the recipe and ``training.json``."""
    model.peft_config["default"].base_model_name_or_path = BASE_NAME
    model.save_pretrained(out, save_embedding_layers=False)
    weights = out / "adapter_model.safetensors"
    save_file(
        {name: tensor.to(torch.bfloat16) for name, tensor in load_file(weights).items()}, weights, metadata={"format": "pt"}
    )
    record_recipe(model, out)
    trained_on = rows("train", settings.examples, settings.seed)
    device = model.get_base_model().get_input_embeddings().weight.device
    record = {
        "base": {"name": BASE_NAME, "files": folder_digests(base)},
        "data": {"rows": len(trained_on), "sha256": sha256(json.dumps(trained_on, ensure_ascii=False).encode()).hexdigest()},
        "settings": asdict(settings),
        "environment": {
            "device": device_name(device),
            "cuda": torch.version.cuda,
            "versions": library_versions("torch", "transformers", "peft", "bitsandbytes", "tokenizers"),
        },
        "history": history,
        "seconds": round(seconds, 1),
    }
    (out / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the example's QLoRA adapter.")
    parser.add_argument("--base", type=Path, required=True, help="the folder that fetch_model.py made")
    parser.add_argument("--out", type=Path, required=True, help="folder for the adapter")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--smoke", action="store_true", help="a few steps on a few examples, to see that everything runs")
    for name, kind in (("epochs", int), ("batch-size", int), ("learning-rate", float), ("decision-weight", float), ("seed", int)):
        parser.add_argument(f"--{name}", type=kind)
    options = parser.parse_args()
    chosen = {name: getattr(options, name) for name in ("epochs", "batch_size", "learning_rate", "decision_weight", "seed")}
    settings = replace(
        SMOKE if options.smoke else Settings(), **{name: value for name, value in chosen.items() if value is not None}
    )

    started = time.perf_counter()
    tokenizer = load_tokenizer(options.base)
    model = add_adapter(load_base(options.base, torch.device(options.device)), settings)
    history = train(model, tokenizer, settings)
    seconds = time.perf_counter() - started
    save(model, options.base, options.out, settings, history, seconds)
    print(f"{options.out}: trained in {seconds:.0f} s on {device_name(torch.device(options.device))}", file=sys.stderr)


if __name__ == "__main__":
    main()
