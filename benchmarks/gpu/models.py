"""vLLM runs our merges of tiny random models, Gemma 3 vision-language included. Oracle: the unmerged PEFT model, float32 in both.

    python benchmarks/gpu/models.py --work models-work --json models.json

For each architecture: a random base and a random LoRA (of the vision-language model on language and vision layers), merged;
vLLM's log-probabilities of the next token and its greedy continuation against the unmerged model's in Transformers. The
vision-language model also gets a prompt with a picture. vLLM runs in a process of its own. The vision-language model needs
torchvision.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from store import Results

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
TOKENS = 8
TOP = 5
PROMPTS = [list(range(10, 42)), [2, 19, 17, 15, 13, 11, 23], [2, 150, 149]]
# vLLM's attention wants heads of at least 32.
HEADS = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"target_modules": ["q_proj", "o_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
TEXT = ("llama", "qwen2", "gemma3", "qwen3_moe")
VISION_TARGETS = r".*language_model.*_proj|.*vision_tower.*(q_proj|k_proj|v_proj|out_proj|fc1|fc2)"
PICTURE_PROMPT = "w10 w11 <start_of_image> w12 w13 w14"
SIDE = 28


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--architectures", default="gemma3_vlm," + ",".join(TEXT))
    parser.add_argument("--only", type=Path, help=argparse.SUPPRESS)  # a child process: run vLLM on this checkpoint
    options = parser.parse_args()
    if options.only:
        print(json.dumps(run_vllm(options.only)))
        return
    chosen = options.architectures.split(",")
    results = Results(options.json, {"architectures": chosen})
    for architecture in chosen:
        results.measure(architecture, lambda name=architecture: compare(name, options.work / name))
    results.finish()


def compare(architecture: str, work: Path) -> dict[str, Any]:
    """Make, merge, ask both, and count what differs."""
    import torch

    from lora_merge import MergeOptions, merge

    torch.set_num_threads(min(4, torch.get_num_threads()))
    base, adapter = work / "base", work / "adapter"
    if architecture == "gemma3_vlm":
        make_vision_language(base, adapter)
    else:
        from tests.tiny import save_tiny_adapter, save_tiny_base

        settings = {**HEADS, **({"head_dim": 32} if architecture in ("gemma3", "qwen3_moe") else {})}
        save_tiny_base(base, architecture, torch.float32, shard_size="300KB", **settings)
        save_tiny_adapter(adapter, base, **(EXPERTS if architecture == "qwen3_moe" else {}))
    merged = merge(base, adapter, work / "merged", MergeOptions(overwrite=True)).out
    expected = answers_of_peft(architecture, base, adapter)
    command = [sys.executable, __file__, "--only", merged, "--work", work, "--json", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stderr[-4000:], flush=True)
    if done.returncode != 0:
        named = [line for line in done.stderr.splitlines() if "Error" in line]
        raise RuntimeError((named or ["vLLM said nothing"])[-1].strip()[:500])
    found = json.loads(done.stdout.splitlines()[-1])
    prompts = []
    for name, reference in expected.items():
        answer = found["answers"][name]
        off = [abs(value - reference["log_probabilities"][int(token)]) for token, value in answer["top"].items()]
        row: dict[str, Any] = {}
        if reference["causal"] is not None:  # vLLM's attention for CPUs does not let the tokens of a picture see each other
            causal = [abs(value - reference["causal"][int(token)]) for token, value in answer["top"].items()]
            row["largest_difference_with_causal_attention_in_the_picture"] = max(causal)
        prompts.append(
            {
                "prompt": name,
                "same_prompt_ids": answer["prompt_ids"] == reference["prompt_ids"],
                "largest_difference_of_log_probabilities": max(off),
                "same_greedy_tokens": answer["tokens"] == reference["tokens"],
                "tokens": answer["tokens"],
                "adapter_moves_log_probability_by": reference["moved"],
                **row,
            }
        )
    return {"engine_class": found["class"], "attention": found["attention"], "compared_tokens": TOP, "prompts": prompts}


def make_vision_language(base: Path, adapter: Path) -> None:
    """A random Gemma 3 vision-language model with tokenizer and image processor, and a LoRA on language and vision layers."""
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model

    text = {
        **HEADS,
        "head_dim": 32,
        "vocab_size": 160,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "max_position_embeddings": 256,
        "sliding_window": 16,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision["vision_use_head"] = False
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config={**vision, "image_size": SIDE, "patch_size": SIDE // 2},
        mm_tokens_per_image=4,
        image_token_index=159,
        boi_token_index=158,
        eoi_token_index=157,
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:  # an embedding so small that the layers decide, not the last token alone
                parameter.normal_(0, 0.02 if "embed_tokens" in name else 0.08)
            elif "bias" in name:
                parameter.normal_(0, 0.3)
    model.float().save_pretrained(base)
    name_as_on_the_hub(base / "model.safetensors")
    processor = tiny_processor()
    processor.save_pretrained(base)
    torch.manual_seed(1)
    wrapped = get_peft_model(model, LoraConfig(r=4, lora_alpha=6, target_modules=VISION_TARGETS))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.1)
    wrapped.save_pretrained(adapter)


def name_as_on_the_hub(file: Path) -> None:
    """Give the tensors the names of Google's checkpoints, which vLLM loads; those that transformers 5 writes it does not."""
    from safetensors.torch import load_file, save_file

    renamed = {}
    for name, tensor in load_file(file).items():
        short = name.removeprefix("model.")
        short = short.replace("language_model.model.", "language_model.").replace("language_model.", "language_model.model.")
        short = short.replace("vision_tower.vision_model.", "vision_tower.").replace(
            "vision_tower.", "vision_tower.vision_model."
        )
        renamed[short] = tensor.contiguous()
    save_file(renamed, file, metadata={"format": "pt"})


