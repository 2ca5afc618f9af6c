"""Mixture-of-experts layers for PyTorch: `torch.ops.moe.dispatch_gemm_combine` and what belongs to it.

Importing the package registers the ops. It never initialises CUDA and works without a GPU and without the native
library.
"""

from . import convert
from . import ops as _ops  # registers torch.ops.moe.*
from .config import get_num_sms, get_timeout, set_num_sms, set_timeout
from .distributed.capacity import rebuild, reserve
from .distributed.partition import expert_range
from .errors import CapacityError, GroupError, MismatchError, MoEError, RoutingError, check_errors
from .functional import moe_layer
from .hopper.support import BackendChoice, backend_for
from .hopper.workspaces import release_workspaces
from .module import MoE
from .profiling.recorder import profile
from .router import Router, Routing
from .workspace import workspace_bytes

__version__ = "0.1.0"

__all__ = [
    "BackendChoice",
    "CapacityError",
    "GroupError",
    "MismatchError",
    "MoE",
    "MoEError",
    "Router",
    "Routing",
    "RoutingError",
    "backend_for",
    "check_errors",
    "convert",
    "expert_range",
    "get_num_sms",
    "get_timeout",
    "moe_layer",
    "profile",
    "rebuild",
    "release_workspaces",
    "reserve",
    "set_num_sms",
    "set_timeout",
    "workspace_bytes",
]
del _ops
