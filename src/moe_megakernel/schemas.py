"""The schemas of `torch.ops.moe`, and named access to the arguments of the inner ops.

Importing this module defines the ops; implementations are registered by `inner_ops` and `ops`, fakes by `fake`,
gradients by `autograd`. The order of arguments is written down here once: a schema and the tuple that reads it stand
side by side.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

from torch import Tensor
from torch.library import Library

from .activations import Activation
from .reference.experts import Needs, Weights

_ROUTE = "route(Tensor topk_idx, int num_experts) -> (Tensor route_order, Tensor class_counts, Tensor first_bad)"

_INPUTS = (
    "Tensor x, Tensor topk_idx, Tensor topk_weights, Tensor w_gate_up, Tensor w_down, Tensor? bias_gate_up{none}, "
    "Tensor? bias_down{none}, Tensor? main_grad_gate_up{none}, Tensor? main_grad_down{none}"
)
_PUBLIC_OPTIONS = (
    "int num_experts, str group_name='', str activation='swiglu', float? alpha=None, float? limit=None, "
    "str backend='auto', str transport='auto', int row_capacity=-1, bool recompute=False"
)
_LAYER = f"dispatch_gemm_combine({_INPUTS.format(none='=None')}, *, {_PUBLIC_OPTIONS}) -> Tensor"

_GROUP = "str group_name, str transport, int row_capacity"
_OPTIONS = "str activation, float alpha, float limit, str backend, int needs, bool recompute"
_FORWARD = f"{_INPUTS.format(none='')}, int num_experts"
_RESULTS = "Tensor y, Tensor h, Tensor anchor, Tensor expert_offsets"
_SAVED = (
    "Tensor dy, Tensor? x, Tensor topk_idx, Tensor topk_weights, Tensor? w_gate_up, Tensor? w_down, "
    "Tensor? bias_gate_up, Tensor? bias_down, Tensor h, Tensor anchor, Tensor expert_offsets"
)
_PLAN = "Tensor row_order, Tensor route_order, Tensor splits"
_MAIN = "Tensor(a!) main_grad_gate_up, Tensor(b!) main_grad_down"
_GRADS = "(Tensor dx, Tensor dtopk_weights, Tensor dw_gate_up, Tensor dw_down, Tensor dbias_gate_up, Tensor dbias_down)"

SCHEMAS = (
    _ROUTE,
    _LAYER,
    f"layer_forward({_FORWARD}, {_OPTIONS}) -> ({_RESULTS}, Tensor row_route)",
    f"layer_forward_direct({_FORWARD}, {_OPTIONS}) -> ({_RESULTS}, Tensor row_route)",
    f"layer_backward({_SAVED}, Tensor row_route, {_OPTIONS}) -> {_GRADS}",
    f"layer_backward_accumulate({_SAVED}, Tensor row_route, {_MAIN}, {_OPTIONS}) -> {_GRADS}",
    f"group_forward({_FORWARD}, {_GROUP}, {_OPTIONS}) -> ({_RESULTS}, {_PLAN})",
    f"group_backward({_SAVED}, {_PLAN}, {_GROUP}, {_OPTIONS}) -> {_GRADS}",
    f"group_backward_accumulate({_SAVED}, {_PLAN}, {_MAIN}, {_GROUP}, {_OPTIONS}) -> {_GRADS}",
)
#: Ops that talk to other ranks and whose calls a compiler must neither merge, drop nor reorder. The accumulating one
#: mutates
#: arguments, which an effect does not survive in a trace: `dispatch_gemm_combine` refuses that combination.
EFFECTFUL = ("group_forward", "group_backward")

lib = Library("moe", "DEF")
for _schema in SCHEMAS:
    lib.define(_schema)


def pack_needs(needs: Needs) -> int:
    """`needs` as an integer, first field in bit 0."""
    x, topk_weights, w_gate_up, w_down, bias_gate_up, bias_down = needs
    return x | topk_weights << 1 | w_gate_up << 2 | w_down << 3 | bias_gate_up << 4 | bias_down << 5


def unpack_needs(mask: int) -> Needs:
    """The inverse of `pack_needs`."""
    return Needs(*(bool(mask >> i & 1) for i in range(len(Needs._fields))))


class Inputs(NamedTuple):
    """The tensors of a forward op, see `_INPUTS`."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    w_gate_up: Tensor
    w_down: Tensor
    bias_gate_up: Tensor | None
    bias_down: Tensor | None
    main_grad_gate_up: Tensor | None
    main_grad_down: Tensor | None

    @property
    def weights(self) -> Weights:
        """The parameters among them."""
        return Weights(self.w_gate_up, self.w_down, self.bias_gate_up, self.bias_down)


