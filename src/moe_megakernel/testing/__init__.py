"""Tools for tests and bug reports: input generators, a slow oracle, and comparison by relative error."""

from .compare import BF16_FORWARD, BF16_GRADIENT, assert_close, assert_equal_bits, poisoned_memory, relative_error
from .generate import DIFFERENTIABLE, LayerInputs, make_inputs, oracle, plain_activation, random_routing

__all__ = [
    "BF16_FORWARD",
    "BF16_GRADIENT",
    "DIFFERENTIABLE",
    "LayerInputs",
    "assert_close",
    "assert_equal_bits",
    "make_inputs",
    "oracle",
    "plain_activation",
    "poisoned_memory",
    "random_routing",
    "relative_error",
]
