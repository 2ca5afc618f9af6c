"""The parts of the row mover's benchmark that need no GPU: moves, layout, rows of the CSV, the library's interface."""

from __future__ import annotations

import ctypes
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from benchmarks.row_mover import __main__ as command
from benchmarks.row_mover import library, mover, moves, worker
from torch import Tensor

from benchmarks import report
from moe_megakernel.bench import records, timing
from moe_megakernel.distributed.partition import expert_range

CONFIG = worker.Config(
    tokens=40,
    hidden=64,
    num_experts=10,
    top_k=3,
    routings=("uniform",),
    warps=(1,),
    blocks=0,
    rounds=2,
    cold=True,
    timeout=1.0,
    library=Path("librow_mover.so"),
)


def pulled(traffic: moves.Traffic, x: Tensor, rank: int) -> Tensor:
    sources = traffic.pull[rank].long()
    return x[sources[:, 0], sources[:, 1]]


@pytest.mark.parametrize(("ranks", "tokens", "routing"), [(1, 70, "uniform"), (4, 40, "zipf"), (3, 1, "uniform")])
def test_both_directions_move_the_same_rows(ranks: int, tokens: int, routing: str) -> None:
    experts, top_k = 10, 3
    routes = moves.make_routes(ranks, tokens, experts, top_k, routing)
    traffic = moves.make_traffic(routes, experts)
    x = torch.arange(ranks * tokens).view(ranks, tokens)
    assert sum(traffic.received) == ranks * tokens * top_k
    pushed = [torch.full((received,), -1) for received in traffic.received]
    for home in range(ranks):
        assert len(traffic.moves("push", home)) == tokens * top_k
        for i, (owner, row) in enumerate(traffic.moves("push", home).tolist()):
            assert pushed[owner][row] == -1
            token, k = divmod(i, traffic.moves_of_near_row("push"))
            assert int(routes[home, token, k]) in expert_range(experts, owner, ranks)
            pushed[owner][row] = x[home, token]
    for rank in range(ranks):
        assert traffic.moves("pull", rank).dtype == traffic.moves("push", rank).dtype == torch.int32
        assert torch.equal(pulled(traffic, x, rank), pushed[rank])


def test_rows_are_ordered_as_in_the_layer() -> None:
    """By expert, then (g mod 64, g div 64): two ranks of 70 tokens that all choose experts 1 and 0."""
    routes = torch.tensor([1, 0]).expand(2, 70, 2)
    traffic = moves.make_traffic(routes, 2)
    order = sorted(range(140), key=lambda g: (g % 64, g // 64))
    expected = torch.tensor([divmod(g, 70) for g in order], dtype=torch.int32)
    assert torch.equal(traffic.pull[0], expected)
    assert torch.equal(traffic.pull[1], expected)
    assert traffic.remote_share() == 0.5


def test_zipf_is_uneven() -> None:
    received = {}
    for routing in moves.ROUTINGS:
        routes = moves.make_routes(4, 200, 16, 2, routing)
        received[routing] = max(moves.make_traffic(routes, 16).received) / (200 * 2)
    assert received["zipf"] > 1.5 > received["uniform"]
    with pytest.raises(ValueError, match="routing: expected one of uniform, zipf, got 'even'"):
        moves.make_routes(4, 200, 16, 2, "even")


def test_layout_and_blocks() -> None:
    x_offset, rows_offset, size = mover.buffer_layout(tokens=3, hidden=8, rows=1000)
    assert x_offset >= 8 * library.MAX_RANKS
    assert rows_offset >= x_offset + 3 * 8 * 2
    assert size >= rows_offset + 1000 * 8 * 2
    assert x_offset % 16 == rows_offset % 16 == size % 2 == 0
    assert worker.blocks_of_rank(0, 132, 4, shares_gpu=True) == 33
    assert worker.blocks_of_rank(0, 132, 4, shares_gpu=False) == 132
    assert worker.blocks_of_rank(7, 132, 4, shares_gpu=True) == 7


def test_parameters_mirror_the_library() -> None:
    """Names in order, and a size that leaves no gap."""
    text = (library.ROOT / "benchmarks" / "row_mover" / "row_mover.cu").read_text()
    body = text.split("struct RowMoverParams {")[1].split("};")[0]
    declared = [line.split(";")[0].split()[-1].lstrip("*") for line in body.splitlines() if ";" in line.split("//")[0]]
    assert declared == [field[0] for field in library.Params._fields_]
    assert ctypes.sizeof(library.Params) == 9 * 8 + 4 * 4
    with pytest.raises(RuntimeError, match=r"library: expected a file, got .*missing.so; build it by cmake"):
        library.Library(Path("missing.so"))


def test_rows() -> None:
    assert worker.last_rank([[1.0, 5.0, 2.0], [3.0, 4.0, 1.0]]) == timing.Times(3.0, 2.0, 5.0)
    times = {"pull": timing.Times(2.0, 1.5, 2.5), "push": timing.Times(3.0, 3.0, 3.0)}
    found = worker.Found("zipf", warps=6, blocks=33, rows=480, rows_busiest=300, remote_share=0.75, times=times)
    machine = {"gpu": "h200", "driver": "580", "torch": "2.11", "date": "2026-12-02", "commit": "abc"}
    pull, push = command.make_rows(machine, 4, "mps", CONFIG, found)
    assert [field.name for field in fields(pull)][:5] == list(machine)
    assert (pull.direction, pull.ms_median, pull.pull_over_push, pull.cache) == ("pull", 2.0, 1.5, "cold")
    assert pull.gb_per_s == pytest.approx(480 * 128 / 2e-3 / 1e9)
    assert push.gb_per_s_busiest == pytest.approx(300 * 128 / 3e-3 / 1e9)
    assert replace(pull, direction="push") != push
    assert "pull/push 1.50" in command.text(push)


def test_rows_append(tmp_path: Path) -> None:
    times = {name: timing.Times(1.0, 1.0, 1.0) for name in moves.DIRECTIONS}
    found = worker.Found("uniform", 1, 33, 480, 120, 0.75, times)
    path = tmp_path / "row_mover.csv"
    for _ in range(2):
        records.append_rows(path, command.make_rows(report.machine("abc"), 4, "own", CONFIG, found))
    heading, *lines = path.read_text().splitlines()
    assert heading.startswith("gpu,driver,torch,date,commit,ranks,sharing,T,H,E,K,routing,")
    assert len(lines) == 4
    assert report.default_path("row_mover", "gb200").parts[-2:] == ("gb200", "row_mover.csv")
