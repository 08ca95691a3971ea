"""The workspace of PyTorch's operators on a CPU: what they allocate inside, which fake tensors do not show.

All of it was measured with torch 2.13. `RULES` tell how much some operators allocate; the rules of those in `CPU_ONLY`
say nothing of a CUDA device. The operators in `UNKNOWN` and `PROBED` were seen to allocate more than their results,
and no rule tells how much. Any other operator is taken to allocate its results alone. `anatomy(..., measure=True)`
shows where that is wrong.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from effops.prediction.allocations import INDUCTOR, Allocations, Bytes, Workspace, fake_mode, round_up
from effops.prediction.convolutions import convolution, convolution_backward, is_measured_cpu
from effops.prediction.cpu_kernels import (
    CPU_RULES,
    Rule,
    contiguous_copies,
    converted_bytes,
    elements_bytes,
    matrix_copies,
)
from effops.prediction.outcomes import FLASH_ATTENTION, OperatorCall, Outcome, result_of, sums_of_attention
from effops.prediction.probes import PROBED, UNKNOWN
from effops.pytorch.calls import FakeTensor, tree_leaves
from effops.pytorch.operators import aten, onednn
from effops.pytorch.prediction import schema_of
from effops.text import format_bytes

FLASH_ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
KNOWN_NAMESPACES = "aten", "prim", "prims", "profiler", "effops"

PRODUCTS = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.addmm_.default,
    aten.baddbmm.default,
    aten.baddbmm_.default,
    aten.addbmm.default,
    aten.mv.default,
    aten.addmv.default,
    aten.dot.default,
    aten.vdot.default,
}
GROUPED_PRODUCT = aten._grouped_mm.default
ONEDNN_MULTIPLICATIONS = 16**3  # products of up to so many go to other kernels
PACKED_LENGTHS = {torch.bfloat16: 64, torch.float16: 16}  # attention packs keys from so many queries and keys on


WITH_OPTIONS = {
    FLASH_ATTENTION,
    aten.gelu_backward.default,
    aten.sort.stable,
}  # operators whose rules look at what they are given by name
BODIES: dict[str, Callable[..., Any]] = {}  # what our operators run, by their names
CPU_ONLY = {
    aten.convolution.default,
    aten.convolution_backward.default,
    aten.mkldnn_rnn_layer.default,
    aten.mkldnn_rnn_layer_backward.default,
}


def workspace(func: Any, args: Sequence[Any], options: Mapping[str, Any], result: Any, cuda: bool = False) -> Workspace:
    """The workspace of a call on fake tensors; with `cuda` they stand for tensors of a CUDA device."""
    if cuda and func in CPU_ONLY:
        return Workspace(known=False)
    if func.namespace == "effops":
        return _body(func, args, cuda)
    is_known = func.namespace in KNOWN_NAMESPACES and func not in UNKNOWN and func not in PROBED
    rule = RULES.get(func) if cuda else CPU_RULES.get(func, RULES.get(func))
    given = (*args, *options.values()) if func in WITH_OPTIONS else args
    found = rule(given, result) if rule else Workspace(known=is_known)
    if cuda:
        return found
    return found._replace(
        temporary_bytes=found.temporary_bytes + converted_bytes(func, args, result),
        known=found.known and not _is_onednn_product(func, args, result),
    )


def told_temporary_bytes(nbytes: int, unknown: str) -> str:
    """Predicted bytes, with what is not known of them."""
    text = format_bytes(nbytes)
    return f"about {text}" if unknown == INDUCTOR else f"{text} or more" if unknown else text


def caution(unknown: Iterable[str]) -> str:
    """A line that names operators which may allocate more than is predicted; empty if there are none."""
    names = [name for name in unknown if name != INDUCTOR]
    allocate = "allocates" if len(names) == 1 else "allocate"
    return f"not known, and not counted: what {', '.join(names)} {allocate} inside" if names else ""


def _loss(args: Sequence[Any], result: Tensor) -> Workspace:
    """A reduced loss keeps its scalar on a storage of all elements, and holds as much again during the call."""
    nbytes = elements_bytes(args, result)
    return Workspace(0 if result.shape else nbytes, {0: nbytes})


def _loss_in_place(args: Sequence[Any], result: Tensor) -> Workspace:
    """A reduced loss keeps its scalar on a storage of all elements."""
    return Workspace(0, {0: elements_bytes(args, result)})


def _huber_loss(args: Sequence[Any], result: Tensor) -> Workspace:
    return Workspace(0 if result.shape else elements_bytes(args, result))


def _binary_cross_entropy_with_logits(args: Sequence[Any], result: Tensor) -> Workspace:
    """It holds the logarithm of the sigmoid and the loss of all elements, and a copy of the positives' weights."""
    weights_bytes = args[3].nbytes if len(args) > 3 and args[3] is not None else 0
    return Workspace(elements_bytes(args, result) * (1 if result.shape else 2) + weights_bytes)


