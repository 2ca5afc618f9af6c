"""Writes the measured tables and plots of the docs from the benchmark's CSV files: `make docs`.

Blocks between `<!-- results NAME -->` and `<!-- end -->` in README.md and docs/benchmarks.md are rewritten; a test
compares them. Of rows that measure the same, the latest counts; ratios are taken between rows of one run only (same
date, commit and command). What others have published has a file and a table of its own. Nothing here knows a figure:
what is not in a file is not in a table.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from moe_megakernel.bench.records import Row, read_rows
from moe_megakernel.shapes import SHAPES, benchmark_shapes

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
#: What others say of themselves: nothing that was measured here.
PUBLISHED = RESULTS / "published.csv"
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")
IMAGES = ROOT / "docs" / "images"
#: In tables and plots, in this order; others follow by name.
ORDER = ("mega", "staged", "sonic", "liger", "scattermoe", "torch_staged", "nccl", "deepep", "dense")
LETTERS = {shape.slug: letter for letter, shape in benchmark_shapes().items()}


def all_rows(folder: Path = RESULTS) -> list[Row]:
    """Of all GPUs, the latest of each kind, in the order of the files."""
    latest: dict[tuple[object, ...], Row] = {}
    for path in sorted(folder.glob("*/bench.csv")):
        for row in read_rows(path):
            latest[_kind(row)] = row
    return list(latest.values())


def _kind(row: Row) -> tuple[object, ...]:
    return (row.gpu, row.shape, row.T, row.ranks, row.routing, row.direction, row.mode, row.cache, row.impl)


def _run(row: Row) -> tuple[object, ...]:
    return (row.date, row.commit, row.command)


def _ordered(names: Iterable[str]) -> list[str]:
    found = set(names)
    return [name for name in ORDER if name in found] + sorted(found - set(ORDER))


def _compared(names: Iterable[str]) -> list[str]:
    """Those that mega is set against; none without mega."""
    ordered = _ordered(names)
    return [name for name in ordered if name not in ("mega", "staged")] if "mega" in ordered else []


def _ratio(mega: Row | None, row: Row | None) -> str:
    """How many times as fast mega is, if both were measured in one run."""
    if mega is None or row is None or _run(mega) != _run(row):
        return "-"
    return f"**{row.ms_median / mega.ms_median:.2f}**"


def _table(heading: list[str], lines: list[list[str]]) -> str:
    rule = ["---"] * len(heading)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heading, rule, *lines))


def _cold(rows: list[Row]) -> list[Row]:
    """Those with cold caches on one rank."""
    return [row for row in rows if row.cache == "cold" and row.ranks == 1]


def _eager(rows: list[Row]) -> list[Row]:
    """Of those the eager ones."""
    return [row for row in _cold(rows) if row.mode == "eager"]


def _named(rows: list[Row]) -> list[Row]:
    """Of those the ones of the benchmark's shapes with their own T."""
    return [row for row in _eager(rows) if row.shape in LETTERS and SHAPES[row.shape].tokens == row.T]


def _source(rows: list[Row]) -> str:
    """Where rows come from, once for each run."""
    runs = dict.fromkeys((row.gpu, row.driver, row.torch, row.date, row.commit, row.command) for row in rows)
    lines = []
    for gpu, driver, torch, date, commit, command in runs:
        lines.append(f"{gpu.upper()}, driver {driver}, torch {torch}, {date}, commit {commit}: `{command}`.")
    return "\n".join(f"* {line}" for line in dict.fromkeys(lines))


