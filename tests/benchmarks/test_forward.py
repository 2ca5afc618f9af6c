"""The parts of the benchmark scripts that need no GPU: inputs, numbers of the peers, rows, the twin op."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from benchmarks import driver, forward, host_time, layers, report, timing
from moe_megakernel.shapes import Shape

SMALL = Shape("small", "small", num_experts=8, hidden=64, width=32, top_k=4, tokens=100)


@pytest.mark.parametrize("routing", ["uniform", "zipf"])
def test_peers_give_the_layers_numbers(routing: str) -> None:
    layer = layers.make_layer(SMALL, routing, "cpu")
    assert all(len(set(ids)) == 4 for ids in layer.topk_idx.tolist())
    counts = layer.topk_idx.flatten().bincount(minlength=8)
    assert bool(counts.max() > 2 * counts.min()) == (routing == "zipf")
    y = layer.forward("reference")
    for combine in layers.COMBINES:
        z = layers.implementation(layer, "torch_staged", combine)()
        assert z.dtype == torch.bfloat16
        assert timing.relative_error(z, y) < forward.TOLERANCE, combine
    assert layers.implementation(layer, "dense", "")().shape == (400, 64)
    assert layers.implementation(layer, "route", "")().shape == (400,)
    with pytest.raises(ValueError, match="routing: expected uniform or zipf, got 'even'"):
        layers.make_layer(SMALL, "even", "cpu")


def test_rows_and_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(report, "gpu_name", lambda: "h200")
    spent = {"mega": 1.0, "staged": 1.25, "torch_staged": 2.0, "dense": 0.5, "route": 0.01}
    times = {name: timing.Times(ms, ms - 0.001, ms + 0.001) for name, ms in spent.items()}
    rows = driver.make_rows("A", SMALL, "forward", "uniform", "abc", times)
    path = tmp_path / "new" / "forward.csv"
    for _ in range(2):
        report.append(path, rows)
    with path.open() as file:
        read = list(csv.DictReader(file))
    assert len(read) == 2 * len(spent)
    assert read[0] | {"driver": "", "torch": "", "date": ""} == {
        **{"gpu": "h200", "driver": "", "torch": "", "date": "", "commit": "abc", "shape": "A", "T": "100", "H": "64"},
        **{"I": "32", "E": "8", "K": "4", "ranks": "1", "routing": "uniform", "direction": "forward", "impl": "mega"},
        **{"ms_median": "1.0", "ms_min": "0.999", "ms_max": "1.001", "tflops": "0.0049", "ratio_dense": "0.5"},
    }
    report.print_table(rows)
    shown = capsys.readouterr().out
    for part in ("mega/torch_staged", "2.00", "1.25", "0.50", "1.0%"):
        assert part in shown, shown


def test_named_shapes_and_options() -> None:
    assert list(driver.benchmark_shapes()) == list("ABCDEF")
    assert driver.split("A, C", ("A", "B", "C"), "--shapes") == ["A", "C"]
    with pytest.raises(Exception, match=r"expected some of A, B, got 'Z'"):
        driver.split("Z", ("A", "B"), "--shapes")


def test_the_twin_stands_in_for_the_layer() -> None:
    layer = layers.make_layer(SMALL, "uniform", "cpu")
    real = torch.ops.moe.layer_forward
    spent = host_time.measure(layer, "reference", calls=21)
    assert torch.ops.moe.layer_forward is real
    assert min(spent) > 0
    assert "the library adds" in host_time.text(spent)
