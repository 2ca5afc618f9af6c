"""Expert weights as DTensors: Shard(0) over the expert group works and gives DTensor gradients, all else is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from tests.distributed.split import check_group, group_step, reserve_all, share_of
from tests.distributed.worker import Rank
from tests.steps import make_dy
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import moe_megakernel
from moe_megakernel.testing import assert_equal_bits, make_inputs, random_routing

pytestmark = pytest.mark.distributed

TOKENS = [3, 5]
WEIGHTS = ("w_gate_up", "w_down", "bias_gate_up", "bias_down")


def make(num_experts: int = 4, dtype: torch.dtype = torch.bfloat16):
    return make_inputs(random_routing(8, num_experts, 2), 16, 8, num_experts, bias=True, dtype=dtype)


def check_shards(rank: Rank) -> None:
    reserve_all(rank, TOKENS, 2)
    whole = make()
    mesh = DeviceMesh.from_group(rank.group, "cpu")
    expected = check_group(rank, whole, TOKENS)
    mine = share_of(rank.rank, TOKENS, 4).inputs(whole).leaves()
    sharded = {n: distribute_tensor(getattr(whole, n), mesh, [Shard(0)]).requires_grad_() for n in WEIGHTS}
    y = replace(mine, **sharded).call(group_name=rank.name)
    y.backward(make_dy(whole.x)[share_of(rank.rank, TOKENS, 4).tokens])
    assert not isinstance(y, DTensor)
    assert_equal_bits(y, expected["y"], "y")
    for name, weight in sharded.items():
        assert isinstance(weight.grad, DTensor), name
        assert weight.grad.placements == (Shard(0),), name
        assert weight.grad.shape == getattr(whole, name).shape, name
        assert_equal_bits(weight.grad.to_local(), expected[name], name)
    assert_equal_bits(mine.x.grad, expected["x"], "x")


def check_compiled_and_main_grads(rank: Rank) -> None:
    """Compiled as in eager; with a main gradient the weight gets none and the buffer what the local shard would add."""
    reserve_all(rank, TOKENS, 2)
    whole = make()
    mesh = DeviceMesh.from_group(rank.group, "cpu")
    expected = check_group(rank, whole, TOKENS)
    share = share_of(rank.rank, TOKENS, 4)
    dy = make_dy(whole.x)[share.tokens]

    def shards() -> dict[str, DTensor]:
        return {n: distribute_tensor(getattr(whole, n), mesh, [Shard(0)]).requires_grad_() for n in WEIGHTS}

    def layer(x, topk_idx, topk_weights, w_gate_up, w_down, bias_gate_up, bias_down):
        return torch.ops.moe.dispatch_gemm_combine(
            x, topk_idx, topk_weights, w_gate_up, w_down, bias_gate_up, bias_down, num_experts=4, group_name=rank.name
        )

    torch.compiler.reset()
    mine, sharded = share.inputs(whole).leaves(), shards()
    y = torch.compile(layer, fullgraph=True, backend="aot_eager")(
        mine.x, mine.topk_idx, mine.topk_weights, *sharded.values()
    )
    y.backward(dy)
    assert_equal_bits(y, expected["y"], "y")
    for name, weight in sharded.items():
        assert_equal_bits(weight.grad.to_local(), expected[name], name)

    plain = {n: torch.ones(share.of(n, getattr(whole, n)).shape) for n in ("w_gate_up", "w_down")}
    group_step(rank, whole, TOKENS, **{f"main_grad_{n[2:]}": buffer for n, buffer in plain.items()})
    buffers = {n: torch.ones_like(buffer) for n, buffer in plain.items()}
    mine, sharded = share.inputs(whole).leaves(), shards()
    y = replace(mine, **sharded).call(
        group_name=rank.name, **{f"main_grad_{n[2:]}": buffer for n, buffer in buffers.items()}
    )
    y.backward(dy)
    for name, buffer in buffers.items():
        assert sharded[name].grad is None, name
        assert_equal_bits(buffer, plain[name], name)
    assert_equal_bits(sharded["bias_down"].grad.to_local(), expected["bias_down"], "bias_down")


def test_compiled_shards_and_main_grads(some_ranks):
    some_ranks(2).run(check_compiled_and_main_grads)


def check_refused(rank: Rank) -> None:
    reserve_all(rank, TOKENS, 2)
    whole = make()
    mine = share_of(rank.rank, TOKENS, 4).inputs(whole)
    mesh = DeviceMesh.from_group(rank.group, "cpu")
    other = DeviceMesh.from_group(dist.new_group(), "cpu")
    square = DeviceMesh("cpu", torch.arange(rank.ranks).view(rank.ranks, 1), mesh_dim_names=("expert", "data"))
    one_dimensional = r"expected a DTensor with placement Shard\(0\) on a one-dimensional mesh over the expert group"
    for name in ("w_gate_up", "w_down", "bias_down"):
        tensor = getattr(whole, name)
        refused = [
            (distribute_tensor(tensor, mesh, [Replicate()]), f"{name}: {one_dimensional}.*Replicate"),
            (distribute_tensor(tensor, mesh, [Shard(1)]), rf"{name}: {one_dimensional}.*Shard\(dim=1\)"),
            (distribute_tensor(tensor, square, [Shard(0), Replicate()]), f"{name}: {one_dimensional}.*take mesh"),
            (
                distribute_tensor(tensor, other, [Shard(0)]),
                f"{name}: expected a DTensor on the expert group '{rank.name}",
            ),
        ]
        for weight, message in refused:
            with pytest.raises(ValueError, match=f"^dispatch_gemm_combine: {message}") as caught:
                replace(mine, **{name: weight}).call(group_name=rank.name)
            assert "redistribute it, or pass the local shard" in str(caught.value)
    for name in ("x", "topk_idx", "topk_weights"):
        tensor = distribute_tensor(getattr(whole, name), mesh, [Shard(0)])
        with pytest.raises(
            TypeError, match=f"{name}: expected a plain tensor of this rank, got a DTensor; pass {name}"
        ):
            replace(mine, **{name: tensor}).call(group_name=rank.name)
    buffer = distribute_tensor(whole.w_down.float(), mesh, [Shard(0)])
    with pytest.raises(TypeError, match="main_grad_down: expected a plain tensor"):
        group_step(rank, whole, TOKENS, main_grad_down=buffer)
    with pytest.raises(ValueError, match="w_down: expected a DTensor on the expert group ''"):
        replace(mine, w_down=distribute_tensor(whole.w_down, mesh, [Shard(0)])).call()
    check_group(rank, whole, TOKENS)


def test_shards_of_the_expert_group(some_ranks):
    some_ranks(2).run(check_shards)


def test_other_dtensors_are_refused_with_advice(some_ranks):
    some_ranks(2).run(check_refused)


def check_uneven(rank: Rank) -> None:
    """DTensor splits 6 over 4 as 2, 2, 2, 0; the layer as 2, 2, 1, 1: refused where they differ, told elsewhere."""
    tokens = [2, 2, 2, 2]
    reserve_all(rank, tokens, 2)
    whole = make(6)
    mesh = DeviceMesh.from_group(rank.group, "cpu")
    sharded = {n: distribute_tensor(getattr(whole, n), mesh, [Shard(0)]) for n in WEIGHTS}
    inputs = replace(share_of(rank.rank, tokens, 6).inputs(whole), **sharded)
    if rank.rank >= 2:
        with pytest.raises(ValueError, match=f"rank {rank.rank} of 4 holds L = 1 of 6 experts"):
            inputs.call(group_name=rank.name)
    else:
        with pytest.raises(moe_megakernel.MoEError, match="rank 2 refused its arguments"):
            inputs.call(group_name=rank.name)
    check_group(rank, whole, tokens)


def test_uneven_shards_are_refused(some_ranks):
    some_ranks(4).run(check_uneven)
