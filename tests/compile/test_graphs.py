"""What compilers make of the layer: one node forward and one backward, run once each; export; data-dependent sizes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from tests.steps import Results, assert_same_bits, run_step
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.utils import run_and_get_code

from moe_megakernel.reference import layer
from moe_megakernel.testing import LayerInputs, assert_equal_bits, make_inputs, poisoned_memory, random_routing

E, K = 4, 2


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def count_runs(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts runs of the experts' forward and backward."""
    counts = {"experts_forward": 0, "experts_backward": 0}

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any) -> Any:
            counts[name] += 1
            return function(*args)

        return wrapper

    for name in counts:
        monkeypatch.setattr(layer, name, counting(name, getattr(layer, name)))
    return counts


class Graphs:
    """A backend that keeps the forward and backward graphs it is given and runs them as they are."""

    def __init__(self) -> None:
        self.seen: dict[str, torch.fx.GraphModule] = {}
        self.backend = aot_autograd(fw_compiler=self._keep("forward"), bw_compiler=self._keep("backward"))

    def _keep(self, name: str) -> Callable[..., Any]:
        def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
            self.seen[name] = graph
            return make_boxed_func(graph.forward)

        return compiler

    def layer_nodes(self, name: str) -> list[str]:
        return [n.target.name() for n in self.seen[name].graph.nodes if "moe" in str(n.target)]

    def saved_shapes(self) -> set[tuple[int, ...]]:
        """Shapes of what the backward graph is given."""
        inputs = [n for n in self.seen["backward"].graph.nodes if n.op == "placeholder"]
        return {tuple(n.meta["val"].shape) for n in inputs if isinstance(n.meta.get("val"), Tensor)}


@pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recompute"])
def test_one_node_each_way(recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The op is one node forward and one backward; h is kept between them unless asked not to be, a never."""
    graphs = Graphs()
    inputs = make_inputs(random_routing(9, E, K), 48, 20, dtype=torch.float32)
    counts = count_runs(monkeypatch)
    compiled = torch.compile(LayerInputs.call, fullgraph=True, backend=graphs.backend)
    results = run_step(inputs, compiled, recompute=recompute)
    assert counts == {"experts_forward": 1, "experts_backward": 1}
    assert_same_bits(results, run_step(inputs))
    assert graphs.layer_nodes("forward") == ["moe::layer_forward"]
    assert graphs.layer_nodes("backward") == ["moe::layer_backward"]
    shapes = graphs.saved_shapes()
    assert ((18, 40) in shapes) == (not recompute)
    assert (18, 20) not in shapes
    assert (9, 48) in shapes


def test_frozen_weights_keep_no_x() -> None:
    graphs = Graphs()
    inputs = make_inputs(random_routing(9, E, K), 48, 20, dtype=torch.float32)
    frozen = {"w_gate_up": False, "w_down": False}
    compiled = torch.compile(LayerInputs.call, fullgraph=True, backend=graphs.backend)
    dy = torch.ones(9, 48)
    assert_same_bits(
        run_step(inputs, compiled, dy=dy, requires_grad=frozen), run_step(inputs, dy=dy, requires_grad=frozen)
    )
    kept = [
        n
        for n in graphs.seen["backward"].graph.nodes
        if n.op == "placeholder" and tuple(n.meta["val"].shape) == (9, 48) and not n.name.startswith("tangents")
    ]
    assert not kept


def test_main_grad_is_changed_in_the_backward_graph() -> None:
    graphs = Graphs()
    inputs = make_inputs(random_routing(9, E, K), dtype=torch.bfloat16)
    eager, main = torch.zeros(inputs.w_down.shape), torch.zeros(inputs.w_down.shape)
    compiled = torch.compile(LayerInputs.call, fullgraph=True, backend=graphs.backend)
    for _ in range(2):
        results = run_step(inputs, compiled, main_grad_down=main)
        assert_same_bits(results, run_step(inputs, main_grad_down=eager))
    assert_equal_bits(main, eager)
    assert results["w_down"] is None
    assert "moe.layer_backward_accumulate" in graphs.seen["backward"].code


def test_main_grad_is_not_copied() -> None:
    """Inductor hands the buffer itself to the op; its code for backward has no other kernel."""
    inputs = make_inputs(random_routing(9, E, K), dtype=torch.float32)
    eager, main = torch.zeros(inputs.w_down.shape), torch.zeros(inputs.w_down.shape)
    compiled = torch.compile(LayerInputs.call, fullgraph=True)
    results, code = run_and_get_code(lambda: run_step(inputs, compiled, main_grad_down=main))
    assert_same_bits(results, run_step(inputs, main_grad_down=eager))
    assert_equal_bits(main, eager)
    backward = code[-1][code[-1].index("def call") : code[-1].index("def get_args")]
    assert "torch.ops.moe.layer_backward_accumulate.default" in backward
    assert not re.search(r"cpp_fused|copy_|clone", backward)


class Layer(torch.nn.Module):
    """The op with its parameters, as `torch.export` wants it."""

    def __init__(self, inputs: LayerInputs) -> None:
        super().__init__()
        self.w_gate_up = torch.nn.Parameter(inputs.w_gate_up)
        self.w_down = torch.nn.Parameter(inputs.w_down)

    def forward(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        return torch.ops.moe.dispatch_gemm_combine(
            x, topk_idx, topk_weights, self.w_gate_up, self.w_down, num_experts=E
        )


def test_export_with_any_number_of_tokens() -> None:
    inputs = make_inputs(random_routing(16, E, K), dtype=torch.float32)
    module = Layer(inputs)
    tokens = torch.export.Dim("tokens", min=0, max=2**20)
    args = (inputs.x, inputs.topk_idx, inputs.topk_weights)
    program = torch.export.export(module, args, dynamic_shapes=({0: tokens}, {0: tokens}, {0: tokens}))
    lowered = program.run_decompositions()
    assert [n.target for n in program.graph.nodes if n.op == "call_function"] == [
        torch.ops.moe.dispatch_gemm_combine.default
    ]
    assert torch.ops.moe.layer_forward.default in [n.target for n in lowered.graph.nodes]
    for count in (16, 5, 1, 0, 70):
        other = make_inputs(random_routing(count, E, K, drop=0.2), dtype=torch.float32, seed=2)
        call = (other.x, other.topk_idx, other.topk_weights)
        with poisoned_memory():
            assert_equal_bits(program.module()(*call), module(*call))
            assert_equal_bits(lowered.module()(*call), module(*call))


def test_data_dependent_number_of_tokens() -> None:
    """Tokens picked by a mask inside the compiled region: their number is known at run time only, and may be 0."""
    inputs = make_inputs(random_routing(16, E, K), dtype=torch.float32)

    def masked(leaves: LayerInputs, mask: Tensor) -> Tensor:
        rows = mask.nonzero()[:, 0]
        some = replace(leaves, x=leaves.x[rows], topk_idx=leaves.topk_idx[rows], topk_weights=leaves.topk_weights[rows])
        return torch.zeros_like(leaves.x).index_copy(0, rows, some.call())

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(masked, fullgraph=True, backend="aot_eager")
        for keep in (3, 1, 100):
            mask = torch.arange(16) % keep == keep - 1

            def both(call: Callable[..., Tensor], mask: Tensor = mask) -> Results:
                return run_step(inputs, lambda leaves: call(leaves, mask))

            assert_same_bits(both(compiled), both(masked))
