"""The module in a group of several ranks: the one-rank module over the whole batch, value and all gradients."""

from __future__ import annotations

import pickle
from functools import partial

import pytest
import torch
import torch.distributed as dist
from tests.distributed.split import reserve_all, share_of
from tests.distributed.worker import Rank
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import moe_megakernel
from moe_megakernel import convert
from moe_megakernel.functional import moe_layer
from moe_megakernel.module import MoE
from moe_megakernel.testing import assert_close, assert_equal_bits, make_inputs, random_routing

pytestmark = pytest.mark.distributed

HIDDEN, WIDTH, EXPERTS, TOP_K = 16, 12, 5, 2
OPTIONS = {"bias": True, "correction_bias": True, "shared_expert_width": 8, "shared_expert_gate": True, "seed": 5}

WAYS = {
    "eager": lambda moe: moe,
    "compiled": lambda moe: torch.compile(moe, fullgraph=True),
    "checkpointed": lambda moe: partial(checkpoint, moe, use_reentrant=False),
}


def build(**options) -> MoE:
    """In fp64, so that a choice of experts never hangs on how the router's product was blocked."""
    return MoE(HIDDEN, WIDTH, EXPERTS, TOP_K, dtype=torch.float64, **OPTIONS, **options)


def check_module(rank: Rank, tokens: list[int], way: str) -> None:
    reserve_all(rank, tokens, TOP_K)
    share = share_of(rank.rank, tokens, EXPERTS)
    x, dy = torch.randn(2, sum(tokens), HIDDEN, dtype=torch.float64)
    whole, part = build(), build(group=rank.group)
    assert part.experts == moe_megakernel.expert_range(EXPERTS, rank.rank, rank.ranks)
    for name, parameter in part.named_parameters():
        expected = whole.get_parameter(name).detach()
        assert_equal_bits(parameter.detach(), share.of(name, expected) if owned(name) else expected, name)

    x_whole, x_part = x.clone().requires_grad_(), x[share.tokens].clone().requires_grad_()
    y_whole, y_part = whole(x_whole), WAYS[way](part)(x_part)
    y_whole.backward(dy)
    y_part.backward(dy[share.tokens])
    assert_close(y_part, y_whole[share.tokens], 1e-12, "y")
    assert_close(x_part.grad, x_whole.grad[share.tokens], 1e-12, "x")
    for name, parameter in part.named_parameters():
        grad, expected = parameter.grad, whole.get_parameter(name).grad
        if not owned(name):
            # The router and the shared expert see this rank's tokens; their sum over ranks belongs to the caller.
            dist.all_reduce(grad, group=rank.group)
        assert_close(grad, share.of(name, expected) if owned(name) else expected, 1e-12, name)
    counts = part.last_expert_counts.clone()
    dist.all_reduce(counts, group=rank.group)
    assert torch.equal(counts, whole.last_expert_counts)


def owned(name: str) -> bool:
    """Whether a parameter is of experts, which ranks divide, and not one that every rank holds."""
    return name.startswith(("w_", "bias_"))


