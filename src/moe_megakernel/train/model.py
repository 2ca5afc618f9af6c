"""The demo model: a causal byte-level transformer whose MLPs are `moe_megakernel.MoE` layers.

Built by `loop.py` on every rank. Experts are sharded over the group, everything else is replicated. Each block is
x + attention(norm(x)), then x + moe(norm(x)); positions enter by rotation of queries and keys.

Shape suffixes: B sequences on this rank, S bytes in a sequence, H hidden, N heads, D = H / N, E experts.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from moe_megakernel import MoE

from .config import TrainConfig
from .data import IGNORED_TARGET

NUM_BYTES = 256
ROTARY_BASE = 10000.0
EMBEDDING_STD = 0.5
# Ten times what long runs use (0.001): this one has a few hundred steps to balance in.
BIAS_RATE = 0.01


class Attention(nn.Module):
    """Causal self-attention with rotary positions (arXiv 2104.09864): [B, S, H] to [B, S, H]."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x_BSH: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x_BSH).chunk(3, dim=-1))
        q, k = _rotate(q, cos_SD, sin_SD), _rotate(k, cos_SD, sin_SD)
        y_BNSD = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y_BNSD.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """One attention and one MoE layer, both on normalised input and added to the stream: [B, S, H] to [B, S, H]."""

    def __init__(self, config: TrainConfig, layer: int, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden)
        self.attention = Attention(config.hidden, config.heads)
        self.moe_norm = nn.RMSNorm(config.hidden)
        self.moe = MoE(
            config.hidden,
            config.expert_width,
            config.experts,
            config.top_k,
            # Experts are kept even by the loss-free bias: exact whole numbers, so the same for any number of ranks.
            correction_bias=True,
            group=group,
            backend=config.backend,
            seed=config.seed * config.layers + layer,
            init_std=config.hidden**-0.5,
        )

    def forward(self, x_BSH: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        x_BSH = x_BSH + self.attention(self.attention_norm(x_BSH), cos_SD, sin_SD)
        return x_BSH + self.moe(self.moe_norm(x_BSH))


class ByteTransformer(nn.Module):
    """Bytes [B, S] and the bytes that follow them [B, S] to the summed negative log likelihood in nats, a scalar.

    Targets of IGNORED_TARGET do not count. The initial weights are a function of `config.seed`, not of the ranks.
    """

    def __init__(self, config: TrainConfig, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        torch.manual_seed(config.seed)
        self.embedding = nn.Embedding(NUM_BYTES, config.hidden)
        self.blocks = nn.ModuleList(Block(config, layer, group) for layer in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden)
        self.head = nn.Linear(config.hidden, NUM_BYTES, bias=False)
        cos_SD, sin_SD = rotary_tables(config.seq, config.hidden // config.heads)
        self.register_buffer("cos_SD", cos_SD, persistent=False)
        self.register_buffer("sin_SD", sin_SD, persistent=False)
        nn.init.normal_(self.embedding.weight, std=EMBEDDING_STD)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=config.hidden**-0.5)

    def forward(self, inputs_BS: Tensor, targets_BS: Tensor) -> Tensor:
        x_BSH = self.embedding(inputs_BS)
        for block in self.blocks:
            x_BSH = block(x_BSH, self.cos_SD, self.sin_SD)
        logits = self.head(self.norm(x_BSH)).flatten(0, 1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return functional.cross_entropy(logits, targets_BS.flatten(), ignore_index=IGNORED_TARGET, reduction="sum")

    def expert_counts(self) -> Tensor:
        """Routes by expert of this rank's last forward: int64 [layers, E]."""
        return torch.stack([moe.last_expert_counts for moe in self._moes()])

    def balance_experts(self, counts: Tensor) -> None:
        """One step of the routers' correction biases from `counts` [layers, E] summed over all ranks."""
        for moe, count in zip(self._moes(), counts, strict=True):
            moe.router.update_correction_bias(count, rate=BIAS_RATE)

    def _moes(self) -> list[MoE]:
        return [module for module in self.modules() if isinstance(module, MoE)]


def rotary_tables(seq: int, head_width: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine [S, D] of position times frequency; the second half of D repeats the first."""
    frequency = ROTARY_BASE ** (-torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)
    angle = torch.outer(torch.arange(seq, dtype=torch.float64), frequency).repeat(1, 2)
    return angle.cos().float(), angle.sin().float()


def _rotate(x_BNSD: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
    first, second = x_BNSD.chunk(2, dim=-1)
    return x_BNSD * cos_SD.to(x_BNSD.dtype) + torch.cat((-second, first), dim=-1) * sin_SD.to(x_BNSD.dtype)


def expert_parameter_names(model: nn.Module) -> set[str]:
    """Names of the parameters that are sharded over the group: all that a MoE layer holds itself, experts first.

    What its submodules hold (router, shared expert) is the same on every rank.
    """
    return {
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        if isinstance(module, MoE)
        for name, _ in module.named_parameters(recurse=False)
    }
