"""The collective transport around the fused kernels, whose launches the reference computes here: bits of one rank.

What is tested is everything but the kernels: which rows they get in which order, what goes where, and what comes back
from where. `tests/gpu/test_collective_kernels.py` runs the same with the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from tests.distributed.split import all_rows, check_group, group_step, reserve_all, share_of
from tests.distributed.worker import TIMEOUT, Rank
from tests.hopper.stand_in import Calls, launch_by_reference
from tests.steps import make_dy, run_step

import moe_megakernel
from moe_megakernel import ops
from moe_megakernel.testing import LayerInputs, assert_equal_bits, make_inputs, random_routing

pytestmark = pytest.mark.distributed

TOP_K = 3
#: Tokens of each rank, by number of ranks.
SPLITS = {2: [[70, 131], [0, 40]], 4: [[3, 0, 90, 71], [0, 0, 23, 0]]}
_MAIN = ("w_gate_up", "w_down")


@contextmanager
def kernels() -> Iterator[Calls]:
    """Named backends run on the CPU; yields their launches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "select_backend", lambda asked, kind, capability: asked)
        launches = launch_by_reference(patch)
        moe_megakernel.set_timeout(TIMEOUT)  # of the gates, until the patch is undone
        yield launches


def make_whole(tokens: list[int], num_experts: int) -> LayerInputs:
    idx = random_routing(sum(tokens), num_experts, TOP_K, zipf=1.0, drop=0.2)
    idx[1] = -1
    idx[2] = num_experts - 1
    return make_inputs(idx, 24, 16, num_experts, bias=True, dtype=torch.bfloat16)


def check_steps(rank: Rank, tokens: list[int], num_experts: int) -> None:
    """A step, one that computes h again, one without gradients, frozen inputs, main gradients."""
    whole = make_whole(tokens, num_experts)
    expected = run_step(whole)
    reserve_all(rank, tokens, TOP_K)
    share = share_of(rank.rank, tokens, num_experts)
    routed = whole.topk_idx[(whole.topk_idx >= share.experts.start) & (whole.topk_idx < share.experts.stop)]
    with kernels() as launches:
        for backend, recompute in (("mega", False), ("staged", True)):
            launches.clear()
            check_group(rank, whole, tokens, expected=expected, backend=backend, recompute=recompute)
            assert len(launches) == (2 if len(routed) else 0)
            for call in launches:
                assert call["staged"] is (backend == "staged")
                assert call["topk_idx"].shape == (len(routed), 1)
        with torch.no_grad():
            y = share.inputs(whole).call(group_name=rank.name, backend="mega")
        assert_equal_bits(y, share.of("y", expected["y"]), "y")
        names = list(whole.grads())
        for mask in (0b000001, 0b000010, 0b000100, 0b001000, 0b110000, 0b100111):
            wants = {name: bool(mask >> i & 1) for i, name in enumerate(names)}
            asked = {name: g if name == "y" or wants[name] else None for name, g in expected.items()}
            step = {"requires_grad": wants, "backend": "mega", "recompute": mask == 0b100111}
            check_group(rank, whole, tokens, expected=asked, **step)
        start = {f"main_grad_{n[2:]}": torch.ones(getattr(whole, n).shape) for n in _MAIN}
        one = {name: buffer.clone() for name, buffer in start.items()}
        many = {name: share.of(name, buffer).clone() for name, buffer in start.items()}
        wanted = share.results(run_step(whole, backend="reference", **one))
        for name, grad in group_step(rank, whole, tokens, backend="mega", **many).items():
            assert_equal_bits(grad, wanted[name], name)
        for name, buffer in many.items():
            assert_equal_bits(buffer, share.of(name, one[name]), name)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("num_experts", [6, 7, 1])
def test_bits_of_one_rank(some_ranks, ranks, num_experts):
    """E that W divides or not, and fewer experts than ranks; tokens on some ranks only."""
    for tokens in SPLITS[ranks]:
        some_ranks(ranks).run(check_steps, tokens, num_experts)


def check_refused(rank: Rank, tokens: list[int]) -> None:
    whole = make_whole(tokens, 6)
    expected = run_step(whole)
    reserve_all(rank, tokens, TOP_K)
    broken = whole.topk_idx.clone()
    broken[-1, 0] = 6  # of the last rank that has tokens
    with kernels() as launches:
        with pytest.raises(moe_megakernel.RoutingError, match="got 6 at topk_idx"):
            group_step(rank, LayerInputs(**{**vars(whole), "topk_idx": broken}), tokens, backend="mega")
        with pytest.raises(moe_megakernel.CapacityError):
            group_step(rank, whole, tokens, backend="mega", row_capacity=1)
        assert not launches
        check_group(rank, whole, tokens, expected=expected, backend="mega")


def test_a_refused_step_launches_nothing(some_ranks):
    some_ranks(2).run(check_refused, [12, 9])


def check_h(rank: Rank, tokens: list[int]) -> None:
    """h is as the reference keeps it: at capacity, in row order, zeros past the last row."""
    whole = make_whole(tokens, 6)
    reserve_all(rank, tokens, TOP_K)
    share = share_of(rank.rank, tokens, 6)
    kept = []
    with kernels():
        for backend in ("reference", "mega"):
            y = share.inputs(whole).leaves().call(group_name=rank.name, backend=backend)
            saved = y.grad_fn.saved_tensors
            kept.append([t for t in saved if t is not None])
            y.backward(make_dy(y))
    for reference, ours in zip(*kept, strict=True):
        assert_equal_bits(ours, reference, str(tuple(ours.shape)))
    assert any(t.shape == (all_rows(tokens, TOP_K), 2 * 16) for t in kept[1])


def test_what_is_saved(some_ranks):
    some_ranks(2).run(check_h, [40, 23])
