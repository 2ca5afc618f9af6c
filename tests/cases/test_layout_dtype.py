"""Cases A10 to A13: strides, dtypes and their mixes, autocast, and the precision of the combine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.steps import (
    ALL_DTYPES,
    TOLERANCES,
    Results,
    assert_near,
    assert_same_bits,
    check_step,
    expected_step,
    make_dy,
    name_of,
    run_step,
)
from torch import Tensor

from moe_megakernel.testing import (
    DIFFERENTIABLE,
    LayerInputs,
    assert_close,
    assert_equal_bits,
    make_inputs,
    poisoned_memory,
    random_routing,
)

#: Layout name -> (shape of the source, source -> [8, 64] view).
LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "transposed": ((64, 8), lambda base: base.t()),
    "column slice": ((8, 128), lambda base: base[:, :64]),
    "odd column slice": ((8, 130), lambda base: base[:, 1:129:2]),
    "one row for all": ((1, 64), lambda base: base.expand(8, 64)),
    "one value a row": ((8, 1), lambda base: base.expand(8, 64)),
    "every other row": ((16, 64), lambda base: base[::2]),
}


def source(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a10_strided_x(layout: str, dtype: torch.dtype) -> None:
    shape, view = LAYOUTS[layout]
    base = source(shape, dtype, 5)
    contiguous = replace(make_inputs(random_routing(8, 4, 2), dtype=dtype), x=view(base).contiguous())
    expected = check_step(contiguous)

    with poisoned_memory():
        leaves, leaf = contiguous.leaves(), base.clone().requires_grad_()
        x = view(leaf)
        x.retain_grad()
        y = replace(leaves, x=x).call()
        y.backward(make_dy(y))
    assert_equal_bits(y, expected["y"], "y")
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert_equal_bits(x.grad, expected["x"], "x")
    rest = {n: g for n, g in leaves.grads().items() if n != "x"}
    assert_same_bits(rest, {n: g for n, g in expected.items() if n not in ("x", "y")})
    again = base.clone().requires_grad_()
    view(again).backward(expected["x"])
    assert_equal_bits(leaf.grad, again.grad, "source of x")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_a10_strided_everything_else(dtype: torch.dtype) -> None:
    """Routing, routing weights, parameters and biases as transposed, sliced and expanded views."""
    inputs = make_inputs(random_routing(8, 4, 2), bias=True, dtype=dtype)
    assert inputs.bias_gate_up is not None
    assert inputs.bias_down is not None
    bias_down = inputs.bias_down.t().contiguous().t()
    row = inputs.topk_weights[:1]
    inputs = replace(inputs, topk_weights=row.expand(8, 2), bias_gate_up=inputs.bias_gate_up[:1].expand(4, 64))
    wide = torch.full((8, 5), 99)
    wide[:, 1:4:2] = inputs.topk_idx
    padded = torch.full((4, 64, 67), torch.nan, dtype=dtype)
    padded[:, :, :64] = inputs.w_gate_up
    strided = replace(
        inputs,
        topk_idx=wide[:, 1:4:2],
        w_gate_up=padded[:, :, :64],
        w_down=inputs.w_down.mT.contiguous().mT,
        bias_down=bias_down,
    )
    contiguous: dict[str, Any] = {
        n: t.contiguous() for n in (*DIFFERENTIABLE, "topk_idx") if (t := getattr(inputs, n)) is not None
    }
    expected = check_step(replace(inputs, **contiguous))
    views: dict[str, Any] = {}
    for name in DIFFERENTIABLE:
        views[name] = getattr(strided, name).detach().requires_grad_()
    with poisoned_memory():
        y = replace(strided, **views).call()
        y.backward(make_dy(y))
    assert_same_bits({"y": y.detach(), **{n: v.grad for n, v in views.items()}}, expected)
    transposed = replace(inputs, topk_weights=inputs.topk_weights.t().contiguous().t())
    assert_same_bits(run_step(transposed, dy=make_dy(y)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_a10_strided_gradients(dtype: torch.dtype) -> None:
    inputs = make_inputs(random_routing(8, 4, 2), bias=True, dtype=dtype)
    wide = source((8, 129), dtype, 7)
    gradients = [
        torch.ones((), dtype=dtype).expand(8, 64),
        source((64, 8), dtype, 6).t(),
        wide[:, 1::2],
        wide[:1, :64].expand(8, 64),
    ]
    with poisoned_memory():
        for dy in gradients:
            assert not dy.is_contiguous()
            results = run_step(inputs, dy=dy)
            assert_same_bits(results, run_step(inputs, dy=dy.contiguous()))
            assert_near(results, expected_step(inputs, dy=dy), dtype)
        leaves = inputs.leaves()
        leaves.call().sum().backward()
        for name, gradient in leaves.grads().items():
            assert_equal_bits(gradient, run_step(inputs, dy=torch.ones(8, 64, dtype=dtype))[name], name)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=name_of)
def test_a11_index_dtypes_agree(dtype: torch.dtype) -> None:
    inputs = make_inputs(random_routing(8, 4, 2, drop=0.2), bias=True, dtype=dtype)
    narrow = replace(inputs, topk_idx=inputs.topk_idx.to(torch.int32))
    assert_same_bits(check_step(narrow), check_step(inputs))


@pytest.mark.parametrize("dtype", [torch.int16, torch.int8, torch.uint8, torch.float32, torch.bool], ids=name_of)
def test_a11_other_index_dtypes_are_refused(dtype: torch.dtype) -> None:
    inputs = make_inputs(random_routing(8, 4, 2))
    with pytest.raises(TypeError, match=f"topk_idx: expected int32 or int64, got {name_of(dtype)}"):
        replace(inputs, topk_idx=inputs.topk_idx.to(dtype)).call()


@pytest.mark.parametrize("weights", ALL_DTYPES, ids=name_of)
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=name_of)
def test_a11_routing_weight_dtypes(dtype: torch.dtype, weights: torch.dtype) -> None:
    """y and dx in x's dtype whatever the routing weights' is; these are widened, and their gradient narrowed again."""
    inputs = make_inputs(random_routing(8, 4, 2), dtype=dtype)
    mixed = replace(inputs, topk_weights=inputs.topk_weights.to(weights))
    if weights == torch.float64 and dtype != torch.float64:
        with pytest.raises(TypeError, match=r"topk_weights: expected float32 or .* with .* x, got float64"):
            mixed.call()
        return
    results = run_step(mixed)
    wide = run_step(replace(inputs, topk_weights=mixed.topk_weights.to(inputs.topk_weights.dtype)))
    assert wide["topk_weights"] is not None
    wide["topk_weights"] = wide["topk_weights"].to(weights)
    assert_same_bits(results, wide)


@pytest.mark.parametrize("name", ["w_gate_up", "w_down", "bias_gate_up", "bias_down"])
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=name_of)
def test_a11_parameters_of_another_dtype_are_refused(dtype: torch.dtype, name: str) -> None:
    inputs = make_inputs(random_routing(8, 4, 2), bias=True, dtype=dtype)
    for other in ALL_DTYPES:
        if other == dtype:
            continue
        expected = f"{name}: expected {name_of(dtype)} with {name_of(dtype)} x, got {name_of(other)}"
        with pytest.raises(TypeError, match=expected):
            replace(inputs, **{name: getattr(inputs, name).to(other)}).call()


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.float8_e4m3fn], ids=name_of)
def test_a11_values_of_no_supported_dtype_are_refused(dtype: torch.dtype) -> None:
    inputs = make_inputs(random_routing(8, 4, 2))
    with pytest.raises(TypeError, match=f"x: expected bfloat16 or float16 or float32 or float64, got {name_of(dtype)}"):
        replace(inputs, x=torch.zeros(8, 64, dtype=dtype)).call()


def cast(inputs: LayerInputs, dtype: torch.dtype) -> LayerInputs:
    """`inputs` in `dtype` with the routing weights in float32, as autocast leaves them."""
    return replace(inputs.to(dtype), topk_weights=inputs.topk_weights)


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=name_of)
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("w_dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_a12_autocast(w_dtype: torch.dtype, x_dtype: torch.dtype, autocast: torch.dtype) -> None:
    """The op runs in the autocast dtype: bits of a manual cast; gradients come back in each input's dtype."""
    inputs = make_inputs(random_routing(8, 4, 2), bias=True, dtype=torch.float32)
    low = inputs.to(w_dtype)
    mixed = replace(low, x=inputs.x.to(x_dtype), topk_weights=inputs.topk_weights)

    def call(leaves: LayerInputs) -> Tensor:
        with torch.autocast("cpu", autocast):
            return leaves.call()

    with poisoned_memory():
        results = run_step(mixed, call)
        expected = run_step(cast(mixed, autocast))
    assert results["y"] is not None
    assert results["y"].dtype == autocast
    for name, tensor in results.items():
        want = expected[name]
        assert want is not None
        if name != "y":
            want = want.to(getattr(mixed, name).dtype)
        assert_equal_bits(tensor, want, name)


