"""Figures of traces made by hand, against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
from tests.profiling.handmade import Trace, training_step

from moe_megakernel.profiling import ProfileError, analyse_files
from moe_megakernel.profiling.files import find_traces, number_ranks

DATA = Path(__file__).parent / "data"
GEMM, SEND, ADD = "nvjet_hsh_64x64", "ncclDevKernel_SendRecv", "vectorized_elementwise_kernel"


def test_training_step(analyse):
    row = analyse(training_step())
    us = {field.name: getattr(row, field.name) for field in dataclasses.fields(row) if field.name.endswith("_ms")}
    assert {name.removesuffix("_ms"): pytest.approx(value * 1000) for name, value in us.items()} == {
        "span": (2 * 950 + 50) / 2,  # from the first kernel of step 3 to the last of step 4
        "busy": 900,
        "compute": 100 + 100 + 20 + 30 + 50 + 200 + 40 + 50 + 90,
        "communication": 150 + 60 + 100,
        "exposed_communication": 100 + 100,
        "overlapped_communication": 50 + 60,
        "memory": 20,
        "exposed_memory": 20,
        "idle": (2 * 50 + 50) / 2,
        "idle_host": (2 * 40 + 50) / 2,
        "idle_wait": 10,
        "moe": 740 - 200,
        "moe_exposed_communication": 200,
    }
    assert (row.rank, row.world_size, row.device, row.steps) == (0, 2, "gpu 0", 2)
    parts = {
        name: (pytest.approx(p.time_ms * 1000), pytest.approx(p.exposed_ms * 1000), p.count)
        for name, p in row.moe.items()
    }
    assert parts == {
        "route": (20, 0, 2),
        "dispatch": (180, 100, 4),
        "expert_gemm": (200, 0, 2),
        "combine": (140, 100, 4),
        "exchange": (0, 0, 0),
        "fused": (0, 0, 0),
        "rest": (50, 0, 2),
    }
    classes = {
        name: (pytest.approx(c.time_ms * 1000), pytest.approx(c.sum_ms * 1000), c.count)
        for name, c in row.classes.items()
    }
    assert classes == {
        "gemm": (440, 440, 8),
        "attention": (100, 100, 2),
        "other": (140, 140, 8),
        "communication": (310, 310, 6),
        "memory": (20, 20, 2),
    }
    # 140 of the experts' 200 us run without communication: no more than that could hide an all-to-all.
    assert row.estimate.hidden_ms * 1000 == pytest.approx(140)
    assert row.estimate.overlapped_ms * 1000 == pytest.approx(975 - 140)
    assert row.estimate.without_exposed_ms * 1000 == pytest.approx(975 - 200)
    named = [(one.name.split("(")[0], one.count, one.sum_ms, one.exposed_ms) for one in row.communication]
    assert named == [
        ("ncclDevKernel_SendRecv", 4, pytest.approx(0.25), pytest.approx(0.2)),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 2, pytest.approx(0.06), 0),
    ]


def test_parts_add_up_to_the_span(analyse):
    row = analyse(training_step(dispatch=333.3))
    total = row.compute_ms + row.exposed_communication_ms + row.exposed_memory_ms + row.idle_ms
    assert total == pytest.approx(row.span_ms)
    assert row.busy_ms + row.idle_ms == pytest.approx(row.span_ms)
    assert row.exposed_communication_ms + row.overlapped_communication_ms == pytest.approx(row.communication_ms)


def test_order_of_events_does_not_matter(analyse):
    trace = training_step()
    expected = analyse(trace)
    random.Random(0).shuffle(trace.events)
    assert analyse(trace) == expected


def test_several_streams_count_once(analyse):
    """Two sends at the same time are one time; so are two products that hide them."""
    trace = Trace()
    trace.kernel(SEND, 0, 100, stream=20)
    trace.kernel(SEND, 50, 150, stream=21)
    trace.kernel(GEMM, 20, 40)
    trace.kernel(GEMM, 30, 60, stream=8)
    trace.kernel(ADD, 140, 200)
    row = analyse(trace)
    assert row.communication_ms == 0.15
    assert row.overlapped_communication_ms == pytest.approx(0.04 + 0.01)
    assert row.exposed_communication_ms == pytest.approx(0.10)
    assert row.classes["communication"].sum_ms == 0.2
    assert row.steps == 0
    assert row.span_ms == 0.2


def test_copies_hide_no_communication(analyse):
    trace = Trace()
    trace.kernel(SEND, 0, 100, stream=20)
    trace.kernel("Memcpy HtoD (Pinned -> Device)", 50, 130, kind="gpu_memcpy", stream=21)
    row = analyse(trace)
    assert row.exposed_communication_ms == 0.1
    assert row.memory_ms == 0.08
    assert row.exposed_memory_ms == 0.03


@pytest.mark.parametrize(
    ("launch", "host", "wait"),
    [((200, 299), 0.1, 0.0), ((190, 201), 0.1, 0.0), ((190, 200), 0.0, 0.1), ((0, 5), 0.0, 0.1), (None, 0.0, 0.0)],
)
def test_who_caused_a_gap(analyse, launch, host, wait):
    """The host, if the launch of what follows ended after the gap had begun at 200."""
    trace = Trace()
    trace.kernel(GEMM, 100, 200, launch=(0, 5))
    trace.kernel(GEMM, 300, 400, launch=launch)
    row = analyse(trace)
    assert row.idle_ms == 0.1
    assert (row.idle_host_ms, row.idle_wait_ms) == (host, wait)


def test_a_gap_before_two_streams_is_the_hosts_only_if_both_were_late(analyse):
    trace = Trace()
    trace.kernel(GEMM, 100, 200, launch=(0, 5))
    trace.kernel(GEMM, 300, 400, launch=(250, 255))
    trace.kernel(GEMM, 300, 350, launch=(50, 55), stream=8)
    assert analyse(trace).idle_wait_ms == 0.1


def test_kernels_of_a_graph_share_their_launch(analyse):
    """What stands around the one host call holds for all kernels, and gaps between them are no fault of the host."""
    trace = Trace()
    trace.range("moe_layer", 0, 30)
    graph = trace.kernel(GEMM, 100, 200, launch=(10, 20))
    for start in (210, 320):
        trace.kernel(GEMM, start, start + 100, launch=graph)
    trace.kernel("nothing", 250, 250, launch=graph)
    row = analyse(trace)
    assert (row.moe["expert_gemm"].time_ms, row.moe["expert_gemm"].count) == (0.3, 3)
    assert (row.idle_host_ms, row.idle_wait_ms) == (0, 0.02)


def test_surroundings_are_of_the_launching_thread(analyse):
    trace = Trace()
    trace.range("moe.dispatch", 0, 30, thread=2)
    trace.range("moe.combine", 12, 14)  # ended before the launch
    trace.op("moe::outer", 40, 50)
    trace.range("ignored", 41, 49)
    trace.kernel(GEMM, 100, 200, launch=(20, 22), thread=1)
    trace.kernel(GEMM, 200, 250, launch=(23, 24), thread=2)
    trace.kernel(GEMM, 250, 260, launch=(45, 46), thread=1)
    row = analyse(trace)
    assert row.moe["dispatch"].time_ms == 0.05
    assert row.moe["expert_gemm"].time_ms == 0.01
    assert row.moe_ms == 0.06


def test_a_backward_has_the_part_of_its_forward(analyse):
    """Autograd's thread is outside of all ranges; numbers tell whose gradient an op is."""
    trace = Trace()
    trace.range("experts", 0, 10)
    trace.op("aten::linear", 1, 9, sequence=7)
    trace.op("aten::mm", 2, 8, sequence=7)
    trace.kernel(GEMM, 100, 110, launch=(3, 4))
    trace.op("aten::mm", 12, 14, sequence=8)  # outside of the range
    trace.kernel(GEMM, 110, 130, launch=(13, 14))
    for start, sequence in ((20, 8), (30, 7), (40, 9)):  # nothing has number 9
        name = "autograd::engine::evaluate_function: MmBackward0"
        trace.op(name, start, start + 9, thread=2, sequence=sequence, forward_thread=1)
        trace.kernel(GEMM, 10 * start, 10 * start + sequence, launch=(start + 1, start + 2), thread=2)
    row = analyse(trace)
    assert row.moe["expert_gemm"].count == 2
    assert row.moe["expert_gemm"].time_ms == pytest.approx(0.010 + 0.007)
    assert row.moe_ms == row.moe["expert_gemm"].time_ms


