"""Draws a report: for every rank a time line with a lane for each kind of work, as a PNG.

Called by the command line and by `train --profile`. A lane's height is the share of a bin in which that work ran, so a
picture of a long trace stays true although single kernels cannot be seen in it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from .report import Report, Row

#: Rows drawn: the first ones and the one with the most exposed communication.
MOST_ROWS = 8

_COLOURS = {
    "gemm": "#1f6f8b",
    "attention": "#4f772d",
    "other": "#8fb339",
    "communication": "#e07a2f",
    "exposed communication": "#b23a48",
    "memory": "#7a5195",
    "idle: host": "#555555",
    "idle: waiting": "#bbbbbb",
}


def write_picture(report: Report, path: str | Path) -> None:
    """Writes a PNG with a panel for each row of the report, at most `MOST_ROWS`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = _chosen(report)
    figure = Figure(figsize=(13.0, 0.8 + 2.4 * len(rows)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, row in zip(figure.subplots(len(rows), 1, squeeze=False)[:, 0], rows, strict=True):
        _draw(axes, row)
    axes.set_xlabel("milliseconds")
    if len(rows) < len(report.rows):
        figure.suptitle(f"{len(rows)} of {len(report.rows)} rows", fontsize=10)
    figure.savefig(path, format="png")


def _chosen(report: Report) -> list[Row]:
    if len(report.rows) <= MOST_ROWS:
        return report.rows
    worst = max(report.rows, key=lambda row: row.exposed_communication_ms)
    first = [row for row in report.rows if row is not worst][: MOST_ROWS - 1]
    return [row for row in report.rows if row is worst or any(row is one for one in first)]


def _draw(axes: Any, row: Row) -> None:
    edges = row.lanes["edges"]
    names = [name for name in _COLOURS if np.any(row.lanes[name] > 0)]
    for lane, name in enumerate(reversed(names)):
        axes.stairs(lane + 0.9 * row.lanes[name], edges, baseline=lane, fill=True, color=_COLOURS[name])
    axes.set_yticks(np.arange(len(names)) + 0.4, list(reversed(names)))
    axes.set_ylim(-0.1, max(len(names), 1))
    axes.set_xlim(edges[0], edges[-1])
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", alpha=0.3)
    steps = f", {row.steps} steps" if row.steps else ""
    exposed = row.share(row.exposed_communication_ms)
    axes.set_title(
        f"rank {row.rank}, {row.device}{steps}: exposed communication {exposed:.1%}, "
        f"idle {row.share(row.idle_ms):.1%}, MoE layer {row.share(row.moe_ms):.1%}",
        fontsize=10,
        loc="left",
    )
