"""Variant sdpa: `F.scaled_dot_product_attention`, which runs PyTorch's own fused kernels where it has them."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

from effops.blocks.plan import Shape
from effops.dispatch.custom_op import Gradients, is_plain, requires_grad
from effops.numerics.layout import without_overlap
from effops.numerics.shapes import is_certain, is_known
from effops.ops.attention.call import AttentionCall
from effops.ops.attention.variants import Fused, in_blocks_backward, scaled_dots
from effops.pytorch.calls import _fused_sdp_choice


class _FourAxes:
    """The operands of a call, with four axes, since `scaled_dot_product_attention` is fused for no other number.

    Where groups of query heads share keys and values (*batch, heads, 1, keys, D), groups and heads become one axis of
    heads.
    """

    def __init__(self, call: AttentionCall) -> None:
        self.call, self.batch = call, call.shape[:-2]
        query, key, value = call.tensors[:3]
        shared = all(_size(tensor, -3) == 1 for tensor in (key, value))
        self.grouped = len(self.batch) == 3 and self.batch[-1] > 1 and shared
        keyed = (*self.batch[:-1], 1) if self.grouped else self.batch
        self.query, self.key, self.value = (
            without_overlap(self._merge(query, self.batch)),  # PyTorch lays the result out as the query
            self._merge(key, keyed),
            self._merge(value, keyed),
        )
        self.mask = self._mask() if call.masked else None

    def _merge(self, tensor: Tensor, batch: Shape) -> Tensor:
        tensor = tensor.expand(*batch, *tensor.shape[-2:])
        if self.grouped:
            return tensor.flatten(-4, -3)
        return tensor.flatten(0, -4) if len(batch) > 2 else _with_axes(tensor, 2 - len(batch))

    @property
    def are_expanded(self) -> bool:
        """Whether an element of an operand stands for several."""
        operands = (self.query, self.key, self.value)
        return any(
            size > 1 and stride == 0 for one in operands for size, stride in zip(one.shape, one.stride(), strict=True)
        )

    def _mask(self) -> Tensor:
        """The mask with axes of size 1 where it broadcasts. PyTorch makes a tensor of this size of a boolean mask."""
        mask = self.call.mask
        if mask.dtype != torch.bool:
            mask = mask.to(self.query.dtype)
        mask = _with_axes(mask, max(4, len(self.batch) + 2) - mask.ndim)
        if len(self.batch) <= 2:
            return mask
        if self.grouped and _size(mask, -3) == _size(mask, -4) == 1:
            return mask.squeeze(-3)
        if self.grouped:
            return self._merge(mask, (mask.shape[0], *self.batch[1:]))
        if all(size == 1 for size in mask.shape[:-3]):
            return mask.flatten(0, -4)
        return self._merge(mask, (*self.batch[:-1], mask.shape[-3]))

    def given_to(self, function: Callable[..., Any]) -> Any:
        """What a function of the arguments of `scaled_dot_product_attention` returns for those of the call."""
        return function(
            self.query,
            self.key,
            self.value,
            self.mask,
            self.call.dropout_p,
            self.call.is_causal,
            scale=self.call.scale if self.call.scale is not None or self.query.shape[-1] else 1.0,
            enable_gqa=self.grouped,
        )

    def restore(self, result: Tensor) -> Tensor:
        if len(self.batch) == 2:
            return result
        if len(self.batch) < 2:
            return result.view(self.call.shape)
        axis, sizes = (1, self.batch[1:]) if self.grouped else (0, self.batch[:-1])
        return torch.unflatten(result, axis, sizes)


def _with_axes(tensor: Tensor, count: int) -> Tensor:
    """A view with so many axes of size 1 in front. An index would start CUDA, which may not be there for fake ones."""
    for _ in range(count):
        tensor = tensor.unsqueeze(0)
    return tensor


def _size(tensor: Tensor, axis: int) -> int:
    return tensor.shape[axis] if tensor.ndim >= -axis else 1


def forward(call: AttentionCall) -> Tensor:
    operands = _FourAxes(call)
    with _seeded(call):
        return operands.restore(operands.given_to(scaled_dot_product_attention))


@contextmanager
def _seeded(call: AttentionCall) -> Iterator[None]:
    """A context in which the call's seed determines what PyTorch drops, so that backward can drop the same."""
    if not call.dropout_p or not is_plain(call.tensors):
        yield
        return
    on_cuda = call.device.type == "cuda"
    generator = torch.cuda.default_generators[call.device.index] if on_cuda else torch.default_generator
    state = generator.get_state()
    generator.manual_seed(call.drawn_seed)
    try:
        yield
    finally:
        generator.set_state(state)


