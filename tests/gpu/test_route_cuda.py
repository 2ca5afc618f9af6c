"""The route kernel on a CUDA device: its sort against numpy, its plan against the host's, number by number.

Every output is allocated poisoned, so an element that the kernel leaves unwritten shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.plan.cases import ALL_NEEDS, Case, count_classes, make_case
from tests.unit.test_route import KINDS, LAYOUTS, lay_out, make_ids, oracle

from moe_megakernel import _native
from moe_megakernel.plan import GradNeeds, PlanConfig, Problem, Schedule, Tiling, make_plan
from moe_megakernel.plan_names import Direction

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = [torch.int32, torch.int64]
TABLES = (
    "expert_offsets",
    "sources",
    "tiles",
    "segments",
    "minibatch_ends",
    "expert_tiles",
    "expert_pieces",
    "tasks",
)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Let ``torch.empty`` return the largest integer everywhere."""
    assert _native.load(), _native.why_missing()
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def check_sort(topk_idx: torch.Tensor, num_experts: int) -> None:
    """`topk_idx` on the CPU goes to the device as it is laid out."""
    expected = oracle(topk_idx.numpy(), num_experts)
    on_device, base = topk_idx.cuda(), topk_idx._base
    if base is not None:
        on_device = base.cuda().as_strided(topk_idx.shape, topk_idx.stride(), topk_idx.storage_offset())
    order, counts, first_bad = torch.ops.moe.route(on_device, num_experts)
    assert (order.dtype, counts.dtype, first_bad.dtype) == (torch.int32, torch.int32, torch.int64)
    np.testing.assert_array_equal(order.cpu().numpy(), expected[0])
    np.testing.assert_array_equal(counts.cpu().numpy(), expected[1])
    assert first_bad.tolist() == [expected[2]]


def draw_sort(seed: int) -> tuple[torch.Tensor, int]:
    rng = np.random.default_rng(seed)
    num_experts = int(rng.choice([1, 5, 8, 64, 128, 384, 1024, 1025, 3000]))
    num_tokens = int(rng.choice([0, 1, 63, 64, 65, 1000, 5000]))
    top_k = int(rng.choice([1, 2, 3, 6, 8, 10, 31, 32, 33, 70]))
    ids = make_ids(rng, str(rng.choice(KINDS)), num_tokens, top_k, num_experts)
    ids = np.where(rng.random(ids.shape) < rng.choice([0.0, 0.2, 1.0]), -1, ids)
    dtype = DTYPES[seed % 2]
    limits = np.iinfo(np.int32 if dtype == torch.int32 else np.int64)
    wrong = rng.choice([num_experts, num_experts + 1, -2, limits.min, limits.max], ids.shape)
    ids = np.where(rng.random(ids.shape) < rng.choice([0.0, 0.001]), wrong, ids)
    return lay_out(torch.from_numpy(ids).to(dtype), str(rng.choice(LAYOUTS))), num_experts


@pytest.mark.parametrize("seed", range(60))
def test_any_routing_is_sorted(seed: int) -> None:
    check_sort(*draw_sort(seed))


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "kind"),
    [
        (8192, 128, 8, "distinct"),
        (32768, 128, 8, "uniform"),
        (32768, 64, 10, "zipf"),
        (32768, 128, 8, "one expert"),
        (100_000, 1024, 8, "uniform"),  # too many to be staged in shared memory
        (300_000, 3, 4, "one expert"),
    ],
)
def test_large_batches_are_sorted(num_tokens: int, num_experts: int, top_k: int, kind: str) -> None:
    ids = make_ids(np.random.default_rng(0), kind, num_tokens, top_k, num_experts)
    check_sort(torch.from_numpy(ids), num_experts)