@pytest.mark.parametrize("w_dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_a12_autocast_between_linear_layers(w_dtype: torch.dtype) -> None:
    inputs = make_inputs(random_routing(8, 4, 2), dtype=torch.float32)
    before, after = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    steps: list[dict[str, Tensor | None]] = []
    with poisoned_memory():
        for _ in range(2):
            leaves = replace(inputs.to(w_dtype), x=inputs.x, topk_weights=inputs.topk_weights).leaves()
            before.zero_grad()
            after.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                out = after(replace(leaves, x=before(leaves.x)).call())
            out.float().square().sum().backward()
            grads = leaves.grads()
            for name, gradient in grads.items():
                assert gradient is not None, name
                assert gradient.dtype == getattr(leaves, name).dtype
                assert gradient.isfinite().all()
            assert before.weight.grad is not None
            assert before.weight.grad.dtype == torch.float32
            steps.append({**grads, "y": out.detach(), "before": before.weight.grad.clone()})
    assert_same_bits(steps[1], steps[0])

    wide = inputs.to(torch.float64).leaves()
    out64 = after.double()(replace(wide, x=before.double()(wide.x)).call())
    out64.square().sum().backward()
    for name, gradient in wide.grads().items():
        assert_close(steps[0][name], gradient, 3e-2, name)  # three chained bfloat16 layers


def test_a12_autocast_leaves_float64_alone() -> None:
    inputs = make_inputs(random_routing(8, 4, 2))
    plain = run_step(inputs)

    def call(leaves: LayerInputs) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return leaves.call()

    assert_same_bits(run_step(inputs, call), plain)


def test_a12_mixed_dtypes_without_autocast_are_refused() -> None:
    inputs = make_inputs(random_routing(8, 4, 2), dtype=torch.bfloat16)
    refused = pytest.raises(TypeError, match="w_gate_up: expected float32 with float32 x, got bfloat16")
    with torch.autocast("cpu", torch.bfloat16, enabled=False), refused:
        replace(inputs, x=inputs.x.float()).call()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
def test_a13_cancelling_outputs(dtype: torch.dtype) -> None:
    """Expert outputs 1, 2^-9, -1: the sum is 2^-9; a running sum in bfloat16 is 0."""
    inputs = make_inputs(torch.tensor([[0, 1, 2]]).repeat(8, 1), num_experts=3, bias=True, dtype=dtype)
    outputs = torch.tensor([1, 2**-9, -1], dtype=dtype)[:, None].expand(3, 64)
    sums = replace(
        inputs,
        topk_weights=torch.ones_like(inputs.topk_weights),
        w_down=torch.zeros_like(inputs.w_down),
        bias_down=outputs.contiguous(),
    )
    y = sums.call()
    assert_equal_bits(y, torch.full_like(y, 2**-9))


def one_route_results(inputs: LayerInputs, k: int, dy: Tensor) -> Results:
    """The step of the k-th routes alone; with weight 1 in the forward their y is the o row."""
    alone = replace(
        inputs, topk_idx=inputs.topk_idx[:, k : k + 1], topk_weights=inputs.topk_weights[:, k : k + 1].contiguous()
    )
    rows = run_step(replace(alone, topk_weights=torch.ones_like(alone.topk_weights)), dy=dy)
    return {"o": rows["y"], "dx": run_step(alone, dy=dy)["x"]}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=name_of)
@pytest.mark.parametrize("top_k", [3, 8, 10])
def test_a13_one_rounding_of_the_sum(top_k: int, dtype: torch.dtype) -> None:
    """y and dx are the float32 sums over k, in ascending k, of rounded rows, rounded once: bit for bit.

    Every token takes the experts in the same order, so that one route's rows meet the same matrix products alone.
    """
    inputs = make_inputs(torch.arange(top_k).repeat(8, 1), num_experts=top_k, dtype=dtype)
    with poisoned_memory():
        results = run_step(inputs)
    dy = make_dy(inputs.x)
    y, dx = torch.zeros(8, 64), torch.zeros(8, 64)
    for k in range(top_k):
        rows = one_route_results(inputs, k, dy)
        assert rows["o"] is not None
        assert rows["dx"] is not None
        y += rows["o"].float() * inputs.topk_weights[:, k : k + 1]
        dx += rows["dx"].float()
    assert_equal_bits(results["y"], y.to(dtype), "y")
    assert_equal_bits(results["x"], dx.to(dtype), "x")
    forward, _ = TOLERANCES[dtype]
    assert_close(results["y"], expected_step(inputs)["y"], forward, "y")
