"""The public functions of a merge; the command line is a thin shell over them."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_merge.console import Progress, no_progress
from lora_merge.merging.adapter import read_adapter
from lora_merge.merging.binding import bind
from lora_merge.merging.cautions import cautions
from lora_merge.merging.checkpoint import INDEX_FILE, Checkpoint, read_checkpoint
from lora_merge.merging.cuda import TorchDevice
from lora_merge.merging.devices import StartingDevice, choose_device
from lora_merge.merging.digests import adapter_digests, adapter_identity, file_digest
from lora_merge.merging.errors import MergeError
from lora_merge.merging.factors import PACKINGS, PEFT_PACKING
from lora_merge.merging.folders import resolve_folder
from lora_merge.merging.lineage import check_lineage
from lora_merge.merging.manifest import Artifact, MergeManifest, environment
from lora_merge.merging.plan import MergePlan, make_plan
from lora_merge.merging.recipes import shared_recipe
from lora_merge.merging.side_files import MANIFEST_FILE, SideFile
from lora_merge.merging.staging import check_free, staged_folder
from lora_merge.merging.token_ids import check_token_ids
from lora_merge.merging.writer import check_disk, write_plan, write_side_file
from lora_merge.readable import printable


@dataclass(frozen=True)
class MergeOptions:
    """How to merge.

    Attributes:
        from_4bit: merge through the dequantized 4-bit base, the weights that a QLoRA adapter was trained on.
        recipe: recipe settings given explicitly, before any other source: ``quant_type``, ``double_quant``, ``block_size``,
            ``quant_dtype``, ``skip_modules``, ``quantized_modules``.
        quant_config: a JSON file with the recipe, second to ``recipe``: a record of :func:`record_recipe`, or the
            ``BitsAndBytesConfig`` that the training script used.
        weights: the factor of each adapter's deltas, in the order of the adapters; None for 1 each.
        base_is_residual: the word that the base is the residual one which a PiSSA, OLoRA, CorDA, LoRA-GA or LoftQ adapter was
            trained with.
        packing: how lora_B of fused experts is laid out: ``"peft"`` or ``"expert-major"``.
        dtype: type of the output's floating tensors; None keeps each tensor's own.
        revision: revision of a base on the hub.
        trust_remote_code: whether Python code in the base may run to build its architecture.
        device: where the arithmetic runs: ``"cpu"``, ``"cuda"``, or ``"auto"``; see
            :func:`~lora_merge.merging.devices.choose_device`.
        jobs: worker threads; None for one a core.
        overwrite: whether an earlier merge at the output may be replaced.
    """

    from_4bit: bool = False
    recipe: Mapping[str, Any] = field(default_factory=dict)
    quant_config: str | os.PathLike[str] | None = None
    weights: tuple[float, ...] | None = None
    base_is_residual: bool = False
    packing: str = PEFT_PACKING
    dtype: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    device: str = "auto"
    jobs: int | None = None
    overwrite: bool = False


@dataclass(frozen=True)
class MergeResult:
    """A finished merge: the folder, its manifest and the plan that was carried out."""

    out: Path
    manifest: MergeManifest
    plan: MergePlan


# What training leaves in an adapter's repository beside the adapter.
_ADAPTER_IGNORE = ("checkpoint-*/*", "global_step*/*", "runs/*", "*.pt", "*.pth", "*.gguf", "*.onnx")

Adapters = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""One adapter, or several to be added up: folders or hub ids."""


def plan_merge(base: str | os.PathLike[str], adapter: Adapters, options: MergeOptions | None = None) -> MergePlan:
    """Settle everything that a merge would do, without writing anything.

    Args:
        base: a folder or hub id: the 16-bit or float32 checkpoint that the adapter's 4-bit base was made from, or the base as
            bitsandbytes stored it quantized.
        adapter: a folder or hub id of a PEFT LoRA adapter, or several of them, whose weighted deltas are added.

    Raises:
        MergeError: anything that would keep the merge from being exactly right.
    """
    options = options or MergeOptions()
    sources = [adapter] if isinstance(adapter, str | os.PathLike) else list(adapter)
    weights = _weights(options.weights, len(sources))
    if options.packing not in PACKINGS:
        raise MergeError(f"expert packing {options.packing!r}: expected one of {', '.join(PACKINGS)}")
    base_folder = resolve_folder(os.fspath(base), "base", options.revision)
    folders = [resolve_folder(os.fspath(source), "adapter", ignore=_ADAPTER_IGNORE) for source in sources]
    checkpoint = read_checkpoint(base_folder)
    loaded = tuple(read_adapter(folder, base_is_residual=options.base_is_residual) for folder in folders)
    check_lineage(checkpoint, loaded)
    given = [*options.recipe] + (["quant_config"] if options.quant_config is not None else [])
    if given and not options.from_4bit:
        raise MergeError(f"{given[0]} was given, but the merge goes into the original weights; set from_4bit=True")
    recipe = None
    if options.from_4bit:
        recipe = shared_recipe(options.recipe, options.quant_config, checkpoint.config, loaded)
    plan = make_plan(
        checkpoint,
        loaded,
        weights,
        recipe,
        dtype=options.dtype,
        packing=options.packing,
        trust_remote_code=options.trust_remote_code,
    )
    check_token_ids(plan)
    return plan


