"""PyTorch's own operators with its own samples (OpInfo): what is predicted of them, and what is measured."""

import contextlib
import dataclasses
import itertools
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from effops.memory import Workload, anatomy

# Sizes that PyTorch's samples are made with. Its own are so small that what an operator holds hardly shows.
SIZES = {"XS": 7, "S": 23, "M": 29, "L": 31}
WRITTEN_OUT = {"_segment_reduce"}  # operators whose samples are wrong in other sizes, and crash the process
ALLOWED_BYTES = 64  # numbers that operators wrap in tensors
ALLOWED = 0.005


@dataclasses.dataclass
class Row:
    """A sample of an operator: what was predicted and measured, or why there is no prediction."""

    name: str
    sample: int
    trains: bool
    found: Any

    @property
    def is_silently_wrong(self) -> bool:
        """Whether the prediction is neither right, nor marked, nor refused as one that cannot be made."""
        if isinstance(self.found, Exception):
            return not isinstance(self.found, NotImplementedError)
        measured = self.found.measured.peak_bytes
        is_right = abs(self.found.peak_bytes - measured) <= max(ALLOWED_BYTES, ALLOWED * measured)
        return not is_right and not self.found.unknown

    def __str__(self) -> str:
        found = self.found
        text = repr(found)[:200]
        if not isinstance(found, Exception):
            text = "; ".join(
                [f"{found.peak_bytes} predicted, {found.measured.peak_bytes} measured", *found.differences[:3]]
            )
        return f"{self.name}, sample {self.sample}, {'with' if self.trains else 'no'} gradients: {text}"


def operators() -> list[Any]:
    """PyTorch's descriptions of its operators that run on a CPU."""
    from torch.testing._internal.common_methods_invocations import op_db  # takes seconds

    return [one for one in op_db if one.supported_dtypes("cpu")]


def screen(operator: Any, most_samples: int) -> Iterator[Row]:
    """Rows of some samples of an operator, without and with gradients; empty ones and those that PyTorch
    refuses are left out."""
    dtypes = operator.supported_dtypes("cpu")
    dtype = torch.float32 if torch.float32 in dtypes else sorted(dtypes, key=str)[0]
    differentiable = operator.supports_autograd and dtype.is_floating_point
    with unseeded(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = list(enumerate(samples_of(operator, dtype, differentiable)))
        chosen = samples[:: max(1, len(samples) // most_samples)]
        for trains, (index, sample) in itertools.product((False, True)[: 1 + differentiable], chosen):
            workload = step(operator.op, (sample.input, *sample.args), sample.kwargs, trains)
            if is_empty((sample.input, sample.args, sample.kwargs)) or not runs(workload):
                continue
            try:
                found: Any = anatomy(workload, 1, measure=True)
            except Exception as error:
                found = error
            yield Row(operator.formatted_name, index, trains, found)


def is_empty(given: Any) -> bool:
    """Whether a tensor has no elements: a call on it may do nothing at all."""
    return any(isinstance(leaf, Tensor) and leaf.numel() == 0 for leaf in tree_leaves(given))


def runs(workload: Workload) -> bool:
    try:
        workload.generate(None, None)
    except Exception:
        return False
    return True


def step(function: Any, args: Any, options: Any, trains: bool) -> Workload:
    """A call on copies of tensors, and its backward pass."""
    leaves, spec = tree_flatten((args, options))
    wanted = [trains and isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
    leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def generate(model: Any, batch: Any) -> Any:
        with torch.set_grad_enabled(trains):
            own = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            for leaf, is_wanted in zip(own, wanted):
                if is_wanted:
                    leaf.requires_grad_()
            given, named = tree_unflatten(own, spec)
            result = function(*given, **named)
            found = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
            if found:
                sum(torch.view_as_real(leaf).sum() if leaf.is_complex() else leaf.sum() for leaf in found).backward()
            return result

    return Workload(nn.Identity, torch.zeros, generate=generate)


def samples_of(operator: Any, dtype: torch.dtype, requires_grad: bool) -> list[Any]:
    """PyTorch's samples of an operator, large ones where it can make them."""
    try:
        with patched({} if operator.name in WRITTEN_OUT else SIZES):
            return list(operator.sample_inputs("cpu", dtype, requires_grad=requires_grad))
    except (IndexError, RuntimeError, ValueError):  # some sizes are written out beside the names
        return list(operator.sample_inputs("cpu", dtype, requires_grad=requires_grad))


def unseeded() -> Any:
    """A context in which samples draw numbers without keeping the state of the generator, which takes bytes."""
    return patched({"freeze_rng_state": contextlib.nullcontext})


@contextlib.contextmanager
def patched(names: Mapping[str, Any]) -> Iterator[None]:
    """Exchange what PyTorch's tests know by these names."""
    with contextlib.ExitStack() as stack:
        for module in [module for name, module in sys.modules.items() if name.startswith("torch.testing.")]:
            own = {name: new for name, new in names.items() if hasattr(module, name)}
            if own:
                stack.enter_context(mock.patch.multiple(module, **own))
        yield
