"""`python -m tests.dist_gpu`: two runs of pytest, the first under an MPS daemon that ends with it, whatever happens.

Tried without a GPU, with a stand-in for NVIDIA's control program.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from tests.dist_gpu import __main__ as entry
from tests.dist_gpu import mps

# `-d` starts a process that outlives the program and writes its id as the daemon does; "quit" ends it.
STAND_IN = """#!/usr/bin/env bash
pid_file=$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid
echo "$@" >> "$CALLS"
if [ "$1" = -d ]; then
    if [ -n "$REFUSES" ]; then echo "no GPU for you"; exit 1; fi
    [ -d "$CUDA_MPS_LOG_DIRECTORY" ] || exit 2
    sleep 300 &
    echo $! > "$pid_file"
else
    read -r told
    echo "$told" >> "$CALLS"
    if [ -z "$IS_DEAF" ]; then kill "$(cat "$pid_file")"; fi
fi
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in comes first on PATH; the file in which it notes how it was called."""
    program = tmp_path / mps.CONTROL
    program.write_text(STAND_IN)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    return tmp_path / "calls"


class Trouble(Exception):
    """What happens inside the `with` block."""


def look_and_raise(seen: dict[str, str]) -> None:
    with mps.running() as variables:
        seen |= variables
        assert mps.is_running(variables)
        assert not mps.is_running({mps.PIPES: variables[mps.LOGS]})
        assert all(Path(path).is_dir() for path in variables.values())
        raise Trouble


def test_it_ends_with_the_block(calls: Path) -> None:
    seen: dict[str, str] = {}
    with pytest.raises(Trouble):
        look_and_raise(seen)
    assert seen.keys() == {mps.PIPES, mps.LOGS}
    assert not mps.is_running(seen)
    assert not any(Path(path).exists() for path in seen.values())
    assert calls.read_text().split("\n")[:3] == ["-d", "", f"quit -t {mps.CLIENT_LIMIT}"]


def test_one_that_does_not_quit_is_ended(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IS_DEAF", "1")
    monkeypatch.setattr(mps, "EXIT_LIMIT", 0.2)
    with mps.running() as variables:
        pid = mps._daemon_pid(variables)
        assert mps._alive(pid)
    assert not mps._alive(pid)


def test_one_that_does_not_start(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFUSES", "1")
    with pytest.raises(mps.MpsError, match="expected exit code 0, got 1: no GPU for you"), mps.running():
        pass
    assert calls.read_text() == "-d\n"


def test_none_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(mps.MpsError, match=f"expected the program {mps.CONTROL}, got none"), mps.running():
        pass


def test_absent() -> None:
    with mps.absent() as variables:
        assert Path(variables[mps.PIPES]).is_dir()
        assert not mps.is_running(variables)


def test_the_entry_says_why_it_skips() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.dist_gpu"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "tests.dist_gpu: every test is skipped: needs a CUDA device\n"


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[bool, list[str]]]]:
    """runs(gpus, outcomes): as if there were such GPUs and each run of pytest ended so; returns (under MPS?, files)."""

    def pretend(gpus: int, outcomes: list[int | BaseException]) -> list[tuple[bool, list[str]]]:
        made: list[tuple[bool, list[str]]] = []

        def run(variables: Mapping[str, str], *arguments: str) -> int:
            made.append((mps.is_running(variables), [Path(a).name for a in arguments]))
            outcome = outcomes[len(made) - 1]
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        monkeypatch.setattr(entry, "missing_kernels", lambda: "")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(signal, "signal", lambda *_: None)
        monkeypatch.setattr(entry, "_pytest", run)
        return made

    return pretend


@pytest.mark.parametrize(
    ("gpus", "outcomes", "code"),
    [(1, [0, 0], 0), (1, [1, 0], 1), (1, [0, 2], 1), (4, [5, 0], 0), (8, [0, 0], 0)],
)
def test_two_runs(calls: Path, runs: Callable, gpus: int, outcomes: list[int], code: int) -> None:
    made = runs(gpus, outcomes)
    assert entry.main(["-x"]) == code
    assert [under_mps for under_mps, _ in made] == [gpus < 8, False]
    assert [arguments[-1] for _, arguments in made] == ["-x", "-x"]
    assert made[0][1][:2] == ["dist_gpu", "test_failures.py"], "all but the failures"
    assert made[1][1][0] == "test_failures.py"
    assert calls.exists() == (gpus < 8)


def test_an_interrupt_ends_the_daemon(calls: Path, runs: Callable) -> None:
    made = runs(1, [KeyboardInterrupt()])
    with pytest.raises(KeyboardInterrupt):
        entry.main([])
    assert len(made) == 1
    assert calls.read_text().split("\n")[2].startswith("quit")


def test_without_mps_ranks_take_turns(
    runs: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    made = runs(1, [0, 0])
    assert entry.main([]) == 0
    assert [under_mps for under_mps, _ in made] == [False, False]
    assert "ranks take turns on the GPU, which takes longer: expected the program" in capsys.readouterr().out