def _weights(given: tuple[float, ...] | None, count: int) -> tuple[float, ...]:
    if count == 0:
        raise MergeError("no adapter was given; expected at least one")
    weights = (1.0,) * count if given is None else tuple(given)
    if len(weights) != count or not all(math.isfinite(weight) for weight in weights):
        raise MergeError(f"weights {', '.join(map(str, weights))}: expected {count} finite numbers, one for each adapter")
    return weights


def merge(
    base: str | os.PathLike[str],
    adapter: Adapters,
    out: str | os.PathLike[str],
    options: MergeOptions | None = None,
    progress: Progress = no_progress,
) -> MergeResult:
    """Merge a LoRA adapter into its base and write the merged checkpoint to ``out``.

    The folder appears complete or not at all. Every merged weight is the float64 sum of base and update rounded once to the
    output type; every other tensor holds the base's bytes. What may not be meant, such as an assumed recipe, is a
    :class:`UserWarning` of one line (:mod:`~lora_merge.merging.cautions`).

    Args:
        base, adapter: as for :func:`plan_merge`.
        out: the folder to create.
        progress: told of bytes written; see :func:`total_bytes` for their sum.

    Raises:
        MergeError: the merge cannot be done exactly right, or reading or writing failed.
    """
    options = options or MergeOptions()
    plan = plan_merge(base, adapter, options)
    for caution in cautions(plan, options):
        warnings.warn(printable(caution), stacklevel=2)
    return execute(plan, out, options, progress)


def execute(
    plan: MergePlan, out: str | os.PathLike[str], options: MergeOptions | None = None, progress: Progress = no_progress
) -> MergeResult:
    """Carry out a plan of :func:`plan_merge`; see :func:`merge`."""
    options = options or MergeOptions()
    target = _absolute(out)
    for check in _checks_of_out(plan, target, options):
        check()
    jobs = options.jobs or os.cpu_count() or 1
    device = _device(plan, options)
    with staged_folder(target, overwrite=options.overwrite, marker=MANIFEST_FILE) as folder:
        adapter_files = [adapter_digests(adapter.folder.path) for adapter in plan.adapters]
        identities = [
            adapter_identity(adapter.folder.path, files) for adapter, files in zip(plan.adapters, adapter_files, strict=True)
        ]
        written = write_plan(plan, folder, jobs=jobs, binder=device.bind if device else bind, progress=progress)
        for adapter, files in zip(plan.adapters, adapter_files, strict=True):
            if adapter_digests(adapter.folder.path) != files:
                raise MergeError(f"{adapter.folder.path}: changed while it was merged; merge again when nothing writes to it")
        base_files = {**written.base, **_base_documents(plan.base)}
        artifacts = [
            Artifact.of(adapter.folder, files, identity)
            for adapter, files, identity in zip(plan.adapters, adapter_files, identities, strict=True)
        ]
        manifest = MergeManifest(
            plan.method,
            Artifact.of(plan.base.folder, base_files),
            artifacts[0],
            plan.recipe,
            options.dtype,
            written.output,
            {**environment(), "device": device.name if device else "cpu"},
            tuple(artifacts[1:]),
            plan.weights,
            options.base_is_residual,
            plan.packing,
        )
        write_side_file(SideFile(MANIFEST_FILE, "written", content=manifest.to_bytes()), folder)
    return MergeResult(target, manifest, plan)


def obstacles(plan: MergePlan, out: str | os.PathLike[str], options: MergeOptions | None = None) -> Iterator[str]:
    """What :func:`execute` would refuse to start for, one sentence each; nothing is written."""
    options = options or MergeOptions()
    checks = (*_checks_of_out(plan, _absolute(out), options), lambda: _wait_for_device(plan, options))
    for check in checks:
        try:
            check()
        except MergeError as error:
            yield str(error)


def total_bytes(plan: MergePlan) -> int:
    """The bytes that :func:`merge` reports to its ``progress`` in all."""
    return plan.weight_bytes + sum(len(shard.header) for shard in plan.shards)


def _base_documents(base: Checkpoint) -> dict[str, str]:
    names = ["config.json"] + ([INDEX_FILE] if base.index is not None else [])
    return {name: file_digest(base.folder.path / name) for name in names}


def _absolute(out: str | os.PathLike[str]) -> Path:
    return Path(os.path.abspath(Path(out).expanduser()))


def _checks_of_out(plan: MergePlan, out: Path, options: MergeOptions) -> tuple[Callable[[], None], ...]:
    """What has to hold of ``out`` before the first byte; each raises :class:`MergeError`."""
    return (
        lambda: _check_apart(out, plan),
        lambda: check_free(out, overwrite=options.overwrite, marker=MANIFEST_FILE),
        lambda: check_disk(plan, out),
    )


def _device(plan: MergePlan, options: MergeOptions) -> TorchDevice | StartingDevice | None:
    return choose_device(options.device, ((tensor.source, tensor.operations) for tensor in plan.tensors))


def _wait_for_device(plan: MergePlan, options: MergeOptions) -> None:
    """Raise :class:`MergeError` where the device cannot be used; one that is only starting says so when it is asked its name."""
    device = _device(plan, options)
    if device is not None:
        _ = device.name


def _check_apart(out: Path, plan: MergePlan) -> None:
    for role, folder in (("base", plan.base.folder.path), *(("adapter", adapter.folder.path) for adapter in plan.adapters)):
        inside = out.resolve()
        if inside == folder.resolve() or folder.resolve() in inside.parents or inside in folder.resolve().parents:
            raise MergeError(f"{out}: lies in the {role}'s folder {folder} or around it; choose a folder apart from both")
