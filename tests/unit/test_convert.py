"""Converters: layouts as described, bit-equal round trips over odd shapes, strict keys, saving (case A27)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_megakernel import convert
from moe_megakernel.distributed.partition import expert_range

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn]
#: layout -> (from, to)
PAIRS = {
    "per_expert": (convert.from_per_expert, convert.to_per_expert),
    "stacked": (convert.from_stacked, convert.to_stacked),
    "interleaved": (convert.from_interleaved, convert.to_interleaved),
    "gpt_oss": (convert.from_gpt_oss, convert.to_gpt_oss),
}


def same(a: Tensor, b: Tensor) -> bool:
    """Equal shape, dtype and bits."""
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and a.contiguous().view(-1).view(torch.uint8).equal(b.contiguous().view(-1).view(torch.uint8))
    )


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


def layer(experts: int, width: int, hidden: int, *, bias: bool, gated: bool = True, dtype=torch.float32) -> dict:
    rows = 2 * width if gated else width
    out = {
        "w_gate_up": draw(experts, rows, hidden, dtype=dtype),
        "w_down": draw(experts, hidden, width, dtype=dtype),
    }
    if bias:
        out |= {"bias_gate_up": draw(experts, rows, dtype=dtype), "bias_down": draw(experts, hidden, dtype=dtype)}
    return out


def checkpoint(
    own: Mapping[str, Tensor], layout: str, names=("gate_proj", "up_proj", "down_proj")
) -> dict[str, Tensor]:
    """The checkpoint of `own` written element by element, from the layouts' descriptions."""
    gate_up, down = own["w_gate_up"], own["w_down"]
    experts, _, width = down.shape
    out: dict[str, Tensor] = {}
    if layout == "per_expert":
        for e in range(experts):
            out[f"experts.{e}.{names[0]}.weight"] = torch.stack([gate_up[e, i] for i in range(width)])
            out[f"experts.{e}.{names[1]}.weight"] = torch.stack([gate_up[e, width + i] for i in range(width)])
            out[f"experts.{e}.{names[2]}.weight"] = down[e].clone()
            if "bias_down" in own:
                out[f"experts.{e}.{names[0]}.bias"] = own["bias_gate_up"][e, :width].clone()
                out[f"experts.{e}.{names[1]}.bias"] = own["bias_gate_up"][e, width:].clone()
                out[f"experts.{e}.{names[2]}.bias"] = own["bias_down"][e].clone()
        return out
    order = list(range(2 * width))
    if layout != "stacked":
        order = [half * width + i for i in range(width) for half in (0, 1)]
    out["experts.gate_up_proj"] = torch.stack([gate_up[:, i] for i in order], dim=2 if layout == "gpt_oss" else 1)
    out["experts.down_proj"] = down.mT.contiguous() if layout == "gpt_oss" else down.clone()
    if "bias_down" in own:
        out["experts.gate_up_proj_bias"] = torch.stack([own["bias_gate_up"][:, i] for i in order], dim=1)
        out["experts.down_proj_bias"] = own["bias_down"].clone()
    return out


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layout", PAIRS)
def test_layouts_as_described(layout: str, bias: bool) -> None:
    torch.manual_seed(0)
    read, write = PAIRS[layout]
    own = layer(3, 5, 7, bias=bias)
    stored = checkpoint(own, layout)
    if layout == "gpt_oss":
        assert stored["experts.gate_up_proj"].shape == (3, 7, 10)
        assert stored["experts.down_proj"].shape == (3, 5, 7)
    loaded = read(stored, num_experts=3, bias=bias)
    assert set(loaded) == set(own)
    assert all(same(loaded[key], own[key]) and loaded[key].is_contiguous() for key in own)
    extra = {"num_experts": 3} if layout == "per_expert" else {}
    written = write(own, **extra)
    assert set(written) == set(stored)
    assert all(same(written[key], stored[key]) and written[key].is_contiguous() for key in stored)


