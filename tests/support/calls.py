"""The ops, what they are called with, and how results are compared."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from effops.dispatch.requirements import requires_torchscript
from effops.reference import reference_of, tried_ops

from .tiers import turn

NUMBERS = {name: turn(name, 60) for name in tried_ops()}
OPS = [pytest.param(op, id=op.name) for op in tried_ops().values()]
BOUND = [
    pytest.param(op, variant, id=f"{op.name}-{variant}")
    for op, variant in itertools.product(tried_ops().values(), ("chunked", "triton"))
    if variant in op.variants
]


def arguments(op, device, generator, case=None, dtype=torch.float64):
    reference = reference_of(op)
    return reference.sample_case(case or next(iter(reference.cases)), dtype=dtype, device=device, generator=generator)


def interpreted(variant, device):
    """Whether the variant is slow: kernels run by Triton's interpreter."""
    return variant == "triton" and device == "cpu"


def on_this_python(variants):
    """The variants without `torchscript` where PyTorch does not support it: on Python 3.14 and later."""
    return [name for name in variants if name != "torchscript" or not requires_torchscript(None)]


def without_cpp(variants):
    """The variants that take float64 and few pairs, which `cpp` refuses."""
    return [name for name in variants if name != "cpp"]


def smallest(op):
    return next(case for case in ("single", "one point") if case in reference_of(op).cases)


def leaves(args):
    return tuple(arg.detach().clone().requires_grad_() for arg in args)


def all_of(args):
    return tuple(range(len(args)))


class Operators(TorchDispatchMode):
    """Records calls of effops' own operators."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "effops":
            detached = tree_map(lambda arg: arg.detach() if isinstance(arg, torch.Tensor) else arg, args)
            self.calls.append((func, detached))
        return func(*args, **(kwargs or {}))


def same(found, expected, **tolerances):
    for one, other in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        torch.testing.assert_close(one, other, **tolerances)