def rates(rows: list[Row], gpu: str, direction: str, routing: str) -> str:
    """TFLOP/s by implementation and shape, and mega over the others."""
    chosen = [row for row in _named(rows) if (row.gpu, row.direction, row.routing) == (gpu, direction, routing)]
    if not chosen:
        return ""
    shapes = [slug for slug in LETTERS if any(row.shape == slug for row in chosen)]
    by_place = {(row.impl, row.shape): row for row in chosen}
    lines = []
    for impl in _ordered(row.impl for row in chosen):
        cells = [f"`{impl}`"]
        for slug in shapes:
            row = by_place.get((impl, slug))
            cells.append("-" if row is None else f"{row.tflops:.0f} ({row.ms_median:.3f} ms)")
        lines.append(cells)
    for impl in _compared(row.impl for row in chosen):
        ratios = [_ratio(by_place.get(("mega", slug)), by_place.get((impl, slug))) for slug in shapes]
        lines.append([f"mega / {impl}", *ratios])
    return _table([f"{direction}, {routing}: TFLOP/s", *(LETTERS[slug] for slug in shapes)], lines)


def rate_tables(rows: list[Row]) -> str:
    """All of `rates`, and where they come from."""
    kinds = dict.fromkeys((row.gpu, row.direction, row.routing) for row in _named(rows))
    tables = [rates(rows, *kind) for kind in kinds]
    return "\n\n".join([*tables, _source(_named(rows))]) if tables else ""


def headline(rows: list[Row]) -> str:
    """For the README: mega and its ratios on the six shapes, uniform routes."""
    tables = [
        rates([row for row in rows if row.impl != "staged"], gpu, direction, "uniform")
        for gpu in dict.fromkeys(row.gpu for row in _named(rows))
        for direction in ("forward", "backward")
    ]
    return "\n\n".join(table for table in tables if table)


def token_table(rows: list[Row]) -> str:
    """TFLOP/s against T, of shapes that were measured at several, and mega over the others."""
    series: dict[tuple[str, ...], dict[str, dict[int, Row]]] = {}
    for row in _eager(rows):
        kind = (row.gpu, row.shape, row.direction, row.routing)
        series.setdefault(kind, {}).setdefault(row.impl, {})[row.T] = row
    tables, shown = [], []
    for (_, shape, direction, routing), by_impl in series.items():
        tokens = sorted({t for of in by_impl.values() for t in of})
        if len(tokens) == 1:
            continue
        lines = [
            [f"`{impl}`", *(f"{by_impl[impl][t].tflops:.0f}" if t in by_impl[impl] else "-" for t in tokens)]
            for impl in _ordered(by_impl)
        ]
        for impl in _compared(by_impl):
            lines.append([f"mega / {impl}", *(_ratio(by_impl["mega"].get(t), by_impl[impl].get(t)) for t in tokens)])
        name = LETTERS.get(shape, shape)
        tables.append(_table([f"{name}, {direction}, {routing}: TFLOP/s at T", *map(str, tokens)], lines))
        shown += [row for of in by_impl.values() for row in of.values()]
    return "\n\n".join([*tables, _source(shown)]) if tables else ""


def step_table(rows: list[Row]) -> str:
    """Host time and memory of a step, by implementation and shape."""
    chosen = [row for row in _named(rows) if row.direction == "forward" and row.routing == "uniform"]
    lines = [
        [
            row.gpu.upper(),
            LETTERS[row.shape],
            f"`{row.impl}`",
            f"{row.host_us:.0f}" if row.host_us >= 0 else "-",
            *(f"{size / 2**20:.0f}" if size >= 0 else "-" for size in (row.saved_bytes, row.peak_bytes)),
        ]
        for row in sorted(chosen, key=lambda row: (row.gpu, LETTERS[row.shape]))
        if row.impl != "dense"
    ]
    heading = ["GPU", "shape", "implementation", "host time of a forward, us", "kept for backward, MiB", "peak, MiB"]
    return _table(heading, lines) if lines else ""


