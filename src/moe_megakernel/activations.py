"""The activations of the layer: names, their parameters and their defaults.

Owns the one table that argument checks, the reference formulas and (later) the kernels' epilogues agree on. The
formulas themselves stand in `reference/activation.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Activation:
    """One activation with its parameters filled in.

    `limit` is infinity where nothing is clamped; `alpha` is 1 where the formula has none.
    """

    name: str
    gated: bool
    alpha: float
    limit: float

    def text(self) -> str:
        """The activation in one line, to the last digit: ranks compare it, and messages show it."""
        limit = "" if math.isinf(self.limit) else f", limit={self.limit}"
        return f"{self.name}(alpha={self.alpha}{limit})" if self.name == "swiglu_oai" or limit else self.name

    @property
    def width_factor(self) -> int:
        """Rows of w_gate_up per expert column: 2 (gate and up) or 1."""
        return 2 if self.gated else 1


@dataclass(frozen=True)
class _Row:
    gated: bool
    takes_alpha: bool = False
    takes_limit: bool = False
    alpha: float = 1.0
    limit: float = math.inf


_TABLE = {
    "swiglu": _Row(gated=True, takes_limit=True),
    "swiglu_oai": _Row(gated=True, takes_alpha=True, takes_limit=True, alpha=1.702, limit=7.0),
    "geglu_tanh": _Row(gated=True),
    "geglu_erf": _Row(gated=True),
    "relu2": _Row(gated=False),
}
_ALIASES = {"geglu": "geglu_erf"}

#: Every name that `activation=` accepts.
ACTIVATIONS = (*_TABLE, *_ALIASES)


def resolve_activation(name: str, alpha: float | None = None, limit: float | None = None) -> Activation:
    """Looks `name` up and fills in the defaults of its parameters.

    swiglu: silu(g) * u; with `limit` (DeepSeek-V4) g is clamped from above and u on both sides before.
    swiglu_oai (GPT-OSS): g * sigmoid(alpha * g) * (u + 1) after the same clamp; alpha 1.702, limit 7.
    geglu_tanh, geglu_erf (alias geglu): gelu(g) * u with the tanh or the erf form of gelu.
    relu2 (not gated): relu(h)^2.

    Raises:
        ValueError: unknown name, a parameter that this activation does not have, or one out of range.
    """
    if alpha is None and limit is None and name in _DEFAULTS:
        return _DEFAULTS[name]
    op = "dispatch_gemm_combine"
    row = _TABLE.get(_ALIASES.get(name, name))
    if row is None:
        raise ValueError(f"{op}: activation: expected one of {', '.join(ACTIVATIONS)}, got {name!r}")
    if alpha is not None and not row.takes_alpha:
        raise ValueError(f"{op}: alpha: expected None with activation {name!r}, got {alpha}")
    if limit is not None and not row.takes_limit:
        raise ValueError(f"{op}: limit: expected None with activation {name!r}, got {limit}")
    if alpha is not None and not math.isfinite(alpha):
        raise ValueError(f"{op}: alpha: expected a finite number, got {alpha}")
    if limit is not None and not limit > 0:
        raise ValueError(f"{op}: limit: expected a number > 0, got {limit}")
    return Activation(
        name=_ALIASES.get(name, name),
        gated=row.gated,
        alpha=row.alpha if alpha is None else float(alpha),
        limit=row.limit if limit is None else float(limit),
    )


#: Activations by every name, for calls that give no parameter.
_DEFAULTS: dict[str, Activation] = {}
_DEFAULTS.update({name: resolve_activation(name) for name in ACTIVATIONS})