def _attention(args: Sequence[Any], result: tuple[Tensor, ...]) -> Workspace:
    """Each thread holds a block of weights, its maxima, sums and results; in a narrow dtype also rounded weights.

    A mask is copied, with all queries and keys, if its keys do not lie in order.
    """
    (_, _, queries, features), keys = args[0].shape, args[1].shape[2]
    masks = (one for one in args[3:] if isinstance(one, Tensor) and one.shape[-1] > 1 and one.stride(-1) > 1)
    copied = sum(math.prod(mask.shape[:-2]) * queries * keys * mask.element_size() for mask in masks)
    rows, pairs = _attention_block(queries, keys)
    itemsize, wide_bytes = args[0].element_size(), sums_of_attention(args[0]).itemsize
    block_bytes = (pairs + rows * (2 + features)) * wide_bytes + _rounded_weights_bytes(itemsize, wide_bytes, pairs)
    return Workspace(copied + torch.get_num_threads() * block_bytes)


def _attention_backward(args: Sequence[Any], result: tuple[Tensor, ...]) -> Workspace:
    """Each thread holds the weights of a block and their gradients.

    The gradient from above is copied if its layout is another one.
    """
    upstream, query, key, wide_bytes = args[0], args[1], args[2], sums_of_attention(args[1]).itemsize
    rows, pairs = _attention_block(query.shape[2], key.shape[2])
    thread_bytes = 2 * (pairs * wide_bytes + _rounded_weights_bytes(query.element_size(), wide_bytes, pairs))
    copied = 0 if upstream.transpose(1, 2).is_contiguous() else upstream.nbytes
    return Workspace(torch.get_num_threads() * thread_bytes + rows * wide_bytes + copied)


def _attention_block(queries: int, keys: int) -> tuple[int, int]:
    """The number of queries in a block of attention, and the number of pairs."""
    rows = min(queries, 256 if queries >= 768 else 64 if queries >= 192 else 32)
    return rows, rows * min(512, keys)


def _rounded_weights_bytes(itemsize: int, wide_bytes: int, pairs: int) -> int:
    return pairs * itemsize if itemsize < wide_bytes else 0


def _is_onednn_product(func: Any, args: Sequence[Any], result: Any) -> bool:
    """Whether oneDNN multiplies in a narrow dtype here, and takes memory from PyTorch's allocator.

    A product has a scratchpad, and attention packs keys and values. No rule tells how much that is: oneDNN decides by
    sizes, threads and instructions of the CPU.
    """
    if func in PRODUCTS or func is GROUPED_PRODUCT:
        left = args[0] if func is GROUPED_PRODUCT else args[-2]
        dtype = left.dtype
        if dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest":
            dtype = torch.bfloat16  # to which such a product may round
        return dtype in _onednn_dtypes() and result.numel() * left.shape[-1] > ONEDNN_MULTIPLICATIONS
    if func is FLASH_ATTENTION:
        query, key = args[:2]
        return query.dtype in _onednn_dtypes() and min(query.shape[2], key.shape[2]) >= PACKED_LENGTHS[query.dtype]
    if func is FLASH_ATTENTION_BACKWARD:
        query, key = args[1:3]
        _, pairs = _attention_block(query.shape[2], key.shape[2])
        return query.dtype in _onednn_dtypes() and pairs * query.shape[3] > ONEDNN_MULTIPLICATIONS
    return False


