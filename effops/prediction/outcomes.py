"""What operators return for fake tensors: as for real ones, and remembered, since FakeTensorMode takes longer."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from effops.pytorch.calls import FakeTensor
from effops.pytorch.operators import aten
from effops.pytorch.prediction import (
    _create_grouped_mm_output_tensor,
    _DisableTorchDispatch,
    handle_of,
    in_kernel_invocation_manager,
    is_zero_tensor,
)

FLASH_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
NAMESPACES = ("aten", "effops")
PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)

Outcome = Callable[[Sequence[FakeTensor]], Any]


class OperatorCall:
    """A call of an operator on fake tensors. What it returns can be remembered for calls that are alike.

    A step has many calls, of few kinds. FakeTensorMode has a memory of its own. It covers more kinds of arguments than
    occur here, at several times the cost.

    Attributes:
        tensors: the tensors among its arguments
        key: equal for calls that are alike; None where results may depend on more than layouts and plain values
    """

    def __init__(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.tensors: list[FakeTensor] = []
        self.key = self._key()

    def outcome(self, result: Any) -> Outcome | None:
        """A function that makes the result of a call that is alike, from its tensors; None if that is not known.

        `result` is what this call returned.
        """
        if self.key is None or OperatorCall(self.func, self.args, self.kwargs).key != self.key:
            return None  # there is no key, or the operator changed its arguments
        if not isinstance(result, (tuple, list)):
            return self._maker(result)
        makers = [maker for leaf in result if (maker := self._maker(leaf)) is not None]
        storages = [handle_of(leaf.untyped_storage()) for leaf in result if isinstance(leaf, Tensor)]
        if len(makers) < len(result) or len(set(storages)) < len(storages):
            return None
        kind = type(result)
        return lambda tensors: kind(make(tensors) for make in makers)

    def _key(self) -> tuple[Any, ...] | None:
        if self.func.namespace not in NAMESPACES or torch.Tag.inplace_view in self.func.tags:
            return None
        parts: list[Any] = [self.func, torch.get_default_dtype(), *self.kwargs]
        is_known = self._describe(self.args, parts) and self._describe(self.kwargs.values(), parts)
        return tuple(parts) if is_known and self.tensors else None

    def _describe(self, values: Iterable[Any], parts: list[Any]) -> bool:
        """Add to a key what matters of the arguments; False if more may matter than is added."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if not is_told_by_layout(value) or value.fake_mode is not (*self.tensors, value)[0].fake_mode:
                    return False
                parts.append(_layout(value))
                self.tensors.append(value)
            elif kind is list or kind is tuple:
                parts.append(len(value))
                if not self._describe(value, parts):
                    return False
            elif kind in PLAIN:
                parts.append((kind, value))
            else:
                return False
        return True

    def _maker(self, result: Any) -> Outcome | None:
        """The same function for one of several results: a plain value, an argument, a view of one, or a new tensor."""
        if type(result) in PLAIN:
            return lambda tensors: result
        if type(result) is not FakeTensor or not is_told_by_layout(result):
            return None
        same = next((index for index, tensor in enumerate(self.tensors) if tensor is result), None)
        if same is not None:
            return lambda tensors: tensors[same]
        shape, stride, offset, dtype, device = _layout(result)
        storage = result.untyped_storage()
        own = [handle_of(tensor.untyped_storage()) for tensor in self.tensors]
        if handle_of(storage) in own:
            base = own.index(handle_of(storage))

            def view(tensors: Sequence[FakeTensor]) -> FakeTensor:
                mode = tensors[base].fake_mode
                with in_kernel_invocation_manager(mode):
                    return FakeTensor(mode, tensors[base].as_strided(shape, stride, offset), device)

            return view if dtype == self.tensors[base].dtype else None

        def new(tensors: Sequence[FakeTensor]) -> FakeTensor:
            with _DisableTorchDispatch():
                memory = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
                return FakeTensor(tensors[0].fake_mode, memory, device)

        return new if new(self.tensors).untyped_storage().nbytes() == storage.nbytes() else None


def is_told_by_layout(tensor: FakeTensor) -> bool:
    """Whether nothing but the layout of a tensor tells what operators return for it."""
    is_plain = tensor.layout is torch.strided and not tensor.dtype.is_complex
    return is_plain and tensor.constant is None and not (tensor.is_neg() or is_zero_tensor(tensor))


def _layout(tensor: FakeTensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.fake_device


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
