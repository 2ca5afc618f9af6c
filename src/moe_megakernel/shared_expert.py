"""The shared expert: a dense MLP that every token passes through beside its routed experts.

Plain torch on this rank, outside the op; called by `module.MoE`. Sigmoid-gated as in Qwen2-MoE, or bare as in DeepSeek.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .activations import resolve_activation
from .reference.activation import activate
from .router import draw_


class SharedExpert(nn.Module):
    """down(act(gate_up(x))), times sigmoid(<w_gate, x>) where `gated_output` is set.

    State dict: `w_gate_up` [2S, H] (rows 0..S-1 gate, S..2S-1 up; [S, H] for relu2), `w_down` [H, S], and with
    `gated_output` `w_gate` [1, H]. The activation and the output gate are computed in fp32 (fp64 stays fp64).
    """

    def __init__(
        self,
        hidden: int,
        width: int,
        *,
        activation: str = "swiglu",
        alpha: float | None = None,
        limit: float | None = None,
        gated_output: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if width < 1:
            raise ValueError(f"shared_expert: width: expected at least 1, got {width}")
        self.hidden = hidden
        self.width = width
        self.activation = resolve_activation(activation, alpha, limit)
        rows = self.activation.width_factor * width
        self.w_gate_up = nn.Parameter(torch.empty(rows, hidden, device=device, dtype=dtype))
        self.w_down = nn.Parameter(torch.empty(hidden, width, device=device, dtype=dtype))
        self.w_gate = nn.Parameter(torch.empty(1, hidden, device=device, dtype=dtype)) if gated_output else None
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None, std: float | None = None) -> None:
        """Draws every weight as `router.draw_` says."""
        with torch.no_grad():
            draw_(self.w_gate_up, self.hidden, generator, std)
            draw_(self.w_down, self.width, generator, std)
            if self.w_gate is not None:
                draw_(self.w_gate, self.hidden, generator, std)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] -> [..., H], in the dtype of the matrix products (the autocast dtype under autocast)."""
        h = nn.functional.linear(x, self.w_gate_up)
        wide = torch.promote_types(h.dtype, torch.float32)
        a = activate(h.to(wide).reshape(-1, h.shape[-1]), self.activation).to(h.dtype)
        y = nn.functional.linear(a, self.w_down).reshape(x.shape)
        if self.w_gate is not None:
            gate = nn.functional.linear(x, self.w_gate)
            y = (y.to(wide) * torch.sigmoid(gate.to(wide))).to(y.dtype)
        return y

    def extra_repr(self) -> str:
        return f"hidden={self.hidden}, width={self.width}, activation={self.activation.name}"
