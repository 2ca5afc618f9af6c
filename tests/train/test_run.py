"""Whole runs: what they leave behind, exact resume, and losses that do not depend on the number of ranks."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from moe_megakernel.train import launch
from moe_megakernel.train.report import load_statistics, plot_curves

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("ranks", [1, 2])
def test_run_leaves_summary_and_curves(tiny, finished, ranks):
    out = finished(ranks)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["ranks"] == ranks
    assert summary["steps"] == tiny.steps
    assert summary["seconds"] > 0
    assert summary["tokens_per_s"] > 0
    assert 0 < summary["heldout_bits_per_byte"] < 10
    assert 3 < summary["order0_bits_per_byte"] < 4.5
    assert len(summary["expert_load"]) == tiny.layers
    for layer in summary["expert_load"]:
        assert 0 <= layer["min_share"] <= layer["mean_share"] <= layer["max_share"] <= 1
        assert layer["mean_share"] == pytest.approx(1 / tiny.experts)
    png = (out / "curves.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert len(png) > 10_000


def test_losses_do_not_depend_on_the_number_of_ranks(tiny, finished, history_of):
    # Three ranks: 5 experts are 2, 2, 1 and 4 sequences are 1, 1, 2.
    one, two, three = (history_of(finished(ranks), tiny.steps) for ranks in (1, 2, 3))
    assert len(one["loss"]) == tiny.steps
    for other in (two, three):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        for (step, loss), (other_step, other_loss) in zip(one["held_out"], other["held_out"], strict=True):
            assert step == other_step
            assert other_loss == pytest.approx(loss, rel=1e-5)


def test_loss_falls(tiny, finished, history_of):
    history = history_of(finished(1), tiny.steps)
    assert 7.5 < history["held_out"][0][1] < 9.5, "untrained: near the 8 bits of equal chances"
    assert history["held_out"][-1][1] < history["held_out"][0][1] - 0.2


@pytest.fixture
def resume_from(run):
    """resume_from(step, config, whole, out): copies the run in `whole` as it stood after `step`, ends it in `out`."""

    def resume(step, config, whole, out):
        shutil.copytree(whole / "checkpoints" / f"step-{step:06d}", out / "checkpoints" / f"step-{step:06d}")
        run(replace(config, out=str(out), resume=True))

    return resume


@pytest.mark.parametrize("ranks", [1, 2])
def test_resume_is_exact(resume_from, tiny, finished, history_of, tmp_path, ranks):
    resume_from(3, replace(tiny, ranks=ranks), finished(ranks), tmp_path)
    assert history_of(tmp_path, tiny.steps) == history_of(finished(ranks), tiny.steps)
    last = f"checkpoints/step-{tiny.steps:06d}"
    for file in (finished(ranks) / last).glob("*.safetensors"):
        assert (tmp_path / last / file.name).read_bytes() == file.read_bytes(), file.name
    summaries = [json.loads((out / "summary.json").read_text()) for out in (finished(ranks), tmp_path)]
    for key in ("heldout_bits_per_byte", "order0_bits_per_byte", "expert_load"):
        assert summaries[0][key] == summaries[1][key]


def test_resume_with_another_number_of_ranks(resume_from, tiny, finished, history_of, tmp_path):
    resume_from(3, tiny, finished(2), tmp_path)
    expected, got = history_of(finished(2), tiny.steps), history_of(tmp_path, tiny.steps)
    assert got["loss"][:3] == expected["loss"][:3]
    assert got["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_resume_of_a_finished_run_trains_no_more(resume_from, tiny, finished, history_of, tmp_path):
    resume_from(tiny.steps, tiny, finished(1), tmp_path)
    assert history_of(tmp_path, tiny.steps) == history_of(finished(1), tiny.steps)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["tokens_per_s"] == 0


def test_new_run_keeps_the_earlier_checkpoints_aside(tmp_path):
    for name in ("step-000003", "step-000006"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "state.json").write_text("{}")
    (tmp_path / "checkpoints.previous").mkdir()
    launch._set_aside(tmp_path)
    assert not (tmp_path / "checkpoints").exists()
    assert sorted(path.name for path in (tmp_path / "checkpoints.previous").iterdir()) == ["step-000003", "step-000006"]
    launch._set_aside(tmp_path)
    assert len(list((tmp_path / "checkpoints.previous").iterdir())) == 2, "a run that saved nothing replaces nothing"


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_other_dtypes_train(run, tiny, finished, history_of, tmp_path, dtype):
    run(replace(tiny, dtype=dtype, steps=2, out=str(tmp_path)))
    loss = history_of(tmp_path, 2)["loss"]
    expected = history_of(finished(1), tiny.steps)["loss"]
    assert loss[0] == pytest.approx(expected[0], rel=1e-2 if dtype == "bfloat16" else 1e-5)


@pytest.mark.slow
def test_compiled_run_equals_eager_and_resumes_exactly(run, resume_from, tiny, history_of, tmp_path, monkeypatch):
    # A fresh cache: compile caches do not know of effects.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    config = replace(tiny, layers=1, ranks=2, compile=True, out=str(tmp_path / "whole"))
    run(config)
    run(replace(config, ranks=1, compile=False, out=str(tmp_path / "eager")))
    whole, eager = history_of(tmp_path / "whole", tiny.steps), history_of(tmp_path / "eager", tiny.steps)
    assert whole["loss"] == pytest.approx(eager["loss"], rel=1e-4)
    resume_from(3, config, tmp_path / "whole", tmp_path / "resumed")
    assert history_of(tmp_path / "resumed", tiny.steps) == whole


def test_load_statistics():
    even, dead = load_statistics(torch.tensor([[5, 5, 5, 5], [0, 0, 3, 1]]))
    assert even == {"min_share": 0.25, "max_share": 0.25, "mean_share": 0.25, "entropy_bits": 2.0, "dead_experts": 0}
    assert dead["dead_experts"] == 2
    assert dead["max_share"] == 0.75
    assert dead["entropy_bits"] == pytest.approx(0.8113, abs=1e-4)


def test_curves_of_one_step_and_one_expert(tiny, tmp_path):
    history = {"loss": [3.0], "held_out": [[0, 8.0]]}
    plot_curves(tiny, history, torch.zeros(1, 1), 4.0, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000