def test_the_last_forward_of_a_number_counts(analyse):
    """Numbers count by thread: another thread may have used one before, or use it later."""
    trace = Trace()
    for start, name in ((0, "router"), (20, "experts"), (60, "router")):
        trace.range(name, start, start + 10, thread=start)
        trace.op("aten::mm", start + 1, start + 9, thread=start, sequence=5)
    trace.op("MmBackward0", 40, 50, thread=9, sequence=5, forward_thread=3)
    trace.kernel(GEMM, 100, 150, launch=(41, 42), thread=9)
    assert analyse(trace).moe["expert_gemm"].time_ms == pytest.approx(0.05)


def test_a_number_is_of_the_thread_that_its_backward_names(analyse):
    """Thread 5 used the number later; but what `Fwd thread id` 1 stands for is known from other numbers."""
    trace = Trace()
    for thread, base, name, numbers in ((3, 0, "experts", (4, 5, 6)), (5, 100, "router", (5,))):
        for at, number in enumerate(numbers):
            trace.range(name, base + 10 * at, base + 10 * at + 9, thread=thread)
            trace.op("aten::mm", base + 10 * at + 1, base + 10 * at + 8, thread=thread, sequence=number)
    for at, number in enumerate((6, 5, 4)):
        trace.op("MmBackward0", 200 + 10 * at, 209 + 10 * at, thread=9, sequence=number, forward_thread=1)
        trace.kernel(GEMM, 300 + 10 * at, 310 + 10 * at, launch=(201 + 10 * at, 202 + 10 * at), thread=9)
    row = analyse(trace)
    assert row.moe["expert_gemm"].count == 3
    assert row.moe["route"].count == 0


