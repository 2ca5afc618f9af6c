"""Where the time of a training step goes: analysis of traces of torch.profiler, and a recorder of them.

`moe-megakernel profile` and `moe_megakernel.profile` are the ways in; docs/profile.md explains the report. A trace
passes through `json_stream` and `reader` (file to columns), `work` with `rules` (columns to classified pieces of work),
`analysis` with `intervals` (pieces to figures) and `report` with `tables` and `picture` (figures to people).
"""

from .errors import ProfileError
from .files import analyse_files
from .report import Report, Row
from .rules import load_rules

__all__ = ["ProfileError", "Report", "Row", "analyse_files", "load_rules"]