@settings(max_examples=80, deadline=None)
@given(
    layout=st.sampled_from(sorted(PAIRS)),
    experts=st.integers(1, 5),
    width=st.integers(1, 7),
    hidden=st.integers(1, 9),
    bias=st.booleans(),
    gated=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    ranks=st.integers(1, 4),
    prefix=st.sampled_from(["", "model.layers.3.mlp.", "experts."]),
)
def test_round_trips_are_bit_equal(
    layout: str, experts: int, width: int, hidden: int, bias: bool, gated: bool, dtype, ranks: int, prefix: str
) -> None:
    read, write = PAIRS[layout]
    options = {"gated": gated} if layout in ("per_expert", "stacked") else {}
    own = layer(experts, width, hidden, bias=bias, gated=gated or not options, dtype=dtype)
    extra = {"num_experts": experts} if layout == "per_expert" else {}
    stored = write(own, prefix=prefix, **options, **extra)
    again = write(
        read(stored, num_experts=experts, prefix=prefix, bias=bias, **options), prefix=prefix, **options, **extra
    )
    assert set(again) == set(stored)
    assert all(key.startswith(f"{prefix}experts.") and same(again[key], stored[key]) for key in stored)

    parts = [
        read(
            {**stored, "other.weight": torch.zeros(1)},
            num_experts=experts,
            prefix=prefix,
            bias=bias,
            experts=expert_range(experts, rank, ranks),
            **options,
        )
        for rank in range(ranks)
    ]
    for key, whole in own.items():
        assert [part[key].shape[0] for part in parts] == [len(expert_range(experts, r, ranks)) for r in range(ranks)]
        joined = torch.cat([part[key].view(torch.uint8) for part in parts if len(part[key])]).view(dtype)
        assert same(joined, whole)
        assert all(part[key].is_contiguous() and part[key].shape[1:] == whole.shape[1:] for part in parts)
    if layout == "per_expert":
        shares: dict[str, Tensor] = {}
        for rank, part in enumerate(parts):
            share = write(part, prefix=prefix, experts=expert_range(experts, rank, ranks), **options, **extra)
            assert not share.keys() & shares.keys()
            shares |= share
        assert set(shares) == set(stored)
        assert all(same(shares[key], stored[key]) for key in stored)


