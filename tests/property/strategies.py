"""Hypothesis strategies for whole layer inputs: awkward routings, odd shapes, every activation.

A drawn layer is described by a few integers, so that a failure shrinks to few tokens and experts.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from tests.steps import ACTIVATION_CASES
from torch import Tensor

from moe_megakernel.testing import LayerInputs, make_inputs, random_routing

KINDS = ["distinct", "zipf", "duplicates", "one expert", "two experts"]
#: Activations without a limit, whose derivatives do not jump.
SMOOTH = [case for case in ACTIVATION_CASES if "limit" not in case and case["activation"] != "swiglu_oai"]


def make_routing(kind: str, tokens: int, experts: int, top_k: int, drop: float, seed: int) -> Tensor:
    """[T, K] of the named kind; only "distinct" and "zipf" avoid repeats inside a token (where K allows it)."""
    generator = torch.Generator().manual_seed(seed)
    if kind in ("distinct", "zipf"):
        return random_routing(tokens, experts, top_k, zipf=1.5 if kind == "zipf" else 0.0, drop=drop, seed=seed)
    few = {"one expert": 1, "two experts": 2}.get(kind, experts)
    names = torch.randperm(experts, generator=generator)[:few]
    ids = names[torch.randint(len(names), (tokens, top_k), generator=generator)]
    return torch.where(torch.rand(tokens, top_k, generator=generator) < drop, -1, ids)


@st.composite
def layers(
    draw: st.DrawFn,
    dtypes: tuple[torch.dtype, ...] = (torch.float64,),
    cases: list[dict[str, Any]] = ACTIVATION_CASES,
    least_width: int = 1,
) -> LayerInputs:
    """Inputs with T 0 to 40, K 1 to 6, E 1 to 12, H and I from `least_width`, odd ones too."""
    tokens, top_k, experts = draw(st.integers(0, 40)), draw(st.integers(1, 6)), draw(st.integers(1, 12))
    widths = st.sampled_from([w for w in (1, 2, 3, 5, 8, 9, 16, 17, 24, 31, 40) if w >= least_width])
    drop = draw(st.sampled_from([0.0, 0.0, 0.3, 1.0]))
    seed = draw(st.integers(0, 2**16))
    ids = make_routing(draw(st.sampled_from(KINDS)), tokens, experts, top_k, drop, seed)
    return make_inputs(
        ids.to(draw(st.sampled_from([torch.int32, torch.int64]))),
        draw(widths),
        draw(widths),
        experts,
        bias=draw(st.booleans()),
        dtype=draw(st.sampled_from(dtypes)),
        seed=seed,
        **draw(st.sampled_from(cases)),
    )
