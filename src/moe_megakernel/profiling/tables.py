"""The report as tables for people: where each rank's time goes, its MoE layer, what overlap would give.

Called by the command line and by the recorder. docs/profile.md explains every column.
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from .report import Report, Row
from .rules import PARTS

_PART_NAMES = {"expert_gemm": "experts"}
_NAME_WIDTH = 44


def print_report(report: Report, console: Console | None = None) -> None:
    """Prints the tables, and sentences on what stands out."""
    console = Console() if console is None else console
    console.print(_time(report))
    if any(row.moe_ms for row in report.rows):
        console.print(_moe(report))
    console.print(_overlap(report))
    worst = max(report.rows, key=lambda row: row.exposed_communication_ms)
    if worst.communication:
        console.print(_communication(worst, _label(worst, report)))
    for line in _findings(report, worst):
        console.print(line, highlight=False, soft_wrap=True)


def _label(row: Row, report: Report) -> str:
    """rank, with the device where a rank has several, and the file where that still does not tell rows apart."""
    same = [other for other in report.rows if other.rank == row.rank]
    label = str(row.rank)
    if len({other.device for other in same}) > 1:
        label += f" {row.device}"
    if sum(other.device == row.device for other in same) > 1:
        label += f" ({row.file})"
    return label


def _unit(report: Report) -> str:
    steps = {row.steps for row in report.rows}
    if steps == {0}:
        return "ms"
    counts = f"{min(steps)}" if len(steps) == 1 else f"{min(steps)} to {max(steps)}"
    return f"ms a step, mean of {counts}"


def _right(title: str, *headings: str) -> Table:
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _cell(row: Row, ms: float | None) -> str:
    return "-" if ms is None else f"{_ms(ms)}\n{row.share(ms):.1%}"


def _ms(ms: float) -> str:
    return f"{ms:.3f}" if ms < 100 else f"{ms:.1f}"


def _time(report: Report) -> Table:
    headings = ("rank", "span", "compute", "exposed comm.", "exposed copies", "idle", "of it: host", "waiting")
    table = _right(f"Where time goes ({_unit(report)})", *headings)
    for row in report.rows:
        parts = (row.compute_ms, row.exposed_communication_ms, row.exposed_memory_ms, row.idle_ms)
        cells = (_cell(row, ms) for ms in (*parts, row.idle_host_ms, row.idle_wait_ms))
        table.add_row(_label(row, report), f"{_ms(row.span_ms)}\n{row.device}", *cells)
    if len(report.rows) > 1:
        table.add_section()
        spread = report.spread()
        for name in ("min", "median", "max"):
            shown = (spread[key][name] for key in ("span_ms", "exposed_communication_ms", "idle_ms"))
            span, exposed, idle = map(_ms, shown)
            table.add_row(name, span, "", exposed, "", idle, "", "")
    return table


def _moe(report: Report) -> Table:
    parts = [part for part in PARTS if any(row.moe[part].count for row in report.rows)]
    headings = ("rank", *(_PART_NAMES.get(part, part) for part in parts), "layer", "exposed comm.")
    table = _right(f"The MoE layer ({_unit(report)})", *headings)
    for row in report.rows:
        cells = (_cell(row, row.moe[part].time_ms) for part in parts)
        ends = _cell(row, row.moe_ms), _cell(row, row.moe_exposed_communication_ms)
        table.add_row(_label(row, report), *cells, *ends)
    return table


def _overlap(report: Report) -> Table:
    headings = ("rank", "comm.", "hidden now", "span", "if experts hid the layer's", "if all were hidden")
    table = _right(f"Overlap ({_unit(report)}; the last two are estimates)", *headings)
    for row in report.rows:
        hidden = row.overlapped_communication_ms / row.communication_ms if row.communication_ms else 1.0
        table.add_row(
            _label(row, report),
            _ms(row.communication_ms),
            f"{hidden:.1%}" if row.communication_ms else "-",
            _ms(row.span_ms),
            f"{_ms(row.estimate.overlapped_ms)} (-{row.share(row.estimate.hidden_ms):.1%})",
            f"{_ms(row.estimate.without_exposed_ms)} (-{row.share(row.exposed_communication_ms):.1%})",
        )
    return table


def _communication(row: Row, label: str) -> Table:
    table = Table(title=f"Communication of rank {label}, longest exposed first")
    table.add_column("name", no_wrap=True)
    for heading in ("count", "sum, ms", "exposed, ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in row.communication:
        table.add_row(_short(one.name), str(one.count), _ms(one.sum_ms), _ms(one.exposed_ms))
    return table


def _short(name: str) -> str:
    """A kernel's name without its arguments; the whole one is in the JSON."""
    name = name.removeprefix("void ").split("(")[0] or name
    return name if len(name) <= _NAME_WIDTH else name[: _NAME_WIDTH - 3] + "..."


def _findings(report: Report, worst: Row) -> list[str]:
    label = _label(worst, report)
    share = worst.share(worst.exposed_communication_ms)
    most = ", the most of all" if len(report.rows) > 1 else ""
    found = [f"Exposed communication: {share:.1%} of the time of rank {label}{most}."]
    idle = max(report.rows, key=lambda row: row.share(row.idle_ms))
    if idle.idle_host_ms is not None and idle.share(idle.idle_ms) >= 0.05:
        if idle.idle_host_ms > idle.idle_ms / 2:
            cause = "mostly because the host launched too late"
        elif (idle.idle_wait_ms or 0.0) > idle.idle_ms / 2:
            cause = "mostly with work launched that waited for something else"
        else:
            cause = "for reasons that the trace does not tell"
        found.append(f"Rank {_label(idle, report)} is idle {idle.share(idle.idle_ms):.1%} of its time, {cause}.")
    return found
