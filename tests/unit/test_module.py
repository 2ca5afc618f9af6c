"""The module against a plain loop over tokens, all gradients; training features (A04, A12, A17, A19) and A27."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Mapping
from functools import partial

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from moe_megakernel import convert, module
from moe_megakernel.distributed.partition import expert_range
from moe_megakernel.module import MoE

H, WIDTH, E, K = 16, 6, 5, 2


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """Tests share code objects, whose compiled versions are limited in number."""
    torch._dynamo.reset()


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-300))


def lively(moe: MoE) -> MoE:
    """Gives every parameter and the correction bias O(1) effect, biases too."""
    torch.manual_seed(11)
    with torch.no_grad():
        for name, parameter in moe.named_parameters():
            scale = 1.0 if "bias" in name else parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape) * scale)
        if moe.router.correction_bias is not None:
            moe.router.correction_bias.normal_(0, 0.3)
    return moe


def act(moe: MoE, h: Tensor) -> Tensor:
    """The activation of one expert's h [2I] or [I], from the published formulas."""
    if moe.activation == "relu2":
        return h.clamp(min=0) ** 2
    gate, up = h.chunk(2)
    if moe.activation == "swiglu_oai":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return gate / (1 + (-1.702 * gate).exp()) * (up + 1)
    assert moe.activation == "swiglu"
    return gate / (1 + (-gate).exp()) * up


def loop(moe: MoE, p: Mapping[str, Tensor], x: Tensor, chosen: Tensor) -> Tensor:
    """The layer token by token in p's and x's dtype, with the experts that were `chosen`."""
    router = moe.router
    rows = []
    for row, experts in zip(x.reshape(-1, H), chosen.reshape(-1, moe.top_k).tolist(), strict=True):
        z = p["router.weight"] @ row + p.get("router.bias", 0)
        score = 1 / (1 + (-z).exp()) if router.scores == "sigmoid" else z.exp()
        if router.scores == "softmax":
            score = score / (score.sum() if router.score_before_topk else score[experts].sum())
        weights = score[experts]
        if router.renormalize:
            weights = weights / weights.sum()
        total = torch.zeros_like(row)
        for expert, weight in zip(experts, weights * router.scale, strict=True):
            h = p["w_gate_up"][expert] @ row + (p["bias_gate_up"][expert] if moe.bias_gate_up is not None else 0)
            o = p["w_down"][expert] @ act(moe, h) + (p["bias_down"][expert] if moe.bias_down is not None else 0)
            total = total + weight * o
        if moe.shared is not None:
            dense = p["shared.w_down"] @ act(moe, p["shared.w_gate_up"] @ row)
            if "shared.w_gate" in p:
                dense = dense / (1 + (-(p["shared.w_gate"] @ row)).exp())
            total = total + dense
        rows.append(total)
    return torch.stack(rows).reshape(x.shape)


STYLES: dict[str, dict] = {
    "mixtral": {},
    "one_choice": {"top_k": 1},
    "qwen2_moe": {"renormalize": False, "shared_expert_width": 7, "shared_expert_gate": True},
    "gpt_oss": {"activation": "swiglu_oai", "bias": True, "router_bias": True, "score_before_topk": False},
    "deepseek_v3": {
        "num_experts": 8,
        "top_k": 3,
        "scores": "sigmoid",
        "correction_bias": True,
        "num_groups": 4,
        "top_groups": 2,
        "scale": 2.5,
        "shared_expert_width": 3,
    },
    "relu2": {"activation": "relu2", "shared_expert_width": 4, "recompute": True},
}


def build(style: str = "mixtral", **options) -> MoE:
    settings = {"num_experts": E, "top_k": K, "seed": 3, **STYLES[style], **options}
    return lively(MoE(H, WIDTH, settings.pop("num_experts"), settings.pop("top_k"), **settings))


