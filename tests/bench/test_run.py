"""The benchmark's loop: what is measured, what is left out and why, rows and tables, and the command."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from typer.testing import CliRunner

from moe_megakernel.bench import modes, records, run, table, timing
from moe_megakernel.bench.implementation import Bound, Implementation
from moe_megakernel.bench.peers import IMPLEMENTATIONS
from moe_megakernel.bench.problem import Problem
from moe_megakernel.bench.routings import Routing
from moe_megakernel.cli.main import app
from moe_megakernel.shapes import SHAPES, Shape

OPTIONS = run.Options(
    shapes=("tiny",),
    tokens=(40,),
    routings=(Routing("zipf"),),
    directions=("forward", "backward"),
    modes=("eager",),
    impls=("torch_staged", "dense"),
    rounds=2,
    cold=False,
    memory=True,
    host=True,
    device=torch.device("cpu"),
    seed=0,
    commit="abc",
    command="moe-megakernel bench",
)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", Shape("tiny", "tiny", num_experts=8, hidden=64, width=32, top_k=4))


class Wrong(Implementation):
    """Right forward, twice the gradients."""

    name = "wrong"

    def bind(self, problem: Problem, variant: str = "") -> Bound:
        right = IMPLEMENTATIONS["torch_staged"].bind(problem)
        assert isinstance(right, Bound)

        def function(*leaves: Tensor) -> Tensor:
            y = right.function(*leaves)
            return 2 * y - y.detach()

        return replace(right, function=function)


class Broken(Wrong):
    """Raises in the middle."""

    name = "broken"

    def bind(self, problem: Problem, variant: str = "") -> Bound:
        raise KeyError("no such kernel")


class Tires(Wrong):
    """Right, until it has been called so many times."""

    name = "tires"
    variants = ("", "other")
    last = 0

    def bind(self, problem: Problem, variant: str = "") -> Bound:
        right = IMPLEMENTATIONS["torch_staged"].bind(problem)
        assert isinstance(right, Bound)
        calls = 0

        def function(*leaves: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            if calls > self.last:
                raise RuntimeError("tired")
            return right.function(*leaves)

        return replace(right, function=function)


class Overwrites(torch.autograd.Function):
    """The identity; backward overwrites what forward has saved."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.save_for_backward(y.clone())
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (saved,) = ctx.saved_tensors
        saved.copy_(grads[0])
        return saved


class Once(Implementation):
    """A backward that runs once, and says so or not."""

    def __init__(self, says_so: bool) -> None:
        self.name = "once" if says_so else "undeclared"
        self.forwards = 0

    def bind(self, problem: Problem, variant: str = "") -> Bound:
        right = IMPLEMENTATIONS["torch_staged"].bind(problem)
        assert isinstance(right, Bound)

        def function(*leaves: Tensor) -> Tensor:
            self.forwards += 1
            return Overwrites.apply(right.function(*leaves))

        return replace(right, function=function, repeats=self.name != "once")


class Absent(Wrong):
    """Needs what nobody has."""

    name = "absent"
    packages = (("no_such_module", "no-such-package"),)


@pytest.fixture
def _others(monkeypatch: pytest.MonkeyPatch) -> None:
    for made in (Wrong(), Broken(), Tires(), Absent(), Once(True), Once(False)):
        monkeypatch.setitem(IMPLEMENTATIONS, made.name, made)


def test_rows() -> None:
    (measured,) = run.run(OPTIONS)
    assert measured.absent == []
    assert [(row.direction, row.impl) for row in measured.rows] == [
        ("forward", "torch_staged"),
        ("forward", "dense"),
        ("backward", "torch_staged"),
        ("backward", "dense"),
    ]
    staged, dense = measured.rows[:2]
    assert (staged.shape, staged.T, staged.H, staged.I, staged.E, staged.K) == ("tiny", 40, 64, 32, 8, 4)
    assert (staged.gpu, staged.routing, staged.mode, staged.cache, staged.ranks) == ("cpu", "zipf", "eager", "hot", 1)
    assert (staged.variant in ("mul_sum", "bmm"), dense.variant) == (True, "")
    assert staged.ms_min <= staged.ms_median <= staged.ms_max
    assert staged.tflops == pytest.approx(6 * 40 * 4 * 64 * 32 / staged.ms_median / 1e9)
    assert staged.ratio_dense == pytest.approx(dense.ms_median / staged.ms_median)
    assert dense.ratio_dense == 1.0
    assert 0 < staged.error < 1e-2
    assert dense.error == 0
    assert staged.host_us > 0
    assert staged.saved_bytes > 0 > dense.saved_bytes
    assert staged.version == f"torch {torch.__version__}"


def test_every_problem_is_measured() -> None:
    options = replace(
        OPTIONS,
        tokens=(3, 5),
        routings=(Routing("uniform"), Routing("one-hot")),
        directions=("both",),
        impls=("dense",),
        rounds=1,
        host=False,
    )
    found = [(m.rows[0].T, m.rows[0].routing, m.rows[0].direction, m.rows[0].host_us) for m in run.run(options)]
    assert found == [(t, name, "both", -1.0) for t in (3, 5) for name in ("uniform", "one-hot")]


