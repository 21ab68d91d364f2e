"""``bench-engines``: the command line over :func:`lora_merge.generation.bench.api.bench_engines`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

import lora_merge
from lora_merge.console import note, quiet_libraries, reports_errors
from lora_merge.readable import json_text, readable
from lora_merge.shares import Share

if TYPE_CHECKING:
    from lora_merge.generation.bench.api import BenchOptions

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


def _sizes(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
    """``32,64,128`` as numbers, or a usage error."""
    parts = [] if value is None else value.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise click.BadParameter(f"{value!r}: expected batch sizes such as 32,64,128,256", context, parameter)
    return tuple(sorted({int(part) for part in parts}))


def _names(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """``hf-two-phase,vllm-two-phase`` as names of arms, or a usage error."""
    if value is None:
        return None
    from lora_merge.generation.bench.arms import ARMS

    known = [arm.name for arm in ARMS]
    names = tuple(name.strip() for name in value.split(","))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise click.BadParameter(f"{unknown[0]!r}: expected some of {', '.join(known)}", context, parameter)
    return names


@click.command("bench-engines", context_settings=SETTINGS)
@click.option("--model", required=True, metavar="OUT", help="Merged checkpoint.")
@click.option("--prompts", required=True, metavar="PROMPTS", help="JSON Lines, as for gated-generate.")
@click.option("--num-prompts", required=True, type=click.IntRange(1), metavar="N", help="Take the first N distinct prompts.")
@click.option("--out", default="bench-engines", show_default=True, metavar="FOLDER", help="Where tables and pictures go.")
@click.option("--arms", callback=_names, metavar="NAMES", help="Some of hf-two-phase,vllm-two-phase,hf-one-shot,vllm-one-shot.")
@click.option("--dtype", type=click.Choice(["auto", "bfloat16", "float32", "float16"]), default="auto", show_default=True)
@click.option("--device", default="auto", show_default=True, help="For Transformers; vLLM runs on what it was built for.")
@click.option("--max-tokens", type=click.IntRange(1), default=64, show_default=True, help="Most tokens after the decision.")
@click.option(
    "--decide-batch", type=click.IntRange(1), help="Transformers: prompts at once.  [default: 1024 with a GPU, else 32]"
)
@click.option("--write-batch", type=click.IntRange(1), help="Transformers: texts at once.  [default: 2048 with a GPU, else 128]")
@click.option("--chunk-size", type=click.IntRange(1), default=8192, show_default=True, help="Prompts a two-phase step.")
@click.option("--skip-threshold", type=Share(0, 1), metavar="T", help="Also measure dropping before against after.")
@click.option("--quantiles", type=click.IntRange(0), default=4, show_default=True, help="Groups by text length to time apart.")
@click.option("--sweep", callback=_sizes, metavar="SIZES", help="Generation batches to try, such as 32,64,128,256.")
@click.option(
    "--sweep-prompts", type=click.IntRange(1), metavar="N", help="Try them on N of the prompts to write, evenly spread."
)
@click.option("--stock", is_flag=True, help="Also time model.generate of Transformers at the sizes of --sweep.")
@click.option(
    "--repeats",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Do each arm's work so often; the median counts.",
)
@click.option("--min-agreement", type=Share(0, 1), default=0.98, show_default=True, help="Same work: equal decisions.")
@click.option("--max-token-difference", type=Share(0, 1), default=0.02, show_default=True, help="Same work: tokens written.")
@click.option("--prefill", default='{"decision": "', show_default=True, help="Text between prompt and decision.")
@click.option("--skip-label", default="skip", show_default=True)
@click.option("--write-label", default="write", show_default=True)
@click.option("--tensor-parallel-size", type=click.IntRange(1), help="vLLM's own.")
@click.option("--max-model-len", type=click.IntRange(1), help="vLLM's own; bounds the prompts in either engine.")
@click.option("--gpu-memory-utilization", type=Share(0, 1, min_open=True), help="vLLM's own.")
@click.option("--max-num-seqs", type=click.IntRange(1), help="vLLM's own.")
@click.option("--resume", is_flag=True, help="Do not measure again what was measured with the same settings.")
@click.option("--no-pictures", is_flag=True, help="Draw nothing.")
@click.option("--format", "output_format", type=click.Choice(["human", "json"]), default="human", show_default=True)
@click.option("--quiet", is_flag=True, help="Say nothing while measuring.")
@click.option("--verbose", is_flag=True, help="Let the measuring processes speak.")
@click.version_option(lora_merge.__version__, prog_name="bench-engines")
@reports_errors
def main(
    model: str, prompts: str, out: str, no_pictures: bool, output_format: str, quiet: bool, verbose: bool, **given: Any
) -> None:
    """Compare Transformers and vLLM, one-shot and two-phase, on the same prompts and the same texts to write.

    Each arm runs in a process of its own. First it is shown that all did the same work; ratios are printed only where they did.
    Then times by phase, memory, waste, and from how many prompts on the faster engine wins with its loading time. FOLDER gets
    engines.md, engines.json and pictures.

    Exit codes: 0 measured, 1 failed or not the same work, 2 usage, 130 interrupted.
    """
    import sys
    from pathlib import Path

    quiet_libraries(verbose)
    from lora_merge.generation.bench.api import bench_engines
    from lora_merge.generation.bench.pictures import check_matplotlib, draw
    from lora_merge.generation.bench.report import to_json, to_markdown
    from lora_merge.generation.errors import Interrupted
    from lora_merge.generation.orphans import no_orphans

    if not no_pictures:
        check_matplotlib()
    say = (lambda text: None) if quiet else note
    try:
        with no_orphans():
            result = bench_engines(model, prompts, out, _options(given), verbose=verbose, say=say)
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; what {out} has measured stays: go on with the same command and --resume") from None
    report = to_json(result)
    shown = json_text(report, indent=2, ensure_ascii=False)
    folder = Path(out)
    (folder / "engines.json").write_text(shown + "\n", encoding="utf-8")
    markdown = readable(to_markdown(result, [] if no_pictures else draw(report, folder)))
    (folder / "engines.md").write_text(markdown, encoding="utf-8")
    click.echo(shown if output_format == "json" else markdown)
    sys.exit(0 if all(proof.holds for proof in result.proof.values()) else 1)


def _options(given: dict[str, Any]) -> BenchOptions:
    from lora_merge.generation.bench.api import BenchOptions
    from lora_merge.generation.bench.proof import Limits
    from lora_merge.generation.options import EngineOptions

    names = ("dtype", "device", "tensor_parallel_size", "max_model_len", "gpu_memory_utilization", "max_num_seqs")
    engine = EngineOptions(**{name: given.pop(name) for name in names})
    limits = Limits(given.pop("min_agreement"), given.pop("max_token_difference"))
    return BenchOptions(engine=engine, limits=limits, **given)


if __name__ == "__main__":
    main()
