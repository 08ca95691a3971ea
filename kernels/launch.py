"""The host's side of all kernels: launches, configurations, arguments and workspaces.

A family of kernels has plans: functions that yield the launches of a call one by one. `run` runs them. A plan allocates
workspaces as it goes, and adds up partial results after the launch that wrote them.
"""

import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")
MAX_GRID = 2**31 - 1
# So many programs keep a device busy: a few for each of its 108 to 304 multiprocessors. A sum is split into parts until
# there are as many programs. The partial sums then take at most 1024 tiles, some tens of megabytes.
BUSY = 1024
# Fused products and sums are Triton's default up to 3.9, which warns that 3.10 will leave them apart.
OPTIONS = {"enable_fp_fusion": True}


@dataclass(frozen=True)
class Config:
    """The sizes of tiles, and the threads and registers of a program. Values of 0 are not passed on."""

    num_warps: int
    num_stages: int
    BLOCK_M: int
    BLOCK_K: int  # the slice of D over which a score sums at a time
    BLOCK_N: int = 0  # row-wise kernels have no columns
    BLOCK_D: int = 0  # the slice of D of a result or gradient
    maxnreg: int = 0

    def options(self) -> dict[str, int]:
        return {name: value for name, value in asdict(self).items() if value}


@dataclass(frozen=True)
class Launch:
    """A kernel and all that it is called with. `first_pid` comes first, as a large grid takes several calls."""

    kernel: Any
    grid: int
    args: tuple[Any, ...]
    constants: dict[str, Any]

    def __call__(self) -> None:
        """Run the kernel. With a fake tensor among the arguments do nothing: only the workspaces count then."""
        if any(isinstance(argument, FakeTensor) for argument in self.args):
            return
        for first_pid in range(0, self.grid, MAX_GRID):
            grid = (min(self.grid - first_pid, MAX_GRID),)
            self.kernel[grid](first_pid, *self.args, **self.constants, **OPTIONS)


def run(tensor: Tensor, launches: Iterable[Launch]) -> None:
    """Run launches on the device of `tensor`, each as soon as its plan yields it.

    The device of a fake tensor need not exist, so it is not selected.
    """
    with nullcontext() if isinstance(tensor, FakeTensor) else torch.cuda.device_of(tensor):
        for launch in launches:
            launch()


def distinct(representatives: Callable[[str, torch.dtype, str], Iterator[Launch]]) -> Iterator[tuple[str, Launch]]:
    """The launches of every architecture, dtype and precision, each once, to compile and inspect without a device.

    `representatives` yields launches on meta tensors. float16 is left out: except for conversions its code is that of
    bfloat16.
    """
    seen = set()
    dtypes = torch.float64, torch.float32, torch.bfloat16
    for architecture, dtype, precision in product(ARCHITECTURES, dtypes, ("highest", "medium")):
        for launch in representatives(architecture, dtype, precision):
            given = tuple(argument is not None for argument in launch.args)
            key = architecture, dtype, launch.kernel, given, *launch.constants.values()
            if key not in seen:
                seen.add(key)
                yield architecture, launch


def _interpret_bounds_of_loops() -> None:
    """Let Triton 3.6 interpret loops with NumPy 2.4, which makes an integer of no array but one without axes.

    The interpreter holds a number in an array of one axis. Triton 3.7 takes the number out first.
    """
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    patch = interpreter._patch_lang_tensor

    def patch_all(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda number: number.handle.data.item())

    interpreter._patch_lang_tensor = patch_all


if triton.knobs.runtime.interpret and triton.__version__.startswith("3.6."):
    _interpret_bounds_of_loops()


def architecture_of(tensor: Tensor) -> str:
    """The architecture whose configurations serve the device of a tensor."""
    if tensor.device.type == "cuda" and torch.version.hip:
        return "gfx942"
    # The interpreter runs the configurations of any architecture. A fake device may have no driver to ask.
    if tensor.device.type != "cuda" or isinstance(tensor, FakeTensor):
        return "sm_90"
    major, _ = torch.cuda.get_device_capability(tensor.device)
    return {9: "sm_90", 10: "sm_100"}.get(major, "sm_80")