@pytest.mark.parametrize(
    ("ranks", "tokens", "way"),
    [
        (2, [7, 12], "eager"),
        (2, [0, 6], "eager"),
        (4, [3, 0, 9, 4], "eager"),
        (2, [0, 6], "checkpointed"),
        (4, [3, 0, 9, 4], "checkpointed"),
        pytest.param(2, [0, 6], "compiled", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_equals_one_rank(some_ranks, ranks, tokens, way):
    some_ranks(ranks).run(check_module, tokens, way)


def check_groups(rank: Rank) -> None:
    tokens = [4, 3]
    reserve_all(rank, tokens, TOP_K)
    x = torch.randn(tokens[rank.rank], HIDDEN, dtype=torch.float64)
    part = build(group=rank.group)
    y = part(x)
    mesh = DeviceMesh.from_group(rank.group, "cpu")
    for same in (build(group=rank.name), build(group=mesh), pickle.loads(pickle.dumps(part))):
        assert same.experts == part.experts
        assert_equal_bits(same(x), y, "y")

    whole = make_inputs(random_routing(sum(tokens), EXPERTS, TOP_K), HIDDEN, WIDTH, EXPERTS, dtype=torch.float64)
    share = share_of(rank.rank, tokens, EXPERTS)
    mine = share.inputs(whole)
    expected = moe_layer(whole.x, whole.topk_idx, whole.topk_weights, whole.w_gate_up, whole.w_down)[share.tokens]
    for group in (rank.group, rank.name, mesh):
        args = (mine.x, mine.topk_idx, mine.topk_weights, mine.w_gate_up, mine.w_down)
        assert_close(moe_layer(*args, num_experts=EXPERTS, group=group), expected, 1e-12, "y")


def test_groups_by_object_name_mesh_and_from_a_pickle(some_ranks):
    some_ranks(2).run(check_groups)


def check_checkpoint(rank: Rank) -> dict[str, torch.Tensor]:
    whole = build()
    stored = convert.to_per_expert(
        {key: whole.state_dict()[key] for key in ("w_gate_up", "w_down", "bias_gate_up", "bias_down")},
        num_experts=EXPERTS,
    )
    part = build(group=rank.group)
    expected = {key: value.clone() for key, value in part.state_dict().items()}
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.zero_()
    mine = convert.from_per_expert(stored, num_experts=EXPERTS, experts=part.experts, bias=True)
    rest = {key: value for key, value in whole.state_dict().items() if not owned(key)}
    part.load_state_dict({**mine, **rest})
    for key, value in part.state_dict().items():
        assert_equal_bits(value, expected[key], key)
    own = {key: value for key, value in part.state_dict().items() if owned(key)}
    return convert.to_per_expert(own, num_experts=EXPERTS, experts=part.experts)


def test_each_rank_loads_and_saves_its_experts(some_ranks):
    whole = {key: value for key, value in build().state_dict().items() if owned(key)}
    expected = convert.to_per_expert(whole, num_experts=EXPERTS)
    shares = some_ranks(2).run(check_checkpoint)
    assert not shares[0].keys() & shares[1].keys()
    joined = {**shares[0], **shares[1]}
    assert joined.keys() == expected.keys()
    for key, value in expected.items():
        assert_equal_bits(joined[key], value, key)


def check_dtensors(rank: Rank) -> None:
    reserve_all(rank, [4, 3], TOP_K)
    mesh = DeviceMesh.from_group(rank.group, "cpu")
    x = torch.randn([4, 3][rank.rank], HIDDEN, dtype=torch.float64)

    def even(**options) -> MoE:
        return MoE(HIDDEN, WIDTH, 6, TOP_K, dtype=torch.float64, bias=True, seed=5, group=mesh, **options)

    plain, sharded = even(), even()
    for name in filter(owned, dict(plain.named_parameters())):
        local = sharded.get_parameter(name).detach()
        setattr(sharded, name, torch.nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)])))
    y, expected = sharded(x), plain(x)
    assert_equal_bits(y, expected, "y")
    y.square().sum().backward()
    expected.square().sum().backward()
    for name, parameter in plain.named_parameters():
        grad = sharded.get_parameter(name).grad
        assert isinstance(grad, DTensor) == owned(name)
        assert_equal_bits(grad.to_local() if owned(name) else grad, parameter.grad, name)

    sharded.zero_grad()
    main_grad = DTensor.from_local(torch.zeros_like(plain.w_down), mesh, [Shard(0)])
    sharded.w_down.main_grad = main_grad
    sharded(x).square().sum().backward()
    assert sharded.w_down.grad is None
    assert_close(main_grad.to_local(), plain.w_down.grad, 1e-12, "main_grad")

    with torch.no_grad():
        sharded.w_down.zero_()
    sharded.reset_parameters()
    assert_equal_bits(sharded.w_down.detach().to_local(), plain.w_down.detach(), "w_down")


def test_parameters_as_dtensors(some_ranks):
    some_ranks(2).run(check_dtensors)
