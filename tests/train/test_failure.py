"""A rank that raises or dies ends the whole run: a clear message, a nonzero exit, no process left."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from moe_megakernel.train import launch
from moe_megakernel.train.config import TrainError

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds processes through /proc"),
]


def children_of(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def hears_ctrl_c():
    """A shell lets its background jobs ignore it, and they what they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def long_run(words_file, tmp_path):
    """A run of two ranks that would go on for ages, caught after it has trained; yields (process, ranks' pids)."""
    out = tmp_path / "out"
    sizes = "--batch 2 --seq 16 --layers 1 --hidden 16 --heads 2 --experts 2 --expert-width 8".split()
    parent = subprocess.Popen(
        [sys.executable, "-m", "moe_megakernel", "train", "--text", words_file, "--out", out, "--no-compile"]
        + ["--steps", "1000000", "--checkpoint-every", "1", *sizes],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},  # a killed parent leaves its scratch folder
        text=True,
        preexec_fn=hears_ctrl_c,
    )
    try:
        wait_until(lambda: any((out / "checkpoints").glob("step-*/state.json")) or parent.poll() is not None, 60)
        assert parent.poll() is None, parent.stderr.read()
        ranks = children_of(parent.pid)
        assert len(ranks) == 2
        yield parent, ranks
    finally:
        for pid in (parent.pid, *children_of(parent.pid)):
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
        parent.wait()


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_rank_ends_the_run(long_run, victim):
    parent, ranks = long_run
    os.kill(ranks[victim], signal.SIGKILL)
    _, errors = parent.communicate(timeout=30)
    assert parent.returncode == 1
    last = errors.strip().splitlines()[-1]
    assert last == f"train: rank {victim} of 2 failed, all ranks were stopped: ended by signal SIGKILL"
    assert not any(is_running(pid) for pid in ranks)


def test_ranks_end_with_a_killed_parent(long_run):
    parent, ranks = long_run
    parent.kill()
    parent.wait()
    wait_until(lambda: not any(is_running(pid) for pid in ranks))


def test_interrupt_ends_the_run(long_run):
    parent, ranks = long_run
    parent.send_signal(signal.SIGINT)
    _, errors = parent.communicate(timeout=30)
    assert parent.returncode == 130
    assert errors == "train: interrupted; all ranks were stopped\n"
    assert not any(is_running(pid) for pid in ranks)


def test_rank_that_raises_is_named_with_its_traceback(tiny, tmp_path):
    # The parent looks for a folder only; the rank that writes into it fails.
    out = tmp_path / "out"
    out.mkdir()
    (out / "checkpoints").write_text("a file where a folder belongs")
    with pytest.raises(TrainError) as caught:
        launch.run(replace(tiny, ranks=2, steps=1, out=str(out)))
    message = str(caught.value)
    assert message.splitlines()[-1].startswith("train: rank 0 of 2 failed, all ranks were stopped: ")
    assert "checkpoint.py" in message, "the traceback shows where"


def test_rank_that_cannot_start_is_reported(tiny, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import os\nif os.environ.get('OMP_NUM_THREADS') == '1': os._exit(7)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with pytest.raises(TrainError, match="rank 0 of 1 failed, all ranks were stopped: ended with exit code 7"):
        launch.run(replace(tiny, out=str(tmp_path / "out")))


def test_first_failure_is_the_cause(tmp_path):
    for rank, moment in enumerate((20.0, 10.0)):
        note = f'{{"time": {moment}, "error": "E{rank}", "trace": "T{rank}", "expected": false}}'
        (tmp_path / f"failure-{rank}.json").write_text(note)
    assert launch._explain([1, 1], tmp_path).endswith("rank 1 of 2 failed, all ranks were stopped: E1")
    (tmp_path / "stderr-2").write_text("last words\n")
    killed = launch._explain([1, 1, -9], tmp_path)
    assert killed.endswith("rank 2 of 3 failed, all ranks were stopped: ended by signal SIGKILL")
    assert "last words" in killed
