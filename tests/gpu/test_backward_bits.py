"""Case A21 on the fused backward, and what must not reach a bit: repetition, the number of SMs, other tokens."""

from __future__ import annotations

import pytest
import torch
from tests.gpu.layers import GPU, backward_arguments, both_backends, gradients, on_device, set_num_sms
from tests.steps import assert_same_bits, make_dy, run_step

from moe_megakernel.testing import LayerInputs, assert_equal_bits, make_inputs, random_routing

pytestmark = GPU


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@both_backends
def test_many_backwards_at_full_capacity(backend: str, recompute: bool) -> None:
    """Races need repeats: 100 launches with many row tiles of every kind of task."""
    inputs = on_device(make_inputs(random_routing(2048, 32, 8, zipf=0.7), 256, 256, 32, bias=True))
    y = inputs.leaves().call(backend=backend, recompute=recompute)
    arguments = backward_arguments(y, make_dy(inputs.x))
    first = gradients(arguments)
    wrong = {name: torch.zeros((), dtype=torch.int64, device="cuda") for name in first}
    for _ in range(100):
        for name, gradient in gradients(arguments).items():
            wrong[name] += (gradient.view(torch.uint8) != first[name].view(torch.uint8)).any()
    assert {name: int(count) for name, count in wrong.items()} == dict.fromkeys(first, 0)


@both_backends
def test_number_of_sms_reaches_no_bit(backend: str) -> None:
    layers = [
        on_device(make_inputs(random_routing(900, 6, 4, zipf=1.0, drop=0.1), 136, 200, 6, bias=True)),
        on_device(make_inputs(random_routing(5, 40, 8), 512, 264, 40)),
    ]
    expected = [run_step(inputs, backend=backend) for inputs in layers]
    for number in (2, 8, 64, None):
        set_num_sms(number)
        try:
            for inputs, want in zip(layers, expected, strict=True):
                for recompute in (False, True):
                    assert_same_bits(run_step(inputs, backend=backend, recompute=recompute), want)
        finally:
            set_num_sms(None)


@both_backends
def test_bits_of_a_token_do_not_depend_on_its_batch(backend: str) -> None:
    """Rows of a tile are independent, so the first tokens alone give the dx and dS that they give among others."""
    inputs = on_device(make_inputs(random_routing(700, 6, 2), 128, 200, 6, bias=True))
    dy = make_dy(inputs.x)
    whole = run_step(inputs, dy=dy, backend=backend)
    for tokens in (1, 63, 130, 512):
        given = (inputs.x[:tokens], inputs.topk_idx[:tokens], inputs.topk_weights[:tokens])
        part = LayerInputs(*given, inputs.w_gate_up, inputs.w_down, inputs.bias_gate_up, inputs.bias_down, 6)
        results = run_step(part, dy=dy[:tokens], backend=backend)
        for name in ("x", "topk_weights"):
            found, want = results[name], whole[name]
            assert want is not None
            assert_equal_bits(found, want[:tokens], f"{name} of the first {tokens}")


@both_backends
def test_weight_gradients_of_an_expert_do_not_depend_on_the_others(backend: str) -> None:
    """An expert's rows alone give the weight gradients that they give among others."""
    ids = random_routing(900, 5, 2, zipf=1.0)
    inputs = on_device(make_inputs(ids, 136, 72, 5, bias=True))
    whole = run_step(inputs, backend=backend)
    for expert in range(5):
        alone = torch.where(inputs.topk_idx == expert, inputs.topk_idx, -1)
        part = LayerInputs(
            inputs.x,
            alone,
            inputs.topk_weights,
            inputs.w_gate_up,
            inputs.w_down,
            inputs.bias_gate_up,
            inputs.bias_down,
            5,
        )
        results = run_step(part, backend=backend)
        for name in ("w_gate_up", "w_down", "bias_gate_up", "bias_down"):
            found, want = results[name], whole[name]
            assert found is not None
            assert want is not None
            assert_equal_bits(found[expert], want[expert], f"{name} of expert {expert}")
