"""The command lines' type of a number in a range, such as a share or a limit."""

from __future__ import annotations

from typing import Any

import click


class Share(click.FloatRange):
    """A number in a range; click itself lets NaN pass every range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if number != number:
            self.fail(f"{value} is no number", param, ctx)
        return number
