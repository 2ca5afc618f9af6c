"""Draws the workspace of a rank from the plan's byte map: which region lies where in shared and in local memory.

Called by the command line and for the picture in docs/.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from moe_megakernel.plan import PlanConfig, Problem, Region, RegionBytes, Tiling, make_layout

from .costs import Costs
from .layer import make_schedule
from .options import Options

_COLOURS = {True: "#1f6f8b", False: "#e07a2f"}


def layout_of(options: Options) -> dict[Region, RegionBytes]:
    """The byte map for a simulation's sizes, with the default capacity: 2 T K rows, or T K on one rank."""
    shape = options.shape
    costs = Costs(shape, options.hardware, Tiling(), options.dtype, options.clusters("forward"))
    rows = options.tokens * shape.top_k
    problem = Problem(
        num_ranks=options.ranks,
        rank=0,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        hidden=shape.hidden,
        width=shape.width,
        gated=shape.gated,
        max_tokens=options.tokens,
        row_capacity=rows if options.ranks == 1 else 2 * rows,
    )
    schedule = make_schedule(options, "forward", costs)
    schedule = replace(schedule, x_slots=0, a_slots=0)  # as many as every routing needs
    return make_layout(PlanConfig(problem, costs.tiles, schedule), 2)


def write_memory_map(options: Options, path: Path) -> None:
    """Writes a PNG with a panel for the memory that peers map and one for the local memory."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    layout = layout_of(options)
    shared = [(region, place) for region, place in layout.items() if place.shared]
    local = [(region, place) for region, place in layout.items() if not place.shared]
    figure = Figure(figsize=(11.0, 1.6 + 0.27 * len(layout)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, height_ratios=[len(shared), len(local)])
    figure.suptitle(
        f"Workspace of a rank: {options.shape.name}, {options.ranks} ranks, {options.tokens} tokens a rank, bf16",
        fontsize=11,
        x=0.01,
        ha="left",
    )
    _draw(upper, shared, "shared with peers")
    _draw(lower, local, "local")
    lower.set_xlabel("offset, MiB")
    figure.savefig(path, format="png")


def _draw(axes: Any, places: list[tuple[Region, RegionBytes]], title: str) -> None:
    end = max(place.offset + place.bytes for _, place in places) / 2**20
    for line, (_, place) in enumerate(places):
        begin, size = place.offset / 2**20, place.bytes / 2**20
        # A region of a few bytes is drawn as a mark.
        axes.barh([line], [max(size, end * 0.002)], left=[begin], height=0.7, color=_COLOURS[place.shared])
        right = begin + size < end * 0.8
        x = begin + max(size, end * 0.002) + end * 0.008 if right else begin - end * 0.008
        axes.text(x, line, _size(place.bytes), va="center", ha="left" if right else "right", fontsize=8)
    axes.set_yticks(range(len(places)), [region.name.lower() for region, _ in places], fontsize=8)
    axes.set_xlim(0, end * 1.02)
    axes.set_ylim(len(places) - 0.4, -0.6)
    axes.set_title(f"{title}: {_size(int(end * 2**20))}", fontsize=10, loc="left")
    axes.grid(axis="x", alpha=0.3)


def _size(count: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}" if count < 1000 * unit else f"{count / unit:.0f} {name}"
    return f"{count} B"