@pytest.mark.usefixtures("_others")
def test_others_go_on() -> None:
    names = ("wrong", "broken", "absent", "mega", "torch_staged")
    (measured,) = run.run(replace(OPTIONS, impls=names, modes=("eager", "graph"), directions=("forward",), host=False))
    assert [row.impl for row in measured.rows] == ["torch_staged"]
    assert [(a.impl, a.mode, a.fault) for a in measured.absent] == [
        ("wrong", "eager", True),
        ("broken", "eager", True),
        ("absent", "", False),
        ("mega", "", False),
        *((name, "graph", False) for name in ("wrong", "broken", "torch_staged")),
    ]
    lines = [table.absent_text(absent) for absent in measured.absent]
    assert lines[0].startswith("wrong (eager): failed: ValueError: gradient of x: expected a relative error below 0.02")
    assert lines[1] == "broken (eager): failed: KeyError: 'no such kernel'"
    assert (
        lines[2] == "absent: needs the package no-such-package: ModuleNotFoundError: No module named 'no_such_module'"
    )
    assert lines[-1] == "torch_staged (graph): CUDA graphs need a CUDA device"


@pytest.mark.usefixtures("_others")
def test_a_backward_that_runs_once_gets_a_forward_before_each_call() -> None:
    options = replace(OPTIONS, impls=("once", "undeclared", "torch_staged"), directions=("backward",), memory=False)
    (measured,) = run.run(options)
    assert [row.impl for row in measured.rows] == ["once", "torch_staged"]
    (absent,) = measured.absent
    assert (absent.impl, absent.fault) == ("undeclared", True)
    assert "modified by an inplace operation" in absent.reason
    once = IMPLEMENTATIONS["once"]
    assert isinstance(once, Once)
    # The numbers, twice to see that it runs, and what is timed.
    assert once.forwards == 1 + 2 + timing.WARM_UP + OPTIONS.rounds + timing.HOST_CALLS


def test_table() -> None:
    (measured,) = run.run(replace(OPTIONS, directions=("forward",)))
    rows = measured.rows
    measured.rows = [replace(rows[0], impl="mega", variant="", ms_median=2.0), *rows]
    console = Console(width=160, record=True)
    for shown in table.make_tables(measured):
        console.print(shown)
    text = console.export_text()
    assert "tiny, T 40, zipf: forward, eager, hot caches, cpu" in text
    assert f"{2.0 / rows[0].ms_median:.2f}" in text


def test_csv_keeps_rows(tmp_path: Path) -> None:
    (measured,) = run.run(replace(OPTIONS, directions=("forward",), host=False))
    path = tmp_path / "new" / "bench.csv"
    for _ in range(2):
        records.append_rows(path, measured.rows)
    read = records.read_rows(path)
    assert len(read) == 4
    rounded = [
        replace(row, **{k: round(v, 4) for k, v in vars(row).items() if isinstance(v, float)}) for row in measured.rows
    ]
    assert read == rounded * 2
    records.append_rows(path, [])
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    with pytest.raises(
        ValueError, match=r"bench: out: expected a file with the columns gpu,driver,.*, got .*other.csv"
    ):
        records.append_rows(other, measured.rows)
    assert other.read_text() == "a,b\n1,2\n"
    with pytest.raises(ValueError, match=r"other.csv:2: expected a row of the benchmark, got KeyError"):
        records.read_rows(other)


def test_times() -> None:
    ran: list[str] = []
    calls = {name: lambda name=name: ran.append(name) for name in "abc"}
    times = timing.time_rounds(calls, 4, torch.device("cpu"), cold=False)
    assert "".join(ran[9:]) == "abcbcacababc"
    assert all(t.least <= t.median <= t.most for t in times.values())
    assert timing.median([3.0, 1.0, 2.0, 10.0]) == 2.5
    assert timing.host_time(lambda: None, torch.device("cpu")) < 100


def test_graphs_and_compilers_are_not_for_everybody() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert modes.mode_fault(IMPLEMENTATIONS["nccl"], "graph", cuda).startswith("waits for the device inside")
    assert modes.mode_fault(IMPLEMENTATIONS["sonic"], "compiled", cuda).startswith("does not run under torch.compile")
    assert modes.mode_fault(IMPLEMENTATIONS["mega"], "graph", cuda) == ""
    assert modes.mode_fault(IMPLEMENTATIONS["mega"], "graph", cpu) == "CUDA graphs need a CUDA device"
    assert modes.mode_fault(IMPLEMENTATIONS["nccl"], "eager", cuda) == ""


SMALL = ["bench", "--device", "cpu", "--shapes", "tiny", "--tokens", "8", "--rounds", "1", "--no-host", "--no-memory"]


