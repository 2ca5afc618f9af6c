"""Draws a simulation: tasks of every cluster over time, and the use of the links below.

Called by the command line and for the pictures in docs/.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from moe_megakernel.plan_names import TaskKind

from .layer import Layer

# One colour a kind: forward stages and their backward mirrors in the same family.
_COLOURS = {
    TaskKind.GATE_UP: "#1f6f8b",
    TaskKind.DOWN: "#e07a2f",
    TaskKind.DOWN_DGRAD: "#1f6f8b",
    TaskKind.ROUTE_GRAD: "#7a5195",
    TaskKind.GATE_UP_DGRAD: "#e07a2f",
    TaskKind.WGRAD_DOWN: "#8fb339",
    TaskKind.WGRAD_GATE_UP: "#4f772d",
    TaskKind.BIAS_DOWN: "#c9b458",
    TaskKind.BIAS_GATE_UP: "#a68a2c",
}
_COMBINE = "#b23a48"


def write_picture(layers: list[Layer], path: Path, rank: int | None = None) -> None:
    """Writes a PNG: for each direction the clusters of one rank, and its links.

    Args:
        layers: simulated with `record`.
        path: the file.
        rank: the rank shown; the slowest if None.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = 2 if layers[0].options.ranks > 1 else 1  # one rank has no links
    figure = Figure(figsize=(13.0, (4.6 + 1.6 * (panels - 1)) * len(layers)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    heights = [3.2, 1.0][:panels] * len(layers)
    axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for index, layer in enumerate(layers):
        shown = int(np.argmax([r.end for r in layer.run.ranks])) if rank is None else rank
        _draw_clusters(axes[panels * index], layer, shown)
        if panels == 2:
            _draw_links(axes[panels * index + 1], layer, shown)
        axes[panels * (index + 1) - 1].set_xlabel("microseconds")
    figure.savefig(path, format="png")


def _draw_clusters(axes: Any, layer: Layer, rank: int) -> None:
    stream, state = layer.streams[rank], layer.run.ranks[rank]
    spans = state.spans or []
    kinds = np.array([stream.kind[task] for task, *_ in spans])
    minibatches = np.array([stream.minibatch[task] for task, *_ in spans])
    for kind, colour in _COLOURS.items():
        # Neighbouring minibatches in two shades, so that their borders are seen.
        for odd, alpha in ((0, 1.0), (1, 0.62)):
            chosen = np.flatnonzero((kinds == kind) & (minibatches % 2 == odd))
            if not len(chosen):
                continue
            label = kind.name.lower() if odd == 0 or not ((kinds == kind) & (minibatches % 2 == 0)).any() else None
            picked = [spans[i] for i in chosen]
            axes.barh(
                [cluster for _, cluster, _, _ in picked],
                [(end - start) * 1e6 for *_, start, end in picked],
                left=[start * 1e6 for *_, start, _ in picked],
                height=0.95,
                color=colour,
                alpha=alpha,
                edgecolor="white",
                linewidth=0.3,
                label=label,
            )
    combine = layer.costs.combine_seconds(layer.options.tokens) * 1e6
    begin = layer.run.combine_start * 1e6
    height = layer.costs.clusters
    if layer.direction == "forward" or layer.options.how.separate:
        axes.barh(
            [height / 2 - 0.5], [combine], left=[begin], height=height, color=_COMBINE, alpha=0.8, label="combine"
        )
    else:
        axes.axvspan(begin, begin + combine, color=_COMBINE, alpha=0.35, lw=0, label="combine (pulling warps)")
    axes.set_xlim(0, float(layer.run.ends.max()) * 1e6)
    axes.set_ylim(-0.7, height - 0.3)
    axes.invert_yaxis()
    axes.set_ylabel("cluster")
    options = layer.options
    axes.set_title(
        f"{options.shape.name}, {layer.direction}, {options.ranks} x {options.hardware.name}, order {options.order}, "
        f"{options.transport}, {options.routing}: {float(layer.run.ends.max()) * 1e3:.3f} ms; rank {rank}",
        fontsize=10,
        loc="left",
    )
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.06), ncols=7, frameon=False, fontsize=9)


def _draw_links(axes: Any, layer: Layer, rank: int) -> None:
    run = layer.run
    wires = layer.options.hardware.link_bandwidth * run.step
    edges = (run.start + np.arange(len(run.egress) + 1) * run.step) * 1e6
    for name, load, colour in (("in", run.ingress, "#1f6f8b"), ("out", run.egress, "#e07a2f")):
        axes.stairs(load[:, rank] / wires * 100.0, edges, color=colour, lw=1.3, label=f"link {name}")
    axes.set_xlim(0, float(run.ends.max()) * 1e6)
    axes.set_ylim(0, 105)
    axes.set_ylabel("% of link")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 0.98), ncols=2, frameon=False, fontsize=9)
    axes.grid(axis="y", alpha=0.3)
