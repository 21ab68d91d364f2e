"""The public function of the benchmark; the command line is a thin shell over it."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lora_merge.engines.labels import DecisionLabels, resolve_labels
from lora_merge.engines.opening import vllm_is_installed
from lora_merge.engines.prompts import DEFAULT_PREFILL, Prompt, iter_prompt_rows, tokenize_rows
from lora_merge.generation.api import check_gate
from lora_merge.generation.bench.arms import ARMS, Arm, ArmResult, Task, WriteList
from lora_merge.generation.bench.machine import machine
from lora_merge.generation.bench.measure import make_write_list
from lora_merge.generation.bench.proof import Limits, SameWork, proofs, within_engines
from lora_merge.generation.bench.runner import Runner
from lora_merge.generation.bench.worker import write_work
from lora_merge.generation.errors import GenerationError
from lora_merge.generation.options import EngineOptions, GateOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Say = Callable[[str], None]


@dataclass(frozen=True)
class BenchOptions:
    """What to compare, and on what.

    Attributes:
        num_prompts: how many of the prompts to take: the first ones whose token ids are distinct.
        arms: names of the arms; None for all whose engine is installed.
        prefill, skip_label, write_label: how the decision is read.
        max_tokens: most tokens after the decision token.
        decide_batch, write_batch: batch sizes of the Transformers engine; None for those of ``gated-generate`` on the device.
        chunk_size: prompts that a two-phase arm decides and then writes at a time, as ``gated-generate`` does.
        skip_threshold: also measure what it brings to apply this threshold before writing.
        quantiles: groups by text length to time apart; 0 for none.
        sweep: generation batch sizes of the Transformers engine to try.
        sweep_prompts: try them on so many of the prompts to write, evenly spread; None for all.
        stock: also time ``model.generate`` of Transformers at the sizes of the sweep.
        repeats: how often the work of each arm is done, once it has started; the median counts.
        engine: dtype, device and vLLM's own options.
        limits: what still counts as the same work.
        resume: do not measure again what was measured with the same settings.
    """

    num_prompts: int
    arms: tuple[str, ...] | None = None
    prefill: str = DEFAULT_PREFILL
    skip_label: str = "skip"
    write_label: str = "write"
    max_tokens: int = 64
    decide_batch: int | None = None
    write_batch: int | None = None
    chunk_size: int = 8192
    skip_threshold: float | None = None
    quantiles: int = 4
    sweep: tuple[int, ...] = ()
    sweep_prompts: int | None = None
    stock: bool = False
    repeats: int = 1
    engine: EngineOptions = field(default_factory=EngineOptions)
    limits: Limits = field(default_factory=Limits)
    resume: bool = False


@dataclass(frozen=True)
class BenchResult:
    """Everything that was measured.

    Attributes:
        options: what was asked for.
        prompts: how many, and their tokens.
        arms: name -> result.
        reference: the arm that fixed the list, and that the others are held against.
        listed: the prompts to write.
        proof: name -> how an arm's work compares with the reference's.
        within: name of a one-shot arm -> how its work compares with the same engine's in two phases.
        sweep, stock: batch sizes, their times and memory.
        swept: how many texts were written at each of these sizes.
        machine: where it ran.
    """

    options: BenchOptions
    prompts: Mapping[str, Any]
    arms: Mapping[str, ArmResult]
    reference: str
    listed: WriteList
    proof: Mapping[str, SameWork]
    within: Mapping[str, SameWork]
    sweep: Sequence[Mapping[str, Any]]
    stock: Sequence[Mapping[str, Any]]
    swept: int
    machine: Mapping[str, Any]


def bench_engines(
    model: str | os.PathLike[str],
    prompts: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    options: BenchOptions,
    *,
    verbose: bool = False,
    say: Say = lambda text: None,
) -> BenchResult:
    """Measure every arm on the same token ids, and hold what they did against each other.

    ``folder`` keeps what each process measured and said. ``say`` is told of each arm as it begins.

    Raises:
        GenerationError: ``folder`` holds an earlier measurement, there are too few distinct prompts, an arm is unknown or its
            engine not installed, or a process failed.
        EngineError: a prompt or a label cannot be used.
    """
    options = _with_batches(options)
    arms = chosen_arms(options.arms, say)
    target = Path(folder) / "parts"
    if Path(folder).is_file():
        raise GenerationError(f"{folder}: is a file; expected a folder as --out")
    if target.resolve().is_relative_to(Path(model).resolve()):
        raise GenerationError(f"{folder}: lies in the checkpoint's folder and would change it; give an --out elsewhere")
    if not options.resume and any(target.glob("*.json")):
        raise GenerationError(f"{folder}: holds an earlier measurement; add --resume to go on with it, or give another --out")
    tokenizer = _tokenizer(model)
    work = distinct_prompts(Path(prompts), tokenizer, options, _room(model, options), _vocabulary(model))
    labels = resolve_labels(tokenizer, work, prefill=options.prefill, skip=options.skip_label, write=options.write_label)
    place = machine()
    runner = Runner(target, place, resume=options.resume, verbose=verbose, say=say)
    base = _base_task(Path(model), target, work, labels, options)
    results: dict[str, ArmResult] = {}
    listed: WriteList | None = None
    for arm in arms:
        result = results[arm.name] = runner.arm(_arm_task(base, arm, options, listed))
        if listed is None:
            listed = make_write_list(result.decisions, result.skip_probabilities, result.texts, options.skip_threshold)
    if listed is None or not listed.indices:
        raise GenerationError(f"none of the {len(work)} prompts is decided as {options.write_label!r}; there is nothing to write")
    reference = arms[0].name
    swept = listed.spread(options.sweep_prompts)
    return BenchResult(
        options=options,
        prompts={"number": len(work), "tokens": sum(len(prompt.token_ids) for prompt in work)},
        arms=results,
        reference=reference,
        listed=listed,
        proof=proofs(reference, results, listed, options.limits),
        within=within_engines(results, listed, options.limits),
        sweep=_sizes(runner, base, options, swept, "sweep"),
        stock=_sizes(runner, base, options, swept, "stock") if options.stock else [],
        swept=len(swept.indices),
        machine=place,
    )


def _with_batches(options: BenchOptions) -> BenchOptions:
    from lora_merge.engines.transformers_engine import usual_batches

    given = options.decide_batch, options.write_batch
    deciding, writing = (
        usual if size is None else size for size, usual in zip(given, usual_batches(options.engine.device), strict=True)
    )
    return dataclasses.replace(options, decide_batch=deciding, write_batch=writing)


def chosen_arms(names: Sequence[str] | None, say: Say = lambda text: None) -> list[Arm]:
    """The arms of these names in the order they run, or all that can run here."""
    known = {arm.name: arm for arm in ARMS}
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise GenerationError(f"arm {unknown[0]!r} is unknown; expected some of {', '.join(known)}")
    wanted = [arm for arm in ARMS if names is None or arm.name in names]
    if vllm_is_installed() or all(arm.engine == "hf" for arm in wanted):
        return wanted
    if names is not None and any(arm.engine == "vllm" for arm in wanted):
        raise GenerationError("a vLLM arm was asked for and vLLM is not installed; run: pip install 'lora-merge[vllm]'")
    say("vLLM is not installed: only the Transformers arms are measured")
    return [arm for arm in wanted if arm.engine != "vllm"]


def distinct_prompts(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    options: BenchOptions,
    max_length: int | None,
    vocabulary: int | None = None,
) -> list[Prompt]:
    """The first ``options.num_prompts`` prompts of ``path`` whose token ids are distinct.

    A repeated prompt would flatter a prefix cache.
    """
    rows = tokenize_rows(iter_prompt_rows(path), tokenizer, prefill=options.prefill, max_length=max_length, vocabulary=vocabulary)
    found: dict[tuple[int, ...], Prompt] = {}
    for row in rows:
        if not isinstance(row, Prompt):
            raise GenerationError(f"{path} line {row.line}: {row.reason}")
        found.setdefault(row.token_ids, row)
        if len(found) == options.num_prompts:
            return list(found.values())
    raise GenerationError(f"{path} holds {len(found)} distinct prompts; --num-prompts asks for {options.num_prompts}")


def _tokenizer(model: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    from lora_merge.engines.model_files import load_tokenizer

    return load_tokenizer(os.fspath(model))


def _room(model: str | os.PathLike[str], options: BenchOptions) -> int | None:
    from lora_merge.engines.model_files import max_positions

    limits = [limit for limit in (max_positions(os.fspath(model)), options.engine.max_model_len) if limit is not None]
    return min(limits) - 1 - options.max_tokens if limits else None


def _vocabulary(model: str | os.PathLike[str]) -> int | None:
    from lora_merge.engines.model_files import vocabulary_rows

    return vocabulary_rows(os.fspath(model))


def _base_task(model: Path, folder: Path, work: Sequence[Prompt], labels: DecisionLabels, options: BenchOptions) -> Task:
    file = folder / "prompts.jsonl"
    write_work(work, file)
    return Task(
        part="arm",
        engine="hf",
        mode="two-phase",
        model=str(model.absolute()),
        model_root=check_gate(model, GateOptions(allow_ungated=True)).root,
        prompts_file=str(file.absolute()),
        prompts_sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
        labels=labels.to_json(),
        max_tokens=options.max_tokens,
        dtype=options.engine.dtype,
        device=options.engine.device,
        chunk_size=options.chunk_size,
        threshold=options.skip_threshold,
        quantiles=options.quantiles,
    )


def _arm_task(base: Task, arm: Arm, options: BenchOptions, listed: WriteList | None) -> Task:
    batches = {"batch_size": options.decide_batch, "write_batch_size": options.write_batch}
    engine_options = batches if arm.engine == "hf" else options.engine.vllm_options()
    return dataclasses.replace(
        base, engine=arm.engine, mode=arm.mode, engine_options=engine_options, write_list=listed, repeats=options.repeats
    )


def _sizes(
    runner: Runner, base: Task, options: BenchOptions, swept: WriteList, part: Literal["sweep", "stock"]
) -> list[dict[str, Any]]:
    """Each size in a process of its own: its peak memory is no other size's, and what was measured outlives a kill."""
    tasks = [dataclasses.replace(base, part=part, write_list=swept, batch_size=size) for size in options.sweep]
    return [runner.measure(task) for task in tasks]
