"""The router against a plain loop over tokens written from the papers' formulas; ties, dtypes, autocast, compile."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_megakernel.router import Router, choose_experts, stable_topk


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """Tests share code objects, whose compiled versions are limited in number."""
    torch._dynamo.reset()


def pick(values: list[float], k: int) -> list[int]:
    """The k largest values' indices, equal values in ascending order of index."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]


def route_one(
    z: list[float],
    k: int,
    *,
    scores="softmax",
    before=True,
    renorm=False,
    bias=None,
    groups=1,
    kept=None,
    best=2,
    scale=1.0,
) -> tuple[list[int], list[float]]:
    """One token in double precision."""

    def score(row: list[float]) -> list[float]:
        if scores == "sigmoid":
            return [1 / (1 + math.exp(-v)) for v in row]
        top = max(row)
        exps = [math.exp(v - top) for v in row]
        return [e / sum(exps) for e in exps]

    basis = score(z) if before else z
    choice = [b + (bias[e] if bias else 0.0) for e, b in enumerate(basis)]
    if kept is not None:
        size = len(z) // groups
        strength = [sum(sorted(choice[g * size : (g + 1) * size])[-best:]) for g in range(groups)]
        allowed = pick(strength, kept)
        choice = [c if e // size in allowed else -math.inf for e, c in enumerate(choice)]
    chosen = pick(choice, k)
    weights = [basis[e] for e in chosen] if before else score([z[e] for e in chosen])
    if renorm:
        weights = [w / sum(weights) for w in weights]
    return chosen, [w * scale for w in weights]


STYLES = {
    "qwen2": ({}, {}),
    "mixtral": ({"renormalize": True}, {"renorm": True}),
    "gpt_oss": ({"score_before_topk": False}, {"before": False}),
    "sigmoid_after": ({"scores": "sigmoid", "score_before_topk": False}, {"scores": "sigmoid", "before": False}),
    "deepseek_v3": (
        {"scores": "sigmoid", "renormalize": True, "num_groups": 4, "top_groups": 2, "scale": 2.5},
        {"scores": "sigmoid", "renorm": True, "groups": 4, "kept": 2, "scale": 2.5},
    ),
    "deepseek_v2": (
        {"num_groups": 4, "top_groups": 2, "group_score": "max", "scale": 16.0},
        {"groups": 4, "kept": 2, "best": 1, "scale": 16.0},
    ),
    "groups_of_one": ({"num_groups": 12, "top_groups": 5}, {"groups": 12, "kept": 5}),
}


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_choice_equals_the_loop(style: str, biased: bool) -> None:
    torch.manual_seed(1)
    ours, plain = STYLES[style]
    logits = torch.randn(3, 11, 12) * 2
    bias = torch.randn(12) * 0.5 if biased else None
    idx, weights = choose_experts(logits, 3, correction_bias=bias, **ours)
    assert idx.shape == weights.shape == (3, 11, 3)
    assert idx.dtype == torch.int64
    assert weights.dtype == torch.float32
    for z, i, w in zip(logits.reshape(-1, 12), idx.reshape(-1, 3), weights.reshape(-1, 3), strict=True):
        chosen, expected = route_one(z.double().tolist(), 3, bias=bias.double().tolist() if biased else None, **plain)
        assert i.tolist() == chosen
        torch.testing.assert_close(w.double(), torch.tensor(expected, dtype=torch.float64), rtol=2e-6, atol=0)


@pytest.mark.parametrize("style", STYLES)
def test_gradient_of_the_weights(style: str) -> None:
    torch.manual_seed(2)
    logits = torch.randn(5, 12, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(12, requires_grad=True)
    torch.autograd.gradcheck(lambda z: choose_experts(z, 3, correction_bias=bias, **STYLES[style][0])[1], logits)
    choose_experts(logits, 3, correction_bias=bias, **STYLES[style][0])[1].sum().backward()
    assert bias.grad is None


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 7.5, -math.inf]), min_size=9, max_size=9), max_size=5),
    st.integers(1, 9),
)
def test_ties_take_the_lowest_expert_first(rows: list[list[float]], k: int) -> None:
    values = torch.tensor(rows).reshape(-1, 9)
    assert stable_topk(values, k).tolist() == [pick(row, k) for row in rows]


