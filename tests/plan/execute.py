"""Runs plans the way kernels do, at the grain of tickets: agents claim in order and wait, in a random interleaving.

A compute agent stands for a cluster, a pull agent for a pulling warp. An agent claims the next ticket of its stream,
goes on when all waits of the ticket are met, raises, and claims again. What happens inside a ticket is the explorer's
business (`kernels/proof`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from moe_megakernel.plan import PlanTables
from moe_megakernel.plan_names import Counter, Stream

Record = tuple[int, int, int]  # counter, index, value
ACROSS_RANKS = (Counter.PEER_READY, Counter.PEER_DONE)
FLAGS = (Counter.PLAN_READY, *ACROSS_RANKS)


def by_ticket(records: np.ndarray) -> dict[tuple[int, int], list[Record]]:
    """(stream, ticket) -> what its roles wait for or raise, all blocks together."""
    out: dict[tuple[int, int], list[Record]] = defaultdict(list)
    for stream, ticket, _, _, counter, index, value in records.tolist():
        out[(stream, ticket)].append((counter, index, value))
    return out


class RankState:
    """Counters and streams of one rank."""

    def __init__(self, plan: PlanTables) -> None:
        self.waits, self.raises = by_ticket(plan.waits.numpy()), by_ticket(plan.raises.numpy())
        self.length = {Stream.COMPUTE: len(plan.tasks), Stream.PULL: len(plan.pulls), Stream.PLAN: 1}
        self.claimed = dict.fromkeys(Stream, 0)
        self.values: dict[tuple[int, int], int] = defaultdict(int)


@dataclass
class Agent:
    rank: int
    stream: Stream
    started: bool = False
    ticket: int | None = None


class Execution:
    """All ranks of a group over one launch.

    Args:
        plans: one for each rank.
        clusters, pullers: agents of each rank.
        alone: the only rank here is one of several whose flags are all set already.
    """

    def __init__(self, plans: list[PlanTables], clusters: int, pullers: int, alone: bool = False) -> None:
        self.ranks = [RankState(plan) for plan in plans]
        self._alone = alone
        self.agents = [
            Agent(rank, stream)
            for rank in range(len(plans))
            for stream, count in ((Stream.PLAN, 1), (Stream.COMPUTE, clusters), (Stream.PULL, pullers))
            for _ in range(count)
        ]
        self.overshot: set[tuple[int, int]] = set()

    def _met(self, rank: int, waits: list[Record]) -> bool:
        values = self.ranks[rank].values
        return all(
            (self._alone and counter in ACROSS_RANKS) or values[(counter, index)] >= target
            for counter, index, target in waits
        )

    def _raise(self, rank: int, raises: list[Record]) -> None:
        for counter, index, amount in raises:
            if counter in ACROSS_RANKS:
                if not self._alone:
                    self.ranks[index].values[(counter, rank)] = amount
            elif counter in FLAGS:
                self.ranks[rank].values[(counter, index)] = amount
            else:
                self.ranks[rank].values[(counter, index)] += amount

    def step(self, agent: Agent) -> bool:
        """Lets one agent go on; false if it cannot."""
        rank, stream = self.ranks[agent.rank], agent.stream
        moved = False
        if not agent.started:
            if not self._met(agent.rank, rank.waits[(stream, -1)]):
                return False
            agent.started = moved = True
            if stream == Stream.PLAN:  # "ready" goes out before the plan task waits for the others'
                self._raise(agent.rank, [r for r in rank.raises[(stream, 0)] if r[0] == Counter.PEER_READY])
        if agent.ticket is None:
            if rank.claimed[stream] >= rank.length[stream]:
                return moved
            agent.ticket, moved = rank.claimed[stream], True
            rank.claimed[stream] += 1
        if not self._met(agent.rank, rank.waits[(stream, agent.ticket)]):
            return moved
        self._raise(agent.rank, rank.raises[(stream, agent.ticket)])
        agent.ticket = None
        return True

    def finished(self) -> bool:
        """Whether every ticket has been done."""
        claimed = all(rank.claimed == rank.length for rank in self.ranks)
        return claimed and all(agent.ticket is None for agent in self.agents)

    def run(self, random: np.random.Generator) -> bool:
        """Runs until all is done or nobody can go on, every agent at a random speed of its own; true if done."""
        speed = random.uniform(0.05, 1.0, len(self.agents)) ** 2
        while True:
            chosen = np.flatnonzero(random.random(len(self.agents)) < speed)
            for i in random.permutation(chosen):
                self.step(self.agents[i])
            if not any([self.step(agent) for agent in self.agents] if random.random() < 0.1 else [True]):
                return self.finished()
