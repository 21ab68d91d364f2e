"""``gated-generate``: the command line over :func:`lora_merge.generation.api.generate_gated` and its companions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import lora_merge
from lora_merge.console import note, quiet_libraries, reports_errors, warn
from lora_merge.readable import json_text
from lora_merge.shares import Share

if TYPE_CHECKING:
    from lora_merge.generation.errors import Interrupted
    from lora_merge.generation.gate import Gate
    from lora_merge.generation.options import GateOptions
    from lora_merge.generation.run import GenerateResult

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
FLOAT = Share(0, 1)
_REQUIRED = ("model", "prompts", "out", "skip_threshold")


def _shard(context: click.Context, parameter: click.Parameter, value: str | None) -> Any:
    """``i/n``, or a usage error."""
    from lora_merge.generation.errors import GenerationError
    from lora_merge.generation.shards import Shard

    try:
        return Shard() if value is None else Shard.parse(value)
    except GenerationError as error:
        raise click.BadParameter(str(error), context, parameter) from error


def gate_options(command: Any) -> Any:
    """The options that every use of a certificate has."""
    for option in reversed(
        (
            click.option("--certificate", metavar="FILE", help="Certificate.  [default: gate.intoto.json in MODEL-report]"),
            click.option(
                "--max-delta",
                type=Share(0, 1, min_open=True, max_open=True),
                default=0.02,
                show_default=True,
                help="Loosest limit of the mean drift that the certificate may have been judged by.",
            ),
            click.option("--trusted-key", metavar="FILE", help="PEM public key that must have signed the certificate."),
            click.option("--accept-assumed-recipe", is_flag=True, help="Accept that the recipe of the reference is assumed."),
            click.option("--accept-warnings", is_flag=True, help="Accept every other warning in the certificate."),
        )
    ):
        command = option(command)
    return command


@click.group("gated-generate", invoke_without_command=True, context_settings=SETTINGS)
@click.option("--model", metavar="OUT", help="Merged checkpoint.")
@click.option("--prompts", metavar="PROMPTS", help="JSON Lines with id and one of prompt, messages, prompt_token_ids.")
@click.option("--out", metavar="RESULTS", help="Results file, one JSON line a prompt.")
@click.option("--skip-threshold", type=FLOAT, metavar="T", help="No text above this skip probability.")
@click.option(
    "--engine", type=click.Choice(["auto", "hf", "vllm"]), default="auto", show_default=True, help="auto: the certified."
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "bfloat16", "float32", "float16"]),
    default="auto",
    show_default=True,
    help="auto: the certified.",
)
@gate_options
@click.option("--allow-ungated", is_flag=True, help="Run without a certificate; every row is marked.")
@click.option("--max-tokens", type=click.IntRange(1), default=64, show_default=True, help="Most tokens after the decision.")
@click.option("--write-all", is_flag=True, help="Write a text for every write decision, whatever its skip probability.")
@click.option("--text-key", default="text", show_default=True, help="Key of the text in the JSON that the model writes.")
@click.option("--prefill", help="Text between prompt and decision.  [default: the certified]")
@click.option("--skip-label", help="Word of the decision to skip.  [default: the certified]")
@click.option("--write-label", help="Word of the decision to write.  [default: the certified]")
@click.option("--max-quarantine", type=FLOAT, default=0.01, show_default=True, help="Largest share of rows that may be unusable.")
@click.option("--resume", is_flag=True, help="Go on with the results that are already there.")
@click.option("--shard", callback=_shard, metavar="I/N", help="Take on only part I of N; see gated-generate join.")
@click.option("--chunk-size", type=click.IntRange(1), help="Prompts a step.  [default: 8192 with a GPU, 1024 without]")
@click.option("--batch-size", type=click.IntRange(1), help="Transformers: texts at once.  [default: 2048 with a GPU, else 128]")
@click.option("--tensor-parallel-size", type=click.IntRange(1), help="vLLM's own.")
@click.option("--max-model-len", type=click.IntRange(1), help="vLLM's own; bounds the prompts in either engine.")
@click.option("--gpu-memory-utilization", type=Share(0, 1, min_open=True), help="vLLM's own.")
@click.option("--max-num-seqs", type=click.IntRange(1), help="vLLM's own.")
@click.option("--trust-remote-code", is_flag=True, help="Let Python code in the checkpoint run.")
@click.option("--format", "output_format", type=click.Choice(["human", "json"]), default="human", show_default=True)
@click.option("--quiet", is_flag=True, help="No progress and no notes; warnings and errors only.")
@click.option("--verbose", is_flag=True, help="Let the other libraries speak.")
@click.version_option(lora_merge.__version__, prog_name="gated-generate")
@click.pass_context
@reports_errors
def main(context: click.Context, /, output_format: str, quiet: bool, verbose: bool, **given: Any) -> None:
    """Decide every prompt with a certified checkpoint, then write a text for those that are worth one.

    The certificate must be of these very files. All prompts are tokenized and checked before the model loads; rows that cannot
    be used are set aside beside the results, in OUT.quarantine.jsonl. A prompt gets a text when the likeliest token is the write
    label and its skip probability is at most T; the others are decided only. Results are saved as they come: after a kill,
    --resume goes on.

    Exit codes: 0 done, 1 refused or failed (saved rows stay), 2 usage, 130 interrupted.
    """
    if context.invoked_subcommand is not None:
        _refuse_stray_options(context)
        return
    for name in _REQUIRED:
        if given[name] is None:
            raise click.UsageError(f"Missing option '--{name.replace('_', '-')}'.", context)
    quiet_libraries(verbose)
    from lora_merge.generation.api import generate_gated
    from lora_merge.generation.display import shown_phases
    from lora_merge.generation.orphans import no_orphans

    model, prompts, out = (given.pop(name) for name in ("model", "prompts", "out"))
    options = _options(given)
    try:
        with no_orphans(), shown_phases(quiet=quiet) as phases:
            result = generate_gated(model, prompts, out, options, phases=phases, say=_Speaker(quiet))
    except KeyboardInterrupt:
        raise _interrupted(Path(out)) from None
    _print_result(result, output_format)


@main.command("check", context_settings=SETTINGS)
@click.option("--model", required=True, metavar="OUT", help="Merged checkpoint.")
@gate_options
@click.option("--format", "output_format", type=click.Choice(["human", "json"]), default="human", show_default=True)
@click.option("--quiet", is_flag=True, help="No progress.")
@reports_errors
def check(model: str, output_format: str, quiet: bool, **given: Any) -> None:
    """Exit with 0 only when OUT has a certificate that allows it to be used: run it before a server loads OUT."""
    from lora_merge.generation.api import check_gate
    from lora_merge.generation.display import shown_phases

    options = _gate_options({**given, "allow_ungated": False})
    with shown_phases(quiet=quiet) as phases:
        gate = check_gate(model, options, phases)
    _print_gate(gate, output_format)


@main.command("join", context_settings=SETTINGS)
@click.argument("parts", nargs=-1, required=True, metavar="RESULTS...")
@click.option("--out", required=True, metavar="JOINED", help="File to create.")
@click.option("--format", "output_format", type=click.Choice(["human", "json"]), default="human", show_default=True)
@reports_errors
def join(parts: tuple[str, ...], out: str, output_format: str) -> None:
    """Join the RESULTS of all shards into the file that one run would have written, once all are complete and none overlaps."""
    from lora_merge.generation.joining import join_results

    _print_result(join_results(parts, out), output_format)


def _interrupted(out: Path) -> Interrupted:
    from lora_merge.generation.errors import Interrupted

    if out.exists() and out.stat().st_size:
        return Interrupted(f"interrupted; the rows in {out} are whole and stay: go on with the same command and --resume")
    return Interrupted(f"interrupted before any row was saved in {out}; start again with the same command")


class _Speaker:
    """Notes and warnings on standard error; only warnings when quiet."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet

    def __call__(self, text: str) -> None:
        if text.startswith("warning: "):
            warn(text.removeprefix("warning: "))
        elif not self._quiet:
            note(text)