class Lazy(Mapping):
    """A checkpoint that notes which tensors were loaded."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.loaded: set[str] = set()

    def __getitem__(self, key: str) -> Tensor:
        self.loaded.add(key)
        return self.tensors[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def test_only_this_ranks_experts_are_loaded() -> None:
    lazy = Lazy({**checkpoint(layer(6, 3, 4, bias=False), "per_expert"), "gate.weight": torch.zeros(6, 4)})
    convert.from_per_expert(lazy, num_experts=6, experts=range(2, 4))
    assert {key.split(".")[1] for key in lazy.loaded} == {"2", "3"}
    mine = {key: value for key, value in lazy.tensors.items() if key.split(".")[1] in "23"}
    assert convert.from_per_expert(mine, num_experts=6, experts=range(2, 4))["w_down"].shape == (2, 4, 3)


def test_mixtral_names() -> None:
    own = layer(2, 3, 4, bias=False)
    stored = checkpoint(own, "per_expert", names=("w1", "w3", "w2"))
    loaded = convert.from_per_expert(stored, num_experts=2, names=convert.MIXTRAL_NAMES)
    assert all(same(loaded[key], own[key]) for key in own)
    written = convert.to_per_expert(own, num_experts=2, names=convert.MIXTRAL_NAMES)
    assert all(same(written[key], stored[key]) for key in stored)


@pytest.mark.parametrize("layout", PAIRS)
def test_missing_and_surplus_keys_are_listed(layout: str) -> None:
    read, _ = PAIRS[layout]
    stored = checkpoint(layer(4, 3, 5, bias=False), layout)
    gone = next(key for key in stored if "down" in key and (layout != "per_expert" or ".2." in key))
    broken = {key: value for key, value in stored.items() if key != gone} | {"experts.extra": torch.zeros(1)}
    with pytest.raises(convert.CheckpointKeyError) as caught:
        read(broken, num_experts=4, bias=False)
    assert str(caught.value) == f"from_{layout}: state_dict: missing: {gone}; surplus: experts.extra"
    assert (caught.value.missing, caught.value.surplus) == ([gone], ["experts.extra"])
    with pytest.raises(convert.CheckpointKeyError, match=re.escape(f"missing: {gone}; surplus: experts.extra")):
        read(broken, num_experts=4, bias=False, strict=False)

    surplus = stored | {"experts.extra": torch.zeros(1)}
    with pytest.raises(convert.CheckpointKeyError, match=r"missing: none; surplus: experts\.extra"):
        read(surplus, num_experts=4, bias=False)
    with pytest.warns(UserWarning, match=rf"from_{layout}: surplus keys were not used: experts\.extra") as warned:
        loaded = read(surplus, num_experts=4, bias=False, strict=False)
    assert warned[0].filename == __file__
    assert all(
        same(a, b) for a, b in zip(loaded.values(), read(stored, num_experts=4, bias=False).values(), strict=True)
    )


def test_long_lists_are_cut_in_the_message_only() -> None:
    with pytest.raises(convert.CheckpointKeyError, match="and 4 more; surplus: none") as caught:
        convert.from_per_expert({}, num_experts=4)
    assert len(caught.value.missing) == 12


@pytest.mark.parametrize("layout", PAIRS)
def test_biases_are_never_dropped_or_invented(layout: str) -> None:
    read, write = PAIRS[layout]
    own = layer(2, 3, 4, bias=True)
    with pytest.raises(convert.CheckpointKeyError, match=r"missing: none; surplus: .*bias"):
        read(checkpoint(own, layout), num_experts=2, bias=False)
    del own["bias_down"]
    extra = {"num_experts": 2} if layout == "per_expert" else {}
    with pytest.raises(convert.CheckpointKeyError, match="missing: bias_down; surplus: none"):
        write(own, **extra)
    del own["bias_gate_up"]
    with pytest.raises(convert.CheckpointKeyError, match=r"missing: .*bias"):
        read(checkpoint(own, layout), num_experts=2, bias=True)
    with pytest.raises(convert.CheckpointKeyError, match=r"missing: none; surplus: router\.weight"):
        write({**own, "router.weight": torch.zeros(2, 4)}, **extra)


def test_another_number_of_experts_is_refused() -> None:
    own = layer(4, 3, 5, bias=False)
    with pytest.raises(convert.CheckpointKeyError, match=r"missing: none; surplus: experts\.3\.down_proj\.weight"):
        convert.from_per_expert(checkpoint(own, "per_expert"), num_experts=3)
    with pytest.raises(
        ValueError, match=r"from_stacked: experts.down_proj: expected shape \(3, 5, 3\), got \(4, 5, 3\)"
    ):
        convert.from_stacked(checkpoint(own, "stacked"), num_experts=3)
    with pytest.raises(ValueError, match=r"to_per_expert: w_down: expected 2 experts \(range\(1, 3\)\), got 4"):
        convert.to_per_expert(own, num_experts=4, experts=range(1, 3))
    for experts in (range(2, 5), range(-1, 2), range(0, 4, 2)):
        with pytest.raises(ValueError, match="from_stacked: experts: expected a contiguous range in"):
            convert.from_stacked(checkpoint(own, "stacked"), num_experts=4, experts=experts)
    with pytest.raises(ValueError, match="from_stacked: num_experts: expected at least 1, got 0"):
        convert.from_stacked({}, num_experts=0)


def test_shapes_and_dtypes_that_do_not_fit_are_named() -> None:
    stored = checkpoint(layer(2, 3, 5, bias=False), "per_expert")
    with pytest.raises(ValueError, match=r"experts\.1\.up_proj\.weight: expected shape \(3, 5\), got \(5, 3\)"):
        convert.from_per_expert(stored | {"experts.1.up_proj.weight": torch.zeros(5, 3)}, num_experts=2)
    with pytest.raises(ValueError, match=r"experts\.0\.up_proj\.weight: expected 2 dimensions, got shape \(3,\)"):
        convert.from_per_expert(stored | {"experts.0.up_proj.weight": torch.zeros(3)}, num_experts=2)
    half = stored["experts.1.down_proj.weight"].half()
    with pytest.raises(
        TypeError, match=r"experts\.1\.down_proj\.weight: expected dtype torch.float32 like its neighbours"
    ):
        convert.from_per_expert(stored | {"experts.1.down_proj.weight": half}, num_experts=2)
    transposed = checkpoint(layer(2, 3, 5, bias=False), "gpt_oss")
    with pytest.raises(ValueError, match=r"from_interleaved: experts\.gate_up_proj: expected shape"):
        convert.from_interleaved(transposed, num_experts=2)
    with pytest.raises(ValueError, match=r"to_stacked: w_gate_up: expected shape \(2, 6, 5\), got \(2, 7, 5\)"):
        convert.to_stacked({"w_gate_up": torch.zeros(2, 7, 5), "w_down": torch.zeros(2, 5, 3)})


def block(family: str, experts: int = 4, width: int = 3, hidden: int = 5) -> dict[str, Tensor]:
    """A checkpoint's MoE block with the names that models of `family` use."""
    mixtral = family == "mixtral"
    own = layer(experts, width, hidden, bias=family == "gpt_oss")
    names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    out = checkpoint(own, "gpt_oss" if family == "gpt_oss" else "per_expert", names=names)
    if family == "gpt_oss":
        return out | {"router.weight": draw(experts, hidden), "router.bias": draw(experts)}
    out["gate.weight"] = draw(experts, hidden)
    shared = {"qwen2_moe": "shared_expert", "deepseek_v2": "shared_experts", "deepseek_v3": "shared_experts"}.get(
        family
    )
    if shared:
        out[f"{shared}.gate_proj.weight"] = draw(6, hidden)
        out[f"{shared}.up_proj.weight"] = draw(6, hidden)
        out[f"{shared}.down_proj.weight"] = draw(hidden, 6)
    if family == "qwen2_moe":
        out["shared_expert_gate.weight"] = draw(1, hidden)
    if family == "deepseek_v3":
        out["gate.e_score_correction_bias"] = draw(experts)
    return out