#: The same without names, which cost time to give.
InputTensors: TypeAlias = tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None
]


def packed_needs(inputs: InputTensors) -> int:
    """`pack_needs` of the inputs that ask for a gradient."""
    x, _, topk_weights, w_gate_up, w_down, bias_gate_up, bias_down, _, _ = inputs
    mask = x.requires_grad | topk_weights.requires_grad << 1 | w_gate_up.requires_grad << 2 | w_down.requires_grad << 3
    if bias_gate_up is not None:
        mask |= bias_gate_up.requires_grad << 4
    if bias_down is not None:
        mask |= bias_down.requires_grad << 5
    return mask


class Saved(NamedTuple):
    """The first tensors of a backward op, see `_SAVED`; `expert_offsets` is followed by the rest of the plan.

    The fused kernels build the plan of their launch from topk_idx; the reference does without.
    """

    dy: Tensor
    x: Tensor | None
    topk_idx: Tensor
    topk_weights: Tensor
    w_gate_up: Tensor | None
    w_down: Tensor | None
    bias_gate_up: Tensor | None
    bias_down: Tensor | None
    h: Tensor
    anchor: Tensor
    expert_offsets: Tensor

    @property
    def weights(self) -> Weights:
        """The parameters among them."""
        return Weights(self.w_gate_up, self.w_down, self.bias_gate_up, self.bias_down)


class GroupOptions(NamedTuple):
    """How the ranks of a group work together, see `_GROUP`."""

    group_name: str
    transport: str
    row_capacity: int


class Options(NamedTuple):
    """The last arguments of every inner op, see `_OPTIONS`; `needs` is packed: the gradients asked for."""

    activation: str
    alpha: float
    limit: float
    backend: str
    needs: int
    recompute: bool

    @property
    def act(self) -> Activation:
        """The activation with its parameters."""
        return Activation(self.activation, self.activation != "relu2", self.alpha, self.limit)

    @property
    def saves_h(self) -> bool:
        """Whether the forward keeps h for backward."""
        return self.needs != 0 and not self.recompute


#: How many arguments `layer_forward` has, how many tensors `layer_backward`, and where the backend stands in the
#: arguments of every inner op.
LAYER_ARGUMENTS = len(Inputs._fields) + 1 + len(Options._fields)
BACKWARD_TENSORS = len(Saved._fields) + 1
BACKEND = Options._fields.index("backend") - len(Options._fields)


class ForwardCall(NamedTuple):
    """Arguments of `layer_forward` (group is None) or `group_forward`."""

    inputs: Inputs
    num_experts: int
    group: GroupOptions | None
    options: Options


class BackwardCall(NamedTuple):
    """Arguments of one of the four backward ops.

    plan: (row_route,) or (row_order, route_order, splits). main_grads: of w_gate_up and w_down, None where there is
    none.
    """

    saved: Saved
    plan: tuple[Tensor, ...]
    main_grads: tuple[Tensor | None, Tensor | None]
    group: GroupOptions | None
    options: Options


def read_forward(args: tuple[Any, ...]) -> ForwardCall:
    """Names the arguments of a forward op."""
    split, end = len(Inputs._fields), len(args) - len(Options._fields)
    group = GroupOptions(*args[split + 1 : end]) if end > split + 1 else None
    return ForwardCall(Inputs(*args[:split]), args[split], group, Options(*args[end:]))


def read_backward(args: tuple[Any, ...], grouped: bool) -> BackwardCall:
    """Names the arguments of a backward op; `grouped` for those of several ranks."""
    split, end = len(Saved._fields), len(args) - len(Options._fields)
    middle = args[split:end]
    group = None
    if grouped:
        group, middle = GroupOptions(*middle[-3:]), middle[:-3]
    plan, main = middle[: 3 if grouped else 1], middle[3 if grouped else 1 :]
    gate_up, down = (given_main_grad(m) for m in main) if main else (None, None)
    return BackwardCall(Saved(*args[:split]), plan, (gate_up, down), group, Options(*args[end:]))


def given_main_grad(tensor: Tensor) -> Tensor | None:
    """The main gradient, or None for the empty tensor that stands for a weight without one."""
    return tensor if tensor.dim() == 3 else None
