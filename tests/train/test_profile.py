"""`train --profile`: what it records and leaves, and that it changes no number of the run."""

import json
from dataclasses import replace

import pytest

from moe_megakernel.profiling import analyse_files
from moe_megakernel.train.loop import Trainer


@pytest.fixture(scope="module")
def profiled(run, tiny, tmp_path_factory):
    """profiled(ranks, steps): the folder of such a run."""

    def folder(ranks, steps):
        out = tmp_path_factory.mktemp("profiled")
        run(replace(tiny, ranks=ranks, steps=steps, out=str(out), profile=True))
        return out

    return folder


@pytest.mark.distributed
def test_two_ranks_leave_traces_and_a_report(profiled, tiny, finished, history_of):
    out = profiled(2, tiny.steps)
    report = analyse_files([out])
    assert [(row.rank, row.steps) for row in report.rows] == [(0, 4), (1, 4)], "steps 2 to 5"
    for row in report.rows:
        assert row.moe["expert_gemm"].time_ms > 0
        assert row.moe_exposed_communication_ms > 0
    assert "Where time goes (ms a step, mean of 4)" in (out / "profile.txt").read_text()
    assert (out / "profile.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "summary.json").read_text())["steps"] == tiny.steps
    assert history_of(out, tiny.steps) == history_of(finished(2), tiny.steps)


@pytest.mark.parametrize(("steps", "recorded"), [(1, 1), (3, 2)])
def test_short_runs_record_what_there_is(profiled, steps, recorded):
    (row,) = analyse_files([profiled(1, steps) / "rank0.pt.trace.json.gz"]).rows
    assert row.steps == recorded
    assert row.device == "cpu"


def test_nothing_is_left_without_the_option(finished):
    assert not list(finished(1).glob("*trace*"))
    assert not (finished(1) / "profile.txt").exists()


def test_an_error_ends_the_recording(run, tiny, tmp_path, monkeypatch):
    """The error of a recorded step is the one that is seen, and the next run can record again."""
    step = Trainer.step

    def failing(self, number):
        if number == 2:
            raise RuntimeError("in step 3")
        return step(self, number)

    config = replace(tiny, out=str(tmp_path), profile=True)
    monkeypatch.setattr(Trainer, "step", failing)
    with pytest.raises(RuntimeError, match=r"^in step 3$"):
        run(config)
    assert not (tmp_path / "profile.txt").exists()
    monkeypatch.undo()
    run(replace(config, steps=2))
    assert (tmp_path / "profile.txt").exists()
