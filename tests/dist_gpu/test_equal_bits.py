"""The result does not depend on the number of ranks: y and every gradient have the bits of one rank's kernels.

Layers of every kind over 2, 4 and 8 ranks, in both backends, with h kept and computed again; frozen inputs, fp32 main
gradients, steps that overlap, and a thousand of them one after the other.
"""

from __future__ import annotations

import random

import pytest
import torch
from tests.dist_gpu.layers import (
    Layer,
    Prepared,
    all_on_one,
    check_bits,
    delay,
    even,
    forward,
    gaps,
    one_rank,
    reserve_for,
    way,
    without_host_sync,
)
from tests.distributed.pool import Pool
from tests.distributed.split import group_step, random_tokens, share_of
from tests.distributed.worker import Rank
from tests.steps import ACTIVATION_CASES, name_of
from torch import Tensor

import moe_megakernel
from moe_megakernel.testing import assert_equal_bits, make_inputs, random_routing

pytestmark = [pytest.mark.gpu, pytest.mark.distributed]


# -- ids, changed in place; `last` are the experts of the last rank ---------------------------------------------------


def repeat_and_drop(idx: Tensor, last: range) -> None:
    """Tokens that name an expert twice or in every slot, tokens without a route, routes dropped here and there."""
    idx[::5, 1:] = idx[::5, :1]
    idx[1::7] = -1
    idx[2::3, 0] = -1


def to_one_expert(idx: Tensor, last: range) -> None:
    idx[:] = 1


def to_the_last_rank(idx: Tensor, last: range) -> None:
    idx[:] = last.start + idx % max(1, len(last)) if last else 0


def drop_all(idx: Tensor, last: range) -> None:
    idx[:] = -1


ZIPF = {"zipf": 1.0, "drop": 0.1}
LAYERS = {
    "uniform": Layer(256, 16, 2, split=even),
    "zipf": Layer(300, 12, 3, 72, 40, routing=ZIPF, options={"bias": True}),
    "duplicates and dropped": Layer(300, 12, 3, routes=repeat_and_drop, options={"bias": True}),
    "experts not divisible": Layer(150, 13, 2, 64, 24, routing=ZIPF, options={"bias": True}),
    "fewer experts than ranks": Layer(90, 3, 2, 40, 24, routing=ZIPF),
    "one expert": Layer(70, 1, 1, 40, 24, options={"bias": True}),
    "ranks without tokens": Layer(200, 10, 4, split=gaps, routing=ZIPF, options={"bias": True}),
    "tokens on one rank": Layer(200, 10, 4, split=all_on_one, routing=ZIPF),
    "one token": Layer(1, 8, 2, split=all_on_one),
    "no token": Layer(0, 8, 2, options={"bias": True}),
    "one token a rank and less": Layer(5, 40, 8, split=even),
    "to one expert": Layer(260, 9, 1, routes=to_one_expert, options={"bias": True}),
    "to one rank": Layer(260, 16, 4, routes=to_the_last_rank, split=even),
    "all dropped": Layer(40, 8, 2, routes=drop_all, options={"bias": True}),
    "top 1": Layer(300, 16, 1, routing={"zipf": 1.0}),
    "top 8": Layer(200, 40, 8, 136, 64, routing=ZIPF),
    "wide": Layer(333, 24, 4, 264, 72, routing=ZIPF, options={"bias": True}),
    "narrow": Layer(100, 8, 2, 8, 8),
    "many tokens": Layer(700, 32, 2, 72, 40, split=even, routing=ZIPF),
    **{
        f"activation {name_of(case)}": Layer(67, 6, 2, 40, 24, routing=ZIPF, options={"bias": True, **case})
        for case in ACTIVATION_CASES
    },
}
#: Layers that two and eight ranks run, too; four run all.
SOME = (
    "zipf",
    "duplicates and dropped",
    "experts not divisible",
    "fewer experts than ranks",
    "ranks without tokens",
    "one token",
    "no token",
    "to one rank",
    "top 8",
    "wide",
)
#: Seconds for what takes long where ranks take turns on a GPU.
LONG = 200.0
LARGE = Layer(4000, 16, 4, 1024, 512, routing=ZIPF, options={"bias": True})


