"""The benchmark's rows as a table to read: one a direction and mode, an implementation a line."""

from __future__ import annotations

from rich.table import Table

from .records import Row
from .run import Absent, Measured


def make_tables(measured: Measured) -> list[Table]:
    """Of one problem."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in measured.rows:
        groups.setdefault((row.direction, row.mode), []).append(row)
    return [_table(rows) for rows in groups.values()]


def _table(rows: list[Row]) -> Table:
    one = rows[0]
    table = Table(
        title=f"{one.shape}, T {one.T}, {one.routing}: {one.direction}, {one.mode}, {one.cache} caches, {one.gpu}",
        title_justify="left",
    )
    headings = ("implementation", "ms", "spread", "TFLOP/s", "/ dense", "/ mega", "host us", "saved", "peak", "error")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "implementation" else "right")
    mega = next((row.ms_median for row in rows if row.impl == "mega"), 0.0)
    for row in rows:
        table.add_row(
            f"{row.impl} ({row.variant})" if row.variant else row.impl,
            f"{row.ms_median:.3f}",
            f"{row.ms_min:.3f}-{row.ms_max:.3f}",
            f"{row.tflops:.3g}" if row.tflops < 1 else f"{row.tflops:.0f}",
            f"{row.ratio_dense:.2f}" if row.ratio_dense else "-",
            f"{mega / row.ms_median:.2f}" if mega else "-",
            f"{row.host_us:.0f}" if row.host_us >= 0 else "-",
            _size(row.saved_bytes),
            _size(row.peak_bytes),
            f"{row.error:.1e}" if row.error else "-",
        )
    return table


def _size(num_bytes: int) -> str:
    return "-" if num_bytes < 0 else f"{num_bytes / 2**20:.0f} MiB"


def absent_text(absent: Absent) -> str:
    """A line that says why an implementation is not in the table."""
    where = f" ({absent.mode})" if absent.mode else ""
    return f"{absent.impl}{where}: {'failed: ' if absent.fault else ''}{absent.reason}"