def test_names_tell_threads_with_the_same_numbers_apart(analyse):
    """Thread 5 has all numbers that thread 3 has, later; names show whose gradients they are."""
    trace = Trace()
    for thread, base, name, ops in ((3, 0, "experts", ("mm", "mul")), (5, 100, "router", ("addmm", "silu", "mm"))):
        for number, op in enumerate(ops):
            start = base + 10 * number
            trace.range(name, start, start + 9, thread=thread)
            trace.op(f"aten::{op}", start + 1, start + 8, thread=thread, sequence=number)
    for start, number, name in ((200, 1, "MulBackward0"), (210, 0, "autograd::engine::evaluate_function: MmBackward0")):
        trace.op(name, start, start + 9, thread=9, sequence=number, forward_thread=2)
        trace.kernel(GEMM, 100 + start, 110 + start, launch=(start + 1, start + 2), thread=9)
    assert analyse(trace).moe["expert_gemm"].count == 2


def test_a_forward_that_runs_again_inside_a_backward(analyse):
    """Under a checkpoint the first backward op that needs a result runs all of the forward again, not its own part."""
    trace = Trace()
    trace.op("aten::softmax", 0, 9, sequence=6)
    trace.range("experts", 10, 20)
    trace.op("aten::mm", 11, 19, sequence=7)
    trace.op("MmBackward0", 100, 150, thread=2, sequence=7, forward_thread=1)
    trace.op("aten::softmax", 101, 109, thread=2, sequence=0)
    trace.range("router", 110, 120, thread=2)
    trace.op("aten::linear", 111, 119, thread=2, sequence=1)
    trace.range("experts", 120, 124, thread=2)
    trace.op("aten::mm", 121, 123, thread=2, sequence=2)
    trace.op("MulBackward0", 130, 140, thread=2, sequence=1, forward_thread=2)  # of what has run again: the router's
    at = {"again": 102, "router": 112, "own": 125, "inner": 132, "behind": 145}
    for number, launch in enumerate(at.values()):
        trace.kernel(GEMM, 300 + 100 * number, 310 + 101 * number, launch=(launch, launch + 1), thread=2)
    row = analyse(trace)
    assert row.moe["route"].time_ms == pytest.approx(0.011 + 0.013)  # router, inner
    assert row.moe["expert_gemm"].time_ms == pytest.approx(0.012 + 0.014)  # own, behind
    assert row.moe_ms == pytest.approx(0.050)  # all but the softmax that ran again


def test_what_a_backward_op_is_called_says_nothing_of_a_forward_in_it(analyse):
    trace = Trace()
    trace.op("moe::dispatch", 0, 9, sequence=7)
    trace.op("MoeDispatchBackward", 100, 150, thread=2, sequence=7, forward_thread=1)
    trace.op("aten::mm", 101, 109, thread=2, sequence=0)
    trace.op("moe::dispatch", 110, 119, thread=2, sequence=1)
    trace.kernel(GEMM, 300, 310, launch=(102, 103), thread=2)
    assert analyse(trace).moe_ms == 0


