"""The process of one task: ``python -m lora_merge.generation.bench.worker TASK.json RESULT.json PROGRESS.json STARTED``.

Each arm has a process of its own, so that memory, caches and whatever an engine leaves behind stay apart. ``STARTED`` is the
time when the process was asked for (seconds since the epoch): importing the libraries belongs to the time it takes to start.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lora_merge.engines.prompts import Prompt
from lora_merge.generation.bench.arms import ArmResult, Task
from lora_merge.generation.bench.progress import ProgressFile, Teller


def main() -> None:
    """Measure the task and write its result."""
    task_file, result_file, progress_file, asked = sys.argv[1:]
    task = Task.from_json(json.loads(Path(task_file).read_text(encoding="utf-8")))
    prompts = read_work(Path(task.prompts_file))
    measure = {"arm": _measure_arm, "sweep": _measure_sweep, "stock": _measure_stock}[task.part]
    result = measure(task, prompts, float(asked), ProgressFile(Path(progress_file)).phase)
    Path(result_file).write_text(json.dumps(result), encoding="utf-8")


def write_work(prompts: Sequence[Prompt], path: Path) -> None:
    """Store the token ids of ``prompts``, one JSON list a line."""
    path.write_text("".join(json.dumps(prompt.token_ids) + "\n" for prompt in prompts), encoding="ascii")


def read_work(path: Path) -> list[Prompt]:
    """The prompts of :func:`write_work`, named by their position."""
    lines = path.read_text(encoding="ascii").splitlines()
    return [Prompt(str(index), tuple(json.loads(line))) for index, line in enumerate(lines)]


def _measure_arm(task: Task, prompts: Sequence[Prompt], asked: float, tell: Teller) -> dict[str, Any]:
    from lora_merge.engines.opening import open_engine
    from lora_merge.generation.bench.measure import Bench, make_write_list, median

    _import_libraries(task.engine)
    imported = time.time() - asked
    started = time.perf_counter()
    options = dict(task.engine_options)
    engine = open_engine(
        task.engine,
        task.model,
        dtype=task.dtype,
        device=task.device,
        hf_options=options,
        vllm_options={**options, "longest": _longest(task, prompts)},
    )
    seconds = {"import": imported, "load": time.perf_counter() - started}
    try:
        bench = Bench(engine, task, prompts, tell=tell)
        seconds["warm_up"] = bench.warm_up()
        works = bench.repeated()
        work = median(works)
        listed = task.write_list or make_write_list(work.decisions, work.skip_probabilities, work.texts, task.threshold)
        two_phase = task.mode == "two-phase"
        groups = listed.quantiles(task.quantiles) if two_phase and task.quantiles else []
        return ArmResult(
            seconds={**seconds, **work.seconds},
            work_seconds_of_repeats=[each.work_seconds for each in works],
            decisions=work.decisions,
            skip_probabilities=work.skip_probabilities,
            texts=work.texts,
            prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts),
            written_tokens=work.written_tokens,
            computed=work.computed,
            memory=_allocated_peak(task),
            kv=_kv_capacity(engine, prompts, task),
            quantile_seconds=[bench.write_again(group)[0] for group in groups],
            kept_seconds=bench.threshold_before_and_after(listed, work) if two_phase else None,
            engine=engine.describe(),
        ).to_json()
    finally:
        engine.close()


def _import_libraries(engine: str) -> None:
    import torch  # noqa: F401
    import transformers  # noqa: F401

    if engine == "vllm":
        import vllm  # noqa: F401


def _allocated_peak(task: Task) -> dict[str, int | None]:
    """What torch handed out at most on the GPU, where the engine runs in this process."""
    import torch

    if task.engine == "vllm" or not torch.cuda.is_available():
        return {}
    return {"allocated_peak": torch.cuda.max_memory_allocated()}


def _longest(task: Task, prompts: Sequence[Prompt]) -> int:
    """Tokens of the longest prompt with its decision and its text."""
    return max(len(prompt.token_ids) for prompt in prompts) + 1 + task.max_tokens


def _kv_capacity(engine: Any, prompts: Sequence[Prompt], task: Task) -> dict[str, float | None] | None:
    """How many tokens the key-value cache holds, and how many of the longest prompts with their texts run at once."""
    longest = _longest(task, prompts)
    if task.engine == "vllm":
        tokens, sequences = _vllm_kv_tokens(engine), int(engine.describe()["settings"]["max_num_seqs"])
        return {
            "bytes_per_token": None,
            "tokens": tokens,
            "prompts": None if tokens is None else min(tokens // longest, sequences),
        }
    from transformers import AutoConfig

    per_token = kv_bytes_per_token(AutoConfig.from_pretrained(task.model).get_text_config(), engine.describe()["dtype"])
    tokens = _free_bytes() // per_token
    return {"bytes_per_token": per_token, "tokens": tokens, "prompts": tokens // longest}


def _free_bytes() -> int:
    """Memory that is free beside the loaded model: the GPU's where there is one, else the host's."""
    import torch

    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[0])
    available = Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]
    return int(available) * 1024


def _vllm_kv_tokens(engine: Any) -> int | None:
    """Tokens that vLLM's cache holds; None when it does not say."""
    cache = engine._live().llm_engine.vllm_config.cache_config
    tokens = getattr(cache, "kv_cache_size_tokens", None)  # vLLM 0.32; before that only blocks are told
    if tokens is None and cache.num_gpu_blocks:
        tokens = cache.num_gpu_blocks * cache.block_size
    return None if tokens is None else int(tokens)


