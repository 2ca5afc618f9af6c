"""One rank's clusters: they claim tasks of the plan in ticket order, wait for what the plan says, and run. Driven by
`engine` in time steps; owns all times of this rank's tasks.

A claim is made by the cluster that is free first. A cluster whose task must wait holds it, as on the device, and the
others claim on. Counters are events: an event happens when all raises of the plan to its counter have been made.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import numpy as np

from .costs import PULL_SLOWDOWN, Costs
from .stream import Stream


class Rank:
    """State of one rank while its layer runs."""

    def __init__(self, stream: Stream, costs: Costs, start: float, spare_warps: bool, record: bool):
        self.stream = stream
        self.main = stream.main.tolist()
        self.fill, self.drain, self.visible = costs.fill, costs.drain, costs.visible
        self.slowdown = 1.0 + PULL_SLOWDOWN if spare_warps else 1.0
        self.pulling = True
        self.left = stream.targets.tolist()
        self.when = [0.0] * len(self.left)
        self.delay = stream.delays.tolist()
        self.free = [(start, cluster) for cluster in range(costs.clusters)]
        heapify(self.free)
        self.held: dict[int, list[tuple[int, float, int]]] = {}  # event -> claims that wait for it
        self.next = 0
        self.finished = 0
        self.busy = 0.0  # cluster-seconds
        self.waited = np.zeros(len(stream.counter_names))  # cluster-seconds, by counter waited for
        self.end = start
        self.home: list[tuple[float, float]] = []  # (time, bytes) of rows ready to go home
        self.spans: list[tuple[int, int, float, float]] | None = [] if record else None  # (task, cluster, start, end)

    @property
    def done(self) -> bool:
        return self.finished == len(self.main)

    def advance(self, horizon: float) -> None:
        """Lets clusters that are free before `horizon` claim tasks."""
        free, tasks = self.free, len(self.main)
        while self.next < tasks and free and free[0][0] < horizon:
            since, cluster = heappop(free)
            self.next += 1
            self._start([(self.next - 1, since, cluster)])

    def raise_event(self, event: int, amount: int, time: float) -> None:
        """Adds to a counter; a pulled piece or a finished task calls it."""
        woken = self._raise(event, amount, time)
        if woken:
            self._start(woken)

    def happened(self, event: int, now: float) -> bool:
        return self.left[event] <= 0 and self.when[event] <= now

    def _raise(self, event: int, amount: int, time: float) -> list[tuple[int, float, int]]:
        if time > self.when[event]:
            self.when[event] = time
        self.left[event] -= amount
        if self.left[event] > 0:
            return []
        self.when[event] += self.delay[event]
        return self.held.pop(event, [])

    def _start(self, claims: list[tuple[int, float, int]]) -> None:
        """Runs claimed tasks as far as their waits are known; holds the others."""
        stream = self.stream
        while claims:
            task, since, cluster = claims.pop()
            ready, reason = since, -1
            for event in stream.waits[task]:
                if self.left[event] > 0:
                    self.held.setdefault(event, []).append((task, since, cluster))
                    break
                if self.when[event] > ready:
                    ready, reason = self.when[event], event
            else:
                claims.extend(self._run(task, since, ready, reason, cluster))

    def _run(self, task: int, since: float, ready: float, reason: int, cluster: int) -> list[tuple[int, float, int]]:
        stream = self.stream
        # A cluster that did not wait had its first loads in flight while the task before drained.
        length = self.main[task] * (self.slowdown if self.pulling else 1.0) + self.drain
        if reason >= 0:
            self.waited[stream.counter_of_event[reason]] += ready - since
            length += self.fill
        end = ready + length
        self.busy += length
        self.finished += 1
        self.end = max(self.end, end)
        heappush(self.free, (end, cluster))
        if self.spans is not None:
            self.spans.append((task, cluster, ready, end))
        seen = end + self.visible
        woken: list[tuple[int, float, int]] = []
        for event, amount in stream.raises[task]:
            woken += self._raise(event, amount, seen)
        if stream.home_event[task] >= 0:
            event = stream.home_event[task]
            woken += self._raise(event, 1, seen)
            if self.left[event] <= 0:
                heappush(self.home, (self.when[event], stream.home_of_event[event]))
        elif stream.home[task] > 0:
            heappush(self.home, (seen, stream.home[task]))
        return woken
