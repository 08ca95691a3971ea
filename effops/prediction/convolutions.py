"""The workspace of convolutions on a CPU, as measured with torch 2.13.

oneDNN computes on copies of its operands, and copies its result back. The channels of these copies come in blocks, each
of as many as a vector register holds. PyTorch's own kernels unfold their input instead.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from effops.prediction.allocations import Workspace, round_up
from effops.pytorch.operators import aten
from effops.pytorch.prediction import _select_conv_backend

CONVOLUTIONS = aten.convolution.default, aten.convolution_backward.default
UNFOLDING = {
    "Slow2d",
    "Slow3d",
    "SlowDilated2d",
    "SlowDilated3d",
    "SlowTranspose2d",
    "SlowTranspose3d",
}
FLOAT_BYTES = 4
BLOCK_CHANNELS = 8  # floats in a register of AVX2
SCRATCH_BYTES = 128  # what oneDNN allocates in front of a bias that it pads


def convolution(args: Sequence[Any], result: Tensor) -> Workspace:
    """The workspace of `aten.convolution`."""
    input, weight, bias = args[:3]
    backend = backend_of(aten.convolution.default, args)
    if backend != "Mkldnn":
        return _unfolded(backend, args, result)
    groups = args[8]
    depthwise = groups == input.shape[1] == weight.shape[0] and input.ndim < 5
    pointwise = math.prod(weight.shape[2:]) == 1 and not _is_dense(args)
    dilated = input.ndim == 5 and max(args[5]) > 1
    if not _is_blocked(input) or pointwise or dilated or (groups > 1 and not depthwise):
        return Workspace(known=False)
    blocked = _blocked_bytes(result)
    padded = 0 if bias is None else _padded_bias_bytes(len(bias))
    computing = _blocked_input_bytes(input, groups) + _blocked_weight_bytes(weight, groups) + blocked + padded
    return Workspace(max(computing - result.nbytes, blocked), early_bytes=computing)


def convolution_backward(args: Sequence[Any], result: Sequence[Tensor | None]) -> Workspace:
    """The workspace of `aten.convolution_backward`."""
    upstream, input, weight = args[:3]
    forward = (input, weight, None, *args[4:10])
    backend = backend_of(aten.convolution_backward.default, args)
    copied = 0 if upstream.is_contiguous() else upstream.nbytes
    if backend != "Mkldnn":
        unfolded = _unfolded(backend, forward, upstream)
        return Workspace(copied + unfolded.temporary_bytes) if unfolded.known else unfolded
    stride, dilation, groups = args[4], args[6], args[9]
    is_measured = _is_blocked(input) and input.ndim == 4 and {*stride, *dilation, groups} == {1}
    if not is_measured or input.shape[1] < BLOCK_CHANNELS or torch.get_num_threads() > 1:
        return Workspace(known=False)
    blocked = [_blocked_bytes(upstream), _blocked_bytes(input), _blocked_weight_bytes(weight, 1)]
    inputs, weights, biases = (0 if one is None else one.nbytes for one in result)
    padded = _padded_bias_bytes(weight.shape[0]) if biases else 0
    most = max(
        sum(blocked) if inputs else 0,
        blocked[1] + inputs,
        inputs + sum(blocked) + biases + padded if weights else 0,
        inputs + blocked[2] + weights + 2 * biases,
    )
    return Workspace(copied + max(0, most - inputs - weights - biases))


def backend_of(func: Any, args: Sequence[Any]) -> str:
    """The name of the kernels that PyTorch takes for a convolution, or for its backward pass."""
    if func is aten.convolution_backward.default:
        backend = _select_conv_backend(*args[1:3], None, *args[4:10], args[3])
    else:
        backend = _select_conv_backend(*args[:9], None if args[2] is None else args[2].shape)
    return str(backend.name)


def unfolded_bytes(func: Any, args: Sequence[Any], result: Any) -> int:
    """What the kernels of a convolution may hold that unfold its input, with that of all items; 0 for other kernels.

    A transposed convolution unfolds the gradient of its result, as large as its result.
    """
    if backend_of(func, args) not in UNFOLDING:
        return 0
    is_backward = func is aten.convolution_backward.default
    input, weight = args[1:3] if is_backward else args[:2]
    output, is_transposed = (args[0], args[7]) if is_backward else (result, args[6])
    places = input if is_transposed else output
    return int(
        weight[0].numel()
        * places.numel()
        // max(1, places.shape[1])
        * args[9 if is_backward else 8]
        * input.element_size()
    )


def is_measured_cpu() -> bool:
    """Whether oneDNN has the layouts that were measured: they depend on the vector registers of the CPU."""
    return torch.backends.cpu.get_cpu_capability() == "AVX2"


def _is_blocked(input: Tensor) -> bool:
    """Whether the blocked layout of such an input was measured."""
    return input.dtype is torch.float32 and input.is_contiguous() and is_measured_cpu()


def _unfolded(backend: Any, args: Sequence[Any], output: Tensor) -> Workspace:
    """The input as PyTorch's own kernels unfold it.

    It is held once for each place of the kernel: the whole batch, or one item if the kernel is dilated.
    """
    input, weight = args[:2]
    places = math.prod(weight.shape[2:])
    item = weight.shape[1] * places * math.prod(output.shape[2:]) * input.element_size()
    if args[8] > 1 or backend not in ("Slow2d", "SlowDilated2d"):
        return Workspace(known=False)
    if backend == "SlowDilated2d":
        return Workspace(item)
    return Workspace(0 if places == 1 and _is_dense(args) else item * input.shape[0])


def _is_dense(args: Sequence[Any]) -> bool:
    """Whether stride and padding let a kernel of one place give each place of the input a result."""
    return set(args[3]) == {1} and not any(args[4])


def _blocked_bytes(images: Tensor) -> int:
    return FLOAT_BYTES * images.shape[0] * round_up(images.shape[1], BLOCK_CHANNELS) * math.prod(images.shape[2:])


def _blocked_input_bytes(input: Tensor, groups: int) -> int:
    """The bytes of the blocked input; one with fewer channels than a block is not copied."""
    return 0 if groups == 1 and input.shape[1] < BLOCK_CHANNELS else _blocked_bytes(input)


def _blocked_weight_bytes(weight: Tensor, groups: int) -> int:
    out_channels, in_channels, *kernel = weight.shape
    if groups == 1 and in_channels >= BLOCK_CHANNELS:
        in_channels = round_up(in_channels, BLOCK_CHANNELS)
    return FLOAT_BYTES * round_up(out_channels, BLOCK_CHANNELS) * in_channels * math.prod(kernel)


def _padded_bias_bytes(channels: int) -> int:
    """The bytes of a bias that oneDNN pads to whole blocks of channels; 0 where there is nothing to pad."""
    return FLOAT_BYTES * round_up(channels, BLOCK_CHANNELS) + SCRATCH_BYTES if channels % BLOCK_CHANNELS else 0