def arithmetic_of(*tensors: Tensor) -> tl.dtype:
    """The dtype of the arithmetic: float64 if an operand is, else float32."""
    return tl.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else tl.float32


def torch_dtype(arithmetic: tl.dtype) -> torch.dtype:
    """The dtype of a workspace for results of the arithmetic."""
    return torch.float64 if arithmetic is tl.float64 else torch.float32


def contraction_of(architecture: str, precision: str, x: Tensor, loc: Tensor, *others: Tensor) -> dict[str, Any]:
    """The constants of a product of x and loc, in arithmetic that suits all operands."""
    if arithmetic_of(x, loc, *others) is tl.float64:
        return {"DTYPE": tl.float64, "UPCAST": True, "PRECISION": "ieee"}
    # Products of 16-bit operands are exact. The interpreter multiplies bf16 wrongly: for it they are converted first.
    upcast = x.dtype != loc.dtype or x.dtype == torch.float32 or triton.knobs.runtime.interpret
    if architecture == "gfx942":  # it has fp32 matrix units, and Triton has no tf32x3 for it
        return {"DTYPE": tl.float32, "UPCAST": upcast, "PRECISION": "ieee"}
    return {"DTYPE": tl.float32, "UPCAST": upcast, "PRECISION": "tf32" if precision == "medium" else "tf32x3"}


def varies(operand: Tensor, axis: int) -> bool:
    """Whether an operand varies along an axis. With size 1 or stride 0 it is constant there."""
    return operand.shape[axis] > 1 and operand.stride(axis) != 0


def pointer(tensor: Tensor | None, ndim: int = 3) -> tuple[Any, ...]:
    """A tensor and its strides, as a kernel takes them. None has strides of 0."""
    return (None, *(0,) * ndim) if tensor is None else (tensor, *tensor.stride())


def zero(*gradients: Tensor | None) -> None:
    """Fill the gradients that are not None with 0, where there is nothing to sum."""
    for gradient in gradients:
        if gradient is not None:
            gradient.zero_()


def split(size: int, block: int, programs: int) -> tuple[int, int]:
    """How to split a sum over `size` elements: the number of parts, and the elements of each.

    Each part takes `programs` programs. A part is a multiple of `block`.
    """
    tiles = triton.cdiv(size, block)
    part = triton.cdiv(tiles, triton.cdiv(BUSY, programs)) * block
    return triton.cdiv(size, part), part


@contextmanager
def partial_sums(total: Tensor | None, ndim: int, parts: int, dtype: tl.dtype) -> Iterator[tuple[Any, ...]]:
    """The arguments with which a kernel writes the parts of `total`: a tensor and its strides, that of parts first.

    One part is written to `total` itself. Several go to a workspace, which is added up at the end.
    """
    if total is None or parts == 1:
        tensor, *strides = pointer(total, ndim)
        yield tensor, 0, *strides
    else:
        workspace = total.new_empty((parts, *total.shape), dtype=torch_dtype(dtype))
        yield pointer(workspace)
        total.copy_(workspace.sum(0))


@contextmanager
def partial_statistics(statistics: Tensor, parts: int) -> Iterator[tuple[Any, ...]]:
    """As `partial_sums`, for the statistics of a logsumexp: the maximum, and the logarithm of the sum."""
    if parts == 1:
        tensor, *strides = pointer(statistics)
        yield tensor, 0, *strides
    else:
        workspace = statistics.new_empty((parts, *statistics.shape))
        yield pointer(workspace)
        maxima, log_sums = workspace.unbind(-1)
        maximum = maxima.amax(0)
        shift = torch.where(maximum.isfinite(), maximum, 0.0)
        statistics[..., 0] = maximum
        statistics[..., 1] = torch.logsumexp(maxima - shift + log_sums, 0)
