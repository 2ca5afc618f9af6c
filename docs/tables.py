"""Writes the tables of schedule.md from the plan itself: counters, edges, what tasks wait for, regions.

`python docs/tables.py` rewrites the blocks between `<!-- table NAME -->` and `<!-- end -->`; a test compares them.
Needs the native library.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from moe_megakernel.plan import (
    Edge,
    GradNeeds,
    PlanConfig,
    PlanTables,
    Problem,
    Schedule,
    Tiling,
    edges,
    make_layout,
    make_plan,
)
from moe_megakernel.plan_names import Counter, Direction, Fence, Region, Role, Stream, TaskKind

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "schedule.md"
HEADERS = ROOT / "kernels" / "include" / "moe" / "plan"

#: The layer of the region table: Kimi K2 with 8 ranks of 8192 tokens, rows for twice the even load.
EXAMPLE = PlanConfig(Problem(8, 0, 384, 8, 7168, 2048, True, 8192, 2 * 8192 * 8))


def word(member: Counter | Role | TaskKind | Region) -> str:
    """As prose: PEER_DONE -> peer done."""
    return member.name.lower().replace("_", " ")


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def comments(header: str, enum: str) -> list[str]:
    """The comment behind each enumerator of an enum in a header, in order."""
    text = (HEADERS / header).read_text()
    body = re.search(rf"enum class {enum}[^{{]*\{{(.*?)\n\}};", text, re.DOTALL)
    assert body is not None
    return re.findall(r"^  k\w+(?: = \d+)?,\s*// (.*)$", body[1], re.MULTILINE)


def counter_table() -> str:
    """Every counter with its meaning, from the comments in edges.h."""
    rows = zip((word(counter) for counter in Counter), comments("edges.h", "Counter"), strict=True)
    return markdown(("counter", "counts"), rows)


def edge_table() -> str:
    """Every edge with its proxies, scope and fences."""

    def fences(mask: Fence) -> str:
        names = {Fence.BULK_WAIT: "bulk wait", Fence.LOADS_DONE: "loads done", Fence.PROXY_FENCE: "proxy fence"}
        return ", ".join(text for fence, text in names.items() if fence & mask) or "-"

    def row(e: Edge) -> tuple[str, ...]:
        guards = "reads, then overwrites" if e.overwrites else "writes, then reads"
        sides = (
            f"{word(e.raiser)} ({e.raiser_proxy.name.lower()})",
            f"{word(e.waiter)} ({e.waiter_proxy.name.lower()})",
        )
        return (word(e.counter), *sides, guards, e.scope.name.lower(), fences(e.raiser_fences), fences(e.waiter_fences))

    head = ("counter", "raised by", "awaited by", "guards", "scope", "before the raise", "after the wait")
    return markdown(head, map(row, edges()))


def sample_plans() -> list[PlanTables]:
    """Plans of both directions with every kind of wait in them, of four experts with 600 rows each."""
    problem = Problem(1, 0, 4, 1, 512, 512, True, 2400, 2400)
    config = PlanConfig(problem, Tiling(), Schedule(num_clusters=1, waves=2, segment_tiles=2, wgrad_tiles=2, lag=1))
    counts = torch.zeros(1, 4, 64, dtype=torch.int32)
    counts[:, :, :60] = 10
    forward = make_plan(config, counts, torch.tensor([2400]))
    needs = [GradNeeds(recompute=recompute) for recompute in (False, True)]
    return [forward, *(make_plan(config, counts, torch.tensor([2400]), Direction.BACKWARD, n) for n in needs)]


def task_table() -> str:
    """What each kind of task waits for and raises, collected from real plans."""
    waits: dict[TaskKind, dict[tuple[Role, Counter], None]] = {kind: {} for kind in TaskKind}
    raises: dict[TaskKind, dict[Counter, None]] = {kind: {} for kind in TaskKind}
    for plan in sample_plans():
        kinds = {
            Stream.COMPUTE: plan.tasks[:, 0].tolist(),
            Stream.PULL: plan.pulls[:, 0].tolist(),
            Stream.PLAN: [TaskKind.PLAN],
        }
        for stream, ticket, _, role, counter, _, _ in plan.waits.tolist():
            if ticket >= 0:
                waits[TaskKind(kinds[Stream(stream)][ticket])][(Role(role), Counter(counter))] = None
        for stream, ticket, _, _, counter, _, _ in plan.raises.tolist():
            raises[TaskKind(kinds[Stream(stream)][ticket])][Counter(counter)] = None
    rows = []
    for kind in TaskKind:
        awaited = ", ".join(f"{word(counter)} ({word(role)})" for role, counter in waits[kind])
        rows.append((word(kind), awaited or "-", ", ".join(map(word, raises[kind])) or "-"))
    return markdown(("task", "waits for (role)", "raises"), rows)


def region_table() -> str:
    """Every region of the byte map with its place and size in one example."""

    def size(count: int) -> str:
        return (
            f"{count / 2**20:.1f} MiB"
            if count >= 2**20
            else f"{count / 2**10:.1f} KiB"
            if count >= 1024
            else f"{count} B"
        )

    texts = [text[:1].replace("[", r"\[") + text[1:] for text in comments("layout.h", "Region")]
    rows = [
        (word(region), "shared" if place.shared else "local", text, size(place.bytes))
        for (region, place), text in zip(make_layout(EXAMPLE).items(), texts, strict=True)
    ]
    return markdown(("region", "memory", "holds", "bytes"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "counters": counter_table,
    "edges": edge_table,
    "tasks": task_table,
    "regions": region_table,
}


def filled_in(page: str) -> str:
    """The page with every block replaced by its table."""
    for name, table in TABLES.items():
        pattern = re.compile(rf"(<!-- table {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text = table()
        page, count = pattern.subn(lambda match, text=text: f"{match[1]}{text}\n{match[2]}", page)
        assert count == 1, name
    return page


if __name__ == "__main__":
    PAGE.write_text(filled_in(PAGE.read_text()))
