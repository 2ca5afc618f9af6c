"""What an analysis found, as plain data and as JSON. `tables.py` and `picture.py` show it.

Owns the names of the JSON fields, which are those of the dataclasses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Of the JSON; raised when a field changes its meaning or goes.
SCHEMA = 1


@dataclass(frozen=True)
class WorkTime:
    """Work of one class. `time_ms`: time in which any of it ran. `sum_ms`: the durations added up. `count`: pieces in
    the whole window (kernels and copies; on a CPU stretches of ops' own time)."""

    time_ms: float
    sum_ms: float
    count: int


@dataclass(frozen=True)
class PartTime:
    """One part of the MoE layer. `exposed_ms`: of its time, that in which it communicated and no compute ran."""

    time_ms: float
    exposed_ms: float
    count: int


@dataclass(frozen=True)
class Estimate:
    """What overlap would give; an estimate, not a prediction.

    `without_exposed_ms` = span - exposed communication: the bound that no overlap can beat. `hidden_ms` = min(exposed
    communication of the MoE layer, time of expert GEMMs in which no communication runs): what could move behind the
    expert GEMMs, if they did not get slower by it. `overlapped_ms` = span - hidden_ms.
    """

    without_exposed_ms: float
    hidden_ms: float
    overlapped_ms: float


@dataclass(frozen=True)
class Communication:
    """Communication kernels (on a CPU: ops) of one name. `count` of the whole window; times as in `Row`."""

    name: str
    count: int
    sum_ms: float
    exposed_ms: float


@dataclass(frozen=True)
class Row:
    """One device of one rank. Times are milliseconds: means per step where `steps` > 0, else of the whole trace.

    Measured on sets of time, see `analysis.py`: span = compute + exposed communication + exposed memory + idle, and
    idle = host + wait + gaps of unknown cause. `idle_host_ms` and `idle_wait_ms` are None for a CPU, which has no
    queue. `moe_ms` is the time in which any part of the layer ran. `lanes` are for the picture: bin edges in
    milliseconds of the window (not per step) as "edges", and by name the share of each bin that is covered.
    """

    file: str
    rank: int
    world_size: int | None
    device: str
    steps: int
    span_ms: float
    busy_ms: float
    compute_ms: float
    communication_ms: float
    exposed_communication_ms: float
    overlapped_communication_ms: float
    memory_ms: float
    exposed_memory_ms: float
    idle_ms: float
    idle_host_ms: float | None
    idle_wait_ms: float | None
    classes: dict[str, WorkTime]
    moe_ms: float
    moe_exposed_communication_ms: float
    moe: dict[str, PartTime]
    estimate: Estimate
    communication: list[Communication]
    lanes: dict[str, NDArray[np.float64]] = field(repr=False, compare=False)

    def share(self, ms: float) -> float:
        """`ms` as a share of the span, 0 to 1; 0 of an empty span."""
        return ms / self.span_ms if self.span_ms else 0.0

    def to_json(self) -> dict[str, Any]:
        """All fields but the picture's, of JSON types only."""
        fields = dataclasses.asdict(dataclasses.replace(self, lanes={}))
        del fields["lanes"]
        return fields


#: What is compared between ranks, by JSON name.
COMPARED: dict[str, Callable[[Row], float]] = {
    "span_ms": lambda row: row.span_ms,
    "busy_ms": lambda row: row.busy_ms,
    "exposed_communication_ms": lambda row: row.exposed_communication_ms,
    "idle_ms": lambda row: row.idle_ms,
    "moe_ms": lambda row: row.moe_ms,
    "overlapped_ms": lambda row: row.estimate.overlapped_ms,
}


@dataclass(frozen=True)
class Report:
    """Rows in order of rank and device."""

    rows: list[Row]

    def spread(self) -> dict[str, dict[str, float]]:
        """Minimum, median and maximum over rows of what `COMPARED` names, milliseconds."""
        found = {}
        for name, figure in COMPARED.items():
            values = np.array([figure(row) for row in self.rows])
            found[name] = {"min": float(values.min()), "median": float(np.median(values)), "max": float(values.max())}
        return found

    def to_json(self) -> dict[str, Any]:
        """The report of JSON types only: `schema`, `rows`, `spread`."""
        return {"schema": SCHEMA, "rows": [row.to_json() for row in self.rows], "spread": self.spread()}
