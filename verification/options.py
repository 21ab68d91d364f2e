"""The options that both command lines share: where base, adapter and recipe come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

FLOAT_TYPES = ("bfloat16", "float16", "float32")
BLOCK_SIZES = tuple(str(1 << power) for power in range(5, 13))
RECIPE_SETTINGS = ("quant_type", "double_quant", "block_size", "quant_dtype")

Command = TypeVar("Command", bound=Callable[..., Any])


def source_options(command: Command) -> Command:
    """Base, adapter and recipe of the reference."""
    options = (
        click.option("--base", metavar="BASE", help="Base: folder or hub id.  [default: what the manifest in OUT names]"),
        click.option(
            "--adapter", metavar="ADAPTER", help="Adapter: folder or hub id.  [default: what the manifest in OUT names]"
        ),
        click.option("--revision", metavar="R", help="Revision of a base on the hub."),
        click.option(
            "--other-base-name", is_flag=True, help="The base is the adapter's own, although the adapter names it differently."
        ),
        click.option("--quant-type", type=click.Choice(["nf4", "fp4"]), help="4-bit type of the training run."),
        click.option("--double-quant/--no-double-quant", default=None, help="Whether training used double quantization."),
        click.option("--blocksize", "block_size", type=click.Choice(BLOCK_SIZES), help="Weights a quantization block."),
        click.option("--quant-dtype", type=click.Choice(FLOAT_TYPES), help="Type of the weights when they were quantized."),
        click.option("--quant-config", metavar="FILE", help="JSON file with the recipe."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def recipe_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe settings among what was given, by name."""
    recipe = {name: given[name] for name in RECIPE_SETTINGS if given[name] is not None}
    if "block_size" in recipe:
        recipe["block_size"] = int(recipe["block_size"])
    return recipe
