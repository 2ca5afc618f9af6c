"""The context manager, and traces that torch.profiler has written: of one process, of two gloo ranks, of a GPU."""

from __future__ import annotations

import collections
import gzip
import json
import multiprocessing
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import moe_megakernel
from moe_megakernel.profiling import ProfileError, analyse_files
from moe_megakernel.profiling.reader import read_trace
from moe_megakernel.profiling.rules import PARTS, load_rules
from moe_megakernel.profiling.work import find_work


def products(times: int = 3) -> None:
    x = torch.ones(200, 200)
    for _ in range(times):
        (x @ x).relu()


def test_reports_a_block():
    with moe_megakernel.profile() as p:
        products()
    (row,) = p.report.rows
    assert row.device == "cpu"
    assert row.steps == 0
    assert row.classes["gemm"].count >= 3
    assert 0 < row.classes["gemm"].time_ms <= row.compute_ms <= row.busy_ms <= row.span_ms
    assert row.communication_ms == 0
    assert p.report is p.report, "analysed once"


def test_the_layer_is_seen():
    layer = moe_megakernel.MoE(hidden=32, expert_width=48, num_experts=4, top_k=2)
    x = torch.randn(64, 32, requires_grad=True)
    with moe_megakernel.profile() as p:
        layer(x).sum().backward()
    (row,) = p.report.rows
    assert row.moe["expert_gemm"].count >= 4 * 2 * 3, "two products an expert forward, four backward"
    assert row.moe["rest"].time_ms > 0
    assert row.moe_ms <= row.busy_ms


def test_backward_of_ranges_is_seen():
    """Products of a real trace belong to the range that the forward ran in, backward ones too."""
    x = torch.randn(64, 128, requires_grad=True)
    experts, head = torch.nn.Linear(128, 256), torch.nn.Linear(256, 512)
    with moe_megakernel.profile() as p:
        with torch.profiler.record_function("experts"):
            h = experts(x)
        with torch.profiler.record_function("shared_experts"):
            y = head(h)
        y.sum().backward()
    (row,) = p.report.rows
    parts = row.moe["expert_gemm"].count, row.moe["rest"].count
    assert min(parts) >= 3, "a product forward, two backward"
    # Beside products the range of the shared experts has sums for the bias, and the views that its backward makes.
    assert sum(parts) >= row.classes["gemm"].count >= 6


def parts_of(step, path):
    """Pieces of CPU work by name and part, of a real trace of one call."""
    with torch.profiler.profile() as profiler:
        step()
    profiler.export_chrome_trace(str(path))
    trace = read_trace(path)
    (work,) = find_work(trace, load_rules())
    names = [trace.names[name] for name in work.name.tolist()]
    return collections.Counter((name, part) for name, part in zip(names, work.part.tolist(), strict=True))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_run_forwards_again_as_what_they_are(use_reentrant, tmp_path):
    """A real trace: products that a checkpoint makes again are of the range that they were made in."""
    x = torch.randn(64, 128, requires_grad=True)
    head, experts = torch.nn.Linear(128, 256, bias=False), torch.nn.Linear(256, 512, bias=False)

    def block(x):
        h = torch.nn.functional.gelu(head(x) @ torch.eye(256))
        with torch.profiler.record_function("experts"):
            return experts(h).sigmoid()

    def step():
        torch.utils.checkpoint.checkpoint(block, x, use_reentrant=use_reentrant).sum().backward()

    parts = parts_of(step, tmp_path / "trace.json")
    inside, outside = PARTS.index("expert_gemm"), -1
    # Every call of linear is cut into as many pieces as any other.
    assert parts["aten::linear", inside] == parts["aten::linear", outside] > 0
    assert parts["aten::mm", inside] > 0
    assert {part for _, part in parts} == {inside, outside}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_range_around_a_checkpoint_is_around_what_runs_again(use_reentrant, tmp_path):
    x = torch.randn(64, 128, requires_grad=True)
    one, two = torch.nn.Linear(128, 256, bias=False), torch.nn.Linear(256, 64, bias=False)

    def step():
        with torch.profiler.record_function("experts"):
            y = torch.utils.checkpoint.checkpoint(lambda x: two(one(x).sigmoid()), x, use_reentrant=use_reentrant)
        y.sum().backward()

    parts = parts_of(step, tmp_path / "trace.json")
    assert parts["aten::mm", PARTS.index("expert_gemm")] > 0
    assert parts["aten::mm", -1] == 0, "forward, again, backward: all of them are inside"


def test_a_backward_of_which_a_graph_is_kept_has_the_part_of_its_forward(tmp_path):
    x = torch.randn(64, 128, requires_grad=True)
    experts = torch.nn.Linear(128, 256, bias=False)

    def step():
        with torch.profiler.record_function("experts"):
            y = experts(x)
        torch.autograd.grad(y.square().sum(), x, create_graph=True)

    parts = parts_of(step, tmp_path / "trace.json")
    assert parts["aten::mm", PARTS.index("expert_gemm")] > 0
    assert parts["aten::mm", -1] == 0