@pytest.mark.parametrize("family", convert.FAMILIES)
def test_blocks_round_trip_and_keep_every_key(family: str) -> None:
    prefix = "model.layers.0.mlp."
    stored = {prefix + key: value for key, value in block(family).items()}
    whole = {**stored, "model.layers.0.input_layernorm.weight": torch.zeros(5), "model.layers.00.mlp.x": torch.zeros(1)}
    loaded = convert.from_block(whole, family=family, num_experts=4, prefix=prefix)
    written = convert.to_block(loaded, family=family, num_experts=4, prefix=prefix)
    assert set(written) == set(stored)
    assert all(same(written[key], stored[key]) for key in stored)

    for key in stored:
        less = {k: v for k, v in whole.items() if k != key}
        for strict in (True, False):
            with pytest.raises(convert.CheckpointKeyError, match=f"missing: {re.escape(key)}"):
                convert.from_block(less, family=family, num_experts=4, prefix=prefix, strict=strict)
    surplus = {**whole, f"{prefix}gate.scale": torch.zeros(1)}
    with pytest.raises(convert.CheckpointKeyError, match=rf"surplus: {prefix}gate\.scale"):
        convert.from_block(surplus, family=family, num_experts=4, prefix=prefix)
    with pytest.warns(UserWarning, match=rf"surplus keys were not used: {prefix}gate\.scale") as warned:
        convert.from_block(surplus, family=family, num_experts=4, prefix=prefix, strict=False)
    assert warned[0].filename == __file__
    for key in loaded:
        with pytest.raises(convert.CheckpointKeyError, match=f"missing: {re.escape(key)}"):
            convert.to_block({k: v for k, v in loaded.items() if k != key}, family=family, num_experts=4)
    with pytest.raises(convert.CheckpointKeyError, match="surplus: more"):
        convert.to_block({**loaded, "more": torch.zeros(1)}, family=family, num_experts=4)


@pytest.mark.parametrize("layout", PAIRS)
def test_blocks_in_another_layout(layout: str) -> None:
    loaded = convert.from_block(block("qwen2_moe"), family="qwen2_moe", num_experts=4)
    stored = convert.to_block(loaded, family="qwen2_moe", num_experts=4, layout=layout)
    again = convert.from_block(stored, family="qwen2_moe", num_experts=4, layout=layout)
    assert set(again) == set(loaded)
    assert all(same(again[key], loaded[key]) for key in loaded)
    part = convert.from_block(stored, family="qwen2_moe", num_experts=4, layout=layout, experts=range(1, 3))
    assert same(part["w_gate_up"], loaded["w_gate_up"][1:3])
    assert same(part["router.weight"], loaded["router.weight"])
    if layout != "per_expert":
        with pytest.raises(ValueError, match="to_block: w_down: expected all 4 experts with layout"):
            convert.to_block(part, family="qwen2_moe", num_experts=4, layout=layout)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"from_block: family: expected one of mixtral, .*, got 'llama'"):
        convert.from_block({}, family="llama", num_experts=4)
    with pytest.raises(ValueError, match=r"to_block: layout: expected one of per_expert, .*, got 'rows'"):
        convert.to_block({}, family="mixtral", num_experts=4, layout="rows")


@pytest.mark.parametrize("layout", PAIRS)
def test_saved_and_reloaded_bit_for_bit(layout: str, tmp_path: Path) -> None:
    """A27: what is written goes into safetensors as it is, and comes back."""
    own = layer(4, 3, 5, bias=True, dtype=torch.bfloat16)
    read, write = PAIRS[layout]
    extra = {"num_experts": 4} if layout == "per_expert" else {}
    save_file(write(own, **extra), tmp_path / "experts.safetensors")
    loaded = read(load_file(tmp_path / "experts.safetensors"), num_experts=4, bias=True)
    assert all(same(loaded[key], own[key]) for key in own)
