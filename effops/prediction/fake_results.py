"""Results of PyTorch's operators on fake tensors, with the dtypes and strides that results of real tensors have."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from effops.pytorch.operators import aten
from effops.pytorch.prediction import _create_grouped_mm_output_tensor

FLASH_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default


def result_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an operator returns for fake tensors, corrected where PyTorch's own is not as of real ones."""
    return RESULTS.get(func, func)(*args, **kwargs)


def sums_of_attention(query: Tensor) -> torch.dtype:
    """The dtype of the sums of exponentials. In torch 2.11 and 2.12 those of fake tensors are always in float32."""
    return torch.promote_types(query.dtype, torch.float32)


def _normalisation_backward(operator: Any) -> Callable[..., tuple[Tensor | None, ...]]:
    """The gradient of the input has its dtype and layout."""

    def results(upstream: Tensor, input: Tensor, *others: Any) -> tuple[Tensor | None, ...]:
        gradient, *parameters = operator(upstream, input, *others)
        return None if gradient is None else torch.empty_like(input), *parameters

    return results


def _group_norm(input: Tensor, weight: Tensor | None, *others: Any) -> tuple[Tensor, ...]:
    """Its statistics have the dtype of the weight, which under autocast has more digits than the input."""
    output, *statistics = aten.native_group_norm.default(input, weight, *others)
    dtype = input.dtype if weight is None else weight.dtype
    return output, *(one.to(dtype) for one in statistics)


def _elementwise(place: int) -> Callable[..., Tensor]:
    """A result with the layout of an elementwise operation on the first argument and on the one at a place."""
    return lambda *args, **kwargs: torch.add(args[0], args[place])


def _as_first(*args: Any) -> Tensor:
    return torch.empty_like(args[0])


def _contiguous(place: int) -> Callable[..., Tensor]:
    """A contiguous result of the shape of the argument at a place."""
    return lambda *args, **kwargs: torch.empty_like(args[place], memory_format=torch.contiguous_format)


def _log_sigmoid(input: Tensor) -> tuple[Tensor, Tensor]:
    output, buffer = aten.log_sigmoid_forward.default(input.contiguous())
    return output, buffer


def _pinned(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """A copy with the same strides. PyTorch has no fake form of it."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _attention(query: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    output, logsumexp = FLASH_ATTENTION(query, *args, **kwargs)
    return output, logsumexp.to(sums_of_attention(query))


# PyTorch's grouped product takes the dtypes and strides of CUDA alone, and other results, mostly gradients where two
# memory formats meet, have another layout or dtype.
RESULTS: dict[Any, Callable[..., Any]] = {
    aten.native_batch_norm_backward.default: _normalisation_backward(aten.native_batch_norm_backward.default),
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _normalisation_backward(aten.native_group_norm_backward.default),
    aten.elu_backward.default: _elementwise(5),
    aten.hardsigmoid_backward.default: _elementwise(1),
    aten.hardswish_backward.default: _elementwise(1),
    aten.hardtanh_backward.default: _elementwise(1),
    aten.softplus_backward.default: _elementwise(1),
    aten.log_sigmoid_forward.default: _log_sigmoid,
    aten.glu_backward.default: _contiguous(1),
    aten.rrelu_with_noise.default: _contiguous(0),
    aten.rrelu_with_noise_backward.default: _contiguous(0),
    aten.channel_shuffle.default: _as_first,
    aten.native_channel_shuffle.default: _as_first,
    aten._pin_memory.default: _pinned,
    FLASH_ATTENTION: _attention,
    aten._grouped_mm.default: lambda left, right, offs=None, bias=None, out_dtype=None: (
        _create_grouped_mm_output_tensor(left, right, offs, out_dtype)
    ),
}