def test_tied_logits_are_chosen_alike_in_every_batch() -> None:
    """A19: a recomputed or differently batched forward must choose the same experts."""
    logits = torch.zeros(64, 300)
    idx, weights = choose_experts(logits, 4, renormalize=True)
    assert torch.equal(idx, torch.arange(4).expand(64, 4))
    assert torch.equal(weights, torch.full((64, 4), 0.25))
    grouped, _ = choose_experts(logits, 4, num_groups=10, top_groups=2)
    assert torch.equal(grouped, torch.arange(4).expand(64, 4))


def test_groups_are_respected_when_every_score_is_negative() -> None:
    """A correction bias can push all scores below 0; experts outside the kept groups still cannot be chosen."""
    logits, bias = torch.randn(50, 16), [-5.0] * 16
    idx, _ = choose_experts(logits, 4, scores="sigmoid", correction_bias=torch.tensor(bias), num_groups=4, top_groups=1)
    for z, chosen in zip(logits.tolist(), idx.tolist(), strict=True):
        assert chosen == route_one(z, 4, scores="sigmoid", bias=bias, groups=4, kept=1)[0]


def test_underflowing_sigmoids_give_finite_weights_and_gradients() -> None:
    logits = torch.full((2, 6), -200.0, requires_grad=True)
    _, weights = choose_experts(logits, 2, scores="sigmoid", renormalize=True)
    weights.sum().backward()
    assert torch.equal(weights.detach(), torch.zeros(2, 2))
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"top_k": 0}, "router: top_k: expected 1 <= top_k <= num_experts = 12, got 0"),
        ({"top_k": 13}, "router: top_k: expected 1 <= top_k <= num_experts = 12, got 13"),
        ({"scores": "relu"}, "router: scores: expected one of softmax, sigmoid, got 'relu'"),
        ({"num_groups": 5}, "router: num_groups: expected a divisor of num_experts = 12, got 5"),
        ({"num_groups": 4, "top_groups": 5}, "router: top_groups: expected 1 <= top_groups <= num_groups = 4, got 5"),
        ({"num_groups": 6, "top_groups": 1}, "router: top_k: expected at most the 2 experts of the kept groups, got 3"),
        ({"group_score": "sum"}, "router: group_score: expected one of top2_sum, max, got 'sum'"),
    ],
)
def test_settings_that_cannot_choose(arguments: dict, message: str) -> None:
    settings = {"top_k": 3, **arguments}
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        choose_experts(torch.randn(2, 12), **settings)
    with pytest.raises(ValueError, match="router: "):
        Router(8, 12, **settings)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("leading", [(), (7,), (0,), (2, 3), (2, 0, 3)])
def test_module_computes_in_fp32(dtype: torch.dtype, leading: tuple[int, ...]) -> None:
    torch.manual_seed(3)
    router = Router(16, 6, 2, bias=True, dtype=dtype)
    with torch.no_grad():
        router.bias.normal_()
    x = torch.randn(*leading, 16, dtype=dtype, requires_grad=True)
    topk_idx, topk_weights, logits = router(x)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert topk_weights.dtype == logits.dtype == wide
    assert topk_idx.shape == topk_weights.shape == (*leading, 2)
    expected = x.detach().double() @ router.weight.detach().double().T + router.bias.detach().double()
    torch.testing.assert_close(logits.detach().double(), expected, rtol=1e-5, atol=1e-5)
    (topk_weights * torch.tensor([1.0, 3.0])).sum().backward()
    assert x.grad.dtype == router.weight.grad.dtype == dtype
    if x.numel():
        assert router.weight.grad.abs().max() > 0


