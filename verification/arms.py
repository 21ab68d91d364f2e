"""Loads one model after the other and scores its arm; at no time are two in memory."""

from __future__ import annotations

import contextlib
import gc
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lora_merge.console import Progress, no_progress
from lora_merge.engines.labels import DecisionLabels
from lora_merge.engines.opening import EngineKind, open_engine
from lora_merge.engines.prompts import Prompt
from lora_merge.engines.protocol import Engine
from lora_merge.engines.scores import DecisionScore
from lora_merge.merging.modules import has_patterns
from lora_merge.merging.names import neutral
from lora_merge.merging.quantization import QuantRecipe
from lora_merge.merging.recipes import recipe_of
from verification.dequantized import dequantized_floor, score_dequantized
from verification.errors import Inconclusive
from verification.measurement import NoiseFloor
from verification.prepare import Prepared
from verification.recipe_checks import other_setting
from verification.reference import score_reference
from verification.reference_file import Reference, write_reference
from verification.sampling import SAMPLE, sample_of
from verification.sources import Sources

SMALL_BATCH = 8


@dataclass(frozen=True)
class EngineOptions:
    """The engine of the merged checkpoint: the one and the settings that generation will use.

    Attributes:
        engine: ``auto`` (vLLM where it is installed, else Transformers), ``hf`` or ``vllm``.
        dtype: ``auto`` for the checkpoint's own.
        device: for Transformers; vLLM runs on the device it was built for.
        tensor_parallel_size, max_model_len, gpu_memory_utilization, max_num_seqs: vLLM's own.
        trust_remote_code: whether Python code in a model folder may run.
    """

    engine: EngineKind = "auto"
    dtype: str = "auto"
    device: str = "auto"
    tensor_parallel_size: int | None = None
    max_model_len: int | None = None
    gpu_memory_utilization: float | None = None
    max_num_seqs: int | None = None
    trust_remote_code: bool = False

    def vllm_options(self) -> dict[str, Any]:
        """Those that are vLLM's and were given."""
        names = ("tensor_parallel_size", "max_model_len", "gpu_memory_utilization", "max_num_seqs")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return {**given, "trust_remote_code": True} if self.trust_remote_code else given

    def hf_options(self) -> dict[str, Any]:
        """Those of the Transformers engine, in batches as generation has them."""
        from lora_merge.engines.transformers_engine import usual_batches

        deciding, writing = usual_batches(self.device)
        given: dict[str, Any] = {"batch_size": deciding, "write_batch_size": writing}
        return {**given, "trust_remote_code": True} if self.trust_remote_code else given


@dataclass(frozen=True)
class Arm:
    """What one loaded model said: its scores, what it was, and how far its arithmetic moved by itself."""

    scores: tuple[DecisionScore, ...]
    facts: Mapping[str, Any]
    floors: tuple[NoiseFloor, ...] = field(default=())


class Stages:
    """Tells the user what is at work; the default says nothing."""

    @contextlib.contextmanager
    def stage(self, what: str, total: float, unit: str = "prompts") -> Iterator[Progress]:
        """Enter one stage of ``total`` prompts or bytes; gives what to tell of those that are done."""
        yield no_progress


def merged_arm(merged: Path, prepared: Prepared, options: EngineOptions, stages: Stages) -> Arm:
    """The merged checkpoint in the generation engine, and again in small batches on a sample."""
    labels = prepared.labels
    sample = sample_of(prepared.prompts, SAMPLE)
    with stages.stage("merged checkpoint", len(prepared.prompts) + len(sample)) as progress:
        engine = open_engine(
            options.engine,
            merged,
            dtype=options.dtype,
            device=options.device,
            hf_options=options.hf_options(),
            vllm_options={**options.vllm_options(), "longest": max(len(prompt.token_ids) for prompt in prepared.prompts) + 1},
        )
        with contextlib.closing(engine):
            scores = engine.score(prepared.prompts, labels, progress=progress)
            floor = _small_batches(engine, "the merged checkpoint", prepared.prompts, scores, labels, progress)
            return Arm(tuple(scores), engine.describe(), (floor,))


