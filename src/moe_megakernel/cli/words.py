"""Options that are lists of words, separated by commas. Used by `bench` and by the scripts in benchmarks/."""

from __future__ import annotations

from collections.abc import Collection

import typer


def words(text: str, option: str) -> list[str]:
    """The words of a list.

    Raises:
        typer.BadParameter: there is none.
    """
    found = [word.strip() for word in text.split(",") if word.strip()]
    if not found:
        raise typer.BadParameter("expected at least one word, got none", param_hint=option)
    return found


def some_of(text: str, allowed: Collection[str], option: str) -> list[str]:
    """The words of a list that may hold only some.

    Raises:
        typer.BadParameter: there is none, or another one.
    """
    found = words(text, option)
    for word in found:
        if word not in allowed:
            raise typer.BadParameter(f"expected some of {', '.join(allowed)}, got {word!r}", param_hint=option)
    return found
