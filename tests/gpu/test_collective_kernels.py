"""The collective transport around the fused kernels: ranks that share one GPU give the bits of `mega` on one rank.

y and every gradient, with routes and experts cut in every uneven way. Each number of ranks is one set of processes that
runs all cases, since starting them takes the most time.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tests.distributed.split import check_group, group_step, reserve_all, share_of
from tests.distributed.worker import Rank
from tests.gpu.layers import GPU, KERNELS, on_device
from tests.steps import Results, make_dy, run_step

import moe_megakernel
from moe_megakernel.hopper.testing import logged
from moe_megakernel.plan_names import Direction
from moe_megakernel.testing import LayerInputs, assert_equal_bits, make_inputs, poisoned_memory, random_routing

pytestmark = [*GPU, pytest.mark.distributed]

TOP_K = 3
#: (tokens of each rank, E), by number of ranks. E that W divides, one that it does not, and fewer experts than ranks;
#: the first case has several row tiles an expert, the others have ranks without tokens.
CASES: dict[int, list[tuple[list[int], int]]] = {
    1: [([300], 6)],
    2: [([5, 595], 6), ([0, 66], 7), ([66, 0], 1)],
    4: [([300, 0, 90, 210], 6), ([0, 0, 23, 0], 3), ([6, 70, 6, 5], 8)],
}
#: Gradients asked for, bit i for the i-th of x, topk_weights, w_gate_up, w_down, bias_gate_up, bias_down.
MASKS = (0b000001, 0b000010, 0b000100, 0b001000, 0b110000, 0b110011)
MAIN = ("w_gate_up", "w_down")
COLLECTIVE = {"transport": "collective"}


def make_whole(tokens: list[int], num_experts: int) -> LayerInputs:
    """The global batch: skewed routes with dropped ones, a token without any, and one that names an expert twice."""
    idx = random_routing(sum(tokens), num_experts, TOP_K, zipf=1.0, drop=0.15)
    idx[1] = -1
    idx[2] = num_experts - 1
    return on_device(make_inputs(idx, 136, 72, num_experts, bias=True))


def rows_of(rank: Rank, whole: LayerInputs, tokens: list[int]) -> int:
    """Rows that this rank's experts get."""
    experts = share_of(rank.rank, tokens, whole.num_experts).experts
    return int(((whole.topk_idx >= experts.start) & (whole.topk_idx < experts.stop)).sum())


def check_steps(rank: Rank, whole: LayerInputs, tokens: list[int], expected: Results) -> None:
    """Both backends, h kept and computed again; the kernels have run where there were rows; without gradients."""
    launches = 1 if rows_of(rank, whole, tokens) else 0
    for backend in KERNELS:
        for recompute in (False, True):
            step = {"expected": expected, "backend": backend, "recompute": recompute, **COLLECTIVE}
            with logged(Direction.FORWARD) as forward, logged(Direction.BACKWARD) as backward:
                check_group(rank, whole, tokens, **step)
            assert (len(forward), len(backward)) == (launches, launches), (backend, recompute)
        share = share_of(rank.rank, tokens, whole.num_experts)
        with torch.no_grad():
            y = share.inputs(whole).call(group_name=rank.name, backend=backend, **COLLECTIVE)
        assert_equal_bits(y, share.of("y", expected["y"]), f"y of {backend} without gradients")


def check_frozen(rank: Rank, whole: LayerInputs, tokens: list[int], expected: Results) -> None:
    names = list(whole.grads())
    for number, mask in enumerate(MASKS):
        wants = {name: bool(mask >> i & 1) for i, name in enumerate(names)}
        asked = {name: g if name == "y" or wants[name] else None for name, g in expected.items()}
        step = {"requires_grad": wants, "backend": KERNELS[number % 2], "recompute": number % 3 == 0}
        check_group(rank, whole, tokens, expected=asked, **step, **COLLECTIVE)