def results(
    moe: nn.Module | Callable, x: Tensor, factors: Tensor, parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """y and the gradients of sum(y * factors) with respect to x and every parameter."""
    x = x.detach().clone().requires_grad_()
    y = moe(x)
    grads = torch.autograd.grad((y.to(factors.dtype) * factors).sum(), [x, *parameters.values()])
    return {"y": y.detach(), "x": grads[0], **dict(zip(parameters, grads[1:], strict=True))}


@pytest.mark.parametrize(
    ("dtype", "y_budget", "grad_budget"),
    [(torch.float64, 1e-12, 1e-11), (torch.float32, 1e-5, 1e-5), (torch.bfloat16, 5e-3, 1e-2)],
    ids=["fp64", "fp32", "bf16"],
)
@pytest.mark.parametrize("style", STYLES)
def test_equals_the_loop(style: str, dtype: torch.dtype, y_budget: float, grad_budget: float) -> None:
    moe = build(style, dtype=dtype)
    torch.manual_seed(5)
    x = torch.randn(2, 9, H).to(dtype)
    factors = torch.randn(2, 9, H, dtype=torch.float64)
    got = results(moe, x, factors, dict(moe.named_parameters()))
    chosen = moe.router(x).topk_idx
    wide = {name: p.detach().double().requires_grad_() for name, p in moe.named_parameters()}
    want = results(lambda z: loop(moe, wide, z, chosen), x.double(), factors, wide)
    assert got["y"].dtype == dtype
    errors = {name: relative(value, want[name]) for name, value in got.items()}
    assert all(got[name].dtype == dtype for name in got)
    assert errors["y"] < y_budget
    assert max(errors.values()) < grad_budget, errors


@pytest.mark.parametrize("style", STYLES)
def test_compiles_whole_and_trains_as_in_eager(style: str) -> None:
    """A17: router, op and shared expert in one graph, forward and backward, at changing batch sizes."""
    moe = build(style)
    twin = copy.deepcopy(moe)
    compiled = torch.compile(moe, fullgraph=True, dynamic=True)
    for tokens in (8, 16, 33):
        torch.manual_seed(tokens)
        x, factors = torch.randn(tokens, H), torch.randn(tokens, H)
        got = results(compiled, x, factors, dict(moe.named_parameters()))
        want = results(twin, x, factors, dict(twin.named_parameters()))
        assert max(relative(got[name], want[name]) for name in want) < 1e-5
        assert torch.equal(moe.last_expert_counts, twin.last_expert_counts)
        assert int(moe.last_expert_counts.sum()) == tokens * moe.top_k


def test_every_option_reaches_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {
        "activation": "swiglu_oai",
        "alpha": 1.1,
        "limit": 3.0,
        "backend": "reference",
        "transport": "collective",
        "row_capacity": 40,
        "recompute": True,
    }
    moe = MoE(H, WIDTH, E, K, bias=True, **options)
    seen = {}

    def call(*args: Tensor, **kwargs) -> Tensor:
        seen.update(kwargs)
        assert args[3:] == (moe.w_gate_up, moe.w_down, moe.bias_gate_up, moe.bias_down)
        return args[0]

    monkeypatch.setattr(module, "moe_layer", call)
    moe(torch.randn(3, H))
    want = {"num_experts": E, "group": "", "main_grad_gate_up": None, "main_grad_down": None, **options}
    assert seen == want


def test_one_recompile_serves_all_batch_sizes() -> None:
    moe = build("qwen2_moe")
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(moe, fullgraph=True, backend=counter)
    for tokens in (5, 2, 3, 17, 64, 33, 8, 100):
        compiled(torch.randn(tokens, H)).sum().backward()
    assert counter.frame_count <= 2


def test_no_tokens() -> None:
    """A04: an empty batch keeps dtype, shape and graph; every gradient is a tensor of zeros."""
    moe = build("qwen2_moe", bias=True)
    for run in (moe, torch.compile(moe, fullgraph=True)):
        got = results(run, torch.zeros(0, H), torch.zeros(0, H), dict(moe.named_parameters()))
        assert got["y"].shape == got["x"].shape == (0, H)
        assert all(not grad.any() for grad in got.values())
        assert not moe.last_expert_counts.any()


def test_autocast() -> None:
    """A12: bf16 out, parameter gradients in the parameter's dtype, routing as without autocast."""
    moe = build("qwen2_moe")
    before, after = nn.Linear(H, H), nn.Linear(H, H)
    x = torch.randn(12, H)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = before(x)
        y = moe(hidden)
        assert y.dtype == torch.bfloat16
        after(y).float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in moe.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        cast = moe(hidden, return_routing=True)[1]
    assert torch.equal(cast.topk_idx, moe.router(hidden).topk_idx)
    want = build("qwen2_moe", dtype=torch.float64)(hidden.detach().double())
    assert relative(y.detach(), want.detach()) < 1e-2


def tied(moe: MoE) -> MoE:
    """All experts look alike to the router: every choice is a tie."""
    with torch.no_grad():
        moe.router.weight.copy_(moe.router.weight[:1].expand_as(moe.router.weight))
    return moe


def selective(policy: CheckpointPolicy) -> Callable:
    def decide(_context, op, *_args, **_kwargs) -> CheckpointPolicy:
        ours = op is torch.ops.moe.layer_forward.default
        other = CheckpointPolicy.PREFER_RECOMPUTE
        return policy if ours else other

    return partial(create_selective_checkpoint_contexts, decide)


WAYS: dict[str, dict] = {
    "reentrant": {"use_reentrant": True},
    "plain": {"use_reentrant": False},
    "saves_the_op": {"use_reentrant": False, "context_fn": selective(CheckpointPolicy.MUST_SAVE)},
    "recomputes_the_op": {"use_reentrant": False, "context_fn": selective(CheckpointPolicy.MUST_RECOMPUTE)},
}


@pytest.mark.parametrize("same_rows", [False, True])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_activation_checkpointing_changes_no_bit(way: str, ties: bool, same_rows: bool) -> None:
    """A19: recomputation routes alike, also at ties, and leaves the counts of one forward."""
    moe = build("qwen2_moe")
    moe = tied(moe) if ties else moe
    torch.manual_seed(6)
    x = torch.randn(1, H).expand(10, H) if same_rows else torch.randn(10, H)
    factors = torch.randn(10, H)

    def run(block: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        moe.zero_grad()
        leaf = x.detach().clone().requires_grad_()
        y = block(leaf)
        (y * factors).sum().backward()
        grads = {name: p.grad.clone() for name, p in moe.named_parameters()}
        return {"y": y.detach(), "x": leaf.grad, "counts": moe.last_expert_counts.clone(), **grads}

    want = run(moe)
    got = run(lambda z: checkpoint(moe, z, **WAYS[way]))
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert int(got["counts"].sum()) == 10 * K
    if ties:
        assert torch.equal(want["counts"], torch.tensor([10, 10, 0, 0, 0]))


@pytest.mark.parametrize("way", ["plain", "saves_the_op"])
def test_activation_checkpointing_compiled(way: str) -> None:
    moe = build("qwen2_moe")
    parameters = dict(moe.named_parameters())
    x, factors = torch.randn(10, H), torch.randn(10, H)
    want = results(moe, x, factors, parameters)
    counts = moe.last_expert_counts.clone()
    moe.last_expert_counts.zero_()
    compiled = torch.compile(lambda z: checkpoint(moe, z, **WAYS[way]), fullgraph=True)
    got = results(compiled, x, factors, parameters)
    assert max(relative(got[name], want[name]) for name in want) < 1e-5
    assert torch.equal(moe.last_expert_counts, counts)


def test_router_outside_the_checkpoint() -> None:
    """A19: the routing saved outside and the experts recomputed inside give the same bits."""
    moe = build()
    x, factors = torch.randn(10, H), torch.randn(10, H)

    def split(z: Tensor) -> Tensor:
        routing = moe.router(z)
        experts = partial(module.moe_layer, w_gate_up=moe.w_gate_up, w_down=moe.w_down)
        return checkpoint(experts, z, routing.topk_idx, routing.topk_weights, use_reentrant=False)

    want = results(moe, x, factors, dict(moe.named_parameters()))
    got = results(split, x, factors, dict(moe.named_parameters()))
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_routing_is_returned_for_auxiliary_losses() -> None:
    moe = build()
    x = torch.randn(3, 4, H)
    y, routing = moe(x, return_routing=True)
    assert torch.equal(y, moe(x))
    assert routing.logits.shape == (3, 4, E)
    assert torch.equal(moe.last_expert_counts, torch.bincount(routing.topk_idx.flatten(), minlength=E))
    (grad,) = torch.autograd.grad(routing.logits.square().sum(), moe.router.weight)
    assert grad.any()


def test_inference_mode_then_training() -> None:
    moe = build("qwen2_moe")
    x = torch.randn(6, H)
    with torch.inference_mode():
        y = moe(x)
    trained = moe(x)
    assert torch.equal(y, trained.detach())
    trained.sum().backward()
    assert all(p.grad is not None for p in moe.parameters())


def test_frozen_parameters_get_no_gradient() -> None:
    moe = build("qwen2_moe", bias=True)
    x, factors = torch.randn(6, H), torch.randn(6, H)
    want = results(moe, x, factors, dict(moe.named_parameters()))
    for frozen in ("router.weight", "w_gate_up", "w_down"):
        moe.requires_grad_(True).get_parameter(frozen).requires_grad_(False)
        rest = {name: p for name, p in moe.named_parameters() if p.requires_grad}
        got = results(moe, x, factors, rest)
        assert all(torch.equal(got[name], want[name]) for name in got)
        assert frozen not in got


@pytest.mark.parametrize("compiled", [False, True])
def test_main_grad_takes_the_weight_gradients(compiled: bool) -> None:
    moe = build("qwen2_moe", dtype=torch.bfloat16)
    x = torch.randn(7, H).bfloat16()
    run = torch.compile(moe, fullgraph=True) if compiled else moe
    moe(x).float().sum().backward()
    want = {name: p.grad.clone() for name, p in moe.named_parameters()}
    moe.zero_grad()
    for weight in (moe.w_gate_up, moe.w_down):
        weight.main_grad = torch.full(weight.shape, 0.5)
    for _ in range(2):
        run(x).float().sum().backward()
    for name in ("w_gate_up", "w_down"):
        weight = moe.get_parameter(name)
        assert weight.grad is None
        assert relative(weight.main_grad - 0.5, 2 * want[name]) < 1e-2
    assert relative(moe.router.weight.grad, 2 * want["router.weight"]) < 1e-2


# -- parameters --------------------------------------------------------------------------------------------------------


def test_initial_weights_do_not_depend_on_the_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"bias": True, "shared_expert_width": 3, "correction_bias": True}
    whole = MoE(H, WIDTH, E, K, seed=7, **options).state_dict()
    for ranks in (2, 4, 7):
        parts = []
        monkeypatch.setattr(module, "group_ranks", lambda _name, n=ranks: n)
        for rank in range(ranks):
            monkeypatch.setattr(module, "group_rank", lambda _name, r=rank: r)
            part = MoE(H, WIDTH, E, K, seed=7, **options)
            assert part.experts == expert_range(E, rank, ranks)
            parts.append(part.state_dict())
        for key, value in whole.items():
            if key.startswith(("w_", "bias_")):
                assert torch.equal(torch.cat([part[key] for part in parts]), value)
            else:
                assert all(torch.equal(part[key], value) for part in parts)


def test_initial_weights_are_drawn_as_said() -> None:
    wide = MoE(64, 32, 4, 2, seed=1, shared_expert_width=16, shared_expert_gate=True)
    fan_in = {"w_down": 32, "shared.w_down": 16}
    for name, parameter in wide.named_parameters():
        bound = fan_in.get(name, 64) ** -0.5
        assert 0.8 * bound < float(parameter.detach().abs().max()) <= bound
        assert abs(float(parameter.detach().mean())) < 0.2 * bound
    experts = [*wide.w_gate_up.flatten(1), *MoE(64, 32, 4, 2, seed=2).w_gate_up.flatten(1)]
    assert all(not torch.equal(a, b) for i, a in enumerate(experts) for b in experts[:i])
    normal = MoE(64, 32, 4, 2, seed=1, init_std=0.02, bias=True)
    assert float(normal.w_gate_up.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert not normal.bias_gate_up.any()
    assert not normal.bias_down.any()
    assert torch.equal(MoE(64, 32, 4, 2, seed=1, init_std=0.02, dtype=torch.bfloat16).w_down, normal.w_down.bfloat16())


def test_without_a_seed_the_default_generator_decides() -> None:
    torch.manual_seed(9)
    first, second = MoE(H, WIDTH, E, K), MoE(H, WIDTH, E, K)
    torch.manual_seed(9)
    again = MoE(H, WIDTH, E, K)
    assert torch.equal(first.w_down, again.w_down)
    assert torch.equal(first.router.weight, again.router.weight)
    assert not torch.equal(first.w_down, second.w_down)


def test_meta_device_then_reset() -> None:
    options = {"seed": 4, "bias": True, "shared_expert_width": 3, "correction_bias": True, "router_bias": True}
    moe = MoE(H, WIDTH, E, K, device="meta", **options)
    assert all(p.is_meta for p in moe.parameters())
    moe = moe.to_empty(device="cpu")
    moe.reset_parameters()
    want = MoE(H, WIDTH, E, K, **options)
    assert all(torch.equal(moe.state_dict()[key], value) for key, value in want.state_dict().items())
    assert torch.equal(moe.last_expert_counts, want.last_expert_counts)


def test_state_dict_names() -> None:
    moe = build("deepseek_v3", bias=True, router_bias=True, shared_expert_gate=True)
    assert set(moe.state_dict()) == {
        "router.weight",
        "router.bias",
        "router.correction_bias",
        "w_gate_up",
        "w_down",
        "bias_gate_up",
        "bias_down",
        "shared.w_gate_up",
        "shared.w_down",
        "shared.w_gate",
    }
    assert set(build().state_dict()) == {"router.weight", "w_gate_up", "w_down"}


def test_copies_and_pickles() -> None:
    moe = build("deepseek_v3")
    x = torch.randn(5, H)
    buffer = io.BytesIO()
    torch.save(moe, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(moe), pickle.loads(pickle.dumps(moe)), torch.load(buffer, weights_only=False)):
        assert torch.equal(other(x), moe(x))
        assert other.experts == moe.experts


@pytest.mark.parametrize("router_dtype", [None, torch.float32])
def test_router_dtype(router_dtype: torch.dtype | None) -> None:
    moe = MoE(H, WIDTH, E, K, dtype=torch.bfloat16, router_dtype=router_dtype)
    assert moe.router.weight.dtype == (router_dtype or torch.bfloat16)
    assert moe(torch.randn(3, H).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hidden": 0}, "MoE: hidden: expected at least 1, got 0"),
        ({"expert_width": -1}, "MoE: expert_width: expected at least 1, got -1"),
        ({"shared_expert_width": -1}, "MoE: shared_expert_width: expected at least 0, got -1"),
        (
            {"shared_expert_gate": True},
            "MoE: shared_expert_gate: expected a shared_expert_width above 0 with it, got 0",
        ),
        ({"top_k": 6}, "router: top_k: expected 1 <= top_k <= num_experts = 5, got 6"),
        ({"activation": "tanh"}, "activation: expected one of .*, got 'tanh'"),
        ({"group": "nobody"}, "group_name: expected the group_name of a live process group, got 'nobody'"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoE(**{"hidden": H, "expert_width": WIDTH, "num_experts": E, "top_k": K, **arguments})


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_per_expert_and_stacked_checkpoints_give_equal_outputs() -> None:
    """A27."""
    torch.manual_seed(8)
    gate, up, down = torch.randn(4, WIDTH, H), torch.randn(4, WIDTH, H), torch.randn(4, H, WIDTH)
    router = {"mlp.gate.weight": torch.randn(4, H)}
    per_expert = dict(router)
    for e in range(4):
        per_expert[f"mlp.experts.{e}.gate_proj.weight"] = gate[e].clone()
        per_expert[f"mlp.experts.{e}.up_proj.weight"] = up[e].clone()
        per_expert[f"mlp.experts.{e}.down_proj.weight"] = down[e].clone()
    stacked = {
        **router,
        "mlp.experts.gate_up_proj": torch.cat((gate, up), dim=1),
        "mlp.experts.down_proj": down.clone(),
    }
    read = partial(convert.from_block, family="qwen3_moe", num_experts=4, prefix="mlp.")
    outputs = []
    x = torch.randn(8, H)
    for stored, layout in ((per_expert, "per_expert"), (stacked, "stacked")):
        moe = MoE(H, WIDTH, 4, K)
        moe.load_state_dict(read(stored, layout=layout))
        outputs.append(moe(x))
        assert relative(outputs[-1].detach(), loop(moe, moe.state_dict(), x, moe.router(x).topk_idx)) < 1e-6
    assert torch.equal(*outputs)

    written = convert.to_block(moe.state_dict(), family="qwen3_moe", num_experts=4, prefix="mlp.")
    reloaded = load(save(written))
    assert set(reloaded) == set(per_expert)
    assert all(torch.equal(reloaded[key], value) for key, value in per_expert.items())

    for expert in range(4):
        name = f"mlp.experts.{expert}.up_proj.weight"
        partial_dict = {key: value for key, value in per_expert.items() if key != name}
        for strict in (True, False):
            with pytest.raises(convert.CheckpointKeyError, match=f"missing: {name}; surplus: none"):
                read(partial_dict, strict=strict)
    with pytest.raises(convert.CheckpointKeyError, match=r"missing: mlp\.experts\.0\.down_proj\.weight, .*; surplus: "):
        read(stacked)
    with pytest.raises(
        convert.CheckpointKeyError, match=r"missing: mlp\.experts\.down_proj, .*; surplus: mlp\.experts\.0"
    ):
        read(per_expert, layout="stacked")