def tiny_processor() -> Any:
    """160 words, among them the line breaks that vLLM looks for and the three tokens around a picture; pictures of 28 × 28."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import Gemma3Processor, PreTrainedTokenizerFast
    from transformers.models.gemma3.image_processing_gemma3 import Gemma3ImageProcessor

    words = ["<pad>", "<eos>", "<bos>", "<unk>", "\n", "\n\n", "\n\n\n", "\n\n\n\n"]
    words += [f"w{place}" for place in range(len(words), 157)] + ["<end_of_image>", "<start_of_image>", "<image_soft_token>"]
    made = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split(Regex("\n+"), "isolated")]
    )
    made.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    special = {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    }
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        extra_special_tokens=special,
    )
    pictures = Gemma3ImageProcessor(size={"height": SIDE, "width": SIDE})
    return Gemma3Processor(image_processor=pictures, tokenizer=tokenizer, image_seq_length=4)


def picture() -> Any:
    """A picture of colours that differ everywhere."""
    import numpy as np
    from PIL import Image

    rows, columns = np.mgrid[0:SIDE, 0:SIDE]
    return Image.fromarray(np.stack([rows * 9, columns * 9, (rows * columns) % 256], axis=-1).astype(np.uint8))


def answers_of_peft(architecture: str, base: Path, adapter: Path) -> dict[str, Any]:
    """What the unmerged model says after each prompt, on the CPU in float32, and how far the adapter moves it."""
    import torch
    import transformers
    from peft import PeftModel

    vision = architecture == "gemma3_vlm"
    kind = transformers.Gemma3ForConditionalGeneration if vision else transformers.AutoModelForCausalLM
    model = PeftModel.from_pretrained(kind.from_pretrained(base, dtype=torch.float32), adapter).eval()
    inputs: dict[str, Any] = {f"text {place}": {"input_ids": torch.tensor([ids])} for place, ids in enumerate(PROMPTS)}
    if vision:
        processor = transformers.AutoProcessor.from_pretrained(base)
        inputs["picture"] = dict(processor(text=PICTURE_PROMPT, images=picture(), return_tensors="pt"))
    answers = {}
    for name, given in inputs.items():
        given = {**given, "attention_mask": torch.ones_like(given["input_ids"])}
        with torch.no_grad():
            log_probabilities = model(**given).logits[0, -1].double().log_softmax(-1)
            causal = None
            if "token_type_ids" in given:
                flat = {**given, "token_type_ids": torch.zeros_like(given["token_type_ids"])}
                causal = model(**flat).logits[0, -1].double().log_softmax(-1).tolist()
            with model.disable_adapter():
                bare = model(**given).logits[0, -1].double().log_softmax(-1)
        answers[name] = {
            "prompt_ids": given["input_ids"][0].tolist(),
            "log_probabilities": log_probabilities.tolist(),
            "causal": causal,
            "tokens": greedy(model, given),
            "moved": float((bare - log_probabilities).abs().max()),
        }
    return answers


def greedy(model: Any, given: dict[str, Any]) -> list[int]:
    """The likeliest :data:`TOKENS` tokens, each from the whole text before it; one that ends a text is like any other."""
    import torch

    written: list[int] = []
    for _ in range(TOKENS):
        with torch.no_grad():
            written.append(int(model(**given).logits[0, -1].argmax()))
        added = {"input_ids": written[-1], "attention_mask": 1, "token_type_ids": 0}
        given = {
            name: torch.cat([value, torch.tensor([[added[name]]])], dim=1) if name in added else value
            for name, value in given.items()
        }
    return written


def run_vllm(merged: Path) -> dict[str, Any]:
    """vLLM's answers, its model class and attention backend."""
    os.environ.update(
        {"HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    )
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["TRITON_F32_DEFAULT"] = "ieee"  # else Triton's attention multiplies float32 in TF32
    import torch
    from vllm import LLM, SamplingParams

    vision = "vision_config" in json.loads((merged / "config.json").read_text())
    settings: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "max_model_len": 128, "max_logprobs": TOP}
    settings |= {"max_num_batched_tokens": 512, "max_num_seqs": 8}
    if torch.cuda.is_available():
        settings |= {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 30}
    settings |= {"limit_mm_per_prompt": {"image": 1}} if vision else {"skip_tokenizer_init": True}
    engine = LLM(str(merged), **settings)
    prompts: dict[str, Any] = {f"text {place}": {"prompt_token_ids": ids} for place, ids in enumerate(PROMPTS)}
    if vision:
        prompts["picture"] = {"prompt": PICTURE_PROMPT, "multi_modal_data": {"image": picture()}}
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0, logprobs=TOP, detokenize=False, ignore_eos=True)
    outputs = engine.generate(list(prompts.values()), sampling, use_tqdm=False)
    answers = {}
    for name, output in zip(prompts, outputs, strict=True):
        first = output.outputs[0]
        answers[name] = {
            "prompt_ids": list(output.prompt_token_ids),
            "top": {str(token): entry.logprob for token, entry in first.logprobs[0].items()},
            "tokens": list(first.token_ids),
        }
    config = engine.llm_engine.vllm_config
    classes = engine.apply_model(lambda model: type(model).__name__)
    layers = config.compilation_config.static_forward_context.values()
    backends = {layer.get_attn_backend().get_name() for layer in layers if hasattr(layer, "get_attn_backend")}
    return {"class": classes[0], "attention": sorted(backends), "answers": answers}


if __name__ == "__main__":
    main()
