"""The routes of a benchmark: what `--routing` may say, what it draws, and files that do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moe_megakernel.bench.problem import LEAVES, make_problem, share_of
from moe_megakernel.bench.routings import Routing, make_routes, parse_routing
from moe_megakernel.shapes import Shape

SMALL = Shape("small", "small", num_experts=8, hidden=64, width=32, top_k=4, tokens=100)


@pytest.mark.parametrize(
    ("text", "expected", "name"),
    [
        ("uniform", Routing("uniform"), "uniform"),
        ("zipf", Routing("zipf"), "zipf"),
        ("zipf:1", Routing("zipf"), "zipf"),
        ("zipf:1.5", Routing("zipf", 1.5), "zipf:1.5"),
        ("one-hot", Routing("one-hot"), "one-hot"),
        ("file:/a/run.pt", Routing("file", path=Path("/a/run.pt")), "file:run.pt"),
    ],
)
def test_words(text: str, expected: Routing, name: str) -> None:
    assert parse_routing(text) == expected
    assert expected.name == name


@pytest.mark.parametrize(
    "text", ["even", "uniform:2", "zipf:x", "zipf:-1", "zipf:nan", "zipf:inf", "file:", "one-hot:3", ""]
)
def test_other_words(text: str) -> None:
    with pytest.raises(ValueError, match="bench: routing: expected uniform, zipf, zipf:S, one-hot or file:PATH, got"):
        parse_routing(text)


@pytest.mark.parametrize("kind", ["uniform", "zipf", "one-hot"])
def test_drawn_routes(kind: str) -> None:
    problem = make_problem(SMALL, Routing(kind), 400, "cpu", seed=3)
    assert problem.topk_idx.dtype == torch.int32
    assert all(len(set(ids)) == 4 for ids in problem.topk_idx.tolist())
    assert torch.allclose(problem.topk_weights.sum(1), torch.ones(400))
    counts = problem.topk_idx.flatten().bincount(minlength=8)
    assert {"uniform": counts.max() < 1.3 * counts.min(), "zipf": counts.max() > 2 * counts.min()}.get(
        kind, counts.tolist() == [400] * 4 + [0] * 4
    )
    again = make_problem(SMALL, Routing(kind), 400, "cpu", seed=3)
    assert all(torch.equal(getattr(problem, name), getattr(again, name)) for name in (*LEAVES, "topk_idx", "dy"))


def test_a_larger_exponent_is_less_even() -> None:
    busiest = []
    for exponent in (0.0, 1.0, 2.0):
        generator = torch.Generator().manual_seed(0)
        idx, _ = make_routes(Routing("zipf", exponent), Shape("s", "s", 32, 8, 8, 1), 4000, generator)
        busiest.append(int(idx.flatten().bincount().max()))
    assert busiest == sorted(busiest)
    assert busiest[0] < 200
    assert busiest[2] > 2000


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("weighted", [False, True])
def test_recorded_routes(tmp_path: Path, suffix: str, weighted: bool) -> None:
    idx = torch.stack([torch.randperm(8)[:4] for _ in range(120)])
    idx[7, 2] = -1
    recorded = {"topk_idx": idx} | ({"topk_weights": torch.rand(120, 4, dtype=torch.float64)} if weighted else {})
    path = tmp_path / f"routes{suffix}"
    torch.save(recorded, path) if suffix == ".pt" else save_file(recorded, path)
    problem = make_problem(SMALL, parse_routing(f"file:{path}"), device="cpu")
    assert torch.equal(problem.topk_idx, idx[:100].int())
    expected = recorded["topk_weights"][:100].float() if weighted else torch.full((100, 4), 0.25)
    assert torch.equal(problem.topk_weights, expected)
    assert problem.routes == 399


@pytest.mark.parametrize(
    ("recorded", "message"),
    [
        ({"topk_idx": torch.zeros(100, 4)}, r"expected topk_idx, integers \[T, K\], got \['topk_idx'\]"),
        ({"ids": torch.zeros(100, 4).int()}, r"expected topk_idx, integers \[T, K\], got \['ids'\]"),
        ([1], r"expected topk_idx, integers \[T, K\], got list"),
        (
            {"topk_idx": torch.zeros(100, 3).int()},
            r"expected topk_idx of at least 100 tokens with 4 experts each, got \[100, 3\]",
        ),
        (
            {"topk_idx": torch.zeros(99, 4).int()},
            r"expected topk_idx of at least 100 tokens with 4 experts each, got \[99, 4\]",
        ),
        ({"topk_idx": torch.full((100, 4), 8)}, r"expected experts in \[-1, 8\), got 8 to 8"),
        (
            {"topk_idx": torch.zeros(100, 4).int(), "topk_weights": torch.zeros(100)},
            r"expected topk_weights of at least 100 tokens with 4 weights each, got \[100\]",
        ),
    ],
)
def test_files_that_do_not_fit(tmp_path: Path, recorded: object, message: str) -> None:
    path = tmp_path / "routes.pt"
    torch.save(recorded, path)
    with pytest.raises(ValueError, match=rf"bench: routing: .*routes.pt: {message}"):
        make_problem(SMALL, Routing("file", path=path), device="cpu")


def test_files_that_are_none(tmp_path: Path) -> None:
    for name, content, message in (
        ("a.pt", b"", "expected a dictionary of tensors, got "),
        ("a.safetensors", b"{}", "expected a dictionary of tensors, got "),
        ("a.npy", b"", r"expected a .safetensors or .pt file, got .npy"),
        ("gone.pt", None, "expected a .safetensors or .pt file, got no such file"),
    ):
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            make_problem(SMALL, Routing("file", path=path), device="cpu")


def test_problems_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="bench: tokens: expected at least 1 for shape s, got None"):
        make_problem(Shape("s", "s", 8, 64, 32, 2), Routing("uniform"), device="cpu")
    with pytest.raises(ValueError, match="bench: shape: expected a gated layer, got s"):
        make_problem(Shape("s", "s", 8, 64, 32, 2, tokens=3, gated=False), Routing("uniform"), device="cpu")


def test_shares_join_to_the_whole() -> None:
    whole = make_problem(SMALL, Routing("zipf"), device="cpu")
    parts = [share_of(whole, rank, 3) for rank in range(3)]
    assert [part.most_tokens for part in parts] == [34] * 3
    of_expert = whole.topk_idx.flatten().bincount(minlength=8)
    assert {part.most_rows for part in parts} == {int(max(of_expert[a:b].sum() for a, b in ((0, 3), (3, 6), (6, 8))))}
    for name in (*LEAVES, "topk_idx", "dy"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name)), name
