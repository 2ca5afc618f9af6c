"""Named converters between the layer's parameters and checkpoint layouts; strict about keys, and bit-equal both ways.

`from_*` read a checkpoint, `to_*` write one. A layout is named by the caller, never guessed from shapes.
"""

from .blocks import FAMILIES, Family, from_block, to_block
from .keys import CheckpointKeyError
from .per_expert import MIXTRAL_NAMES, PROJ_NAMES, ExpertNames, from_per_expert, to_per_expert
from .stacked import from_gpt_oss, from_interleaved, from_stacked, to_gpt_oss, to_interleaved, to_stacked

__all__ = [
    "FAMILIES",
    "MIXTRAL_NAMES",
    "PROJ_NAMES",
    "CheckpointKeyError",
    "ExpertNames",
    "Family",
    "from_block",
    "from_gpt_oss",
    "from_interleaved",
    "from_per_expert",
    "from_stacked",
    "to_block",
    "to_gpt_oss",
    "to_interleaved",
    "to_per_expert",
    "to_stacked",
]