def live_reference(
    prepared: Prepared, sources: Sources, options: EngineOptions, record_to: Path | None, stages: Stages
) -> tuple[Arm, Arm]:
    """The QLoRA reference, 4-bit base and unmerged adapter, and the bare base on a sample, from one load.

    ``record_to``: also write the reference there, for other machines; then its noise floor is measured on all prompts.
    """
    from lora_merge.engines.loading import load_adapter, load_causal_model, resolve_device
    from lora_merge.engines.transformers_engine import TransformersEngine

    assert sources.base is not None and sources.adapter is not None
    base, adapter = sources.base.path, sources.adapter.path
    prompts, sample = prepared.prompts, sample_of(prepared.prompts, SAMPLE)
    rounds = 2 if record_to is not None else 1
    with stages.stage("QLoRA reference", rounds * len(prompts) + 3 * len(sample)) as progress:
        model: Any = load_causal_model(
            base,
            dtype=sources.live_dtype,
            device=resolve_device(options.device),
            trust_remote_code=options.trust_remote_code,
            bnb_config=sources.bnb_config(options.trust_remote_code),
            quantized=True,
        )
        model = load_adapter(model, adapter, base_is_residual=sources.base_is_residual)
        _check_quantized_modules(model, sources.recipe)  # before any forward: a repacked layer no longer tells
        engine = TransformersEngine.from_model(model)
        facts = {**engine.describe(), "base": sources.base.source, "adapter": sources.adapter.source, "recorded": False}
        floors: tuple[NoiseFloor, ...]
        if record_to is not None:
            reference = _record(model, prepared, record_to, sources, progress)
            scores, floors = list(reference.scores), reference.measured_floors
        else:
            dequantized = score_dequantized(model, sample, prepared.labels, engine.batch_size, progress)
            scores = engine.score(prompts, prepared.labels, progress=progress)
            by_kernel = dequantized_floor(scores, dequantized)
            floors = (_small_batches(engine, "the reference", prompts, scores, prepared.labels, progress),)
            floors += () if by_kernel is None else (by_kernel,)
        with model.disable_adapter():
            control = engine.score(sample, prepared.labels, progress=progress)
        del model
        engine.close()
        gc.collect()
    bare = {**facts, "adapter": None}
    return Arm(tuple(scores), facts, floors), Arm(tuple(control), bare)


def recorded_reference(reference: Reference, prepared: Prepared) -> Arm:
    """The arm that a recorded reference stands for, over the prompts of this run."""
    scores = {score.id: score for score in reference.scores}
    facts = {
        "kind": "transformers",
        "versions": reference.environment["versions"],
        "dtype": reference.dtypes["compute"] or reference.dtypes["embedding"],
        "device": reference.environment["device"],
        "settings": {"attention": reference.environment["attention"], "batch_size": reference.environment["batch_size"]},
        "base": reference.model["name"],
        "adapter": None if reference.adapter is None else reference.adapter["root"],
        "recorded": True,
        "sha256": reference.sha256,
    }
    return Arm(tuple(scores[prompt.id] for prompt in prepared.prompts), facts, reference.measured_floors)


def control_arm(prepared: Prepared, sources: Sources, options: EngineOptions, stages: Stages) -> Arm:
    """The bare base as the reference has it, without adapter, on a sample; with rows for the tokens that training added."""
    from lora_merge.engines.transformers_engine import TransformersEngine

    assert sources.base is not None
    sample, labels = sample_of(prepared.prompts, SAMPLE), prepared.labels
    highest = max(labels.skip.token_id, labels.write.token_id, *(max(prompt.token_ids) for prompt in sample))
    settings: dict[str, Any] = {
        "device": options.device,
        "trust_remote_code": options.trust_remote_code,
        "least_vocabulary": highest + 1,
    }
    with stages.stage("bare base", len(sample)) as progress:
        if sources.recipe is None and not sources.prequantized:
            engine = TransformersEngine.from_checkpoint(sources.base.path, **settings)
        else:
            settings["dtype"] = sources.live_dtype
            engine = TransformersEngine.from_quantized(
                sources.base.path, None, sources.bnb_config(options.trust_remote_code), **settings
            )
        with contextlib.closing(engine):
            scores = engine.score(sample, prepared.labels, progress=progress)
            return Arm(tuple(scores), {**engine.describe(), "base": sources.base.source, "adapter": None})