def kv_bytes_per_token(config: Any, dtype: str) -> int:
    """Bytes that one token takes in the keys and values of all layers. Sliding layers count like the others: an upper bound."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * width * (4 if dtype == "float32" else 2))


def _continued(task: Task, prompts: Sequence[Prompt]) -> list[Prompt]:
    token = int(task.labels["write"]["token_id"])
    indices = task.write_list.indices if task.write_list else range(len(prompts))
    return [Prompt(prompts[index].id, (*prompts[index].token_ids, token)) for index in indices]


def _measure_sweep(task: Task, prompts: Sequence[Prompt], asked: float, tell: Teller) -> dict[str, Any]:
    """Our engine writing the list at one batch size. Where it had to halve its batches, that size was not measured."""
    from lora_merge.engines.errors import EngineError
    from lora_merge.engines.protocol import GenerationLimits
    from lora_merge.engines.transformers_engine import TransformersEngine

    engine = TransformersEngine.from_checkpoint(
        task.model, dtype=task.dtype, device=task.device, write_batch_size=task.batch_size
    )
    continued, limits = _continued(task, prompts), GenerationLimits(task.max_tokens)
    engine.generate(continued[:8], GenerationLimits(8))

    def write() -> dict[str, Any]:
        texts = engine.generate(continued, limits, progress=tell("writing", len(continued)))
        if engine.write_fit is not None:
            raise EngineError(f"the device's memory holds no more than {engine.write_fit} at once")
        return {"tokens": sum(len(text.token_ids) for text in texts), "wasted_share": engine.token_counts.wasted_share}

    return {**_watched(task.batch_size, write), "engine": engine.describe()}


def _measure_stock(task: Task, prompts: Sequence[Prompt], asked: float, tell: Teller) -> dict[str, Any]:
    """``model.generate`` of Transformers writing the list at one batch size, sorted by length and padded on the left."""
    import torch

    from lora_merge.engines.loading import load_causal_model, resolve_device
    from lora_merge.engines.model_files import end_ids, load_tokenizer

    device = resolve_device(task.device)
    model = load_causal_model(task.model, dtype=task.dtype, device=device)
    ends = list(end_ids(task.model, load_tokenizer(task.model)))
    continued = sorted(_continued(task, prompts), key=lambda prompt: -len(prompt.token_ids))

    def generate(batch: Sequence[Prompt], tokens: int) -> int:
        width = max(len(prompt.token_ids) for prompt in batch)
        fill = [width - len(prompt.token_ids) for prompt in batch]
        ids = torch.tensor([[ends[0]] * gap + list(prompt.token_ids) for gap, prompt in zip(fill, batch, strict=True)])
        mask = torch.tensor([[0] * gap + [1] * (width - gap) for gap in fill])
        written = model.generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=tokens,
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            eos_token_id=ends,
            pad_token_id=ends[0],
        )[:, width:].tolist()
        stops = [[position for position, token in enumerate(row) if token in ends] for row in written]
        return sum(found[0] + 1 if found else len(row) for found, row in zip(stops, written, strict=True))

    def write() -> dict[str, Any]:
        tokens, progress = 0, tell("writing", len(continued))
        for start in range(0, len(continued), task.batch_size):
            part = continued[start : start + task.batch_size]
            tokens += generate(part, task.max_tokens)
            progress(len(part))
        return {"tokens": tokens, "wasted_share": None}

    with torch.no_grad():
        generate(continued[:8], 8)
        return _watched(task.batch_size, write)


def _watched(batch: int, write: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """One batch size: seconds, peak memory, and what ``write`` says; ``failed`` instead where it did not fit."""
    import torch

    from lora_merge.engines.errors import EngineError
    from lora_merge.generation.bench.memory import host_peak, reset_host_peak

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    else:
        reset_host_peak()
    started = time.perf_counter()
    try:
        told: Mapping[str, Any] = write()
    except (EngineError, torch.OutOfMemoryError) as error:
        return {"batch": batch, "failed": str(error).splitlines()[0]}
    seconds = time.perf_counter() - started
    peak = torch.cuda.max_memory_allocated() if on_gpu else host_peak(os.getpid())
    return {"batch": batch, "seconds": seconds, "peak": peak, **told}


if __name__ == "__main__":
    main()
