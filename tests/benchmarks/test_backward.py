"""The parts of the backward's benchmark that need no GPU: gradients of the peers, memory, rows."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import backward, driver, gradients, layers, memory, report, timing
from moe_megakernel.shapes import Shape

SMALL = Shape("small", "small", num_experts=8, hidden=64, width=32, top_k=4, tokens=100)


@pytest.mark.parametrize("combine", gradients.COMBINES)
def test_gradients_of_the_peer_are_the_layers(combine: str) -> None:
    layer = layers.make_layer(SMALL, "zipf", "cpu")
    dy = gradients.make_dy(layer)
    expected = gradients.make_step(layer, "reference", "", dy).gradients()
    step = gradients.make_step(layer, "torch_staged", combine, dy)
    for _ in range(2):  # the graph is kept
        for name, found, want in zip(gradients.NAMES, step.gradients(), expected, strict=True):
            assert found.shape == want.shape
            assert timing.relative_error(found, want) < backward.TOLERANCE, name
    assert layer.x.grad is layer.w_down.grad is None
    assert not layer.x.requires_grad


def test_wrong_numbers_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layers.make_layer(SMALL, "uniform", "cpu")
    dy = gradients.make_dy(layer)
    backward.check_numbers(layer, ["reference", "torch_staged", "dense"], dy)
    real = backward.make_step

    def scaled(layer: layers.Layer, name: str, combine: str, dy: torch.Tensor) -> gradients.Step:
        return real(layer, name, combine, 1.1 * dy if name == "reference" else dy)

    monkeypatch.setattr(backward, "make_step", scaled)
    with pytest.raises(RuntimeError, match=r"backward: reference : x: expected a relative error below 0.02, got 1"):
        backward.check_numbers(layer, ["reference"], dy)


def test_dense_has_as_many_operations() -> None:
    layer = layers.make_layer(SMALL, "uniform", "cpu")
    count = FlopCounterMode(display=False)
    with count:
        gradients.dense(layer)()
    assert SMALL.tokens is not None
    assert count.get_total_flops() == SMALL.flops(SMALL.tokens, "backward")


def test_saved_bytes() -> None:
    """The layer keeps h, offsets and route numbers; staged PyTorch the rows of x, h, a and o, and more."""
    layer = layers.make_layer(SMALL, "uniform", "cpu")
    dy = gradients.make_dy(layer)
    rows, h, offsets = 400, 400 * 64 * 2, 9 * 4
    assert memory.saved_bytes(layer, "reference", "", dy) == h + offsets + rows * 4
    x_rows = o_rows = rows * 64 * 2
    assert memory.saved_bytes(layer, "torch_staged", "mul_sum", dy) >= x_rows + h + h // 2 + o_rows


def test_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(report, "gpu_name", lambda: "h200")
    times = {name: timing.Times(ms, ms, ms) for name, ms in {"mega": 1.0, "torch_staged": 2.0, "dense": 0.5}.items()}
    rows = driver.make_rows("A", SMALL, "backward", "uniform", "abc", times)
    forward = driver.make_rows("A", SMALL, "forward", "uniform", "abc", times)
    assert rows == [replace(row, direction="backward", tflops=2 * row.tflops) for row in forward]
    report.print_table(rows)
    assert "backward, uniform routing" in capsys.readouterr().out
    layer = layers.make_layer(SMALL, "uniform", "cpu")
    found = memory.Memory(saved=3 << 20, workspace=5, peak=7 << 20)
    path = tmp_path / "memory.csv"
    report.append(path, [memory.make_row("A", layer, "abc", "mega", found)])
    with path.open() as file:
        (read,) = csv.DictReader(file)
    assert [read[name] for name in ("saved_bytes", "workspace_bytes", "peak_bytes")] == [
        str(3 << 20),
        "5",
        str(7 << 20),
    ]
    assert [read[name] for name in ("shape", "impl", "I", "commit")] == ["A", "mega", "32", "abc"]
    assert memory.text("mega", found) == "memory of a step, mega: saved 3 MiB, workspace 0 MiB, peak 7 MiB"