def float32_arms(
    merged: Path, prepared: Prepared, sources: Sources, options: EngineOptions, scratch: Path, stages: Stages
) -> tuple[Arm, Arm]:
    """Both functions in float32 arithmetic: what was trained, dequantized base plus adapter, and the merged weights.

    The first is merged anew in float32 below ``scratch``, four bytes a parameter, and removed again.
    """
    from lora_merge.merging.api import execute, plan_merge

    if sources.base is None or sources.adapter is None:
        raise Inconclusive("--split needs base and adapter on this machine; give --base and --adapter")
    merging = sources.merge_options(dtype="float32", trust_remote_code=options.trust_remote_code)
    prompts = len(prepared.prompts)
    with tempfile.TemporaryDirectory(prefix=".float32-", dir=scratch) as place:
        truth = Path(place) / "reference"
        execute(plan_merge(sources.base.path, sources.adapter.path, merging), truth, merging)
        with stages.stage("reference in float32", prompts) as progress:
            first = _float32_arm(truth, prepared, options, progress)
    with stages.stage("merged checkpoint in float32", prompts) as progress:
        return first, _float32_arm(merged, prepared, options, progress)


def _float32_arm(folder: Path, prepared: Prepared, options: EngineOptions, progress: Progress) -> Arm:
    from lora_merge.engines.transformers_engine import TransformersEngine

    engine = TransformersEngine.from_checkpoint(
        folder, dtype="float32", device=options.device, trust_remote_code=options.trust_remote_code
    )
    with contextlib.closing(engine):
        return Arm(tuple(engine.score(prepared.prompts, prepared.labels, progress=progress)), engine.describe())


def _record(model: Any, prepared: Prepared, path: Path, sources: Sources, progress: Progress) -> Reference:
    """Record the model that was loaded by the recipe of ``sources``: its layers cannot tell more than who told that one."""
    assert sources.adapter is not None
    scored = score_reference(
        model,
        prepared.prompts,
        prepared.labels,
        adapter_dir=sources.adapter.path,
        prefill=prepared.prefill,
        second_batch_size=SMALL_BATCH,
        progress=progress,
    )
    recipe = scored.recipe
    if recipe is not None and sources.recipe is not None:
        recipe = replace(recipe, origins=sources.recipe.origins)
    reference = replace(scored, recipe=recipe, recipe_origin=sources.recipe_origin)
    write_reference(reference, path)
    return reference


def _small_batches(
    engine: Engine,
    what: str,
    prompts: Sequence[Prompt],
    scores: Sequence[DecisionScore],
    labels: DecisionLabels,
    progress: Progress,
) -> NoiseFloor:
    """The floor between ``scores``, made at the engine's ease, and scores of a sample made a few prompts at a time."""
    sample = sample_of(prompts, SAMPLE)
    first = {score.id: score for score in scores}
    again: list[DecisionScore] = []
    for start in range(0, len(sample), SMALL_BATCH):
        again += engine.score(sample[start : start + SMALL_BATCH], labels, progress=progress)
    source = f"{what} at {SMALL_BATCH} prompts a call against all at once"
    return NoiseFloor.between(source, [first[prompt.id] for prompt in sample], again)


def _check_quantized_modules(model: Any, recipe: QuantRecipe | None) -> None:
    """A recipe that was read from live layers names them; a fresh load must quantize the same, and in the same way."""
    wanted = None if recipe is None else recipe.quantized_modules
    live = recipe_of(model)
    if recipe is not None and live is not None and (wrong := other_setting(recipe, live)):
        raise Inconclusive(
            f"the reference's layers have {wrong} {getattr(live, wrong)}, its recipe says {getattr(recipe, wrong)}: record a "
            "reference at training instead"
        )
    if wanted is None or live is None or has_patterns(wanted):
        return
    expected, found = ({neutral(name) for name in names} for names in (wanted, live.quantized_modules or ()))
    if expected != found:
        module = min(expected ^ found)
        where = "in training and not here" if module in expected else "here and not in training"
        raise Inconclusive(
            f"module {module} was quantized {where}, by another class or version of transformers; record a reference at training "
            "instead, or give --quant-config with the training's BitsAndBytesConfig"
        )
