"""The friendly call: leading dimensions, defaults, groups as objects; it must be the op and nothing else."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from moe_megakernel.functional import group_name_of, moe_layer

H, WIDTH, E, K = 12, 5, 4, 2


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """Tests share code objects, whose compiled versions are limited in number."""
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def one_rank_group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def inputs(*leading: int, rows: int = 2 * WIDTH) -> list[torch.Tensor]:
    torch.manual_seed(len(leading))
    idx = torch.rand(*leading, E).argsort(-1)[..., :K]
    tensors = [torch.randn(*leading, H), torch.rand(*leading, K), torch.randn(E, rows, H), torch.randn(E, H, WIDTH)]
    for tensor in tensors:
        tensor.requires_grad_()
    return [tensors[0], idx, *tensors[1:]]


def loop(x, idx, weights, w_gate_up, w_down) -> torch.Tensor:
    """SwiGLU experts, token by token, in double precision."""
    x, weights, w_gate_up, w_down = (t.double() for t in (x, weights, w_gate_up, w_down))
    rows = []
    for row, experts, factors in zip(x.reshape(-1, H), idx.reshape(-1, K), weights.reshape(-1, K), strict=True):
        total = torch.zeros(H, dtype=torch.float64)
        for expert, factor in zip(experts.tolist(), factors, strict=True):
            gate, up = w_gate_up[expert][:WIDTH] @ row, w_gate_up[expert][WIDTH:] @ row
            total = total + factor * (w_down[expert] @ (gate / (1 + (-gate).exp()) * up))
        rows.append(total)
    return torch.stack(rows).reshape(x.shape) if rows else x * 1


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm().clamp(min=1e-300))


@pytest.mark.parametrize("leading", [(), (6,), (2, 3), (1, 2, 3), (0,), (2, 0)])
def test_leading_dimensions(leading: tuple[int, ...]) -> None:
    args = inputs(*leading)
    y = moe_layer(*args)
    assert y.shape == (*leading, H)
    assert error(y.detach(), loop(*args).detach()) < 1e-6
    leaves = [t for t in args if t.requires_grad]
    factors = torch.randn(*leading, H)
    grads = torch.autograd.grad((y * factors).sum(), leaves)
    if leading and 0 in leading:
        assert all(not grad.any() for grad in grads)
        return
    for grad, expected, leaf in zip(
        grads, torch.autograd.grad((loop(*args) * factors).sum(), leaves), leaves, strict=True
    ):
        assert grad.shape == leaf.shape
        assert error(grad, expected.double()) < 1e-5


def test_strided_leading_dimensions() -> None:
    x, idx, weights, *experts = (t.detach() for t in inputs(4, 6))
    y = moe_layer(x.transpose(0, 1), idx.transpose(0, 1), weights.transpose(0, 1), *experts)
    assert torch.equal(y.transpose(0, 1), moe_layer(x, idx, weights, *experts))


def test_options_reach_the_op() -> None:
    x, idx, weights, w_gate_up, w_down = (t.detach() for t in inputs(6))
    options = {"activation": "swiglu_oai", "alpha": 1.5, "limit": 2.0, "recompute": True, "backend": "reference"}
    bias_gate_up, bias_down = torch.randn(E, 2 * WIDTH), torch.randn(E, H)
    got = moe_layer(x, idx, weights, w_gate_up, w_down, bias_gate_up, bias_down, num_experts=E, **options)
    want = torch.ops.moe.dispatch_gemm_combine(
        x, idx, weights, w_gate_up, w_down, bias_gate_up, bias_down, num_experts=E, **options
    )
    assert torch.equal(got, want)
    main = [torch.ones_like(w_gate_up), torch.ones_like(w_down)]
    w_gate_up.requires_grad_(), w_down.requires_grad_()
    moe_layer(x, idx, weights, w_gate_up, w_down, main_grad_gate_up=main[0], main_grad_down=main[1]).sum().backward()
    assert w_gate_up.grad is None
    expected = torch.autograd.grad(moe_layer(x, idx, weights, w_gate_up, w_down).sum(), [w_gate_up, w_down])
    for buffer, grad in zip(main, expected, strict=True):
        torch.testing.assert_close(buffer, 1 + grad)


class Recorder(TorchDispatchMode):
    """Notes the options with which the inner forward op is called."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.moe.layer_forward.default:
            names = [argument.name for argument in func._schema.arguments]
            self.options = dict(zip(names, args, strict=True)) | (kwargs or {})
        return func(*args, **(kwargs or {}))


