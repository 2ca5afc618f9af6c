"""Small layers for compute-sanitizer: `python -m tests.gpu.sanitized` runs forward and backward of each by both
backends.

Fast paths, odd widths, dropped and skewed routes, and few SMs, so that every ring turns over. Prints one line a layer,
and fails where two steps or backends differ, kept and recomputed h included.
"""

from __future__ import annotations

import torch
from tests.gpu.layers import KERNELS, missing_kernels, on_device, saved, set_num_sms
from tests.steps import assert_same_bits, run_step

import moe_megakernel
from moe_megakernel.testing import LayerInputs, assert_equal_bits, make_inputs, random_routing


def layers() -> dict[str, LayerInputs]:
    """Name -> layer; every one is of another kind for the kernels."""
    return {
        "even": make_inputs(random_routing(192, 4, 2), 128, 128, 4),
        "odd": make_inputs(random_routing(150, 5, 3, zipf=1.0, drop=0.2), 200, 72, 5, bias=True),
        "plain activation": make_inputs(random_routing(70, 40, 8), 72, 136, 40, activation="relu2", bias=True),
        "one expert": make_inputs(random_routing(300, 1, 1), 264, 64, 1, activation="swiglu_oai"),
    }


def main() -> None:
    reason = missing_kernels()
    if reason:
        raise SystemExit(reason)
    moe_megakernel.set_timeout(500.0)  # the tools slow a kernel down a hundred times and more
    set_num_sms(8)
    for name, layer in layers().items():
        inputs = on_device(layer)
        first, expected = saved(inputs, "mega"), run_step(inputs, backend="mega")
        for backend in KERNELS:
            again = saved(inputs, backend)
            for field in first._fields:
                assert_equal_bits(getattr(again, field), getattr(first, field), f"{name}: {field} of {backend}")
            for recompute in (False, True):
                assert_same_bits(run_step(inputs, backend=backend, recompute=recompute), expected)
        print(name, flush=True)
    torch.cuda.synchronize()
    moe_megakernel.check_errors()


if __name__ == "__main__":
    main()
