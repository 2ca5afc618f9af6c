"""Every message of the argument checks, word for word (`op: argument: expected ..., got ...`); invalid expert ids."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.steps import assert_same_bits, name_of, run_step

import moe_megakernel
from moe_megakernel import backends, inner_ops
from moe_megakernel.distributed import capacity
from moe_megakernel.errors import CapacityError, MoEError, RoutingError
from moe_megakernel.schemas import GroupOptions
from moe_megakernel.testing import LayerInputs, make_inputs, random_routing

OP = "dispatch_gemm_combine"
E, K, T, H, I = 4, 2, 8, 6, 3  # noqa: E741
HOLDS = "(rank 0 of 1 holds L = 4 of 4 experts)"


def inputs(**options: Any) -> LayerInputs:
    return make_inputs(random_routing(T, E, K), H, I, E, bias=True, **{"dtype": torch.float32, **options})


def empty(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


#: Changed tensors -> the whole message.
TENSORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"x": empty(T)}, ValueError, f"x: expected [T, H], got shape [{T}]"),
    ({"x": empty(T, 2, H)}, ValueError, f"x: expected [T, H], got shape [{T}, 2, {H}]"),
    ({"x": empty(T, 0)}, ValueError, f"x: expected [T, H] with H at least 1, got shape [{T}, 0]"),
    (
        {"x": empty(T, H, dtype=torch.int32)},
        TypeError,
        "x: expected bfloat16 or float16 or float32 or float64, got int32",
    ),
    ({"topk_idx": empty(T, dtype=torch.int64)}, ValueError, f"topk_idx: expected [T, K], got shape [{T}]"),
    (
        {"topk_idx": empty(T, 0, dtype=torch.int64)},
        ValueError,
        f"topk_idx: expected [T, K] with K at least 1, got shape [{T}, 0]",
    ),
    (
        {"topk_idx": empty(7, K, dtype=torch.int64)},
        ValueError,
        f"topk_idx: expected [T, K] = [{T}, {K}], got shape [7, {K}]",
    ),
    ({"topk_idx": empty(T, K)}, TypeError, "topk_idx: expected int32 or int64, got float32"),
    ({"topk_weights": empty(T)}, ValueError, f"topk_weights: expected [T, K], got shape [{T}]"),
    (
        {"topk_weights": empty(T, 3)},
        ValueError,
        f"topk_weights: expected [T, K] = [{T}, {K}], got shape [{T}, 3]",
    ),
    (
        {"topk_weights": empty(T, K, dtype=torch.float64)},
        TypeError,
        "topk_weights: expected float32 or bfloat16 or float16 with float32 x, got float64",
    ),
    ({"w_down": empty(H, I)}, ValueError, f"w_down: expected [L, H, I], got shape [{H}, {I}]"),
    (
        {"w_down": empty(E, H, 0)},
        ValueError,
        f"w_down: expected [L, H, I] with I at least 1, got shape [{E}, {H}, 0]",
    ),
    (
        {"w_down": empty(3, H, I)},
        ValueError,
        f"w_down: expected [L, H, I] {HOLDS} = [{E}, {H}, {I}], got shape [3, {H}, {I}]",
    ),
    (
        {"w_down": empty(E, I, H)},
        ValueError,
        f"w_down: expected [L, H, I] {HOLDS} = [{E}, {H}, {H}], got shape [{E}, {I}, {H}]",
    ),
    (
        {"w_gate_up": empty(E, I, H)},
        ValueError,
        f"w_gate_up: expected [L, 2I, H] for swiglu {HOLDS} = [{E}, {2 * I}, {H}], got shape [{E}, {I}, {H}]",
    ),
    (
        {"activation": "relu2"},
        ValueError,
        f"w_gate_up: expected [L, I, H] for relu2 {HOLDS} = [{E}, {I}, {H}], got shape [{E}, {2 * I}, {H}]",
    ),
    (
        {"w_gate_up": empty(E, 2 * I, H, dtype=torch.bfloat16)},
        TypeError,
        "w_gate_up: expected float32 with float32 x, got bfloat16",
    ),
    (
        {"bias_gate_up": empty(E, I)},
        ValueError,
        f"bias_gate_up: expected [L, 2I] = [{E}, {2 * I}], got shape [{E}, {I}]",
    ),
    ({"bias_gate_up": empty(2 * I)}, ValueError, f"bias_gate_up: expected [L, 2I], got shape [{2 * I}]"),
    ({"bias_down": empty(E, 1)}, ValueError, f"bias_down: expected [L, H] = [{E}, {H}], got shape [{E}, 1]"),
    (
        {"bias_down": empty(E, H, dtype=torch.float64)},
        TypeError,
        "bias_down: expected float32 with float32 x, got float64",
    ),
    (
        {"w_down": empty(E, H, I, device="meta")},
        ValueError,
        "w_down: expected device cpu (that of x), got meta",
    ),
    ({"num_experts": 0}, ValueError, "num_experts: expected at least 1, got 0"),
    (
        {"num_experts": 5},
        ValueError,
        f"w_down: expected [L, H, I] (rank 0 of 1 holds L = 5 of 5 experts) = [5, {H}, {I}], got shape [{E}, {H}, {I}]",
    ),
    (
        {
            "x": empty(1, 1).expand(2**16, H),
            "topk_idx": empty(1, 1, dtype=torch.int64).expand(2**16, 2**15),
            "topk_weights": empty(1, 1).expand(2**16, 2**15),
        },
        ValueError,
        f"topk_idx: expected fewer than 2**31 routes (T * K), got {2**31}",
    ),
]
#: Options of the call -> the whole message.
OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"row_capacity": -2}, ValueError, "row_capacity: expected -1 or at least 0, got -2"),
    (
        {"activation": "gelu"},
        ValueError,
        "activation: expected one of swiglu, swiglu_oai, geglu_tanh, geglu_erf, relu2, geglu, got 'gelu'",
    ),
    ({"alpha": 2.0}, ValueError, "alpha: expected None with activation 'swiglu', got 2.0"),
    ({"activation": "geglu", "limit": 3.0}, ValueError, "limit: expected None with activation 'geglu', got 3.0"),
    ({"activation": "swiglu_oai", "alpha": math.inf}, ValueError, "alpha: expected a finite number, got inf"),
    ({"limit": 0.0}, ValueError, "limit: expected a number > 0, got 0.0"),
    ({"limit": math.nan}, ValueError, "limit: expected a number > 0, got nan"),
    ({"backend": "triton"}, ValueError, "backend: expected one of auto, mega, staged, reference, got 'triton'"),
    (
        {"backend": "mega"},
        ValueError,
        "backend: expected one usable here (reference), got 'mega': needs a CUDA device, found cpu",
    ),
    ({"transport": "tcp"}, ValueError, "transport: expected one of auto, peer, collective, got 'tcp'"),
    (
        {"transport": "peer"},
        ValueError,
        "transport: expected one usable here (collective), got 'peer': needs CUDA devices",
    ),
    (
        {"group_name": "nobody"},
        ValueError,
        "group_name: expected the group_name of a live process group, got 'nobody'",
    ),
    (
        {"main_grad_gate_up": empty(E, I, H)},
        ValueError,
        f"main_grad_gate_up: expected [L, 2I, H] = [{E}, {2 * I}, {H}], got shape [{E}, {I}, {H}]",
    ),
    (
        {"main_grad_down": empty(E, H)},
        ValueError,
        f"main_grad_down: expected [L, H, I], got shape [{E}, {H}]",
    ),
    (
        {"main_grad_down": empty(E, H, I, dtype=torch.bfloat16)},
        TypeError,
        "main_grad_down: expected float32 with float32 x, got bfloat16",
    ),
    (
        {"main_grad_down": empty(E, H, I).requires_grad_()},
        ValueError,
        "main_grad_down: expected a tensor that does not require grad, got one that does",
    ),
]


@pytest.mark.parametrize(("change", "kind", "message"), TENSORS, ids=lambda v: v if isinstance(v, str) else "")
def test_tensor_that_does_not_fit(change: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        replace(inputs(), **change).call()
    assert str(caught.value) == f"{OP}: {message}"


@pytest.mark.parametrize(("change", "kind", "message"), OPTIONS, ids=lambda v: v if isinstance(v, str) else "")
def test_option_that_does_not_fit(change: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        inputs().call(**change)
    assert str(caught.value) == f"{OP}: {message}"


def test_no_backend_for_a_device() -> None:
    expected = f"{OP}: backend: expected a usable one, got none: .*runs on cpu and cuda, found xpu"
    with pytest.raises(ValueError, match=expected):
        backends.select_backend("auto", "xpu")


def test_meta_tensors_give_shapes() -> None:
    given = inputs()
    tensors: dict[str, Any] = {n: t.to("meta") for n, t in vars(given).items() if isinstance(t, torch.Tensor)}
    results = run_step(replace(given, **tensors))
    for name, tensor in run_step(given).items():
        meta = results[name]
        assert tensor is not None
        assert meta is not None
        assert meta.is_meta
        assert (meta.shape, meta.dtype) == (tensor.shape, tensor.dtype)
    with pytest.raises(ValueError, match="needs a CUDA device, found meta"):
        replace(given, **tensors).call(backend="mega")


def test_backends_and_transports_by_device() -> None:
    assert backends.available_backends("cpu")["reference"] == ""
    assert backends.available_transports("cpu")["collective"] == ""
    assert "not in this build" in backends.available_transports("cuda")["peer"]
    assert "an unknown one" in backends.available_backends("cuda")["mega"]
    assert backends.select_backend("auto", "cpu") == backends.select_backend("reference", "cpu") == "reference"
    assert backends.select_transport("auto", "cuda") == backends.select_transport("collective", "cpu") == "collective"


BAD_IDS = [E, -2, 99, 2**31 - 1, -(2**31), 2**40, -(2**63), 2**32]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=name_of)
@pytest.mark.parametrize("bad", BAD_IDS)
def test_invalid_expert_id(bad: int, dtype: torch.dtype) -> None:
    """The first bad id is named with its place; the next call is not affected."""
    if dtype == torch.int32 and not -(2**31) <= bad < 2**31:
        return
    good = inputs()
    good = replace(good, topk_idx=good.topk_idx.to(dtype))
    before = run_step(good)
    ids = good.topk_idx.clone()
    ids[2, 0], ids[2, 1], ids[5, 0] = -1, bad, E
    broken = replace(good, topk_idx=ids)
    with pytest.raises(RoutingError) as caught:
        broken.call()
    assert str(caught.value) == (
        f"{OP}: topk_idx: expected -1 or an expert id in [0, {E}), got {bad} at topk_idx[2, 1]"
    )
    assert isinstance(caught.value, MoEError)
    assert isinstance(caught.value, IndexError)
    compiled = torch.compile(LayerInputs.call, backend="aot_eager")
    if bad == E:
        with pytest.raises(RoutingError, match=re.escape("at topk_idx[2, 1]")):
            compiled(broken)
    assert_same_bits(run_step(good), before)


#: Calls that need no process group -> the whole message.
LOCAL: list[tuple[Callable[[], Any], str]] = [
    (lambda: moe_megakernel.reserve("", -1, 2), "reserve: max_tokens: expected at least 0, got -1"),
    (lambda: moe_megakernel.reserve("", 8, 0), "reserve: top_k: expected at least 1, got 0"),
    (lambda: moe_megakernel.reserve("", 8, 2, -2), "reserve: row_capacity: expected -1 or at least 0, got -2"),
    (
        lambda: moe_megakernel.reserve("nobody", 8, 2),
        f"{OP}: group_name: expected the group_name of a live process group, got 'nobody'",
    ),
    (lambda: moe_megakernel.expert_range(0, 0, 1), "expert_range: num_experts: expected at least 1, got 0"),
    (lambda: moe_megakernel.expert_range(4, 0, 0), "expert_range: ranks: expected at least 1, got 0"),
    (lambda: moe_megakernel.expert_range(4, 2, 2), "expert_range: rank: expected 0 <= rank < 2, got 2"),
    (lambda: moe_megakernel.expert_range(4, -1, 2), "expert_range: rank: expected 0 <= rank < 2, got -1"),
    (lambda: moe_megakernel.set_timeout(0), "set_timeout: seconds: expected a finite number > 0, got 0"),
    (lambda: moe_megakernel.set_timeout(math.inf), "set_timeout: seconds: expected a finite number > 0, got inf"),
    (lambda: moe_megakernel.set_timeout(math.nan), "set_timeout: seconds: expected a finite number > 0, got nan"),
]


@pytest.mark.parametrize(("call", "message"), LOCAL, ids=lambda v: v if isinstance(v, str) else "")
def test_local_functions(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        call()
    assert str(caught.value) == message


def test_reserve_of_one_rank() -> None:
    assert moe_megakernel.reserve("", 8, 2) == (8, 16)
    moe_megakernel.rebuild("")


def test_timeout_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_megakernel.config._timeout", None)
    monkeypatch.delenv("MOE_MEGAKERNEL_TIMEOUT", raising=False)
    assert moe_megakernel.get_timeout() == 600
    monkeypatch.setenv("MOE_MEGAKERNEL_TIMEOUT", "2.5")
    assert moe_megakernel.get_timeout() == 2.5
    for text in ("soon", "-1", "0", "inf", "nan"):
        monkeypatch.setenv("MOE_MEGAKERNEL_TIMEOUT", text)
        with pytest.raises(ValueError, match=f"MOE_MEGAKERNEL_TIMEOUT: expected a number of seconds > 0, got '{text}'"):
            moe_megakernel.get_timeout()
    moe_megakernel.set_timeout(7)
    assert moe_megakernel.get_timeout() == 7


def payload(tokens: int, sends: list[int], row_capacity: int = -1) -> dict[str, Any]:
    return {"tokens": tokens, "top_k": 2, "row_capacity": row_capacity, "sends": sends}


def new_group() -> Any:
    """What `capacity` reads and writes of a group of two ranks."""
    return SimpleNamespace(name="g", ranks=2, max_tokens=None, row_capacity=None)


def test_capacity_decision() -> None:
    group = new_group()
    assert capacity.agree(group, OP, [payload(3, [4, 2]), payload(5, [10, 0])]) == 20
    assert (group.max_tokens, group.row_capacity) == (5, 20)
    assert capacity.agree(group, OP, [payload(5, [10, 0], 12), payload(1, [2, 0], 12)]) == 12
    advice = "call moe_megakernel.reserve on every rank"
    refused = {
        f"{OP}: x: expected at most 5 tokens on a rank, got 6 on rank 1; {advice}": [
            payload(5, [0, 0]),
            payload(6, [0, 0]),
        ],
        f"{OP}: row_capacity: expected at most the 20 rows agreed, got 21; {advice}": [payload(5, [0, 0], 21)] * 2,
        f"{OP}: row_capacity: expected at most 11 rows on a rank, got 12 needed on rank 0; "
        f"{advice} or pass a larger row_capacity": [payload(5, [10, 0], 11), payload(1, [2, 0], 11)],
    }
    for message, payloads in refused.items():
        error = capacity.agree(group, OP, payloads)
        assert isinstance(error, CapacityError)
        assert str(error) == message
        assert (group.max_tokens, group.row_capacity) == (5, 20)


def test_tracing_before_a_capacity_is_agreed() -> None:
    group = new_group()
    assert capacity.traced_row_capacity(group, 7) == 7
    with pytest.raises(CapacityError, match=r"row_capacity: expected a number of rows, or a call .*reserve.* group g"):
        capacity.traced_row_capacity(group, -1)
    group.row_capacity = 9
    assert capacity.traced_row_capacity(group, -1) == 9


def test_graph_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    inner_ops._refuse_capture(torch.device("cpu"), "reference")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    message = "backend: expected one without host synchronisation while a CUDA graph is captured, got 'reference'"
    with pytest.raises(MoEError, match=message):
        inner_ops._refuse_capture(torch.device("cuda", 0), "reference")
    message = "transport: expected one without host synchronisation while a CUDA graph is captured, got 'collective'"
    with pytest.raises(MoEError, match=message):
        inner_ops._refuse_capture(torch.device("cuda", 0), "mega", GroupOptions("g", "collective", -1))
