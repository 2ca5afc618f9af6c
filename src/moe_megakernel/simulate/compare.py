"""Compares task orders, and pulling with pushing, for one shape: what `simulate --compare` prints.

Every row is a simulation of its own with all other options kept. The orders under a skewed routing stand beside, since
that is where pulling and pushing differ.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from .layer import simulate
from .options import ORDERS, Options
from .report import describe

_COMM_SMS = 40  # of the lagged order with SMs of their own, the published default of the SM-split design
_SKEW = "zipf:0.5"  # the busiest of 384 experts gets 10 times its share


def variants(options: Options) -> list[tuple[str, Options]]:
    """What is compared, with a name for each."""
    plain = replace(options, comm_sms=-1, transport="pull")
    comm_sms = options.comm_sms if options.comm_sms > 0 else _COMM_SMS
    skewed = replace(plain, order="lagged", routing=_SKEW if options.routing == "uniform" else options.routing)
    return [
        ("separate stages", replace(plain, order="separate")),
        ("unlagged, spare warps", replace(plain, order="unlagged")),
        ("lagged, spare warps", replace(plain, order="lagged")),
        (f"lagged, {comm_sms} communication SMs", replace(plain, order="lagged", comm_sms=comm_sms)),
        ("SM-split with bulk barriers", replace(plain, order="sm-split")),
        ("lagged, push", replace(plain, order="lagged", transport="push")),
        (f"lagged, pull, {skewed.routing}", skewed),
        (f"lagged, push, {skewed.routing}", replace(skewed, transport="push")),
    ]


def compare(options: Options) -> list[dict[str, Any]]:
    """Simulates all variants.

    Returns:
        For each variant its name, order, transport, routing, and the directions as in the report.
    """
    assert "lagged" in ORDERS
    results = []
    for name, variant in variants(options):
        directions = [describe(layer) for layer in simulate(variant)]
        results.append(
            {
                "name": name,
                "order": variant.order,
                "transport": variant.transport,
                "routing": variant.routing,
                "directions": directions,
                "layer_ms": sum(one["layer_ms"] for one in directions),
            }
        )
    return results


def print_comparison(options: Options, results: list[dict[str, Any]], console: Console) -> None:
    """A line for each variant; the times of the two directions are added where both were asked for."""
    console.print(
        f"{options.shape.name}: {options.ranks} x {options.hardware.name}, {options.tokens} tokens a rank, "
        f"{options.dtype}, {options.direction}",
        highlight=False,
    )
    table = Table("order", "ms", "exposed communication", "clusters busy", "slowest / median rank")
    for result in results:
        ones = result["directions"]
        weight = [one["layer_ms"] / result["layer_ms"] for one in ones]
        exposed = sum(w * one["exposed_communication"] for w, one in zip(weight, ones, strict=True))
        busy = sum(w * one["busy"]["mean"] for w, one in zip(weight, ones, strict=True))
        spread = max(one["compute_end_ms"]["max"] / one["compute_end_ms"]["median"] for one in ones)
        table.add_row(
            result["name"],
            f"{result['layer_ms']:.3f}",
            f"{exposed * 100:.1f} %",
            f"{busy * 100:.1f} %",
            f"{spread:.2f}",
        )
    console.print(table)
