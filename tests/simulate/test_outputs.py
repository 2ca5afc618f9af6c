"""What a simulation writes: JSON with its fields, a trace with every block and link, pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_megakernel.plan_names import Region
from moe_megakernel.simulate import Layer, simulate
from moe_megakernel.simulate.compare import compare
from moe_megakernel.simulate.memory_map import layout_of, write_memory_map
from moe_megakernel.simulate.picture import write_picture
from moe_megakernel.simulate.report import to_json
from moe_megakernel.simulate.trace import write_trace

from .small import small_options

SPREAD = {"min", "median", "max"}
FIELDS = {
    "direction",
    "layer_ms",
    "exposed_communication",
    "tflops_per_gpu",
    "tensor_utilisation",
    "busy",
    "waiting",
    "sms",
    "rows",
    "minibatches",
    "dispatch_end_ms",
    "compute_end_ms",
    "home_end_ms",
    "rank_end_ms",
    "combine_ms",
    "link_use",
    "step_us",
}


@pytest.fixture(scope="module")
def layers() -> list[Layer]:
    return simulate(small_options(direction="both"), record=True)


def test_json_has_its_fields_and_sound_values(layers: list[Layer]) -> None:
    report = json.loads(json.dumps(to_json(layers)))
    assert report["schema"] == 1
    assert report["shape"] == {"slug": "small", "num_experts": 16, "hidden": 1024, "width": 512, "top_k": 4}
    assert [one["direction"] for one in report["directions"]] == ["forward", "backward"]
    assert report["layer_ms"] == pytest.approx(sum(one["layer_ms"] for one in report["directions"]))
    for one in report["directions"]:
        assert set(one) == FIELDS
        assert 0.0 <= one["exposed_communication"] < 1.0
        assert 0.0 < one["tensor_utilisation"] < 1.0
        assert 0.0 < one["busy"]["min"] <= one["busy"]["mean"] <= one["busy"]["max"] <= 1.0
        assert sum(one["waiting"].values()) + one["busy"]["mean"] < 1.0
        assert one["sms"] == {"compute": 132, "communication": 0, "idle": 0}
        assert one["rows"] == {"min": 1024, "mean": 1024.0, "max": 1024}
        for name in ("dispatch_end_ms", "compute_end_ms", "home_end_ms", "rank_end_ms"):
            assert set(one[name]) == SPREAD
            assert one[name]["min"] <= one[name]["median"] <= one[name]["max"] <= one["layer_ms"] * (1 + 1e-9)
        assert 0.0 < one["link_use"]["ingress"]["mean"] <= one["link_use"]["ingress"]["max"] <= 1.0


def test_trace_has_events_for_every_block_and_link(layers: list[Layer], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(layers, path)
    events = json.loads(path.read_text())["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(processes.values()) == ["links", "rank 0", "rank 1", "rank 2", "rank 3"]
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans: dict[tuple[int, int], int] = {}
    for event in events:
        if event["ph"] == "X":
            spans[event["pid"], event["tid"]] = spans.get((event["pid"], event["tid"]), 0) + 1
            assert event["dur"] >= 0
    links = {track for track in tracks if processes[track[0]] == "links"}
    assert len(links) == 8
    blocks = {track for track, name in tracks.items() if name.startswith("block")}
    assert len(blocks) == 4 * 132
    busy = {track for track in blocks if track in spans}
    used = sum(len({cluster for _, cluster, _, _ in rank.spans or []}) for rank in layers[1].run.ranks)
    assert len(busy) >= 2 * used > 0
    assert links <= set(spans)
    combines = [e for e in events if e["name"] == "combine"]
    assert len(combines) == 8


def test_trace_of_many_ranks_shows_the_first_and_the_slowest(tmp_path: Path) -> None:
    (layer,) = simulate(small_options(ranks=8, expected_routing=False), record=True, exposed=False)
    layer.run.ranks.extend(layer.run.ranks[:1])  # nine: too many to show whole
    layer.run.egress = layer.run.ingress = layer.run.egress[:, [0, *range(8)]]
    path = tmp_path / "trace.json"
    write_trace([layer], path)
    events = json.loads(path.read_text())["traceEvents"]
    shown = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert "rank 0" in shown
    assert len(shown) in (2, 3)


@pytest.mark.parametrize("ranks", [1, 4])
def test_pictures_are_written(ranks: int, tmp_path: Path) -> None:
    options = small_options(ranks=ranks, direction="both")
    write_picture(simulate(options, record=True, exposed=False), tmp_path / "time.png")
    write_memory_map(options, tmp_path / "map.png")
    for name in ("time.png", "map.png"):
        content = (tmp_path / name).read_bytes()
        assert content.startswith(b"\x89PNG")
        assert len(content) > 10_000


def test_the_memory_map_is_the_plans() -> None:
    layout = layout_of(small_options())
    assert set(layout) == set(Region)
    assert layout[Region.ROWS].bytes == 256 * 4 * 1024 * 2
    assert layout[Region.TOKENS].shared
    assert not layout[Region.X_RING].shared


def test_comparison_has_all_orders_and_both_transports() -> None:
    results = compare(small_options())
    assert [(r["order"], r["transport"], r["routing"]) for r in results] == [
        ("separate", "pull", "uniform"),
        ("unlagged", "pull", "uniform"),
        ("lagged", "pull", "uniform"),
        ("lagged", "pull", "uniform"),
        ("sm-split", "pull", "uniform"),
        ("lagged", "push", "uniform"),
        ("lagged", "pull", "zipf:0.5"),
        ("lagged", "push", "zipf:0.5"),
    ]
    assert all(r["layer_ms"] > 0 for r in results)