def test_options_without_effect_on_numbers_reach_the_op() -> None:
    x, idx, weights, w_gate_up, w_down = inputs(6)
    for recompute in (False, True):
        with Recorder() as seen:
            moe_layer(x, idx, weights, w_gate_up, w_down, recompute=recompute, backend="reference")
        assert seen.options["recompute"] is recompute
        assert seen.options["backend"] == "reference"
    for option, value in {"backend": "none", "transport": "none", "row_capacity": -2}.items():
        with pytest.raises(ValueError, match=f"{option}: expected"):
            moe_layer(x, idx, weights, w_gate_up, w_down, **{option: value})


def test_defaults_are_the_ops() -> None:
    schema = torch.ops.moe.dispatch_gemm_combine.default._schema
    ours = {name: p.default for name, p in inspect.signature(moe_layer).parameters.items()}
    for argument in schema.arguments:
        if argument.name in ("num_experts", "group_name"):
            continue
        assert argument.name in ours
        default = argument.default_value if argument.has_default_value() else inspect.Parameter.empty
        assert ours[argument.name] == default
    assert ours["num_experts"] is None
    assert ours["group"] is None


def test_groups_by_object_name_and_mesh(one_rank_group: dist.ProcessGroup) -> None:
    args = [t.detach() for t in inputs(6)]
    mesh = dist.init_device_mesh("cpu", (1,))
    plain = moe_layer(*args)
    for group in (one_rank_group, one_rank_group.group_name, mesh):
        assert torch.equal(moe_layer(*args, num_experts=E, group=group), plain)
        with pytest.raises(ValueError, match="moe_layer: num_experts: expected the number"):
            moe_layer(*args, group=group)
    square = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "expert"))
    assert group_name_of(square["expert"]) == square.get_group("expert").group_name
    with pytest.raises(ValueError, match="moe_layer: group: expected a DeviceMesh of one dimension, got 2 dimensions"):
        moe_layer(*args, num_experts=E, group=square)


def test_group_objects_compile_whole(one_rank_group: dist.ProcessGroup) -> None:
    args = [t.detach() for t in inputs(2, 3)]
    call = torch.compile(lambda *a: moe_layer(*a, num_experts=E, group=one_rank_group), fullgraph=True)
    torch.testing.assert_close(call(*args), moe_layer(*args))


def test_wrong_arguments_are_named() -> None:
    x, idx, weights, w_gate_up, w_down = (t.detach() for t in inputs(2, 3))
    with pytest.raises(
        ValueError, match=r"topk_idx: expected the leading shape of x \(2, 3\) .*, got shape \(3, 2, 2\)"
    ):
        moe_layer(x, idx.transpose(0, 1), weights, w_gate_up, w_down)
    with pytest.raises(ValueError, match=r"moe_layer: topk_weights: expected the leading shape of x \(2, 3\)"):
        moe_layer(x, idx, weights[0], w_gate_up, w_down)
    with pytest.raises(ValueError, match=r"moe_layer: x: expected at least one dimension, got shape \(\)"):
        moe_layer(x[0, 0, 0], idx, weights, w_gate_up, w_down)
    with pytest.raises(TypeError, match=r"moe_layer: group: expected None, a ProcessGroup, .*, got int"):
        moe_layer(x, idx, weights, w_gate_up, w_down, num_experts=E, group=3)


@pytest.mark.parametrize("leading", [1, 2])
def test_compiles_whole_with_changing_batches(leading: int) -> None:
    call = torch.compile(moe_layer, fullgraph=True, dynamic=True)
    for tokens in (4, 7, 16):
        args = inputs(*([tokens] if leading == 1 else [2, tokens]))
        torch.testing.assert_close(call(*args), moe_layer(*args))
