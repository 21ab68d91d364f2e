"""How long a merge takes against ``cp -r`` and against the other ways to do it, and how much memory.

    python benchmarks/merge.py --shape 4b --rounds 3 --work /path/on/the/disk/to/measure

Makes a synthetic checkpoint of the given shape (random weights, three shards) and an adapter for all its linear layers, then
runs every arm once a round, alternating, each in a process of its own, deletes every output before the next arm starts, and
prints medians, ratios to the copy and peak memory (the kernel's high-water mark of resident memory, VmHWM; on a CUDA device the
most that NVML saw in use beyond what was in use before). An arm runs on the processor, or with ``@cuda`` on the device:
``--arms copy,from-4bit,from-4bit@cuda,peft@cuda``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from lora_merge.generation.bench.memory import device_used

# Gemma 3 (text) shapes: hidden, intermediate, layers, heads, key-value heads, head size, vocabulary.
SHAPES = {
    "270m": (640, 2048, 18, 4, 1, 256, 262144),
    "1b": (1152, 6912, 26, 4, 1, 256, 262144),
    "4b": (2560, 10240, 34, 8, 4, 256, 262208),
    "8b": (3584, 14336, 40, 16, 8, 256, 262208),
}
RANK = 16

ARMS = {
    "copy": "cp -r + sync",
    "naive": "lora-merge, original weights",
    "from-4bit": "lora-merge --from-4bit",
    "peft": "PEFT: load bf16, merge_and_unload, save_pretrained",
    "dequantize": "Transformers 4-bit load, dequantize(), PEFT merge, save",
}


@dataclass(frozen=True)
class Run:
    """One arm once: seconds by the wall clock until the result is on the disk, peak memory of host and device in bytes."""

    arm: str
    seconds: float
    peak_bytes: int
    device_bytes: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="4b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--arms", default="copy,naive,from-4bit,peft,dequantize", help="comma-separated, of: " + ", ".join(ARMS))
    parser.add_argument("--work", type=Path, default=Path("bench-merge"), help="folder for base, adapter and outputs")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path, help="also write every run here, after each")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # a child process: run this arm's Python
    options = parser.parse_args()
    base, adapter = options.work / f"base-{options.shape}", options.work / f"adapter-{options.shape}"
    if options.only == "make":
        make_base(base, options.shape)
        make_adapter(adapter, base)
        return
    if options.only:
        arm, device = arm_and_device(options.only)
        LIBRARY_ARMS[arm](base, adapter, options.work / "out", device)
        return
    arms = options.arms.split(",")
    for arm in arms:
        if arm_and_device(arm)[0] not in ARMS:
            parser.error(f"arm {arm!r}: expected one of {', '.join(ARMS)}, with @cuda or without")
    # In a process of its own: a child starts with its parent's high-water mark, so this one stays small.
    subprocess.run([sys.executable, __file__, "--only", "make", "--shape", options.shape, "--work", options.work], check=True)
    runs: list[Run] = []
    for _ in range(options.rounds):
        for arm in arms:
            runs.append(run(arm, base, adapter, options))
            if options.json:
                options.json.write_text(json.dumps(summary(runs, base, options), indent=2) + "\n")
    report(runs, base, options)


def arm_and_device(arm: str) -> tuple[str, str]:
    """``"naive@cuda"`` -> ``("naive", "cuda")``."""
    name, _, device = arm.partition("@")
    return name, device or "cpu"


def run(arm: str, base: Path, adapter: Path, options: argparse.Namespace) -> Run:
    out = options.work / "out"
    shutil.rmtree(out, ignore_errors=True)
    name, device = arm_and_device(arm)
    # No child reads the base cold: it is in the page cache, as after a download, or it is not, alike for every arm.
    os.sync()
    if name == "copy":
        command = ["sh", "-c", f"cp -r '{base}' '{out}' && sync '{out}'/* '{out}'"]
    elif name in ("naive", "from-4bit"):
        command = [sys.executable, "-m", "lora_merge.merging", "--base", str(base), "--adapter", str(adapter), "--out", str(out)]
        command += ["--quiet", "--jobs", str(options.jobs), "--device", device]
        command += ["--from-4bit"] if name == "from-4bit" else []
    else:
        command = [sys.executable, __file__, "--only", arm, "--shape", options.shape, "--work", str(options.work)]
    with DeviceMemory(watch=device == "cuda") as device_memory:
        start = time.perf_counter()
        child = os.posix_spawnp(command[0], command, os.environ)
        _, status, usage = os.wait4(child, 0)
        if name not in ("copy", "naive", "from-4bit"):
            os.sync()  # the libraries leave their files in the page cache; the others have synced theirs
        seconds = time.perf_counter() - start
    if os.waitstatus_to_exitcode(status) != 0:
        raise SystemExit(f"{arm} failed")
    shutil.rmtree(out)
    done = Run(arm, seconds, usage.ru_maxrss * 1024, device_memory.peak)
    on_device = f", {done.device_bytes / 2**30:5.2f} GiB on the device" if device == "cuda" else ""
    print(f"  {arm:>15}: {seconds:6.1f} s, {done.peak_bytes / 2**30:5.2f} GiB{on_device}", file=sys.stderr)
    return done


class DeviceMemory:
    """Watches the memory in use on the CUDA devices, five times a second; ``peak`` is in bytes, beyond what was in use."""

    def __init__(self, watch: bool) -> None:
        self.peak = 0
        before = device_used() if watch else None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(before,)) if before is not None else None

    def __enter__(self) -> DeviceMemory:
        if self._thread:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread:
            self._thread.join()

    def _watch(self, before: int) -> None:
        while not self._stop.wait(0.2):
            self.peak = max(self.peak, (device_used() or 0) - before)


def summary(runs: list[Run], base: Path, options: argparse.Namespace) -> dict[str, object]:
    """The setting and every run, for the JSON file."""
    from lora_merge.merging.manifest import environment

    size = sum(file.stat().st_size for file in base.iterdir())
    setting = {"shape": options.shape, "bytes": size, "cores": os.cpu_count(), "jobs": options.jobs, "rank": RANK}
    return {**setting, "environment": environment(), "runs": [asdict(one) for one in runs]}


def report(runs: list[Run], base: Path, options: argparse.Namespace) -> None:
    size = sum(file.stat().st_size for file in base.iterdir())
    print(f"{options.shape}: {size / 1e9:.2f} GB, {options.rounds} rounds, {os.cpu_count()} cores")
    copy = [one.seconds for one in runs if one.arm == "copy"]
    for arm in dict.fromkeys(one.arm for one in runs):
        mine = [one for one in runs if one.arm == arm]
        seconds = [one.seconds for one in mine]
        ratio = f"{statistics.median(seconds) / statistics.median(copy):5.2f} x copy" if copy else ""
        spread = f"{min(seconds):.1f} to {max(seconds):.1f}"
        name, device = arm_and_device(arm)
        title = ARMS[name] + (f" on {device}" if device != "cpu" else "")
        peak = f"peak {max(one.peak_bytes for one in mine) / 2**30:5.2f} GiB"
        if device != "cpu":
            peak += f", on the device {max(one.device_bytes for one in mine) / 2**30:5.2f} GiB"
        print(f"  {title:<63} median {statistics.median(seconds):6.1f} s ({spread})  {ratio}  {peak}")


def make_base(folder: Path, shape: str) -> None:
    """Write a Gemma 3 text checkpoint of random normal bfloat16 weights, in three shards."""
    if (folder / "config.json").exists():
        return
    import numpy as np
    from transformers import Gemma3TextConfig

    from lora_merge.merging.dtypes import BY_NAME
    from lora_merge.merging.safetensors_file import encode_header

    hidden, intermediate, layers, heads, kv_heads, head_dim, vocabulary = SHAPES[shape]
    folder.mkdir(parents=True, exist_ok=True)
    tensors = [("model.embed_tokens.weight", (vocabulary, hidden))]
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        tensors += [
            (f"{prefix}self_attn.q_proj.weight", (heads * head_dim, hidden)),
            (f"{prefix}self_attn.k_proj.weight", (kv_heads * head_dim, hidden)),
            (f"{prefix}self_attn.v_proj.weight", (kv_heads * head_dim, hidden)),
            (f"{prefix}self_attn.o_proj.weight", (hidden, heads * head_dim)),
            (f"{prefix}mlp.gate_proj.weight", (intermediate, hidden)),
            (f"{prefix}mlp.up_proj.weight", (intermediate, hidden)),
            (f"{prefix}mlp.down_proj.weight", (hidden, intermediate)),
            (f"{prefix}self_attn.q_norm.weight", (head_dim,)),
            (f"{prefix}self_attn.k_norm.weight", (head_dim,)),
        ]
        norms = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
        tensors += [(f"{prefix}{norm}.weight", (hidden,)) for norm in norms]
    tensors.append(("model.norm.weight", (hidden,)))
    # Sixteen million normal values, read from another place for every tensor: speed does not depend on more of them.
    pool = (np.random.default_rng(0).standard_normal(1 << 24).astype(np.float32) * 0.02).view(np.uint32) >> 16
    pool = pool.astype(np.uint16)
    total = sum(int(np.prod(shape)) * 2 for _, shape in tensors)
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[], [], []]
    filled = 0
    for tensor in tensors:
        shards[min(filled * 3 // total, 2)].append(tensor)
        filled += int(np.prod(tensor[1])) * 2
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-00003.safetensors"
        with (folder / name).open("wb") as file:
            file.write(encode_header({tensor: (BY_NAME["BF16"], shape) for tensor, shape in shard}, {"format": "pt"}))
            for place, (tensor, shape) in enumerate(shard):
                weight_map[tensor] = name
                left = int(np.prod(shape))
                start = place * 7919 % (1 << 20)
                while left:
                    part = pool[start : start + left]
                    file.write(part.tobytes())
                    left, start = left - part.size, 0
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = Gemma3TextConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocabulary,
        dtype="bfloat16",
        architectures=["Gemma3ForCausalLM"],
    )
    (folder / "config.json").write_text(config.to_json_string(use_diff=False))


def make_adapter(folder: Path, base: Path) -> None:
    """Write a rank-16 adapter of every linear layer, as PEFT would."""
    if (folder / "adapter_config.json").exists():
        return
    import torch
    from peft import LoraConfig
    from safetensors.torch import save_file

    from lora_merge.merging.checkpoint import read_checkpoint
    from lora_merge.merging.folders import ModelFolder

    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, tensor in read_checkpoint(ModelFolder(base, str(base))).tensors.items():
        if "_proj." in name:
            key = f"base_model.model.{name.removesuffix('.weight')}.lora_"
            tensors[f"{key}A.weight"] = torch.randn(RANK, tensor.shape[1]) * 0.02
            tensors[f"{key}B.weight"] = torch.randn(tensor.shape[0], RANK) * 0.02
    save_file(tensors, folder / "adapter_model.safetensors")
    projections = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    LoraConfig(r=RANK, lora_alpha=RANK, target_modules=projections, task_type="CAUSAL_LM").save_pretrained(folder)
    # What record_recipe leaves at the end of a training run: with it nothing has to be built to find the quantized modules.
    modules = sorted({key.removeprefix("base_model.model.").rpartition(".lora_")[0] for key in tensors})
    recipe = {
        "quant_type": "nf4",
        "double_quant": True,
        "block_size": 64,
        "quant_dtype": "bfloat16",
        "quantized_modules": modules,
    }
    record = {"format": "lora-merge/quantization-recipe", "version": 1, "recipe": recipe}
    (folder / "quantization_recipe.json").write_text(json.dumps(record))


def merge_with_peft(base: Path, adapter: Path, out: Path, device: str) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16, device_map=device)
    PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(out)


def merge_dequantized_with_peft(base: Path, adapter: Path, out: Path, device: str) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16
    )
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16, quantization_config=config, device_map=device)
    PeftModel.from_pretrained(model.dequantize(), adapter).merge_and_unload().save_pretrained(out)


LIBRARY_ARMS = {"peft": merge_with_peft, "dequantize": merge_dequantized_with_peft}

if __name__ == "__main__":
    main()
