"""The published measurement that the simulation is held against: rows per minibatch in Mixture-of-Kittens, for Kimi.

`python -m moe_megakernel.simulate.published` prints the comparison; a test holds it. No constant of the cost model was
chosen by looking at it.

Source: Cursor, "Mixture-of-Kittens" (https://cursor.com/blog/mixture-of-kittens, 2026-08), forward of one layer. Its
benchmarks ran on a GB300 NVL72 with 64-way expert parallelism and 2048 tokens a GPU in bf16 and MXFP8; which dtype and
how many tokens the sweep used is not stated.
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from .layer import simulate
from .options import make_options

#: Rows of a minibatch -> milliseconds of the forward.
SWEEP_MS = {512: 5.98, 1024: 4.67, 1536: 3.98, 2048: 3.67, 2560: 3.43, 3072: 3.45, 3584: 3.52, 4096: 3.47}


@dataclass(frozen=True)
class Point:
    """One size of minibatch: times, and both as multiples of their best."""

    rows: int
    published_ms: float
    simulated_ms: float
    published_ratio: float
    simulated_ratio: float

    @property
    def error(self) -> float:
        """Of the ratio, relative."""
        return self.simulated_ratio / self.published_ratio - 1.0


def sweep(dtype: str = "bf16", tokens: int = 2048, ranks: int = 64, shape: str = "kimi-k2") -> list[Point]:
    """Simulates the sweep: SM-split with 40 communication SMs, two bulk barriers, rows padded to 256.

    Args:
        dtype: of the operands.
        tokens: of a GPU.
        ranks, shape: "bench-d" on 8 ranks gives a rank the experts and rows that "kimi-k2" on 64 does, in an eighth of
            the time; only the share of rows that stay on their rank differs.
    """
    times = {}
    for rows in SWEEP_MS:
        options = make_options(
            shape, "gb300", ranks=ranks, tokens=tokens, dtype=dtype, order="sm-split", comm_sms=40, minibatch_rows=rows
        )
        (layer,) = simulate(options, exposed=False)
        times[rows] = float(layer.run.ends.max()) * 1e3
    best, published_best = min(times.values()), min(SWEEP_MS.values())
    return [Point(rows, ms, times[rows], ms / published_best, times[rows] / best) for rows, ms in SWEEP_MS.items()]


def main() -> None:
    """Prints the sweep for both dtypes, at the benchmarks' tokens and at twice as many."""
    console = Console()
    for dtype, tokens in (("bf16", 2048), ("fp8", 2048), ("bf16", 4096), ("fp8", 4096)):
        table = Table("rows", "published, ms", "simulated, ms", "published ratio", "simulated ratio", "error of ratio")
        for p in sweep(dtype, tokens):
            table.add_row(
                str(p.rows),
                f"{p.published_ms:.2f}",
                f"{p.simulated_ms:.2f}",
                f"{p.published_ratio:.3f}",
                f"{p.simulated_ratio:.3f}",
                f"{p.error * 100:+.1f} %",
            )
        console.print(f"{dtype}, {tokens} tokens a GPU", highlight=False)
        console.print(table)


if __name__ == "__main__":
    main()