def check_layer(rank: Rank, layer: Layer) -> None:
    whole, tokens = layer.batch(rank)
    reserve_for(rank, [(whole, tokens)])
    expected = one_rank(rank, whole)
    share = share_of(rank.rank, tokens, whole.num_experts)
    for backend in way(rank).backends:
        for recompute in (False, True):
            check_bits(rank, whole, tokens, backend, expected=expected, recompute=recompute)
        with torch.no_grad():
            y = forward(rank, share.inputs(whole), backend)
        assert_equal_bits(y, share.of("y", expected["y"]), "y without gradients")
    check_bits(rank, whole, tokens, expected=expected)  # after the other backend


@pytest.mark.parametrize("pool", [4], indirect=True)
@pytest.mark.parametrize("name", LAYERS)
def test_layers(pool: Pool, name: str) -> None:
    pool.run(check_layer, LAYERS[name], world=True)


@pytest.mark.parametrize("pool", [2, 8], indirect=True)
@pytest.mark.parametrize("name", SOME)
def test_some_layers_over_more_and_fewer_ranks(pool: Pool, name: str) -> None:
    pool.run(check_layer, LAYERS[name], world=True)


def test_large_layer(pool: Pool) -> None:
    pool.run(check_layer, LARGE, world=True)


# -- what is asked for ------------------------------------------------------------------------------------------------