def test_command(tmp_path: Path) -> None:
    path = tmp_path / "bench.csv"
    options = ["--impls", "dense,torch_staged,sonic", "--direction", "forward", "--out", str(path)]
    done = CliRunner().invoke(app, [*SMALL, *options])
    assert done.exit_code == 0, done.output
    assert "torch_staged" in done.output
    assert "sonic: needs the package sonic-moe" in done.output
    assert f"rows are in {path}" in done.output
    with path.open() as file:
        assert [row["impl"] for row in csv.DictReader(file)] == ["dense", "torch_staged"]


@pytest.mark.usefixtures("_others")
@pytest.mark.parametrize("last", range(18))
def test_others_go_on_whenever_one_fails(monkeypatch: pytest.MonkeyPatch, last: int) -> None:
    """In its first call, in those before the times, in a warm-up, in a round, in those of the host."""
    monkeypatch.setattr(Tires, "last", last)
    monkeypatch.setattr(timing, "HOST_CALLS", 4)
    (measured,) = run.run(replace(OPTIONS, impls=("tires", "torch_staged"), directions=("forward",)))
    (row,) = (row for row in measured.rows if row.impl == "torch_staged")
    assert min(row.ms_median, row.host_us) > 0
    assert {(absent.impl, absent.mode, absent.fault) for absent in measured.absent} == {("tires", "eager", True)}
    assert all(absent.reason.endswith("RuntimeError: tired") for absent in measured.absent)


@pytest.mark.usefixtures("_others")
def test_a_variant_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    bind = Tires.bind
    monkeypatch.setattr(
        Tires,
        "bind",
        lambda self, problem, variant="": (
            bind(self, problem, variant) if variant else IMPLEMENTATIONS["torch_staged"].bind(problem)
        ),
    )
    monkeypatch.setattr(Tires, "last", 4)
    (measured,) = run.run(replace(OPTIONS, impls=("tires",), directions=("forward",), memory=False))
    assert [(row.impl, row.variant) for row in measured.rows] == [("tires", "")]
    assert [absent.reason for absent in measured.absent] == ["forward, other: RuntimeError: tired"]


@pytest.mark.usefixtures("_others")
def test_a_failure_shows_in_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    done = CliRunner().invoke(app, [*SMALL, "--impls", "wrong,dense"])
    assert done.exit_code == 1, done.output
    assert "wrong (eager): failed: ValueError" in done.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shapes", "z"], "shape: expected one of"),
        (["--shapes", ","], "expected at least one word, got none"),
        (["--routing", "even"], "routing: expected uniform, zipf"),
        (["--direction", "up"], "expected some of forward, backward, both, got 'up'"),
        (["--mode", "fast"], "expected some of eager, compiled, graph, got 'fast'"),
        (["--impls", "ours"], "expected some of mega, staged"),
        (["--tokens", "0"], "expected numbers of tokens, got '0'"),
        (["--cache", "warm"], "expected cold or hot, got 'warm'"),
        (["--device", "tpu"], "expected cuda or cpu, got 'tpu'"),
        (["--rounds", "0"], "--rounds"),
        (["--routing", "file:/nowhere.pt"], "expected a .safetensors or .pt file, got no such file"),
        (["--shapes", "kimi-k2", "--tokens", ""], "bench: tokens: expected at least 1 for shape kimi-k2, got None"),
    ],
)
def test_wrong_options(options: list[str], message: str) -> None:
    done = CliRunner().invoke(app, [*SMALL, *options], env={"COLUMNS": "400", "TERM": "dumb"})
    assert done.exit_code == 2, done.output
    assert message in done.output.replace("\n", " ")


@pytest.mark.distributed
def test_under_torchrun(tmp_path: Path) -> None:
    """Rank 0 reports the ranks' times together; single-GPU peers are left out."""
    path = tmp_path / "bench.csv"
    options = ["--shapes", "f", "--impls", "nccl,reference,torch_staged", "--direction", "both", "--out", str(path)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "moe_megakernel", *SMALL, *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("torch_staged: has no ranks") == 1
    assert [(row.impl, row.ranks, row.T) for row in records.read_rows(path)] == [("nccl", 2, 8), ("reference", 2, 8)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_gpu() -> None:
    """All modes of all that run there, by their numbers; times are somebody else's."""
    options = replace(
        OPTIONS,
        tokens=(300,),
        modes=("eager", "compiled", "graph"),
        directions=("forward", "backward", "both"),
        impls=("mega", "staged", "reference", "dense", "torch_staged"),
        cold=True,
        rounds=2,
        device=torch.device("cuda", torch.cuda.current_device()),
    )
    (measured,) = run.run(options)
    assert [table.absent_text(a) for a in measured.absent if a.fault] == []
    found = {(row.impl, row.mode, row.direction) for row in measured.rows}
    assert {("mega", mode, direction) for mode in options.modes for direction in options.directions} <= found
    assert all(row.peak_bytes > 0 for row in measured.rows if row.impl == "mega")
