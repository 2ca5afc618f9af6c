"""Each stage of the reference backend alone, against plain formulas with the same roundings."""

from __future__ import annotations

import pytest
import torch
from tests.steps import ALL_DTYPES, name_of
from torch import Tensor

from moe_megakernel.reference import route as python_route
from moe_megakernel.reference.combine import combine, scatter_rows
from moe_megakernel.reference.dispatch import gather_rows, gather_weights
from moe_megakernel.reference.down import down, down_dgrad, down_wgrad, route_weight_grad
from moe_megakernel.reference.gate_up import gate_up, gate_up_dgrad, gate_up_wgrad
from moe_megakernel.reference.layer import new_h, offsets_from_counts
from moe_megakernel.reference.numerics import ALIGNMENT, compute_dtype, operand, rows_dtype, tree_sum
from moe_megakernel.testing import assert_close, assert_equal_bits, poisoned_memory, random_routing

#: Relative error of one product in the compute dtype, by storage dtype.
PRODUCT = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 1e-6, torch.bfloat16: 1e-6}
#: Relative error of one rounding to the storage dtype.
ROUNDED = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


def normal(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# -- numerics ---------------------------------------------------------------------------------------------------------


def test_dtypes() -> None:
    assert [compute_dtype(d) for d in ALL_DTYPES] == [torch.float64, *[torch.float32] * 3]
    assert [rows_dtype(d) for d in ALL_DTYPES] == [torch.float64, torch.float32, torch.float32, torch.bfloat16]


def fold(values: list[float], single: bool) -> float:
    """The documented tree, one row at a time in Python floats, rounded to float32 after each addition if `single`."""

    def add(a: float, b: float) -> float:
        return float(torch.tensor(a + b, dtype=torch.float32)) if single else a + b

    def halve(v: list[float]) -> float:
        while len(v) > 1:
            half = -(-len(v) // 2)
            v = [add(v[i], v[i + half]) if i + half < len(v) else v[i] for i in range(half)]
        return v[0]

    padded = values + [0.0] * (-len(values) % 128)
    return halve([halve(padded[i : i + 128]) for i in range(0, max(len(padded), 1), 128)] or [0.0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=name_of)
@pytest.mark.parametrize("width", [1, 2, 127, 128, 129, 384, 640, 1000])
def test_tree_sum(width: int, dtype: torch.dtype) -> None:
    values = normal(7, width, dtype=dtype)
    with poisoned_memory():
        sums = tree_sum(values)
    explicit = [fold(row, dtype == torch.float32) for row in values.tolist()]
    assert_equal_bits(sums, torch.tensor(explicit, dtype=dtype))
    assert_close(sums, values.double().sum(1), {torch.float64: 1e-14, torch.float32: 1e-5}[dtype])
    for row in range(7):
        assert_equal_bits(tree_sum(values[row : row + 1]), sums[row : row + 1])
    assert_equal_bits(tree_sum(values.flip(0)), sums.flip(0))
    assert_equal_bits(tree_sum(values.t().contiguous().t()), sums)


def test_tree_sum_of_nothing() -> None:
    assert tree_sum(torch.empty(0, 5)).shape == (0,)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=name_of)
def test_operand(dtype: torch.dtype) -> None:
    wide = normal(40, 40, dtype=dtype)
    for view in (wide, wide[1:], wide[:, 1:], wide.t(), wide[3:4].expand(5, 40), wide[::2], wide[:0]):
        result = operand(view, compute_dtype(dtype))
        assert result.dtype == compute_dtype(dtype)
        assert result.is_contiguous()
        assert result.data_ptr() % ALIGNMENT == 0
        assert_equal_bits(result, view.to(compute_dtype(dtype)))
    assert operand(wide, dtype) is wide


# -- route ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=name_of)
@pytest.mark.parametrize("tokens", [0, 1, 63, 64, 65, 200])
def test_python_route_is_the_op(tokens: int, dtype: torch.dtype) -> None:
    """The two implementations of `route` agree, also on invalid ids."""
    ids = random_routing(tokens, 7, 3, zipf=1.0, drop=0.2).to(dtype)
    invalid = ids.clone()
    if tokens:
        invalid[tokens // 2, 1], invalid[-1, 2] = 7, -2
    for case in (ids, invalid, ids.t().contiguous().t()):
        with poisoned_memory():
            for ours, op in zip(python_route.route(case, 7), torch.ops.moe.route(case, 7), strict=True):
                assert_equal_bits(ours, op)


def test_route_order() -> None:
    """Expert-major; inside an expert by (t mod 64, t div 64, k); -1 last."""
    ids = random_routing(150, 5, 2, drop=0.3, seed=2)
    order, counts, first_bad = python_route.route(ids, 5)
    valid = [r for r in range(300) if ids.flatten()[r] >= 0]
    valid.sort(key=lambda r: (int(ids.flatten()[r]), r // 2 % 64, r // 2 // 64, r % 2))
    assert order.tolist() == valid + [-1] * (300 - len(valid))
    assert int(counts.sum()) == len(valid)
    assert first_bad.tolist() == [-1]
    assert offsets_from_counts(counts).tolist() == [sum(int((ids == e).sum()) for e in range(n)) for n in range(6)]


# -- dispatch ---------------------------------------------------------------------------------------------------------


def test_gather() -> None:
    tokens, weights = normal(5, 6), normal(5, 3)
    routes = torch.tensor([14, 0, 1, 7, 7], dtype=torch.int32)
    for layout in (tokens, tokens.t().contiguous().t(), tokens[:1].expand(5, 6)):
        rows = gather_rows(layout, routes, 3)
        assert rows.is_contiguous()
        assert_equal_bits(rows, torch.stack([layout[t] for t in (4, 0, 0, 2, 2)]))
    expected = torch.stack([weights[4, 2], weights[0, 0], weights[0, 1], weights[2, 1], weights[2, 1]])
    assert_equal_bits(gather_weights(weights, routes), expected)
    assert_equal_bits(gather_weights(weights.t().contiguous().t(), routes), expected)
    assert gather_rows(tokens, routes[:0], 3).shape == (0, 6)


# -- gate_up and down -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=name_of)
def test_gate_up(dtype: torch.dtype, bias: bool) -> None:
    x, weight, b = normal(9, 31, dtype=dtype), normal(14, 31, dtype=dtype, seed=1), normal(14, dtype=dtype, seed=2)
    dh = normal(9, 14, dtype=dtype, seed=3)
    h = gate_up(x, weight, b if bias else None)
    exact = torch.einsum("nh,ph->np", x.double(), weight.double()) + (b.double() if bias else 0)
    assert h.dtype == dtype
    assert_close(h, exact, ROUNDED[dtype])
    dx = gate_up_dgrad(dh, weight)
    assert dx.dtype == rows_dtype(dtype)
    assert_close(dx, torch.einsum("np,ph->nh", dh.double(), weight.double()), ROUNDED[dx.dtype])
    dw = gate_up_wgrad(dh, x)
    assert dw.dtype == compute_dtype(dtype)
    assert_close(dw, torch.einsum("np,nh->ph", dh.double(), x.double()), PRODUCT[dtype])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=name_of)
def test_down(dtype: torch.dtype, bias: bool) -> None:
    a, weight, b = normal(9, 13, dtype=dtype), normal(31, 13, dtype=dtype, seed=1), normal(31, dtype=dtype, seed=2)
    dy = normal(9, 31, dtype=dtype, seed=3)
    given = b if bias else None
    o = down(a, weight, given)
    exact = torch.einsum("ni,hi->nh", a.double(), weight.double()) + (b.double() if bias else 0)
    assert o.dtype == rows_dtype(dtype)
    assert_close(o, exact, ROUNDED[o.dtype])
    da = down_dgrad(dy, weight)
    assert da.dtype == compute_dtype(dtype)
    assert_close(da, torch.einsum("nh,hi->ni", dy.double(), weight.double()), PRODUCT[dtype])
    dw = down_wgrad(dy, a)
    assert dw.dtype == compute_dtype(dtype)
    assert_close(dw, torch.einsum("nh,ni->hi", dy.double(), a.double()), PRODUCT[dtype])
    ds = route_weight_grad(da, a, dy, given)
    assert ds.dtype == compute_dtype(dtype)
    assert_close(ds, torch.einsum("nh,nh->n", dy.double(), exact), PRODUCT[dtype] * 4)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=name_of)
def test_route_weight_grad_is_summed_in_the_tree(dtype: torch.dtype) -> None:
    """Bits that depend on nothing but the row: <da, a> and <dy, bias>, each folded in the fixed tree."""
    compute = compute_dtype(dtype)
    da, a = normal(5, 300, dtype=compute), normal(5, 300, dtype=dtype, seed=1)
    dy, bias = normal(5, 200, dtype=dtype, seed=2), normal(200, dtype=dtype, seed=3)
    expected = tree_sum(da * a.to(compute))
    assert_equal_bits(route_weight_grad(da, a, dy, None), expected)
    assert_equal_bits(route_weight_grad(da, a, dy, bias), expected + tree_sum(dy.to(compute) * bias.to(compute)))


def test_biases_are_added_before_the_rounding() -> None:
    """256 + 1 + 1 is 258; rounded to bfloat16 before the bias is added it would stay 256."""
    x = torch.tensor([[256.0, 1.0]], dtype=torch.bfloat16)
    weight, bias = torch.ones(1, 2, dtype=torch.bfloat16), torch.ones(1, dtype=torch.bfloat16)
    for gemm in (gate_up, down):
        assert gemm(x, weight, bias).item() == 258
        assert gemm(x, weight, None).item() == 256


# -- combine ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=name_of)
def test_combine(dtype: torch.dtype) -> None:
    """Sums in the compute dtype, in ascending k, rounded once; weights at dropped routes have no effect, NaN too."""
    ids = random_routing(10, 4, 3, drop=0.4)
    rows = normal(10, 3, 7, dtype=rows_dtype(dtype)).masked_fill((ids < 0)[..., None], 0)
    weights = normal(10, 3, dtype=compute_dtype(dtype), seed=1)
    total = torch.zeros(10, 7, dtype=compute_dtype(dtype))
    plain = total.clone()
    for k in range(3):
        weight = torch.where(ids[:, k] >= 0, weights[:, k], 0)
        total = total + rows[:, k].to(total.dtype) * weight[:, None]
        plain = plain + rows[:, k].to(total.dtype)
    sick = torch.where(ids >= 0, weights, torch.nan)
    for given in (weights, sick, sick.masked_fill(ids < 0, torch.inf)):
        assert_equal_bits(combine(rows, given, ids, dtype), total.to(dtype))
    assert_equal_bits(combine(rows, None, None, dtype), plain.to(dtype))


def test_scatter_rows() -> None:
    rows, routes = normal(3, 4), torch.tensor([5, 0, 2], dtype=torch.int32)
    with poisoned_memory():
        out, values = scatter_rows(rows, routes, 6), scatter_rows(rows[:, 0], routes, 6)
    expected = torch.zeros(6, 4, dtype=torch.float64)
    expected[[5, 0, 2]] = rows
    assert_equal_bits(out, expected)
    assert_equal_bits(values, expected[:, 0])


def test_new_h_is_zero_past_the_used_rows() -> None:
    with poisoned_memory():
        h = new_h(torch.empty(0, 3), 5, 2, 4)
    assert h[:2].isnan().all()
    assert not h[2:].any()