def check_masks(rank: Rank) -> None:
    """Any inputs may be frozen; what is asked for has the bits that it has when all is."""
    layer = LAYERS["zipf"]
    whole, tokens = layer.batch(rank)
    reserve_for(rank, [(whole, tokens)])
    expected = one_rank(rank, whole)
    names = list(whole.grads())
    for mask in range(1, 2 ** len(names), 3):
        wants = {name: bool(mask >> i & 1) for i, name in enumerate(names)}
        asked = {name: g if name == "y" or wants[name] else None for name, g in expected.items()}
        backend = way(rank).backends[mask // 3 % len(way(rank).backends)]
        check_bits(rank, whole, tokens, backend, expected=asked, requires_grad=wants, recompute=bool(mask // 6 % 2))


@pytest.mark.parametrize("pool", [2, 4], indirect=True)
def test_some_inputs_frozen(pool: Pool) -> None:
    pool.run(check_masks, world=True)


def check_main_grads(rank: Rank) -> None:
    """float32 buffers that hold values already grow by the step's gradient."""
    whole, tokens = LAYERS["zipf"].batch(rank)
    reserve_for(rank, [(whole, tokens)])
    share = share_of(rank.rank, tokens, whole.num_experts)
    for backend in way(rank).backends:
        one, many = {}, {}
        for name in ("w_gate_up", "w_down"):
            values = torch.randn(getattr(whole, name).shape, generator=torch.Generator().manual_seed(3))
            one[f"main_grad_{name[2:]}"] = values.to(rank.device)
            many[f"main_grad_{name[2:]}"] = share.of(name, values).clone().to(rank.device)
        for _ in range(2):
            wanted = share.results(one_rank(rank, whole, **one))
            options = {"transport": way(rank).transport, "backend": backend, **many}
            actual = group_step(rank, whole, tokens, **options)
            moe_megakernel.check_errors()
            for name, tensor in actual.items():
                assert_equal_bits(tensor, wanted[name], name)
            for name, buffer in many.items():
                assert_equal_bits(buffer, share.of(f"w_{name[10:]}", one[name]), name)


@pytest.mark.parametrize("pool", [2, 4], indirect=True)
def test_main_gradients(pool: Pool) -> None:
    pool.run(check_main_grads, world=True)


# -- several steps ----------------------------------------------------------------------------------------------------


def check_steps_in_flight(rank: Rank) -> None:
    """Forwards of several batches before the first backward, and backwards in another order."""
    layer = Layer(160, 12, 3, 72, 40, routing=ZIPF, options={"bias": True})
    batches = [layer.batch(rank, seed) for seed in range(4)]
    batches += [Layer(90, 12, 3, 72, 40, split=gaps, options={"bias": True}).batch(rank)]
    reserve_for(rank, batches)
    steps = [Prepared(rank, *batch) for batch in batches]
    for backend in way(rank).backends:
        for order in ((0, 1, 2, 3, 4), (4, 2, 0, 3, 1)):
            for recompute in (False, True):
                ys = [step.forward(backend, recompute=recompute) for step in steps]
                results = {i: steps[i].backward(ys[i]) for i in order}
                moe_megakernel.check_errors()
                for i, step in enumerate(steps):
                    step.check(results[i], f"in batch {i}, backwards in order {order}")


@pytest.mark.parametrize("pool", [2, 4], indirect=True)
def test_several_forwards_before_their_backwards(pool: Pool) -> None:
    pool.run(check_steps_in_flight, world=True)


def check_two_layers(rank: Rank) -> None:
    """Layers of different shapes share the group's memory, in turns and one inside the other."""
    layers = [
        Layer(160, 12, 3, 72, 40, routing=ZIPF, options={"bias": True}),
        Layer(100, 40, 8, 264, 24, split=gaps, routing=ZIPF, options={"activation": "geglu_tanh"}),
        Layer(230, 3, 1, 16, 136, options={"activation": "relu2"}),
    ]
    batches = [layer.batch(rank) for layer in layers]
    reserve_for(rank, batches)
    steps = [Prepared(rank, *batch) for batch in batches]
    for backend in way(rank).backends:
        for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
            ys = {i: steps[i].forward(backend) for i in order}
            results = {i: steps[i].backward(ys[i]) for i in reversed(order)}
            moe_megakernel.check_errors()
            for i, step in enumerate(steps):
                step.check(results[i], f"of layer {i}")


@pytest.mark.parametrize("pool", [2, 8], indirect=True)
def test_layers_of_different_shapes_share_a_group(pool: Pool) -> None:
    pool.run(check_two_layers, world=True)


def check_many_steps(rank: Rank, backend: str, number: int) -> None:
    """Steps back to back, without a word between host and device: every result's bits are compared on the device."""
    num_experts, top_k, routings = 16, 4, 8
    batches = []
    for seed in range(routings):
        tokens = random_tokens(torch.Generator().manual_seed(seed), rank.ranks, 600 // rank.ranks)
        idx = random_routing(sum(tokens), num_experts, top_k, zipf=seed % 3 / 2, drop=0.1, seed=seed)
        whole = make_inputs(idx, 128, 64, num_experts, bias=True, seed=seed).to(torch.bfloat16, rank.device)
        batches.append((whole, tokens))
    reserve_for(rank, batches)
    steps = [Prepared(rank, *batch) for batch in batches]
    for step in steps:
        step.check(step.backward(step.forward(backend)))
    order = random.Random(0).choices(range(routings), k=number)
    differs = torch.zeros(number, len(steps[0].names), dtype=torch.bool, device=rank.device)
    with without_host_sync(rank):
        for i, routing in enumerate(order):
            if i % 64 == rank.rank:
                delay(rank, 1_000_000)  # each rank is the last one now and then
            step = steps[routing]
            results = step.backward(step.forward(backend))
            for column, (actual, expected) in enumerate(zip(results, step.expected, strict=True)):
                differs[i, column] = (_bits(actual) != _bits(expected)).any()
    moe_megakernel.check_errors()
    wrong = [(i, order[i], steps[0].names[column]) for i, column in differs.nonzero().tolist()]
    assert not wrong, f"{len(wrong)} results differ; the first (step, routing, name): {wrong[:5]}"


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().view(torch.int16 if tensor.element_size() == 2 else torch.int32)


@pytest.mark.parametrize(("backend", "number"), [("mega", 1000), ("staged", 200)])
def test_a_thousand_steps(pool: Pool, backend: str, number: int) -> None:
    pool.run(check_many_steps, backend, number, world=True, limit=LONG)
