"""Case A21 on the fused kernels, and what must not reach a bit: repetition, the number of SMs, what runs beside."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.gpu.layers import GPU, both_backends, on_device, saved, set_num_sms
from tests.steps import Results, make_dy, run_step

from moe_megakernel.testing import LayerInputs, assert_equal_bits, make_inputs, random_routing

pytestmark = GPU


def layer_a21() -> LayerInputs:
    return on_device(make_inputs(random_routing(512, 16, 8, zipf=0.5), 256, 128, 16, bias=True))


def differences(results: Results, expected: Results) -> list[str]:
    """Names of the tensors whose bits differ; compared on the device."""
    return [
        name
        for name, tensor in results.items()
        if not torch.equal(tensor.view(torch.uint8), expected[name].view(torch.uint8))  # type: ignore[union-attr]
    ]


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@both_backends
def test_a21_fifty_steps(backend: str) -> None:
    inputs = layer_a21()
    dy = make_dy(inputs.x)
    first = run_step(inputs, dy=dy, backend=backend)
    for repeat in range(50):
        assert not differences(run_step(inputs, dy=dy, backend=backend), first), f"repeat {repeat}"


@pytest.mark.usefixtures("deterministic")
@both_backends
def test_a21_under_deterministic_algorithms(backend: str) -> None:
    inputs = layer_a21()
    first = run_step(inputs, backend=backend)
    for repeat in range(5):
        assert not differences(run_step(inputs, backend=backend), first), f"repeat {repeat}"


@both_backends
def test_many_forwards_at_full_capacity(backend: str) -> None:
    """Races need repeats: every ring turns over several times in each of 300 launches."""
    inputs = on_device(make_inputs(random_routing(2048, 32, 8, zipf=0.7), 256, 256, 32))
    with torch.no_grad():
        first = inputs.call(backend=backend)
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(300):
            wrong += (inputs.call(backend=backend).view(torch.int16) != first.view(torch.int16)).any()
    assert int(wrong) == 0


@both_backends
def test_number_of_sms_reaches_no_bit(backend: str) -> None:
    layers = [
        on_device(make_inputs(random_routing(900, 6, 4, zipf=1.0, drop=0.1), 136, 200, 6, bias=True)),
        on_device(make_inputs(random_routing(5, 40, 8), 512, 264, 40)),
    ]
    expected = [saved(inputs, backend) for inputs in layers]
    for number in (2, 8, 64, None):
        set_num_sms(number)
        try:
            for inputs, want in zip(layers, expected, strict=True):
                got = saved(inputs, backend)
                for name in want._fields:
                    assert_equal_bits(getattr(got, name), getattr(want, name), f"{name} with num_sms = {number}")
        finally:
            set_num_sms(None)


@both_backends
def test_bits_of_a_token_do_not_depend_on_its_batch(backend: str) -> None:
    """Rows of a tile are independent, so the first tokens alone give the bits that they give among others."""
    inputs = on_device(make_inputs(random_routing(700, 6, 2), 128, 128, 6))
    whole = inputs.call(backend=backend)
    for tokens in (1, 63, 130, 512):
        part = LayerInputs(
            inputs.x[:tokens],
            inputs.topk_idx[:tokens],
            inputs.topk_weights[:tokens],
            inputs.w_gate_up,
            inputs.w_down,
            None,
            None,
            6,
        )
        assert_equal_bits(part.call(backend=backend), whole[:tokens], f"the first {tokens}")
