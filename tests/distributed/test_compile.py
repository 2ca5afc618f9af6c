"""torch.compile with a group: eager numbers forward and backward, and no call merged, dropped or moved.

Every rank must make the same calls whatever its own tokens are; a compiler that merges equal calls or drops unused ones
on one rank only would leave the others waiting. Gates count what was really called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.distributed.split import check_group, group_step, reserve_all, share_of
from tests.distributed.worker import Rank
from tests.steps import make_dy, run_step
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import moe_megakernel
from moe_megakernel.distributed.group import get_group
from moe_megakernel.testing import LayerInputs, assert_equal_bits, make_inputs, random_routing

pytestmark = pytest.mark.distributed

EXPERTS, TOP_K = 6, 2
#: Gates of a forward and of a backward call.
FORWARD_GATES, BACKWARD_GATES = 2, 2
#: Arguments that a compiled function takes as tensors; the options are constants.
TENSORS = ("x", "topk_idx", "topk_weights", "w_gate_up", "w_down")


def make(tokens: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> LayerInputs:
    idx = random_routing(tokens, EXPERTS, TOP_K, zipf=1.0, drop=0.1, seed=seed)
    return make_inputs(idx, 24, 16, EXPERTS, dtype=dtype, seed=seed)


def compiled(
    block: Callable[..., Tensor], name: str, backend: Any, dynamic: bool | None = None
) -> Callable[..., Tensor]:
    """`call` for `check_group`: `block(layer, *tensors)` compiled as a whole, layer being the op with its options.

    It is what runs with one rank, too, so that both sides are compiled.
    """

    def run(*tensors: Tensor, **options: Any) -> Tensor:
        layer = functools.partial(torch.ops.moe.dispatch_gemm_combine, num_experts=EXPERTS, **options)
        return block(layer, *tensors)

    torch.compiler.reset()
    function = torch.compile(run, fullgraph=True, backend=backend, dynamic=dynamic)

    def call(leaves: LayerInputs, **options: Any) -> Tensor:
        return function(*(getattr(leaves, n) for n in TENSORS), **options)

    return call


def once(layer: Callable[..., Tensor], x: Tensor, *rest: Tensor) -> Tensor:
    return layer(x * 2, *rest).relu()


def unused_and_equal(layer: Callable[..., Tensor], x: Tensor, *rest: Tensor) -> Tensor:
    layer(x, *rest)
    first = layer(x, *rest)
    second = layer(x, *rest)
    layer(x.detach(), *rest)
    return first - second / 2  # exact, whatever a compiler fuses


def eager(block: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(leaves: LayerInputs, **options: Any) -> Tensor:
        layer = functools.partial(torch.ops.moe.dispatch_gemm_combine, num_experts=EXPERTS, **options)
        return block(layer, *(getattr(leaves, n) for n in TENSORS))

    return call


def check_calls(rank: Rank, backend: str, dynamic: bool | None, splits: list[list[int]]) -> None:
    """Equal calls, unused calls, a rank without tokens: every one of them takes place, on every rank."""
    reserve_all(rank, [max(max(s) for s in splits)] * rank.ranks, TOP_K)
    call = compiled(unused_and_equal, rank.name, backend, dynamic)
    for seed, tokens in enumerate(splits):
        whole = make(sum(tokens), seed)
        results = []
        for way in (call, eager(unused_and_equal)):
            before = get_group(rank.name)._gates
            results.append(group_step(rank, whole, tokens, call=way))
            gates = get_group(rank.name)._gates - before
            expected = 4 * FORWARD_GATES + 2 * BACKWARD_GATES
            assert gates == expected, f"expected {expected} gates with {tokens} tokens, got {gates}"
        for name, tensor in results[0].items():
            assert_equal_bits(tensor, results[1][name], name)


@pytest.mark.parametrize(
    ("backend", "dynamic", "splits"),
    [
        ("aot_eager", False, [[5, 0], [0, 9]]),
        ("aot_eager", True, [[5, 8], [0, 9], [16, 4], [7, 0], [3, 3]]),
        ("inductor", False, [[5, 0]]),
        pytest.param("inductor", True, [[5, 8], [0, 9], [7, 2]], marks=pytest.mark.slow),
    ],
)
def test_no_call_is_merged_or_dropped(some_ranks, backend, dynamic, splits):
    some_ranks(2).run(check_calls, backend, dynamic, splits)


@pytest.mark.slow
def test_no_call_is_merged_or_dropped_on_four_ranks(some_ranks):
    some_ranks(4).run(check_calls, "aot_eager", True, [[5, 0, 3, 8], [4, 4, 0, 0]])


def check_numbers(rank: Rank, backend: str) -> None:
    """Against one rank, compiled as well and eager; then without gradients, with recompute and with frozen inputs."""
    tokens = [5, 8]
    reserve_all(rank, tokens, TOP_K)
    whole = make(13)
    call = compiled(once, rank.name, backend)
    expected = run_step(whole, eager(once))
    check_group(rank, whole, tokens, call=call, expected=expected)
    check_group(rank, whole, tokens, call=call, expected=expected, recompute=True)
    frozen = {**expected, "w_gate_up": None, "x": None}
    check_group(rank, whole, tokens, call=call, expected=frozen, requires_grad={"w_gate_up": False, "x": False})
    with torch.no_grad():
        share = share_of(rank.rank, tokens, EXPERTS)
        y = call(share.inputs(whole), group_name=rank.name)
    assert_equal_bits(y, share.of("y", expected["y"]), "y")


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_numbers_of_eager(some_ranks, backend):
    some_ranks(2).run(check_numbers, backend)


def check_recompiles(rank: Rank) -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    reserve_all(rank, [40, 40], TOP_K)
    call = compiled(once, rank.name, counter)
    for size in range(2, 22):
        tokens = [size, 23 - size]
        check_group(rank, make(23), tokens, call=call, expected=run_step(make(23), eager(once)))
    assert counter.frame_count <= 2, counter.frame_count


def test_at_most_one_recompile_over_twenty_batch_sizes(some_ranks):
    some_ranks(2).run(check_recompiles)


def check_before_reserve(rank: Rank) -> None:
    """One clear error; nobody waits for anybody, and afterwards everything works."""
    tokens = [5, 8]
    call = compiled(once, rank.name, "aot_eager")
    before = get_group(rank.name)._gates
    with pytest.raises(
        Exception, match=r"moe_megakernel.reserve\(group, ...\) on every rank before compiling"
    ) as caught:
        group_step(rank, make(13), tokens, call=call)
    chain = [caught.value]
    while chain[-1].__cause__ or chain[-1].__context__:
        chain.append(chain[-1].__cause__ or chain[-1].__context__)
    named = "CapacityError" in str(caught.value) or any(isinstance(e, moe_megakernel.CapacityError) for e in chain)
    assert named, chain
    assert get_group(rank.name)._gates == before
    reserve_all(rank, tokens, TOP_K)
    check_group(rank, make(13), tokens, call=call, expected=run_step(make(13), eager(once)))


def check_row_capacity_instead(rank: Rank) -> None:
    """A figure in the call needs no reserve: the first call agrees on it."""
    call = compiled(once, rank.name, "aot_eager")
    check_group(rank, make(13), [5, 8], call=call, expected=run_step(make(13), eager(once)), row_capacity=40)


def test_compiling_before_reserve(some_ranks):
    some_ranks(2).run(check_before_reserve)
    some_ranks(2).run(check_row_capacity_instead)


def check_larger_batch(rank: Rank) -> None:
    """The capacity is a number in the graph: a larger batch is refused everywhere, until reserve and a new trace."""
    moe_megakernel.reserve(rank.group, 8, TOP_K, 4 * 8 * TOP_K)
    call = compiled(once, rank.name, "aot_eager", dynamic=True)
    check_group(rank, make(13), [5, 8], call=call, expected=run_step(make(13), eager(once)))
    with pytest.raises(moe_megakernel.CapacityError, match="expected at most 8 tokens on a rank, got 9 on rank 1"):
        group_step(rank, make(14), [5, 9], call=call)
    moe_megakernel.reserve(rank.group, 100, TOP_K, 2 * 100 * TOP_K)
    check_group(rank, make(14), [5, 9], call=call, expected=run_step(make(14), eager(once)))
    with pytest.raises(moe_megakernel.CapacityError, match="row_capacity: expected at most 64 rows on a rank"):
        group_step(rank, make(180), [90, 90], call=call)
    torch.compiler.reset()
    check_group(rank, make(180), [90, 90], call=call, expected=run_step(make(180), eager(once)))


def test_a_larger_batch_than_compiled_for(some_ranks):
    some_ranks(2).run(check_larger_batch)


def check_bad_expert(rank: Rank) -> None:
    tokens = [5, 8]
    reserve_all(rank, tokens, TOP_K)
    call = compiled(once, rank.name, "aot_eager")
    whole = make(13)
    check_group(rank, whole, tokens, call=call, expected=run_step(whole, eager(once)))
    broken = replace(whole, topk_idx=whole.topk_idx.clone())
    broken.topk_idx[7, 1] = EXPERTS
    with pytest.raises(moe_megakernel.RoutingError, match=r"got 6 at topk_idx\[2, 1\] on rank 1"):
        group_step(rank, broken, tokens, call=call)
    check_group(rank, whole, tokens, call=call, expected=run_step(whole, eager(once)))


def test_bad_expert_id_in_a_compiled_call(some_ranks):
    some_ranks(2).run(check_bad_expert)


def check_main_grads(rank: Rank) -> None:
    tokens = [5, 8]
    reserve_all(rank, tokens, TOP_K)
    whole = make(13)
    share = share_of(rank.rank, tokens, EXPERTS)
    buffers = {f"main_grad_{n[2:]}": torch.zeros(share.of(n, getattr(whole, n)).shape) for n in ("w_gate_up", "w_down")}
    call = compiled(once, rank.name, "aot_eager")
    before = get_group(rank.name)._gates
    with pytest.raises(Exception, match="main_grad: expected None in a compiled region with a group of several ranks"):
        group_step(rank, whole, tokens, call=call, **buffers)
    assert get_group(rank.name)._gates == before
    actual = group_step(rank, whole, tokens, call=eager(once), **buffers)
    expected = share.results(run_step(whole, eager(once)))
    assert actual["w_gate_up"] is None
    for name, buffer in buffers.items():
        assert_equal_bits(buffer.bfloat16(), expected[f"w_{name[10:]}"], name)


def test_main_grads_are_refused_in_a_compiled_region(some_ranks):
    some_ranks(2).run(check_main_grads)


def check_checkpoints(rank: Rank, backend: str) -> None:
    """Around the compiled region; inside it, with a policy that saves the layer's results."""
    tokens = [5, 8]
    reserve_all(rank, tokens, TOP_K)
    whole = make(13)
    expected = run_step(whole, eager(once))
    inner = compiled(once, rank.name, backend)

    def around(leaves: LayerInputs, reentrant: bool = False, **options: Any) -> Tensor:
        def block(*tensors: Tensor) -> Tensor:
            return inner(replace(leaves, **dict(zip(TENSORS, tensors, strict=True))), **options)

        return checkpoint(block, *(getattr(leaves, n) for n in TENSORS), use_reentrant=reentrant)

    for reentrant in (False, True):
        call = functools.partial(around, reentrant=reentrant)
        check_group(rank, whole, tokens, call=call, expected=expected)

    save = functools.partial(create_selective_checkpoint_contexts, [torch.ops.moe.group_forward.default])

    def inside(layer: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        return checkpoint(once, layer, *tensors, use_reentrant=False, context_fn=save)

    check_group(rank, whole, tokens, call=compiled(inside, rank.name, backend), expected=expected)


def test_a19_checkpointing_and_compilation(some_ranks):
    some_ranks(2).run(check_checkpoints, "aot_eager")


def check_two_layers(rank: Rank) -> None:
    """Two layers and a router in one graph, a train step at several sizes, one rank without tokens now and then."""
    reserve_all(rank, [16, 16], TOP_K)
    router = torch.randn(EXPERTS, 24, generator=torch.Generator().manual_seed(5)).bfloat16()

    def block(x: Tensor, w_gate_up: Tensor, w_down: Tensor, group_name: str) -> Tensor:
        for _ in range(2):
            weights, idx = (x @ router.t()).float().softmax(1).topk(TOP_K)
            x = x + torch.ops.moe.dispatch_gemm_combine(
                x, idx, weights, w_gate_up, w_down, num_experts=EXPERTS, group_name=group_name
            )
        return x

    def step(function: Callable[..., Tensor], inputs: LayerInputs, dy: Tensor, group_name: str) -> dict[str, Tensor]:
        leaves = inputs.leaves()
        y = function(leaves.x, leaves.w_gate_up, leaves.w_down, group_name)
        y.backward(dy)
        return {"y": y.detach(), "x": leaves.x.grad, "w_gate_up": leaves.w_gate_up.grad, "w_down": leaves.w_down.grad}

    torch.compiler.reset()
    function = torch.compile(block, fullgraph=True, backend="inductor", dynamic=True)
    for tokens in ([8, 0], [5, 16], [9, 3]):
        whole, share = make(sum(tokens)), share_of(rank.rank, tokens, EXPERTS)
        dy = make_dy(whole.x)
        actual = step(function, share.inputs(whole), dy[share.tokens], rank.name)
        wanted = step(block, share.inputs(whole), dy[share.tokens], rank.name)
        one = step(block, whole, dy, "")
        for name, tensor in wanted.items():
            assert_equal_bits(tensor, share.of(name, one[name]), f"{name}, eager")
            # Fused kernels round the router and the residual otherwise.
            error = (actual[name].double() - tensor.double()).norm() / tensor.double().norm().clamp_min(1e-30)
            assert error < 2e-2, f"{name}: {error:.2e}"


@pytest.mark.slow
def test_a_train_step_of_two_layers(some_ranks):
    some_ranks(2).run(check_two_layers)
