"""Errors that a CUDA step leaves are raised by compiled calls as well; tried with an error left for the CPU."""

from __future__ import annotations

import pytest
import torch

from moe_megakernel import MoEError, errors
from moe_megakernel.testing import make_inputs, random_routing


@pytest.mark.parametrize("compiled", [False, True])
def test_the_next_forward_raises_and_the_one_after_runs(compiled):
    inputs = make_inputs(random_routing(8, 4, 2), dtype=torch.float32)

    def call(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.moe.dispatch_gemm_combine(
            x, inputs.topk_idx, inputs.topk_weights, inputs.w_gate_up, inputs.w_down, num_experts=4
        )

    function = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    expected = function(inputs.x)
    errors.defer(inputs.x.device, MoEError("left by an earlier step"))
    with pytest.raises(MoEError, match="left by an earlier step"):
        function(inputs.x)
    assert torch.equal(function(inputs.x), expected)