@cache
def _onednn_dtypes() -> frozenset[torch.dtype]:
    """Narrow dtypes in which oneDNN computes products on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return frozenset()
    supported = {
        torch.bfloat16: onednn._is_mkldnn_bf16_supported.packet(),
        torch.float16: onednn._is_mkldnn_fp16_supported.packet(),
    }
    return frozenset(dtype for dtype, is_supported in supported.items() if is_supported)


def _logsumexp(args: Sequence[Any], result: Tensor) -> Workspace:
    """It holds the exponentials, and the maxima beside the result."""
    return Workspace((args[0].numel() + result.numel()) * result.element_size())


def _layer_norm(args: Sequence[Any], result: tuple[Tensor, ...]) -> Workspace:
    """Mean and deviation have the dtype of the weight if it is wider than that of the input."""
    copied, (weight, mean) = contiguous_copies(args, result), (args[2], result[1])
    if weight is None or weight.dtype == mean.dtype:
        return copied
    nbytes = weight.element_size() * mean.numel()
    return Workspace(copied.temporary_bytes, {1: nbytes, 2: nbytes})


PAGE_BYTES = 4096
ONEDNN_STATE_BYTES = 12856
ONEDNN_INFERENCE_BYTES = PAGE_BYTES + 776


def _lstm(args: Sequence[Any], result: tuple[Tensor, ...]) -> Workspace:
    """oneDNN keeps the gates and states of all steps of a layer, each kind on pages of its own.

    Without gradients it keeps the gates of one step only, and releases everything when the call ends. It also copies
    the weights into its own layout.
    """
    input, hidden_size, trains = args[0], args[10], args[15]
    if input.dtype is not torch.float32:
        return Workspace(known=False)
    steps, batch, size = input.shape
    rows, inputs, outputs = (steps * batch, 3, 2) if trains else (batch, 1, 1)
    states = 2 * (steps + 1) * batch
    sections = [
        rows * _leading_dimension(4 * hidden_size),
        rows * _leading_dimension(hidden_size),
        *[states * _leading_dimension(max(size, hidden_size))] * inputs,
        *[states * hidden_size] * outputs,
    ]
    nbytes = sum(round_up(4 * count, PAGE_BYTES) for count in sections)
    if trains:
        return Workspace(result_bytes={3: nbytes})
    weights_bytes = 16 * ((size + hidden_size) * round_up(hidden_size, 16) + hidden_size)
    return Workspace(nbytes + weights_bytes + ONEDNN_INFERENCE_BYTES, known=is_measured_cpu())


def _lstm_backward(args: Sequence[Any], result: Any) -> Workspace:
    """It holds the gradients of the gates of all steps, and of the weights in oneDNN's layout.

    The weights are copied into that layout if they have another one.
    """
    input, hx, output, upstream, hidden_size = args[0], args[5], args[7], args[10], args[15]
    if input.dtype is not torch.float32:
        return Workspace(known=False)
    elements, gates = input.shape[0] * input.shape[1], 4 * hidden_size
    copied = output.numel() if upstream is None or not upstream.is_contiguous() else 0
    floats = 2 * hx.numel() + gates + copied
    for size in (input.shape[2], hidden_size):
        padded = _leading_dimension(size)
        floats += size * _leading_dimension(gates) + (gates * padded if size != padded else 0)
    return Workspace(4 * floats + round_up(4 * elements * _leading_dimension(gates), PAGE_BYTES) + ONEDNN_STATE_BYTES)


def _leading_dimension(size: int) -> int:
    """The leading dimension that oneDNN gives to rows of floats."""
    rounded = round_up(size, 16)
    return rounded + 16 if rounded % 256 == 0 else rounded


def register_body(name: str, function: Callable[..., Any]) -> None:
    """Tell what an operator of ours runs, so that what it allocates is found by running that on fake tensors."""
    BODIES[name] = function


def _body(func: Any, args: Sequence[Any], cuda: bool) -> Workspace:
    """The workspace of one of our operators: what its body allocates."""
    function = BODIES[schema_of(func).name.split("::")[1]]
    with Inside(cuda) as allocations:
        for tensor in (leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)):
            allocations.count(tensor, nbytes=0)
        result = function(*args)
        kept = allocations.live_bytes
        del result
    return Workspace(int(allocations.peak_bytes - kept), known=not allocations.unknown)


MOST_REMEMBERED = 10000  # calls of operators
_remembered: dict[Any, tuple[Outcome, Workspace]] = {}


class Inside(Allocations):
    """Counts what operators allocate, their workspaces too. It names those in `unknown` that may allocate more.

    It takes operators apart where PyTorch does not by itself. With `cuda`, tensors stand for those of a CUDA device.
    """

    def __init__(self, cuda: bool = False) -> None:
        super().__init__()
        self.cuda = cuda
        self.unknown: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # a quarter of all calls
        call = OperatorCall(func, args, kwargs or {})
        key = call.key, self.cuda, torch.get_num_threads(), torch.get_float32_matmul_precision()
        known = _remembered.get(key)
        if known is not None:
            outcome, allocated = known
            result = outcome(call.tensors)
        else:
            if func.namespace == "aten":
                with self:
                    result = func.decompose(*args, **call.kwargs)
                if result is not NotImplemented:
                    return result
            result = result_of(func, args, call.kwargs)
            allocated = workspace(func, args, call.kwargs, result, self.cuda)
            made = call.outcome(result) if func.namespace == "aten" else None  # our operators have settings besides
            if made is not None:
                if len(_remembered) >= MOST_REMEMBERED:
                    _remembered.clear()
                _remembered[key] = made, allocated
        self.count_all(result)
        self.hold(allocated.temporary_bytes)
        if not allocated.known:
            self.unknown.add(schema_of(func).name)
        return result

    def hold(self, nbytes: int) -> None:
        """Count what an operator allocates and releases inside."""
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + nbytes)


class InsideUntilReturned(Inside):
    """Counts likewise, and tells at the end how much was there at once of what is not returned."""

    def __init__(self, cuda: bool = False) -> None:
        super().__init__(cuda)
        self.events: list[tuple[weakref.ref[Any] | None, int]] = []  # a storage and its bytes, or what an operator held

    def allocate(self, reference: weakref.ref[Any], nbytes: int) -> None:
        self.events.append((reference, nbytes))
        super().allocate(reference, nbytes)

    def release(self, reference: weakref.ref[Any]) -> None:
        self.events.append((reference, -self.storages[reference]))
        super().release(reference)

    def hold(self, nbytes: int) -> None:
        self.events.append((None, nbytes))
        super().hold(nbytes)

    def most_bytes_without(self, results: Sequence[Tensor | None]) -> int:
        """The highest sum, at any moment, of live storages that are none of the results."""
        returned = {weakref.ref(one.untyped_storage()) for one in results if one is not None}
        known = {id(reference) for reference in self.storages if reference in returned}
        live = most = 0
        for reference, nbytes in self.events:
            if reference is None:
                most = max(most, live + nbytes)
            elif id(reference) not in known:
                live += nbytes
                most = max(most, live)
        return most


def predict_bytes(function: Callable[..., Tensor], *tensors: Tensor, made: Sequence[bool] = ()) -> Bytes:
    """Predict the bytes of `function(*tensors)` in the current grad mode.

    The tensors may be on any device, or meta tensors. Those that are `made` for the call are among what it allocates.
    So are copies of those whose memory holds the negatives of their values.
    """
    grad, cuda = torch.is_grad_enabled(), tensors[0].device.type == "cuda"
    made = made or (False,) * len(tensors)
    # The graph keeps what requires gradients: with a copy, it begins with a leaf that takes no memory.
    copied = [one.is_neg() or (is_made and one.requires_grad) for one, is_made in zip(tensors, made)]
    # In inference mode a dispatch mode does not see what composite operators call.
    with torch.inference_mode(False), torch.set_grad_enabled(grad), fake_mode(allow_non_fake_inputs=True):
        fakes = [
            torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="cpu", requires_grad=one.requires_grad)
            for one in tensors
        ]
        with Inside(cuda) as allocations:
            for fake, is_made, is_copied in zip(fakes, made, copied):
                allocations.count(fake, nbytes=None if is_made and not is_copied else 0)
            operands = [fake.clone() if is_copied else fake for fake, is_copied in zip(fakes, copied)]
            output = function(*operands)
            del fakes, operands, fake
            output_bytes = allocations.storages.get(weakref.ref(output.untyped_storage()), 0)
            saved_bytes = allocations.live_bytes - output_bytes
    temporary_bytes = allocations.peak_bytes - output_bytes - saved_bytes
    return Bytes(output_bytes, saved_bytes, temporary_bytes, ", ".join(sorted(allocations.unknown)))


RULES: dict[Any, Rule] = {
    aten.mse_loss.default: _loss,
    aten.smooth_l1_loss.default: _loss,
    aten.huber_loss.default: _huber_loss,
    aten.binary_cross_entropy.default: _loss_in_place,
    aten.soft_margin_loss.default: _loss_in_place,
    aten.binary_cross_entropy_with_logits.default: _binary_cross_entropy_with_logits,
    FLASH_ATTENTION: _attention,
    FLASH_ATTENTION_BACKWARD: _attention_backward,
    **dict.fromkeys(
        (
            aten._softmax.default,
            aten._log_softmax.default,
            aten._softmax_backward_data.default,
            aten._log_softmax_backward_data.default,
            aten.native_layer_norm_backward.default,
            aten.gelu_backward.default,
            aten.max_pool2d_with_indices_backward.default,
            aten.max_pool3d_with_indices_backward.default,
            aten.avg_pool2d_backward.default,
            aten.avg_pool3d_backward.default,
            aten._adaptive_avg_pool2d_backward.default,
            aten._adaptive_avg_pool3d_backward.default,
            aten.adaptive_max_pool2d_backward.default,
            aten.adaptive_max_pool3d_backward.default,
            aten.embedding_dense_backward.default,
            aten.fractional_max_pool2d_backward.default,
            aten.fractional_max_pool3d_backward.default,
            aten.pixel_shuffle.default,
            aten.pixel_unshuffle.default,
            aten.reflection_pad1d_backward.default,
            aten.reflection_pad2d_backward.default,
            aten.reflection_pad3d_backward.default,
            aten.replication_pad1d_backward.default,
            aten.replication_pad2d_backward.default,
            aten.replication_pad3d_backward.default,
            aten._upsample_nearest_exact1d_backward.default,
            aten._upsample_nearest_exact2d_backward.default,
            aten._upsample_nearest_exact3d_backward.default,
            aten.upsample_linear1d_backward.default,
            aten.upsample_bicubic2d_backward.default,
            aten.upsample_bilinear2d_backward.default,
            aten.upsample_trilinear3d_backward.default,
            aten.upsample_nearest1d_backward.default,
            aten.upsample_nearest2d_backward.default,
            aten.upsample_nearest3d_backward.default,
            aten.grid_sampler_2d_backward.default,
        ),
        contiguous_copies,
    ),
    aten.logsumexp.default: _logsumexp,
    **dict.fromkeys(
        (
            aten.mm.default,
            aten.addmm.default,
            aten.addmm_.default,
            aten.bmm.default,
            aten.baddbmm.default,
            aten.baddbmm_.default,
        ),
        matrix_copies,
    ),
    aten.native_layer_norm.default: _layer_norm,
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
    aten.mkldnn_rnn_layer.default: _lstm,
    aten.mkldnn_rnn_layer_backward.default: _lstm_backward,
}
