"""What every family of kernels takes to launch them: configurations, arguments, workspaces and the launch itself."""

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
# Programs that keep a device busy: a few for each of the 108 to 304 multiprocessors. A sum over rows is split until
# there are as many; the partial sums then take at most 1024 tiles, some tens of megabytes.
BUSY = 1024


@dataclass(frozen=True)
class Config:
    num_warps: int
    num_stages: int
    BLOCK_M: int
    BLOCK_K: int  # slice of D
    BLOCK_N: int = 0  # not row-wise
    BLOCK_D: int = 0  # backward, not row-wise: slice of D of the gradient
    maxnreg: int = 0

    def options(self) -> dict[str, int]:
        return {name: value for name, value in asdict(self).items() if value}


@dataclass(frozen=True)
class Launch:
    kernel: Any
    grid: int
    args: tuple[Any, ...]
    constants: dict[str, Any]

    def __call__(self) -> None:
        """Run the kernel, unless an argument is a fake tensor: then its workspace is all that is asked for."""
        if any(isinstance(argument, FakeTensor) for argument in self.args):
            return
        for first_pid in range(0, self.grid, MAX_GRID):
            self.kernel[(min(self.grid - first_pid, MAX_GRID),)](first_pid, *self.args, **self.constants)


def run(tensor: Tensor, launches: Iterable[Launch]) -> None:
    """Run launches on the device of `tensor`, each as soon as the plan gives it.

    A plan allocates workspaces as it goes. It does so on fake tensors too, whose device need not exist.
    """
    with nullcontext() if isinstance(tensor, FakeTensor) else torch.cuda.device_of(tensor):
        for launch in launches:
            launch()


def distinct(representatives: Callable[[str, torch.dtype, str], Iterator[Launch]]) -> Iterator[tuple[str, Launch]]:
    """The launches of every architecture, dtype and precision, each once.

    Those of float16 are left out: but for conversions their code is that of bfloat16.
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
    return torch.float64 if arithmetic is tl.float64 else torch.float32


def contraction_of(architecture: str, precision: str, x: Tensor, loc: Tensor, *others: Tensor) -> dict[str, Any]:
    if arithmetic_of(x, loc, *others) is tl.float64:
        return {"DTYPE": tl.float64, "UPCAST": True, "PRECISION": "ieee"}
    # 16-bit operands are multiplied as they are, exactly, save in the interpreter, which multiplies bf16 wrongly
    upcast = x.dtype != loc.dtype or x.dtype == torch.float32 or triton.knobs.runtime.interpret
    if architecture == "gfx942":  # has fp32 matrix units, and Triton no tf32x3 there
        return {"DTYPE": tl.float32, "UPCAST": upcast, "PRECISION": "ieee"}
    return {"DTYPE": tl.float32, "UPCAST": upcast, "PRECISION": "tf32" if precision == "medium" else "tf32x3"}


def varies(operand: Tensor, axis: int) -> bool:
    """Whether an operand may differ along an axis: one of size 1 or stride 0 holds one value there."""
    return operand.shape[axis] > 1 and operand.stride(axis) != 0


def pointer(tensor: Tensor | None, ndim: int = 3) -> tuple[Any, ...]:
    """A tensor and its strides, as a kernel takes them."""
    return (None, *(0,) * ndim) if tensor is None else (tensor, *tensor.stride())


def zero(*gradients: Tensor | None) -> None:
    """Fill those that are not None with 0: what a launch of no programs would leave unwritten."""
    for gradient in gradients:
        if gradient is not None:
            gradient.zero_()


def split(size: int, block: int, programs: int) -> tuple[int, int]:
    """(parts, elements of a part) of a sum over `size` elements, where each part takes `programs` programs."""
    tiles = triton.cdiv(size, block)
    part = triton.cdiv(tiles, triton.cdiv(BUSY, programs)) * block
    return triton.cdiv(size, part), part


@contextmanager
def partial_sums(total: Tensor | None, ndim: int, parts: int, dtype: tl.dtype) -> Iterator[tuple[Any, ...]]:
    """Where to write `total` in parts: itself if there is one, else a workspace that is added up at the end."""
    if total is None or parts == 1:
        tensor, *strides = pointer(total, ndim)
        yield tensor, 0, *strides
    else:
        workspace = total.new_empty((parts, *total.shape), dtype=torch_dtype(dtype))
        yield pointer(workspace)
        total.copy_(workspace.sum(0))


@contextmanager
def partial_statistics(statistics: Tensor, parts: int) -> Iterator[tuple[Any, ...]]:
    """Where to write statistics of parts of the components: as `partial_sums` does for sums."""
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