def mode_table(rows: list[Row]) -> str:
    """Milliseconds by mode."""
    found: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in _cold(rows):
        if row.routing == "uniform":
            found.setdefault((row.gpu, row.shape, str(row.T), row.direction, row.impl), {})[row.mode] = row
    lines = [
        [gpu.upper(), LETTERS.get(shape, shape), tokens, direction, f"`{impl}`"]
        + [f"{modes[m].ms_median:.3f}" if m in modes else "-" for m in ("eager", "compiled", "graph")]
        for (gpu, shape, tokens, direction, impl), modes in found.items()
        if len(modes) > 1
    ]
    heading = ["GPU", "shape", "T", "direction", "implementation", "eager, ms", "compiled, ms", "CUDA graph, ms"]
    shown = [row for modes in found.values() if len(modes) > 1 for row in modes.values()]
    return "\n\n".join([_table(heading, lines), _source(shown)]) if lines else ""


def published_table(rows: list[Row]) -> str:
    """Figures of others, each with its source; `rows`, which are measured, have no part in it."""
    del rows
    with PUBLISHED.open(newline="") as file:
        lines = [
            [line["impl"], line["gpu"], line["shape"], line["T"], line["direction"], line["tflops"]]
            + [f"[{line['how']}]({line['source']})"]
            for line in csv.DictReader(file)
        ]
    return _table(["published", "GPU", "shape", "T", "direction", "TFLOP/s", "source"], lines) if lines else ""


BLOCKS: dict[str, Callable[[list[Row]], str]] = {
    "headline": headline,
    "rates": rate_tables,
    "tokens": token_table,
    "steps": step_table,
    "modes": mode_table,
    "published": published_table,
}
_BLOCK = re.compile(r"(<!-- results (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def filled_in(page: str, rows: list[Row]) -> str:
    """A page with its blocks written anew.

    Raises:
        KeyError: a block of a name that is not in `BLOCKS`.
    """

    def block(match: re.Match[str]) -> str:
        text = BLOCKS[match[2]](rows)
        return f"{match[1]}{text}\n{match[4]}" if text else f"{match[1]}{match[4]}"

    return _BLOCK.sub(block, page)


def draw(rows: list[Row], folder: Path) -> list[Path]:
    """One picture a GPU and direction: bars of TFLOP/s by shape, uniform routes. Returns the files."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    written = []
    for gpu, direction in dict.fromkeys((row.gpu, row.direction) for row in _named(rows)):
        chosen = [row for row in _named(rows) if (row.gpu, row.direction, row.routing) == (gpu, direction, "uniform")]
        shapes = [slug for slug in LETTERS if any(row.shape == slug for row in chosen)]
        impls = _ordered(row.impl for row in chosen)
        by_place = {(row.impl, row.shape): row.tflops for row in chosen}
        figure, axes = plt.subplots(figsize=(9, 3.6), layout="constrained")
        for i, impl in enumerate(impls):
            places = [place + (i - len(impls) / 2) * 0.8 / len(impls) for place in range(len(shapes))]
            axes.bar(
                places,
                [by_place.get((impl, slug), 0.0) for slug in shapes],
                0.8 / len(impls),
                align="edge",
                label=impl,
                color="0.8" if impl == "dense" else None,
            )
        axes.set_xticks(range(len(shapes)), [SHAPES[slug].name for slug in shapes], fontsize=7)
        axes.set_ylabel("TFLOP/s")
        axes.set_title(f"{direction}, {gpu.upper()}, bfloat16, near-uniform routes", fontsize=9)
        axes.legend(fontsize=7, ncols=len(impls), loc="upper center")
        axes.margins(y=0.15)
        path = folder / f"results-{gpu}-{direction}.png"
        figure.savefig(path, dpi=150, metadata={"Software": None})
        plt.close(figure)
        written.append(path)
    return written


def main() -> None:
    """Rewrites pages and pictures."""
    rows = all_rows()
    for page in PAGES:
        text = page.read_text()
        page.write_text(filled_in(text, rows))
    for path in draw(rows, IMAGES):
        print(path)


if __name__ == "__main__":
    main()
