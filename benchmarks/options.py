"""Checks of options that the benchmark scripts share."""

from __future__ import annotations

import typer

ROUTINGS = ("uniform", "zipf")


def split(text: str, allowed: tuple[str, ...], option: str) -> list[str]:
    """Names of a comma-separated list.

    Raises:
        typer.BadParameter: a name is not among the allowed ones.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in allowed:
            raise typer.BadParameter(f"expected some of {', '.join(allowed)}, got {name!r}", param_hint=option)
    return names
