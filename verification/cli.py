"""``verify-skip-drift``: the command line over :func:`verification.verify_skip_drift` and :func:`verification.judge`."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

import lora_merge
from lora_merge.console import Progress, note, progress_bar, quiet_libraries, reports_errors
from lora_merge.readable import json_text
from lora_merge.shares import Share
from verification.options import FLOAT_TYPES, Command, recipe_options, source_options

if TYPE_CHECKING:
    from verification.api import VerifyOptions
    from verification.limits import Limits
    from verification.verdict import Verdict


def _device(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """A device by a name that can be one; whether this machine has it is found out later, and is not wrong usage."""
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", value) is None:
        raise click.BadParameter(f"{value!r} is none of auto, cpu, cuda and cuda:1", context, parameter)
    return value


_SHARE = Share(0, 1, min_open=True, max_open=True)
_LIMITS = ("max_delta", "skip_threshold", "max_p99_delta", "max_abs_delta", "max_bias", "max_flip_rate")


def limit_options(command: Command) -> Command:
    """The limits, shared by measuring and judging again."""
    options = (
        click.option(
            "--max-delta",
            type=_SHARE,
            default=0.02,
            show_default=True,
            help="Limit of the MEAN |delta| of the skip probability, held against its 95 % upper bound; single prompts may "
            "differ by more. Also of the mean loss of label mass.",
        ),
        click.option(
            "--skip-threshold",
            type=Share(0, 1),
            default=0.5,
            show_default=True,
            help="Skip probability up to which a text is kept; for the flips at the threshold.",
        ),
        click.option("--max-p99-delta", type=_SHARE, help="Limit of the 99th percentile of |delta|; needs 299 prompts."),
        click.option("--max-abs-delta", type=_SHARE, help="Limit of the largest |delta| of any prompt."),
        click.option("--max-bias", type=_SHARE, help="Limit of |mean delta|."),
        click.option(
            "--max-flip-rate", type=_SHARE, help="Limit of the share of flipped decisions, at arg-max and at threshold."
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def output_options(command: Command) -> Command:
    """Report folder, signature and format."""
    options = (
        click.option("--sign-key", metavar="KEY", help="Ed25519 private key (PEM) that signs the certificate."),
        click.option("--format", "output_format", type=click.Choice(["human", "json"]), default="human", show_default=True),
    )
    for option in reversed(options):
        command = option(command)
    return command


_SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


@click.group(
    "verify-skip-drift", invoke_without_command=True, context_settings=_SETTINGS, subcommand_metavar="[judge DRIFT.jsonl]"
)
@click.option("--merged", metavar="OUT", help="Folder of the merged checkpoint.  [required]")
@click.option("--prompts", metavar="PROMPTS", help="JSON Lines prompt file.  [required]")
@limit_options
@source_options
@click.option("--reference", metavar="FILE", help="A recorded reference, instead of a live one.")
@click.option("--record-reference", metavar="FILE", help="Write the live reference there.")
@click.option("--prefill", metavar="TEXT", help='Text between prompt and decision.  [default: {"decision": "]')
@click.option("--skip-label", metavar="WORD", help="[default: skip]")
@click.option("--write-label", metavar="WORD", help="[default: write]")
@click.option("--num-prompts", type=click.IntRange(min=1), metavar="N", help="Score a seeded sample of N prompts.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the sample.")
@click.option("--control/--no-control", default=True, show_default=True, help="Score the bare base on a sample.")
@click.option("--audit/--no-audit", default=True, show_default=True, help="Hold every weight against base and adapter first.")
@click.option("--split", is_flag=True, help="Also measure in float32 arithmetic, to tell merge drift from engine drift.")
@click.option("--engine", type=click.Choice(["auto", "hf", "vllm"]), default="auto", show_default=True, help="Of generation.")
@click.option("--dtype", type=click.Choice(["auto", *FLOAT_TYPES]), default="auto", show_default=True, help="Of the engine.")
@click.option("--device", callback=_device, default="auto", show_default=True, help="Of Transformers: auto, cpu, cuda or cuda:1.")
@click.option("--tensor-parallel-size", type=click.IntRange(min=1), metavar="N", help="vLLM's own.")
@click.option("--max-model-len", type=click.IntRange(min=1), metavar="N", help="vLLM's own.")
@click.option("--gpu-memory-utilization", type=_SHARE, metavar="SHARE", help="vLLM's own.")
@click.option("--max-num-seqs", type=click.IntRange(min=1), metavar="N", help="vLLM's own.")
@click.option("--trust-remote-code", is_flag=True, help="Let Python code in a model folder run.")
@click.option("--report", metavar="DIR", help="Report folder.  [default: OUT-report]")
@output_options
@click.option("--quiet", is_flag=True, help="No progress and no notes.")
@click.option("--verbose", is_flag=True, help="Let the libraries speak.")
@click.version_option(lora_merge.__version__, prog_name="verify-skip-drift")
@click.pass_context
@reports_errors
def main(context: click.Context, /, output_format: str, quiet: bool, verbose: bool, **settings: Any) -> None:
    """Show that a merged checkpoint decides as its QLoRA reference did, and certify it.

    The reference is the 4-bit base with the unmerged adapter, live or recorded. The limit bounds the mean |delta| of the skip
    probability, P(skip) / (P(skip) + P(write)), over the prompts. The report folder gets drift.json, drift.jsonl, junit.xml and
    the certificate gate.intoto.json, which gated-generate asks for. A warned verdict exits with 0 and is certified as WARNED;
    generation then needs consent.

    `verify-skip-drift judge DRIFT.jsonl --max-delta 0.01` judges a measurement again, without a model.

    Exit codes: 0 passed or warned, 1 failed, 2 usage, 3 inconclusive (never a pass, no certificate), 130 interrupted.
    """
    if context.invoked_subcommand is not None:
        given = [name for name in settings if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE]
        if given:
            raise click.UsageError(f"--{given[0].replace('_', '-')} before judge has no effect; give options of judge after it")
        return
    for name in ("merged", "prompts"):
        if settings[name] is None:
            raise click.UsageError(f"Missing option '--{name}'.")
    if settings["reference"] is not None and settings["record_reference"] is not None:
        raise click.UsageError("--reference and --record-reference exclude each other: one is read instead of the other written")
    quiet_libraries(verbose)
    from verification.api import verify_skip_drift
    from verification.errors import Interrupted, verdict_expected

    options = _verify_options(settings)
    try:
        with verdict_expected():
            verdict = verify_skip_drift(settings["merged"], settings["prompts"], options, _terminal_stages(quiet))
    except KeyboardInterrupt:
        raise Interrupted("interrupted before there was a verdict: the report is as it was; run it again") from None
    _finish(verdict, output_format)


@main.command("judge", context_settings=_SETTINGS)
@click.argument("drift_file", metavar="DRIFT.jsonl")
@limit_options
@click.option("--report", metavar="DIR", help="Also write a whole report there, certificate included.")
@output_options
@reports_errors
def judge_command(drift_file: str, report: str | None, sign_key: str | None, output_format: str, **limits: Any) -> None:
    """Judge a measurement again by other limits, without a model.

    Exit codes as for measuring.
    """
    from verification.api import judge_again
    from verification.errors import verdict_expected

    if sign_key is not None and report is None:
        raise click.UsageError("--sign-key signs the certificate, which only --report writes")
    with verdict_expected():
        verdict = judge_again(drift_file, _limits(limits), report, sign_key)
    _finish(verdict, output_format)


def _verify_options(settings: dict[str, Any]) -> VerifyOptions:
    from verification.api import VerifyOptions
    from verification.arms import EngineOptions
    from verification.measure import MeasureOptions
    from verification.prepare import DecisionOptions
    from verification.sources import SourceOptions

    def picked(*names: str) -> dict[str, Any]:
        return {name: settings[name] for name in names}

    recipe = recipe_options(settings)
    engine = ("engine", "dtype", "device", "tensor_parallel_size", "max_model_len", "gpu_memory_utilization", "max_num_seqs")
    measure = MeasureOptions(
        sources=SourceOptions(recipe=recipe, **picked("base", "adapter", "revision", "quant_config", "other_base_name")),
        decision=DecisionOptions(**picked("prefill", "skip_label", "write_label", "num_prompts", "seed")),
        engine=EngineOptions(**picked(*engine, "trust_remote_code")),
        **picked("reference", "record_reference", "control", "audit", "split"),
    )
    return VerifyOptions(limits=_limits(picked(*_LIMITS)), measure=measure, **picked("report", "sign_key"))


def _limits(values: dict[str, Any]) -> Limits:
    from verification.limits import Limits

    return Limits.from_mapping(values)


def _terminal_stages(quiet: bool) -> Any:
    from verification.arms import Stages

    class TerminalStages(Stages):
        @contextlib.contextmanager
        def stage(self, what: str, total: float, unit: str = "prompts") -> Iterator[Progress]:
            if not quiet:
                note(f"{'scoring' if unit == 'prompts' else 'checking'}: {what}")
            with progress_bar(what, total, unit=unit, quiet=quiet) as progress:
                yield progress

    return TerminalStages()


def _finish(verdict: Verdict, output_format: str) -> None:
    """Print the verdict on standard output and leave with its exit code."""
    from verification.checks import Outcome
    from verification.report import render

    if output_format == "json":
        click.echo(json_text(verdict.to_json(), indent=2, allow_nan=False))
    else:
        colors = {Outcome.PASSED: "green", Outcome.WARNED: "yellow", Outcome.FAILED: "red", Outcome.INCONCLUSIVE: "magenta"}
        for line, outcome in render(verdict):
            click.echo(line if outcome is None else click.style(line, fg=colors[outcome]))
    sys.exit(verdict.exit_code)