def test_steps_are_what_is_reported():
    with moe_megakernel.profile() as p:
        products(20)
        for _ in range(2):
            with p.step():
                products(5)
            products(20)
    (row,) = p.report.rows
    assert row.steps == 2
    whole = sum(row.classes[name].count for name in row.classes)
    assert 2 * 5 * 2 <= row.classes["gemm"].count + row.classes["other"].count <= whole < 20 * 4 * 3


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_saves_the_trace(tmp_path, name):
    with moe_megakernel.profile() as p:
        products()
    path = tmp_path / name
    p.save(path)
    data = gzip.decompress(path.read_bytes()) if name.endswith(".gz") else path.read_bytes()
    assert json.loads(data)["traceEvents"]
    (saved,) = analyse_files([path]).rows
    (row,) = p.report.rows
    assert saved.span_ms == row.span_ms


def test_prints_the_report(capsys):
    with moe_megakernel.profile() as p:
        products()
    p.print()
    assert "Where time goes" in capsys.readouterr().out


def test_an_exception_passes_unchanged():
    error = KeyError("of the block")
    p = moe_megakernel.profile()
    with pytest.raises(KeyError) as caught, p:
        raise error
    assert caught.value is error
    with pytest.raises(ProfileError, match="report: expected a block that has ended, got one that raised KeyError"):
        _ = p.report
    with moe_megakernel.profile() as again:  # the profiler is free for another
        products()
    assert again.report.rows


def test_no_report_before_the_end(tmp_path):
    p = moe_megakernel.profile()
    with pytest.raises(ProfileError, match="got one that has not begun"):
        p.save(tmp_path / "trace.json")
    with p, pytest.raises(ProfileError, match="got one that runs"):
        _ = p.report
    with pytest.raises(ProfileError, match="one block for each object, got a second one"), p:
        pass


def test_empty_block():
    with moe_megakernel.profile() as p:
        pass
    with pytest.raises(ProfileError, match="expected kernels or CPU ops, got "):
        _ = p.report


def test_rules_of_users(tmp_path):
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps({"rules": [{"name": "^aten::relu", "class": "attention"}]}))
    with moe_megakernel.profile(rules) as p:
        products()
    assert p.report.rows[0].classes["attention"].count >= 3
    with pytest.raises(ProfileError, match="expected a file of rules"):
        moe_megakernel.profile(tmp_path / "none")


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    x = torch.ones(256, 256)
    with moe_megakernel.profile() as p:
        for _ in range(3):
            with p.step():
                received = torch.empty_like(x)
                dist.all_to_all_single(received, x)
                product = received @ x
                dist.all_reduce(product)
    p.save(f"{folder}/worker.{1 - rank}.pt.trace.json.gz")  # a name whose order is not the ranks'
    (row,) = p.report.rows
    assert (row.rank, row.world_size) == (rank, 2)
    dist.destroy_process_group()


@pytest.mark.distributed
def test_two_gloo_ranks(tmp_path):
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_rank, args=(rank, str(tmp_path))) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0, 0]
    report = analyse_files([tmp_path])
    assert [(row.rank, row.world_size, row.steps, row.device) for row in report.rows] == [
        (0, 2, 3, "cpu"),
        (1, 2, 3, "cpu"),
    ]
    for row in report.rows:
        names = {one.name for one in row.communication}
        assert {"gloo:all_to_all", "gloo:all_reduce", "c10d::alltoall_base_", "c10d::allreduce_"} <= names
        assert row.classes["gemm"].time_ms > 0
        assert 0 < row.exposed_communication_ms <= row.communication_ms
        assert row.moe["exchange"].count >= 3
        total = row.compute_ms + row.exposed_communication_ms + row.exposed_memory_ms + row.idle_ms
        assert total == pytest.approx(row.span_ms)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_layer_on_a_gpu(tmp_path: Path) -> None:
    layer = moe_megakernel.MoE(hidden=512, expert_width=256, num_experts=8, top_k=2).to("cuda", torch.bfloat16)
    x = torch.randn(1024, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dense = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    layer(x).sum().backward()
    with moe_megakernel.profile() as p:
        for _ in range(2):
            with p.step():
                _ = dense @ dense
                layer(x).sum().backward()
                x.grad = x.grad.clone()
    p.save(tmp_path / "trace.json.gz")
    (row,) = p.report.rows
    assert row.device == "gpu 0"
    assert row.steps == 2
    assert row.classes["gemm"].count >= 4
    assert row.memory_ms > 0
    assert row.communication_ms == 0
    if moe_megakernel.backend_for(512, 256, 8).backend == "mega":
        assert row.moe["fused"].count == 4, "one launch forward and one backward, twice"
        assert row.moe["route"].count >= 4
    else:
        assert row.moe["expert_gemm"].time_ms > 0
    assert row.idle_host_ms is not None
    assert row.idle_host_ms > 0, "a small layer is bound by its launches"
    total = row.compute_ms + row.exposed_communication_ms + row.exposed_memory_ms + row.idle_ms
    assert total == pytest.approx(row.span_ms)
    assert analyse_files([tmp_path / "trace.json.gz"]).rows == [
        type(row)(**{**vars(row), "file": str(tmp_path / "trace.json.gz")})
    ]