def test_autocast_leaves_the_router_in_fp32() -> None:
    torch.manual_seed(4)
    router = Router(32, 8, 2)
    x = torch.randn(40, 32)
    plain = router(x)
    with torch.autocast("cpu", torch.bfloat16):
        cast = router(x)
    assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))


def test_one_choice_keeps_its_score_so_that_the_router_learns() -> None:
    router = Router(8, 4, 1)
    assert router.renormalize is False
    router(torch.randn(5, 8)).topk_weights.sum().backward()
    assert router.weight.grad.abs().max() > 0
    assert Router(8, 4, 2).renormalize is True
    assert Router(8, 4, 1, renormalize=True).renormalize is True


@pytest.mark.parametrize("style", ["sigmoid_after", "deepseek_v2"])
def test_compiles_whole_and_equals_eager(style: str) -> None:
    torch.manual_seed(5)
    router = Router(16, 12, 3, correction_bias=True, **STYLES[style][0])
    router.correction_bias.normal_(0, 0.1)
    compiled = torch.compile(router, fullgraph=True, dynamic=True)
    for tokens in (8, 16, 33):
        x = torch.randn(tokens, 16, requires_grad=True)
        twin = x.detach().clone().requires_grad_()
        ours, theirs = compiled(x), router(twin)
        assert torch.equal(ours.topk_idx, theirs.topk_idx)
        torch.testing.assert_close(ours.topk_weights, theirs.topk_weights, rtol=1e-5, atol=1e-7)
        factors = torch.randn(tokens, 3)
        (grad,) = torch.autograd.grad((ours.topk_weights * factors).sum(), x)
        (expected,) = torch.autograd.grad((theirs.topk_weights * factors).sum(), twin)
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-6)


def test_correction_bias_moves_against_the_load() -> None:
    router = Router(8, 4, 2, correction_bias=True)
    router.update_correction_bias(torch.tensor([0, 2, 2, 4]), rate=0.5)
    router.update_correction_bias(torch.tensor([1, 1, 1, 5]), rate=0.25)
    assert router.correction_bias.tolist() == [0.75, 0.25, 0.25, -0.75]
    with pytest.raises(ValueError, match=r"router: counts: expected shape \(4,\), got \(3,\)"):
        router.update_correction_bias(torch.zeros(3))
    with pytest.raises(ValueError, match="router: correction_bias: expected a router built with correction_bias=True"):
        Router(8, 4, 2).update_correction_bias(torch.zeros(4))


def test_correction_bias_balances_a_skewed_router() -> None:
    torch.manual_seed(6)
    router = Router(8, 8, 2, scores="sigmoid", correction_bias=True)
    with torch.no_grad():
        router.weight[0] += 1.0
    x = torch.randn(512, 8) + 1.0

    def spread() -> float:
        counts = torch.bincount(router(x).topk_idx.flatten(), minlength=8).float()
        return float(counts.max() / counts.mean())

    before = spread()
    for _ in range(300):
        router.update_correction_bias(torch.bincount(router(x).topk_idx.flatten(), minlength=8), rate=0.01)
    assert spread() < 1.2 < 2 < before


def test_correction_bias_stays_fp32_and_is_saved() -> None:
    router = Router(8, 4, 2, correction_bias=True)
    values = torch.tensor([1.001, -0.002, 3.0e-3, 7.1])
    router.correction_bias.copy_(values)
    router.to(torch.bfloat16)
    assert router.weight.dtype == torch.bfloat16
    assert torch.equal(router.correction_bias, values)
    assert torch.equal(router.half().correction_bias, values)
    other = copy.deepcopy(router)
    other.correction_bias.zero_()
    other.load_state_dict(router.state_dict())
    assert torch.equal(other.correction_bias, values)
    assert set(router.state_dict()) == {"weight", "correction_bias"}
    assert router.to("meta").correction_bias.is_meta