def backward(dout: Tensor, call: AttentionCall, wanted: Sequence[bool]) -> Gradients:
    """The gradients, where the graph of PyTorch's own backward pass is not at hand.

    The forward pass runs again for this graph. Inside of an operator there is no graph, and blocks compute the
    gradients.
    """
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_(is_wanted) for tensor, is_wanted in zip(call.tensors, wanted)]
        result = forward(AttentionCall.split(call.output, (*leaves, *call.settings)))
    if not result.requires_grad:
        if call.dropout_p:
            raise NotImplementedError(
                'attention(variant="sdpa"): with dropout gradients cannot be transformed; set dropout_p=0, or give '
                'variant="chunked"'
            )
        return in_blocks_backward(scaled_dots, dout, call, wanted)
    sources = [leaf for leaf in leaves if leaf.requires_grad]
    found = iter(torch.autograd.grad(result, sources, dout, allow_unused=True, materialize_grads=True))
    return [next(found) if is_wanted else None for is_wanted in wanted]


def requires_one_dtype(call: AttentionCall) -> str:
    dtypes = {tensor.dtype for tensor in call.tensors[:3]}
    if dtypes == {call.dtype}:
        return ""
    return f"needs query, key and value in the dtype of the result, {call.dtype}; got {', '.join(map(str, dtypes))}"


def requires_ordinary_scale(call: AttentionCall) -> str:
    if not abs(call.factor) < math.inf:
        return f"needs a finite scale, for PyTorch's kernels do not give NaN where it is due; got {call.scale}"
    if not call.is_causal or call.factor > 0:
        return ""
    return f"needs a positive scale if is_causal, for PyTorch's kernels give NaN with {call.scale}"


def requires_upper_left(call: AttentionCall) -> str:
    return "needs the upper left corner, for PyTorch's is_causal means that" if call.is_lower_right else ""


def requires_features(call: AttentionCall) -> str:
    is_empty = is_certain(call.tensors[0].shape[-1] == 0)
    return "needs features, for PyTorch 2.12 returns zeros without any" if is_empty else ""


def is_fused(call: AttentionCall) -> bool:
    """Whether `F.scaled_dot_product_attention` holds nothing of the size of queries times keys for this call."""
    if call.device.type == "cuda" and is_plain(call.tensors):
        return bool(_FourAxes(call).given_to(_fused_sdp_choice) != SDPBackend.MATH.value)
    query, key, value = call.tensors[:3]
    if call.device.type == "cuda":
        return call.dtype != torch.float64
    return (
        call.dropout_p == 0
        and not requires_grad((call.mask,))
        and query.shape[-1] == value.shape[-1] > 0
        and is_known(query.shape[-2] > 0)
        and is_known(key.shape[-2] > 0)
        and all(tensor.stride(-1) == 1 for tensor in (query, key, value))
    )


def serves_compiled(call: AttentionCall) -> bool:
    """Whether the kernels serve a compiled call on a CPU as the forms do.

    They round 16 bits, and give NaN where booleans exclude a key that is NaN. TorchInductor would copy expanded
    operands. Where the result is a view of what backward saves, PyTorch would not see that it was changed in place.
    """
    return (
        call.device.type == "cpu"
        and len(call.shape) == 4
        and all(tensor.dtype == call.arithmetic for tensor in call.tensors[:3])
        and not (call.masked and call.mask.dtype == torch.bool)
        and not call.is_lower_right
        and 0 < call.factor < math.inf
        and is_fused(call)
        and not _FourAxes(call).are_expanded
    )


FUSED = Fused(serves_compiled, forward)
