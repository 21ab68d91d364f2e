"""``verify-merge``: the command line over :func:`verification.audit_merge`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

import lora_merge
from lora_merge.console import progress_bar, quiet_libraries, reports_errors, say
from lora_merge.readable import json_text
from verification.options import RECIPE_SETTINGS, recipe_options, source_options

if TYPE_CHECKING:
    from verification.audit_api import AuditResult

_SHOWN = 20


@click.command("verify-merge", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--merged", required=True, metavar="OUT", help="Folder of the merged checkpoint, whichever tool merged it.")
@source_options
@click.option(
    "--method",
    type=click.Choice(["auto", "from-4bit", "original-weights"]),
    default="auto",
    show_default=True,
    help="How it should have been merged; auto follows the recipe recorded at training, else the manifest.",
)
@click.option("--trust-remote-code", is_flag=True, help="Let Python code in the base run to build its architecture.")
@click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="Worker threads.  [default: one a core]")
@click.option("--format", "output_format", type=click.Choice(["human", "json"]), default="human", show_default=True)
@click.option("--quiet", is_flag=True, help="No progress.")
@click.version_option(lora_merge.__version__, prog_name="verify-merge")
@reports_errors
def main(
    merged: str, method: str, trust_remote_code: bool, jobs: int | None, output_format: str, quiet: bool, **given: Any
) -> None:
    """Hold every weight of a merged checkpoint against base, adapter and recipe, without a prompt.

    Each tensor is recomputed and compared bit by bit. One that differs is explained by the mistake that comes closest: adapter
    omitted or doubled, merged into the original weights, another recipe, another scale, rounded twice.

    Exit codes: 0 as planned, 1 not as planned, 2 usage, 3 inconclusive, 130 interrupted.
    """
    quiet_libraries()
    from verification.audit_api import AuditOptions, audit_merge
    from verification.errors import verdict_expected
    from verification.sources import SourceOptions

    sources = SourceOptions(recipe=recipe_options(given), **{name: given[name] for name in given if name not in RECIPE_SETTINGS})
    options = AuditOptions(sources, method, trust_remote_code, jobs)  # type: ignore[arg-type]  # click checked the choice
    with verdict_expected(), progress_bar("auditing", _weight_bytes(merged), unit="bytes", quiet=quiet) as progress:
        result = audit_merge(merged, options, progress)
    if output_format == "json":
        checks = [check.to_json() for check in result.findings]
        shown = {**result.audit.to_json(), "outcome": result.outcome.value, "findings": checks}
        click.echo(json_text(shown, indent=2, allow_nan=False))
    else:
        _print(result)
    sys.exit({"PASSED": 0, "WARNED": 0, "FAILED": 1, "INCONCLUSIVE": 3}[result.outcome.value])


def _weight_bytes(merged: str) -> int:
    from pathlib import Path

    return sum(path.stat().st_size for path in Path(merged).glob("*.safetensors"))


def _print(result: AuditResult) -> None:
    from verification.checks import Outcome

    audit = result.audit
    say(f"{result.outcome}: {audit.check().detail}")
    wrong = sorted((tensor for tensor in audit.tensors if not tensor.as_planned), key=lambda tensor: -tensor.distance)
    for tensor in wrong[:_SHOWN]:
        say(f"  {tensor.distance:10.4g}  {tensor.name}: {tensor.history}")
    if len(wrong) > _SHOWN:
        say(f"  and {len(wrong) - _SHOWN} more (--format json lists all)")
    for check in result.findings:
        if check.outcome is not Outcome.PASSED:
            say(f"  {check.outcome.value:<13}{check.name}: {check.detail}")
