"""``lora-merge``: the command line over :func:`lora_merge.merge`."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import click

import lora_merge
from lora_merge.console import note, progress_bar, quiet_libraries, reports_errors, say, warn
from lora_merge.readable import json_text

if TYPE_CHECKING:
    from lora_merge.merging.api import MergeOptions, MergeResult
    from lora_merge.merging.plan import MergePlan

FLOAT_TYPES = ("bfloat16", "float16", "float32")
BLOCK_SIZES = tuple(str(1 << power) for power in range(5, 13))
_FLAGS = {"block_size": "--blocksize"}
"""Flags that are named otherwise than their setting."""


@click.command("lora-merge", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option(
    "--base",
    required=True,
    metavar="BASE",
    help="Base checkpoint in safetensors (16-bit, float32, bitsandbytes): a folder or a hub id.",
)
@click.option(
    "--adapter",
    "adapters",
    required=True,
    multiple=True,
    metavar="ADAPTER",
    help="PEFT LoRA adapter: a folder or a hub id. Give it again to add up several.",
)
@click.option("--weights", metavar="W,W", help="Factor of each adapter's deltas, such as 0.7,0.3.  [default: 1 each]")
@click.option("--out", required=True, metavar="OUT", help="Folder to create; it appears complete or not at all.")
@click.option(
    "--from-4bit", is_flag=True, help="Merge through the dequantized 4-bit base, the weights a QLoRA adapter was trained on."
)
@click.option("--quant-type", type=click.Choice(["nf4", "fp4"]), help="4-bit type of the training run.")
@click.option("--double-quant/--no-double-quant", default=None, help="Whether training used double quantization.")
@click.option("--blocksize", "block_size", type=click.Choice(BLOCK_SIZES), help="Weights a quantization block.  [default: 64]")
@click.option(
    "--quant-dtype", type=click.Choice(FLOAT_TYPES), help="Type of the weights when they were quantized.  [default: bfloat16]"
)
@click.option(
    "--quant-config", metavar="FILE", help="JSON file with the recipe: quantization_recipe.json or a BitsAndBytesConfig."
)
@click.option(
    "--quantized-modules",
    metavar="NAMES",
    help="Modules that were 4-bit in training, by commas: names, patterns with *, and 'default' for transformers' rule.",
)
@click.option(
    "--base-is-residual",
    is_flag=True,
    help="BASE is the residual base that this PiSSA, OLoRA, CorDA, LoRA-GA or LoftQ adapter was trained with.",
)
@click.option(
    "--expert-packing",
    "packing",
    type=click.Choice(["peft", "expert-major"]),
    default="peft",
    show_default=True,
    help="How lora_B of fused experts is laid out: rank by rank (PEFT), or expert by expert (older Unsloth).",
)
@click.option("--dtype", type=click.Choice(FLOAT_TYPES), help="Type of the output.  [default: each tensor keeps its own]")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Where the arithmetic runs; cuda goes through training's own kernels, cpu starts faster, and so auto is cpu.",
)
@click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="Worker threads.  [default: one a core]")
@click.option("--overwrite", is_flag=True, help="Replace an earlier merge at OUT, at the very end.")
@click.option("--dry-run", is_flag=True, help="Print the plan, say what would be refused (exit 1), and write nothing.")
@click.option("--revision", metavar="R", help="Revision of a base on the hub.")
@click.option("--trust-remote-code", is_flag=True, help="Let Python code in the base run to build its architecture.")
@click.option("--format", "output_format", type=click.Choice(["human", "json"]), default="human", show_default=True)
@click.option("--quiet", is_flag=True, help="No progress and no notes; warnings and errors only.")
@click.version_option(lora_merge.__version__, prog_name="lora-merge")
@reports_errors
def main(base: str, adapters: tuple[str, ...], out: str, dry_run: bool, output_format: str, quiet: bool, **settings: Any) -> None:
    """Merge a LoRA adapter into its base and write a checkpoint that any engine loads.

    With --from-4bit the base is first taken through the 4-bit quantization the adapter was trained on, so that the merged model
    decides as the trained one did. The recipe comes from the flags, else from what was recorded beside the adapter, else from
    the usual QLoRA settings (NF4, double quantization, block 64, bfloat16), which are then marked as assumed.

    Exit codes: 0 merged, 1 impossible or failed (nothing is left behind), 2 usage, 130 interrupted.
    """
    quiet_libraries()
    _keep_freed_memory()
    if settings["device"] == "cuda":
        from lora_merge.merging import cuda_start

        cuda_start.begin(quantizing=settings["from_4bit"], own_process=True)
    from lora_merge.merging import api
    from lora_merge.merging.cautions import cautions, notes

    options = _options(settings)
    _check_usage(options, len(adapters))
    plan = api.plan_merge(base, adapters, options)
    for caution in cautions(plan, options):
        warn(caution)
    for line in () if quiet else notes(plan):
        note(line)
    if dry_run:
        obstacles = list(api.obstacles(plan, out, options))
        _print_plan(plan, options, obstacles, output_format)
        for obstacle in obstacles:
            warn(f"this merge would be refused: {obstacle}")
        sys.exit(1 if obstacles else 0)
    if not quiet:
        note(_intention(plan))
    with progress_bar("merging", api.total_bytes(plan), unit="bytes", quiet=quiet) as progress:
        result = api.execute(plan, out, options, progress)
    _print_result(result, output_format)


def _options(settings: dict[str, Any]) -> MergeOptions:
    from lora_merge.merging.api import MergeOptions

    recipe = {name: settings.pop(name) for name in ("quant_type", "double_quant", "block_size", "quant_dtype")}
    modules, weights = settings.pop("quantized_modules"), settings.pop("weights")
    if modules is not None:
        recipe["quantized_modules"] = tuple(name.strip() for name in modules.split(",") if name.strip())
    if weights is not None:
        settings["weights"] = _numbers(weights)
    if recipe["block_size"] is not None:
        recipe["block_size"] = int(recipe["block_size"])
    return MergeOptions(recipe={name: value for name, value in recipe.items() if value is not None}, **settings)


def _check_usage(options: MergeOptions, adapters: int) -> None:
    """Flags that cannot go together, by their own names; the library would name its parameters."""
    import math

    weights = options.weights
    if weights is not None and (len(weights) != adapters or not all(map(math.isfinite, weights))):
        found = ",".join(f"{weight:g}" for weight in weights)
        numbers = "one finite number" if adapters == 1 else f"{adapters} finite numbers, one for each --adapter"
        raise click.BadParameter(f"{found}: expected {numbers}", param_hint="--weights")
    given = [*options.recipe] + (["quant_config"] if options.quant_config is not None else [])
    if given and not options.from_4bit:
        flag = _FLAGS.get(given[0], f"--{given[0].replace('_', '-')}")
        raise click.UsageError(f"{flag} was given, but the merge goes into the original weights; add --from-4bit")


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise click.BadParameter(
            f"{text!r}: expected numbers separated by commas, such as 0.7,0.3", param_hint="--weights"
        ) from error


def _keep_freed_memory() -> None:
    """Let the allocator keep what is freed: blocks of a megabyte come and go, and fresh pages for each cost a tenth of the time.

    Peak memory stays what it is. A property of the process, so the command sets it and the library does not.
    """
    import contextlib
    import ctypes

    trim_threshold, mmap_threshold = -1, -3  # names of <malloc.h>
    with contextlib.suppress(OSError, AttributeError):  # another C library has no mallopt
        library = ctypes.CDLL(None)
        library.mallopt(trim_threshold, 1 << 30)
        library.mallopt(mmap_threshold, 1 << 30)


def _intention(plan: MergePlan) -> str:
    merged = sum(1 for tensor in plan.tensors if tensor.operations or tensor.target)
    if plan.recipe:
        through = f"through the 4-bit base ({plan.recipe.describe()}; {plan.recipe.source})"
    else:
        through = "into the original weights" if plan.method == "original-weights" else "through the 8-bit base"
    change = f"{merged} of {len(plan.tensors)} tensors change, {_size(plan.output_bytes)}"
    pieces = sum(len(adapter.pairs) + len(adapter.replacements) + len(adapter.token_rows) for adapter in plan.adapters)
    untied = "; tied tensors are no longer equal: they are written apart (tie_word_embeddings false)" if plan.untied else ""
    return f"merging {pieces} updates {through}: {change}{untied}"


def _print_plan(plan: MergePlan, options: MergeOptions, obstacles: list[str], output_format: str) -> None:
    jobs = options.jobs or os.cpu_count() or 1
    if output_format == "json":
        click.echo(json_text({**plan.to_json(jobs), "obstacles": obstacles}, indent=2))
        return
    for shard in plan.shards:
        say(f"{shard.file}: {len(shard.tensors)} tensors")
        for tensor in shard.tensors:
            steps = " -> ".join(_step(operation.to_json()) for operation in tensor.operations) or (
                "copied" if tensor.copied else f"cast from {tensor.source.dtype.torch_name}"
            )
            if tensor.target is not None:
                steps = f"from {tensor.source.name}: {steps}"
            say(f"  {tensor.name} {list(tensor.shape)} {tensor.dtype.torch_name} {_size(tensor.nbytes)}: {steps}")
    for file in plan.side_files:
        say(f"{file.name}: {file.origin}")
    if plan.recipe is not None:
        say(f"recipe: {plan.recipe.describe()} ({plan.recipe.source})")
    say(
        f"disk: {_size(plan.disk_bytes)}, working memory: at most {_size(plan.memory_bytes(jobs))} with {jobs} jobs; "
        "nothing was written"
    )


def _step(operation: dict[str, Any]) -> str:
    """One operation in a few words: its name and what sets it apart."""
    if operation["operation"] == "add low rank":
        return f"add rank {operation['rank']} x {operation['scaling']:g}"
    if operation["operation"] == "add low rank parts":
        return f"add rank {operation['rank']} x {operation['scaling']:g} to {operation['parts']} {operation['what']}"
    detail = next((operation[key] for key in ("recipe", "magnitude", "vector", "values") if key in operation), None)
    return f"{operation['operation']} ({detail})" if detail else str(operation["operation"])


def _print_result(result: MergeResult, output_format: str) -> None:
    manifest = result.manifest.to_json()
    if output_format == "json":
        click.echo(json_text({"out": str(result.out), "manifest": manifest}, indent=2))
        return
    next_step = f"verify-skip-drift --merged {result.out} --prompts PROMPTS"
    say(f"merged into {result.out} ({result.manifest.method}); verify it next: {next_step}")


def _size(count: int) -> str:
    value = float(count)
    for unit in ("bytes", "KB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:,.0f} {unit}" if unit == "bytes" else f"{value:,.1f} {unit}"
        value /= 1000
    raise AssertionError("unreachable")