def test_the_sort_is_captured_in_a_graph() -> None:
    topk_idx = torch.randint(0, 16, (500, 4), device="cuda")
    torch.ops.moe.route(topk_idx, 16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        order, counts, first_bad = torch.ops.moe.route(topk_idx, 16)
    for _ in range(3):
        topk_idx.random_(0, 16)
        graph.replay()
        expected = oracle(topk_idx.cpu().numpy(), 16)
        np.testing.assert_array_equal(order.cpu().numpy(), expected[0])
        np.testing.assert_array_equal(counts.cpu().numpy(), expected[1])
        assert first_bad.tolist() == [-1]


def check_plan(case: Case, needs: GradNeeds | None = None) -> None:
    backward = needs is not None
    got = dict(
        zip(
            TABLES,
            torch.ops.moe.device_plan(
                case.class_counts.cuda(), case.tokens, case.config.tensor(), -1 if needs is None else needs.mask()
            ),
            strict=True,
        )
    )
    expected = case.plan() if needs is None else case.plan(Direction.BACKWARD, needs)
    for name in TABLES:
        if name != "sources":
            assert torch.equal(got[name], getattr(expected, name)), name
    if case.config.problem.num_ranks > 1 and not backward:
        starts = torch.cumsum(case.tokens, 0) - case.tokens
        sources = torch.ops.moe.merge_rows(case.class_counts, starts, case.config.problem.rank)[1]
        assert torch.equal(got["sources"], sources.long())


@pytest.mark.parametrize("seed", range(60))
def test_any_plan_is_that_of_the_host(seed: int) -> None:
    check_plan(make_case(seed, max_tokens=3000, max_experts=200))


@pytest.mark.parametrize("seed", range(128))
def test_any_backward_plan_is_that_of_the_host(seed: int) -> None:
    check_plan(make_case(seed, max_tokens=3000, max_experts=200), ALL_NEEDS[seed])


def one_rank(tokens: int, num_experts: int, top_k: int, kind: str, schedule: Schedule, width: int = 768) -> Case:
    ids = make_ids(np.random.default_rng(0), kind, tokens, top_k, num_experts)
    problem = Problem(1, 0, num_experts, top_k, 2048, width, True, tokens, tokens * top_k)
    counts = torch.from_numpy(count_classes(ids, num_experts))[None]
    return Case(PlanConfig(problem, Tiling(), schedule), counts, torch.tensor([tokens]))


@pytest.mark.parametrize("kind", ["uniform", "zipf", "one expert"])
@pytest.mark.parametrize(("tokens", "num_experts", "top_k"), [(8192, 128, 8), (32768, 128, 8), (8192, 1024, 8)])
@pytest.mark.parametrize("separate_stages", [False, True])
@pytest.mark.parametrize("needs", [None, GradNeeds(), GradNeeds(recompute=True)], ids=["forward", "saved", "recompute"])
def test_plans_of_real_layers(
    kind: str, tokens: int, num_experts: int, top_k: int, separate_stages: bool, needs: GradNeeds | None
) -> None:
    schedule = Schedule(separate_stages=separate_stages, segment_tiles=16)
    check_plan(one_rank(tokens, num_experts, top_k, kind, schedule), needs)


@pytest.mark.parametrize("num_clusters", [1, 3, 66])
def test_more_segments_than_shared_memory_holds(num_clusters: int) -> None:
    schedule = Schedule(num_clusters=num_clusters, waves=1, segment_tiles=2, lag=2)
    case = one_rank(300_000, 8, 8, "uniform", schedule, width=128)
    assert len(make_plan(case.config, case.class_counts, case.tokens).segments) > 8000
    check_plan(case)
    check_plan(case, GradNeeds(recompute=True))


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"moe::route: num_experts: expected 1 to 33554431, got 0"):
        torch.ops.moe.route(torch.zeros(2, 2, dtype=torch.int64, device="cuda"), 0)
    case = make_case(0, max_ranks=2)
    few = replace(case.config, problem=replace(case.config.problem, row_capacity=0))
    with pytest.raises(RuntimeError, match=r"moe::device_plan: config: expected row_capacity >= \d+, the rows"):
        torch.ops.moe.device_plan(case.class_counts.cuda(), case.tokens, few.tensor())
    many = one_rank(10, 1025, 1, "uniform", Schedule())
    with pytest.raises(RuntimeError, match=r"moe::device_plan: config: expected at most 1024 experts a rank, got 1025"):
        torch.ops.moe.device_plan(many.class_counts.cuda(), many.tokens, many.config.tensor())
    with pytest.raises(RuntimeError, match=r"moe::device_plan: needs: expected -1 or a mask of 7 bits, got 128"):
        torch.ops.moe.device_plan(case.class_counts.cuda(), case.tokens, case.config.tensor(), 128)
