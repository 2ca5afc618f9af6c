"""Errors of other people's code in one line."""

from __future__ import annotations


def one_line(error: BaseException) -> str:
    """Kind and first line of an error, which may have none."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
