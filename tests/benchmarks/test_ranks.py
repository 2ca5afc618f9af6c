"""The parts of the comparison of several ranks with one that need no GPU, and the processes that ranks are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from benchmarks import group, host_time, mps, rank_steps, ranks
from moe_megakernel.bench import timing
from moe_megakernel.bench.problem import LEAVES, Problem, make_problem, rows_of_busiest, share_of
from moe_megakernel.bench.routings import Routing
from moe_megakernel.cli.words import some_of
from moe_megakernel.shapes import Shape, benchmark_shapes

SMALL = Shape("small", "small", num_experts=5, hidden=64, width=32, top_k=2, tokens=61)
CONFIG = rank_steps.Config(
    ("A",), "uniform", "reference", "collective", ("cold",), rounds=1, steps=1, own_sms=True, rest=0.0
)
MACHINE = {"gpu": "h200", "driver": "580", "torch": "2.11", "date": "2026-12-02", "commit": "abc"}


def small() -> Problem:
    return make_problem(SMALL, Routing("zipf"), device="cpu")


def test_sms() -> None:
    assert [rank_steps.sms_of_rank(132, n) for n in (2, 4, 8, 66)] == [66, 32, 16, 2]
    with pytest.raises(ValueError, match="ranks: expected at most 66 on 132 SMs, got 67"):
        rank_steps.sms_of_rank(132, 67)


def test_shares_join_to_the_whole() -> None:
    whole = small()
    parts = [share_of(whole, rank, 3) for rank in range(3)]
    assert [part.tokens for part in parts] == [21, 20, 20]
    for name in ("x", "topk_idx", "topk_weights", "w_gate_up", "w_down", "dy"):
        joined = torch.cat([getattr(part, name) for part in parts])
        assert torch.equal(joined, getattr(whole, name)), name
    assert all(leaf.requires_grad and leaf.is_leaf for leaf in parts[0].leaves)
    results = rank_steps.results_of(rank_steps.make_step(whole, CONFIG))
    shares = [rank_steps.share_of_results(results, 5, rank, 3) for rank in range(3)]
    for i, result in enumerate(results):
        assert torch.equal(torch.cat([share[i] for share in shares]), result)


def test_busiest_rank() -> None:
    routes = torch.tensor([[0, 1], [0, 4], [0, 2], [3, 4]], dtype=torch.int32)
    # Experts 0 and 1; 2 and 3; 4.
    assert rows_of_busiest(routes, 5, 3) == 4


def test_row() -> None:
    found = rank_steps.Found(
        "A",
        "backward",
        "hot",
        10,
        32,
        timing.Times(2.0, 1.0, 3.0),
        timing.Times(2.1, 2.0, 2.2),
        timing.Times(2.06, 2.0, 2.2),
    )
    row = ranks.make_row(MACHINE, 4, "mps", CONFIG, found)
    assert (row.shape, row.T, row.ranks, row.sms, row.impl, row.transport) == (
        "A",
        8192,
        4,
        32,
        "reference",
        "collective",
    )
    assert row.ratio == pytest.approx(1.05)
    assert ranks.text(row).endswith(
        "one of 128 2.000 ms (1.000 to 3.000): 1.050, within 1.10; layers of their own 2.060 ms, 1.030"
    )


def test_totals() -> None:
    def found(direction: str, single: float, several: float) -> ranks.Row:
        times = (timing.Times(value, value, value) for value in (single, several, 2.0))
        return ranks.make_row(MACHINE, 4, "mps", CONFIG, rank_steps.Found("A", direction, "cold", 1, 32, *times))

    assert ranks.total_text([found("forward", 1.0, 1.3), found("backward", 3.0, 3.2)]) == [
        "A, cold, forward and backward: 4.500 ms over 4.000 ms: 1.125, above 1.10; over layers of their own 1.125"
    ]


def test_own_layer_keeps_its_routes() -> None:
    own = rank_steps.own_layer(share_of(small(), 2, 3))
    assert (own.shape.num_experts, own.tokens, own.ranks) == (1, 20, 1)
    assert set(own.topk_idx.flatten().tolist()) == {0}
    assert rank_steps.forward_of(own, CONFIG)().shape == (20, 64)


def test_named_shapes_and_options() -> None:
    assert list(benchmark_shapes()) == list("ABCDEF")
    assert some_of("A, C", ("A", "B", "C"), "--shapes") == ["A", "C"]
    with pytest.raises(Exception, match=r"expected some of A, B, got 'Z'"):
        some_of("Z", ("A", "B"), "--shapes")


def test_the_twin_stands_in_for_the_layer() -> None:
    real = torch.ops.moe.layer_forward
    spent = host_time.measure(small(), "reference", calls=21)
    assert torch.ops.moe.layer_forward is real
    assert min(spent) > 0
    assert "the library adds" in host_time.text(spent)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(RuntimeError, match="ranks: device: expected a CUDA device, got none"):
        group.require_gpu()
    assert group.devices_for(2, 0) == ["cpu", "cpu"]
    assert group.devices_for(2, 1) == ["cuda:0", "cuda:0"]
    assert group.devices_for(2, 8) == ["cuda:0", "cuda:1"]


def test_a_wrong_bit_is_an_error() -> None:
    step = rank_steps.make_step(small(), CONFIG)
    rank = group.Rank(0, 1, torch.device("cpu"), shares_gpu=False)
    for i, name in enumerate(("y", *(f"gradient of {name}" for name in LEAVES))):
        expected = [t.clone() for t in rank_steps.results_of(step)]
        rank_steps.check_bits(rank, step, expected)
        expected[i].view(torch.uint8).flatten()[-1] ^= 1
        with pytest.raises(RuntimeError, match=f"ranks: rank 0: {name}: expected one rank's bits, got 1 other bytes"):
            rank_steps.check_bits(rank, step, expected)


def _compare(rank: group.Rank) -> list[int]:
    whole = small()
    expected = rank_steps.expected_share(rank, whole, CONFIG)
    step = rank_steps.make_step(share_of(whole, rank.rank, rank.ranks, rank.group), CONFIG)
    for _ in range(2):  # the graph is kept
        rank_steps.check_bits(rank, step, expected)
    return rank.gather(rank.rank)


@pytest.mark.distributed
def test_ranks_give_the_bits_of_one() -> None:
    assert group.run_ranks(_compare, 2, limit=120.0, gpus=0) == [0, 1]


CONTROL = """#!/bin/sh
if [ "$1" = -d ]; then echo "start $CUDA_MPS_PIPE_DIRECTORY" >> "$CALLS"; exit "$STATUS"; fi
read -r line; echo "$line $CUDA_MPS_PIPE_DIRECTORY" >> "$CALLS"
"""


def test_mps_starts_and_quits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(mps.PIPES, raising=False)
    calls = tmp_path / "calls"
    program = tmp_path / mps.CONTROL
    program.write_text(CONTROL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CALLS", str(calls))
    monkeypatch.setenv("STATUS", "0")
    with group.sharing(2, True, gpus=1) as how:
        pipes = os.environ[mps.PIPES]
        assert how == "mps"
        with group.sharing(2, True, gpus=1) as inner:  # the environment names one
            assert inner == "mps"
    assert not mps.in_environment()
    assert calls.read_text().splitlines() == [f"start {pipes}", f"quit {pipes}"]
    monkeypatch.setenv("STATUS", "3")
    with pytest.raises(RuntimeError, match="expected exit status 0, got 3"), mps.server():
        pass
    program.unlink()
    with pytest.raises(RuntimeError, match="expected the program nvidia-cuda-mps-control, got none"), mps.server():
        pass
    with group.sharing(2, False, gpus=1) as how:
        assert how == "slices"
    with group.sharing(2, True, gpus=2) as how:
        assert how == "own"
