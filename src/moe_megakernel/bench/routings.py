"""Which experts a benchmark's tokens choose: drawn from a named distribution, or recorded in somebody's training run.

Owns the words of `--routing` and what they mean. The same routing tensor goes to every implementation.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..shapes import Shape
from .faults import one_line

WORDS = "uniform, zipf, zipf:S, one-hot or file:PATH"
SUFFIXES = (".safetensors", ".pt")


@dataclass(frozen=True)
class Routing:
    """kind: "uniform", "zipf", "one-hot" or "file"; exponent: of zipf; path: of a file."""

    kind: str
    exponent: float = 1.0
    path: Path | None = None

    @property
    def name(self) -> str:
        """For tables and CSV files: `zipf` is Zipf(1); a file's folder is left out."""
        if self.kind == "zipf" and self.exponent != 1.0:
            return f"zipf:{self.exponent:g}"
        return f"file:{self.path.name}" if self.path is not None else self.kind


def parse_routing(text: str) -> Routing:
    """What `--routing` says.

    Raises:
        ValueError: it says nothing of that kind.
    """
    kind, _, rest = text.partition(":")
    fault = ValueError(f"bench: routing: expected {WORDS}, got {text!r}")
    if kind == "file" and rest:
        return Routing("file", path=Path(rest))
    if kind == "zipf":
        try:
            exponent = float(rest or "1")
        except ValueError:
            raise fault from None
        if 0.0 <= exponent <= 100.0:
            return Routing("zipf", exponent)
    if kind in ("uniform", "one-hot") and ":" not in text:
        return Routing(kind)
    raise fault


def make_routes(routing: Routing, shape: Shape, tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Experts and weights of every token, on the generator's device.

    * uniform: the top K of Gaussian logits, weighted by their softmax. Nearly uniform, as a trained router's are.
    * zipf: expert e (in a shuffled order) is preferred with a probability proportional to 1 / (e + 1)^S: logits are
      Gumbel noise plus the logarithm of that (Efraimidis and Spirakis, 2006), and again the top K count.
    * one-hot: all tokens choose the same K experts, the worst there is for anything that splits work by expert.
    * file: recorded ones.

    Returns:
        topk_idx int32 [T, K] and topk_weights float32 [T, K].

    Raises:
        ValueError: the file does not hold routes of this shape.
    """
    experts, top_k, device = shape.num_experts, shape.top_k, generator.device
    if routing.kind == "file":
        assert routing.path is not None
        idx, weights = read_routes(routing.path, shape, tokens)
        return idx.to(device), weights.to(device)
    if routing.kind == "one-hot":
        idx = torch.arange(top_k, device=device, dtype=torch.int32).expand(tokens, top_k).contiguous()
        return idx, torch.randn(tokens, top_k, generator=generator, device=device).softmax(-1)
    if routing.kind == "uniform":
        logits = torch.randn(tokens, experts, generator=generator, device=device)
    else:
        order = torch.randperm(experts, generator=generator, device=device)
        popularity = torch.arange(1, experts + 1, device=device).float().log()[order] * routing.exponent
        noise = torch.rand(tokens, experts, generator=generator, device=device).clamp(1e-7, 1 - 1e-7)
        logits = -(-noise.log()).log() - popularity
    values, ids = logits.topk(top_k)
    return ids.int(), values.softmax(-1)


def read_routes(path: Path, shape: Shape, tokens: int) -> tuple[Tensor, Tensor]:
    """The first `tokens` recorded tokens' routes.

    Args:
        path: a `.safetensors` or `.pt` file of a dictionary with topk_idx, integers [T, K], and, if they are there,
            topk_weights [T, K]; without them every route weighs 1 / K.

    Raises:
        ValueError: no such file, not such a dictionary, another K, fewer tokens, or an expert that the shape lacks.
    """

    def fault(expected: str, got: object) -> ValueError:
        return ValueError(f"bench: routing: {path}: expected {expected}, got {got}")

    if path.suffix not in SUFFIXES or not path.is_file():
        raise fault(f"a {' or '.join(SUFFIXES)} file", "no such file" if path.suffix in SUFFIXES else path.suffix)
    try:
        if path.suffix == ".pt":
            found = torch.load(path, map_location="cpu", weights_only=True)
        else:
            from safetensors.torch import load_file

            found = load_file(path)
    except Exception as error:
        raise fault("a dictionary of tensors", one_line(error)) from None
    idx = found.get("topk_idx") if isinstance(found, dict) else None
    if not isinstance(idx, Tensor) or idx.dtype.is_floating_point or idx.dim() != 2:
        raise fault("topk_idx, integers [T, K]", sorted(found) if isinstance(found, dict) else type(found).__name__)
    if idx.shape[1] != shape.top_k or len(idx) < tokens:
        raise fault(f"topk_idx of at least {tokens} tokens with {shape.top_k} experts each", list(idx.shape))
    idx = idx[:tokens].int().contiguous()
    if int(idx.min()) < -1 or int(idx.max()) >= shape.num_experts:
        raise fault(f"experts in [-1, {shape.num_experts})", f"{int(idx.min())} to {int(idx.max())}")
    weights = found.get("topk_weights")
    if weights is None:
        return idx, torch.full(idx.shape, 1 / shape.top_k)
    if weights.dim() != 2 or weights.shape[1] != shape.top_k or len(weights) < tokens:
        raise fault(f"topk_weights of at least {tokens} tokens with {shape.top_k} weights each", list(weights.shape))
    return idx, weights[:tokens].float().contiguous()