def check_main_grads(rank: Rank, whole: LayerInputs, tokens: list[int]) -> None:
    """float32 buffers that hold values already, twice."""
    share, generator = share_of(rank.rank, tokens, whole.num_experts), torch.Generator().manual_seed(3)
    start = {n: torch.randn(getattr(whole, n).shape, generator=generator).cuda() for n in MAIN}
    for given in (("w_gate_up",), MAIN):
        one: dict[str, Any] = {f"main_grad_{n[2:]}": start[n].clone() for n in given}
        many: dict[str, Any] = {f"main_grad_{n[2:]}": share.of(n, start[n]).clone() for n in given}
        for backend in KERNELS:
            wanted = share.results(run_step(whole, backend="mega", **one))
            for name, tensor in group_step(rank, whole, tokens, backend=backend, **many, **COLLECTIVE).items():
                assert_equal_bits(tensor, wanted[name], name)
            for name, buffer in many.items():
                assert_equal_bits(buffer, share.of(name, one[name]), name)


def check_refused(rank: Rank, whole: LayerInputs, tokens: list[int], expected: Results) -> None:
    """A bad id on one rank: NaN on all ranks, also in main gradients, the error on all ranks, then all right."""
    broken = whole.topk_idx.clone()
    broken[-1, 0] = 77
    share = share_of(rank.rank, tokens, whole.num_experts)
    leaves = share.inputs(replace(whole, topk_idx=broken)).leaves()
    main = torch.zeros_like(leaves.w_down, dtype=torch.float32)
    y = leaves.call(group_name=rank.name, backend="mega", main_grad_down=main, **COLLECTIVE)
    y.backward(make_dy(y))
    for name, tensor in {"y": y, "main_grad_down": main, **leaves.grads()}.items():
        if name != "w_down":
            assert tensor is not None, name
            assert tensor.isnan().all(), name
    with pytest.raises(moe_megakernel.RoutingError, match=r"got 77 at topk_idx\[\d+, 0\] on rank"):
        moe_megakernel.check_errors()
    check_group(rank, whole, tokens, expected=expected, backend="mega", **COLLECTIVE)


def check_ranks(number: int, ranks: int, store: str, process_backend: str) -> None:
    """What each process runs."""
    torch.cuda.set_device(0)
    dist.init_process_group(process_backend, init_method=f"file://{store}", rank=number, world_size=ranks)
    moe_megakernel.set_timeout(60)
    assert dist.group.WORLD is not None
    rank = Rank(number, ranks, dist.group.WORLD)
    warnings.filterwarnings("error", message="dispatch_gemm_combine: backend")  # no fallback to the reference
    with poisoned_memory():
        for i, (tokens, num_experts) in enumerate(CASES[ranks]):
            whole = make_whole(tokens, num_experts)
            reserve_all(rank, tokens, TOP_K)
            expected = run_step(whole, backend="mega")
            check_steps(rank, whole, tokens, expected)
            if i == 0:
                check_frozen(rank, whole, tokens, expected)
                check_main_grads(rank, whole, tokens)
                if ranks > 1:
                    check_refused(rank, whole, tokens, expected)
    moe_megakernel.check_errors()
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize(("ranks", "process_backend"), [(2, "gloo"), (4, "gloo"), (1, "nccl")])
def test_ranks_on_one_gpu_give_the_bits_of_one_rank(ranks: int, process_backend: str, tmp_path: Path) -> None:
    mp.spawn(check_ranks, args=(ranks, str(tmp_path / "store"), process_backend), nprocs=ranks)


def check_transport(number: int, store: str) -> None:
    """ "auto" takes the kernels, and a CUDA graph of the exchange is refused in words on every rank."""
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)
    moe_megakernel.set_timeout(60)
    assert dist.group.WORLD is not None
    rank = Rank(number, 2, dist.group.WORLD)
    tokens = [20, 30]
    whole = make_whole(tokens, 4)
    reserve_all(rank, tokens, TOP_K)
    step = {"group_name": rank.name, **COLLECTIVE}
    with logged() as logs:
        check_group(rank, whole, tokens, expected=run_step(whole, backend="mega"), **step)
    assert len(logs) == 2  # of one rank, which `expected` is made by, and of the group
    mine = share_of(number, tokens, 4).inputs(whole)
    graph = torch.cuda.CUDAGraph()
    refused = pytest.raises(moe_megakernel.MoEError, match="transport: expected one without host synchronisation")
    with refused, torch.cuda.graph(graph):
        mine.call(**step)
    torch.cuda.synchronize()
    check_group(rank, whole, tokens, expected=run_step(whole, backend="mega"), **step)
    dist.barrier()
    dist.destroy_process_group()


def test_auto_and_capture(tmp_path: Path) -> None:
    mp.spawn(check_transport, args=(str(tmp_path / "store"),), nprocs=2)
