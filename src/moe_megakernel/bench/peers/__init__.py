"""The implementations, in the order in which they are shown."""

from __future__ import annotations

from ..implementation import Implementation
from .dense import Dense
from .exchange import DeepEPExchange, NcclExchange
from .liger import LigerTriton
from .ours import Ours
from .scatter import ScatterMoE
from .sonic import SonicMoE
from .torch_staged import TorchStaged

IMPLEMENTATIONS: dict[str, Implementation] = {
    implementation.name: implementation
    for implementation in (
        Ours("mega"),
        Ours("staged"),
        Ours("reference"),
        Dense(),
        TorchStaged(),
        SonicMoE(),
        LigerTriton(),
        ScatterMoE(),
        NcclExchange(),
        DeepEPExchange(),
    )
}