def _refuse_stray_options(context: click.Context) -> None:
    """Options before a subcommand would be read and then ignored."""
    from click.core import ParameterSource

    stray = [name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    if stray:
        name = "--" + stray[0].replace("output_format", "format").replace("_", "-")
        raise click.UsageError(f"{name} stands before '{context.invoked_subcommand}'; put its options behind it.", context)


def _gate_options(given: dict[str, Any]) -> GateOptions:
    from lora_merge.generation.options import GateOptions

    names = ("certificate", "max_delta", "trusted_key", "accept_assumed_recipe", "accept_warnings", "allow_ungated")
    return GateOptions(**{name: given.pop(name) for name in names})


def _options(given: dict[str, Any]) -> Any:
    from lora_merge.generation.options import EngineOptions, GenerateOptions

    sizes = ("batch_size", "tensor_parallel_size", "max_model_len", "gpu_memory_utilization", "max_num_seqs")
    engine = EngineOptions(**{name: given.pop(name) for name in ("engine", "dtype", *sizes, "trust_remote_code")})
    return GenerateOptions(gate=_gate_options(given), engine=engine, **given)


def _print_result(result: GenerateResult, output_format: str) -> None:
    if output_format == "json":
        click.echo(json_text(result.to_json(), indent=2))
        return
    from lora_merge.generation.summary import summary_lines

    for line in summary_lines(result):
        click.echo(line)


def _print_gate(gate: Gate, output_format: str) -> None:
    from lora_merge.generation.api import standing

    if output_format == "json":
        click.echo(json_text({"model": str(gate.model), "root": gate.root, **gate.to_json()}, indent=2))
        return
    click.echo(f"{gate.model}: may be used; root digest {gate.root}")
    click.echo(standing(gate))


if __name__ == "__main__":
    main()
