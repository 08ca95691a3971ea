"""The workspace of convolutions on a CPU, as measured with torch 2.13.

oneDNN computes on copies of its operands, and copies its result back. The channels of these copies come in blocks, each
of as many as a vector register holds. PyTorch's own kernels unfold their input instead.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from effops.prediction.allocations import round_up
from effops.pytorch import _ConvBackend, _select_conv_backend

FLOAT_BYTES = 4
BLOCK_CHANNELS = 8  # floats in a register of AVX2
SCRATCH_BYTES = 128  # what oneDNN allocates in front of a bias that it pads


def convolution_bytes(args: Sequence[Any], result: Tensor) -> int | None:
    """The bytes that `aten.convolution` allocates beyond its result; None if they are not known."""
    input, weight, bias = args[:3]
    backend = _select_conv_backend(*args[:9], None if bias is None else bias.shape)
    if backend != _ConvBackend.Mkldnn:
        return _unfolded_bytes(backend, args, result)
    groups = args[8]
    depthwise = groups == input.shape[1] == weight.shape[0] and input.ndim < 5
    pointwise = math.prod(weight.shape[2:]) == 1 and not _is_dense(args)
    if not _is_blocked(input) or pointwise or (groups > 1 and not depthwise):
        return None
    blocked = _blocked_bytes(result)
    computing = _blocked_input_bytes(input, groups) + _blocked_weight_bytes(weight, groups) + blocked
    if bias is not None:
        computing += _padded_bias_bytes(len(bias))
    return max(computing - _tensor_bytes(result), blocked)


def convolution_backward_bytes(args: Sequence[Any], result: Sequence[Tensor | None]) -> int | None:
    """The bytes that `aten.convolution_backward` allocates beyond its results; None if they are not known."""
    upstream, input, weight, bias_sizes = args[:4]
    forward = (input, weight, None, *args[4:10])
    backend = _select_conv_backend(*forward, bias_sizes)
    copied = 0 if upstream.is_contiguous() else _tensor_bytes(upstream)
    if backend != _ConvBackend.Mkldnn:
        unfolded = _unfolded_bytes(backend, forward, upstream)
        return None if unfolded is None else copied + unfolded
    stride, dilation, groups = args[4], args[6], args[9]
    is_measured = _is_blocked(input) and input.ndim == 4 and {*stride, *dilation, groups} == {1}
    if not is_measured or input.shape[1] < BLOCK_CHANNELS or torch.get_num_threads() > 1:
        return None
    blocked = [_blocked_bytes(upstream), _blocked_bytes(input), _blocked_weight_bytes(weight, 1)]
    inputs, weights, biases = (0 if one is None else _tensor_bytes(one) for one in result)
    padded = _padded_bias_bytes(weight.shape[0]) if biases else 0
    most = max(
        sum(blocked) if inputs else 0,
        blocked[1] + inputs,
        inputs + sum(blocked) + biases + padded if weights else 0,
        inputs + blocked[2] + weights + 2 * biases,
    )
    return copied + max(0, most - inputs - weights - biases)


def is_measured_cpu() -> bool:
    """Whether oneDNN has the layouts that were measured: they depend on the vector registers of the CPU."""
    return torch.backends.cpu.get_cpu_capability() == "AVX2"


def _is_blocked(input: Tensor) -> bool:
    """Whether the blocked layout of such an input was measured."""
    return input.dtype is torch.float32 and input.is_contiguous() and is_measured_cpu()


def _unfolded_bytes(backend: Any, args: Sequence[Any], output: Tensor) -> int | None:
    """The bytes of the input as PyTorch's own kernels unfold it; None if they are not known.

    It is held once for each place of the kernel: the whole batch, or one item if the kernel is dilated.
    """
    input, weight = args[:2]
    places = math.prod(weight.shape[2:])
    item = weight.shape[1] * places * math.prod(output.shape[2:]) * input.element_size()
    if args[8] > 1 or backend not in (_ConvBackend.Slow2d, _ConvBackend.SlowDilated2d):
        return None
    if backend == _ConvBackend.SlowDilated2d:
        return int(item)
    return 0 if places == 1 and _is_dense(args) else int(item * input.shape[0])


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


def _tensor_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