def test_what_a_backward_says_itself_comes_first(analyse):
    """Of the forward only the part is taken, not the class, and only where nothing else tells it."""
    trace = Trace()
    trace.range("moe.dispatch", 0, 10)
    trace.op("aten::mm", 1, 9, sequence=5)
    trace.range("moe.combine", 20, 50, thread=2)
    trace.op("MmBackward0", 21, 49, thread=2, sequence=5, forward_thread=1)
    trace.kernel(ADD, 100, 150, launch=(30, 31), thread=2)
    row = analyse(trace)
    assert row.moe["combine"].time_ms == pytest.approx(0.05)
    assert row.moe["dispatch"].count == 0
    assert row.classes["other"].count == 1


def test_a_step_of_two_ranks_on_a_gpu():
    """What torch.profiler wrote of `train --device cuda --dtype bfloat16 --profile`, without unused arguments.

    Two ranks took turns on an H200; their replicated gradients went through gloo, on the host. Expected figures are
    counted in the file's own events, by names that it has.
    """
    report = analyse_files([DATA / f"rank{rank}.pt.trace.json.gz" for rank in (0, 1)])
    for row in report.rows:
        with gzip.open(row.file, "rt") as file:
            events = [event for event in json.load(file)["traceEvents"] if "stream" in event["args"]]
        events = [event for event in events if event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
        on_device = [(event["ts"], event["ts"] + event["dur"]) for event in events]

        def count(*parts: str, of: list[dict[str, Any]] = events) -> int:
            return sum(any(part in event["name"] for part in parts) for event in of)

        assert (row.steps, row.world_size, row.device) == (1, 2, "gpu 0")
        span = max(end for _, end in on_device) - min(start for start, _ in on_device)
        assert row.span_ms == pytest.approx(span / 1000)
        ticks = {tick for start, end in on_device for tick in range(round(start * 20), round(end * 20))}  # of 50 ns
        assert row.busy_ms == pytest.approx(len(ticks) / 20e3, rel=0.01)
        assert row.idle_ms == pytest.approx(row.span_ms - row.busy_ms)
        assert row.idle_host_ms + row.idle_wait_ms == pytest.approx(row.idle_ms)
        assert row.moe["fused"].count == count("layer_kernel") == 6, "three layers, forward and backward"
        assert row.moe["route"].count == count("group_route_kernel", "group_backward_plan_kernel") == 6
        assert row.classes["gemm"].count == count("nvjet", "xmma_gemm", "layer_kernel") == 39
        assert row.classes["attention"].count == count("_sdpa_", "compute_dot_do_o", "convert_dq") == 12
        assert row.classes["communication"].count == count("nccl") == 0


def test_several_devices_are_several_rows(tmp_path):
    trace = Trace(rank=3)
    trace.kernel(GEMM, 0, 100, device=1)
    trace.kernel(SEND, 0, 50, device=0)
    rows = analyse_files([trace.write(tmp_path / "t.json")]).rows
    assert [(row.rank, row.device, row.exposed_communication_ms) for row in rows] == [
        (3, "gpu 0", 0.05),
        (3, "gpu 1", 0),
    ]


def test_steps_on_a_device_that_runs_behind(analyse):
    """A step is what was launched in it, though it runs after the host has left it."""
    trace = Trace()
    for step in range(3):
        trace.range(f"ProfilerStep#{step}", 10 * step, 10 * step + 10)
        trace.kernel(GEMM, 1000 + 100 * step, 1100 + 100 * step, launch=(10 * step + 1, 10 * step + 2))
    trace.kernel(SEND, 1300, 2000, launch=(31, 32))
    row = analyse(trace)
    assert (row.steps, row.span_ms, row.communication_ms) == (3, 0.1, 0)


def test_what_runs_between_steps_is_left_out(analyse):
    """An evaluation between two steps, and idle time between the next two, which counts."""
    trace = Trace()
    for step, start in enumerate((0, 300, 450)):
        trace.range(f"ProfilerStep#{step}", start, start + 20)
        trace.kernel(GEMM, start + 10, start + 110, launch=(start + 1, start + 2))
    trace.kernel(SEND, 120, 300, launch=(105, 106))
    row = analyse(trace)
    assert row.steps == 3
    assert row.span_ms == pytest.approx((100 + 150 + 100) / 3 / 1000)
    assert row.communication_ms == 0
    assert row.idle_ms == row.idle_host_ms == pytest.approx(50 / 3 / 1000)


def test_steps_without_work_on_the_device_are_ignored(analyse):
    trace = Trace()
    trace.range("ProfilerStep#1", 0, 10)
    trace.kernel(GEMM, 1000, 1100)
    assert (row := analyse(trace)).steps == 0
    assert row.span_ms == 0.1


def test_own_time_of_cpu_ops(analyse):
    """Nested ops on two threads: time belongs to the innermost one of its thread."""
    trace = Trace()
    trace.op("aten::layer", 0, 100)
    trace.op("aten::linear", 10, 60)
    trace.op("aten::mm", 20, 50)
    trace.op("aten::view", 25, 30)
    trace.range("moe", 0, 100)
    trace.range("user's mark", 70, 80)
    trace.range("gloo:all_to_all", 40, 120, thread=2)
    trace.op("aten::mul", 150, 160)
    row = analyse(trace)
    assert row.device == "cpu"
    assert row.classes["gemm"].time_ms == 0.045  # linear 10-20 and 50-60, mm 20-25 and 30-50
    assert row.classes["other"].sum_ms == pytest.approx(0.010 + 0.040 + 0.005 + 0.010)
    assert row.compute_ms == 0.11
    assert row.communication_ms == 0.08
    assert row.exposed_communication_ms == 0.02
    assert row.idle_ms == 0.03
    assert (row.idle_host_ms, row.idle_wait_ms) == (None, None)
    assert row.moe["expert_gemm"].time_ms == 0.045
    assert row.moe["rest"].time_ms == pytest.approx(0.055)
    assert row.moe["exchange"].exposed_ms == 0.02
    assert row.moe_ms == pytest.approx(0.12)


def test_a_wait_inside_an_op_hides_no_communication(analyse):
    """The own time of an op that holds others may be a wait; that of ATen's ops is not, nor that of one without ops."""
    trace = Trace()
    trace.op("moe::group_forward", 0, 100)
    trace.op("aten::index_select", 0, 10)
    trace.op("aten::empty", 2, 3)
    trace.op("moe::merge_rows", 60, 70)
    trace.range("gloo:all_to_all", 5, 80, thread=2)
    row = analyse(trace)
    assert row.communication_ms == 0.075
    assert row.exposed_communication_ms == 0.06  # all but 5-10 and 60-70
    assert row.compute_ms == pytest.approx(0.01 + 0.01 + 0.02)
    assert row.compute_ms + row.exposed_communication_ms == row.span_ms
    assert row.moe["rest"].time_ms == pytest.approx(row.compute_ms)


def test_steps_of_a_cpu_run(analyse):
    trace = Trace()
    trace.op("aten::mm", 0, 50)
    for step in range(2):
        trace.range(f"ProfilerStep#{step}", 100 + 100 * step, 200 + 100 * step)
        trace.op("aten::mm", 110 + 100 * step, 150 + 100 * step)
    row = analyse(trace)
    assert (row.steps, row.span_ms, row.compute_ms) == (2, 0.1, pytest.approx(0.04))


def test_ranks_and_spread(two_ranks, tmp_path):
    report = analyse_files([tmp_path])
    assert [(row.rank, row.file) for row in report.rows] == [(0, str(two_ranks[0])), (1, str(two_ranks[1]))]
    assert report.spread()["exposed_communication_ms"] == pytest.approx({"min": 0.2, "median": 0.25, "max": 0.3})
    assert json.loads(json.dumps(report.to_json()))["rows"][1]["estimate"]["hidden_ms"] == pytest.approx(0.14)


def test_traces_of_a_folder(tmp_path):
    for name in ("rank10.pt.trace.json", "rank9.pt.trace.json.gz", "summary.json", "x.txt"):
        (tmp_path / name).touch()
    assert [path.name for path in find_traces([tmp_path])] == ["rank9.pt.trace.json.gz", "rank10.pt.trace.json"]
    (tmp_path / "rank10.pt.trace.json").unlink()
    (tmp_path / "rank9.pt.trace.json.gz").unlink()
    assert [path.name for path in find_traces([tmp_path, tmp_path / "x"])] == ["summary.json", "x"]
    (tmp_path / "summary.json").unlink()
    with pytest.raises(
        ProfileError, match=r"expected a folder with \*\.json or \*\.json\.gz, got none in it"
    ) as caught:
        find_traces([tmp_path])
    assert caught.value.exit_code == 2


def test_number_of_ranks():
    assert number_ranks([None, 0, None, 5]) == [1, 0, 2, 5]
    assert number_ranks([None, None]) == [0, 1]


def test_only_empty_kernels(tmp_path):
    trace = Trace()
    trace.kernel(GEMM, 5, 5)
    with pytest.raises(ProfileError, match="expected kernels or CPU ops that took time, got only empty ones"):
        analyse_files([trace.write(tmp_path / "t.json")])
