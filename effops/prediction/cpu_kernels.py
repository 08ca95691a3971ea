"""What the kernels of a CPU allocate inside, where those of a CUDA device do otherwise; measured with torch 2.13."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from effops.numerics.shapes import broadcast_shapes
from effops.prediction.allocations import Workspace
from effops.pytorch.operators import aten, is_elementwise
from effops.pytorch.prediction import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes, schema_of

FLOAT_BYTES, PLACE_BYTES = 4, 8
LOOP_MULTIPLICATIONS = 400  # products of a batch of fewer are plain loops, which take matrices as they lie
SMALL_IMAGE, FEW_CHANNELS = 128, 3  # which interpolation takes other kernels for
IMAGE_LAYOUTS = {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}  # by the number of axes
Rule = Callable[[Sequence[Any], Any], Workspace]


def elements_bytes(args: Sequence[Any], result: Tensor) -> int:
    return int(result.element_size() * math.prod(broadcast_shapes(args[0].shape, args[1].shape)))


def contiguous_copies(args: Sequence[Any], result: Any) -> Workspace:
    """Arguments that are not contiguous are copied, such as the gradient that comes from a sum."""
    given = (one for one in args if isinstance(one, Tensor) and not one.is_contiguous())
    return Workspace(sum(one.nbytes for one in given))


def has_ordered_rows(matrix: Tensor, *, single_anywhere: bool = False) -> bool:
    """Whether BLAS reads the matrix row by row as it lies; `single_anywhere` for a single row of any row stride."""
    is_single = single_anywhere and matrix.shape[-2] == 1
    return matrix.stride(-1) == 1 and (is_single or matrix.stride(-2) >= max(1, matrix.shape[-1]))


def _is_ordered(matrix: Tensor, *, single_anywhere: bool = False) -> bool:
    """Whether BLAS reads the matrix as it lies, by rows or by columns."""
    return any(has_ordered_rows(one, single_anywhere=single_anywhere) for one in (matrix, matrix.mT))


def matrix_copies(args: Sequence[Any], result: Tensor) -> Workspace:
    """A matrix is copied if neither its rows nor its columns lie in order; in a batch one at a time."""
    left, right = args[-2:]
    multiplications = math.prod(result.shape[-2:]) * left.shape[-1]
    if result.numel() == 0 or left.shape[-1] == 0:
        return Workspace()
    if left.ndim > 2:
        is_batched = torch.backends.mkl.is_available() and result.is_contiguous()
        if multiplications < LOOP_MULTIPLICATIONS:
            return Workspace()
        if is_batched and all(_is_ordered(one, single_anywhere=True) for one in (left, right)):
            return Workspace()
    copied = [one for one in (left, right) if not _is_ordered(one)]
    copied += [] if _is_ordered(result, single_anywhere=True) else [result]
    return Workspace(sum(math.prod(one.shape[-2:]) * one.element_size() for one in copied))


def _gelu_backward(args: Sequence[Any], result: Tensor) -> Workspace:
    """By the hyperbolic tangent it computes on tensors of any layout."""
    return Workspace() if "tanh" in args else contiguous_copies(args, result)


def _isinf(args: Sequence[Any], result: Tensor) -> Workspace:
    """It compares the magnitudes of floats."""
    return Workspace(args[0].nbytes if args[0].is_floating_point() else 0)


def _layer_norm_backward(args: Sequence[Any], result: tuple[Tensor | None, ...]) -> Workspace:
    """Each thread sums gradients of weight and bias by itself."""
    parameters = [one for one in result[1:] if one is not None]
    sums_bytes = 2 * torch.get_num_threads() * parameters[0].nbytes if parameters else 0
    return Workspace(contiguous_copies(args, result).temporary_bytes + sums_bytes)


def _group_norm_backward(args: Sequence[Any], result: tuple[Tensor, ...]) -> Workspace:
    """It holds two sums of each channel."""
    return Workspace(contiguous_copies(args, result).temporary_bytes + 2 * args[5] * args[6] * args[2].element_size())


def _batch_norm(args: Sequence[Any], result: tuple[Tensor, ...]) -> Workspace:
    """It holds a factor and a summand of each channel."""
    return Workspace(2 * args[0].shape[1] * max(FLOAT_BYTES, args[0].element_size()))


def _batch_norm_backward(args: Sequence[Any], result: tuple[Tensor, ...]) -> Workspace:
    """It holds a sum of each channel, or a tensor like the input where that and the gradient have the same layout."""
    upstream, input = args[:2]
    layouts = (torch.contiguous_format, *IMAGE_LAYOUTS.get(input.ndim, ()))
    if any(upstream.is_contiguous(memory_format=one) and input.is_contiguous(memory_format=one) for one in layouts):
        return Workspace(input.nbytes)
    return Workspace(input.shape[1] * max(FLOAT_BYTES, input.element_size()))


def _zeros_without_storage(args: Sequence[Any], result: Tensor) -> Workspace:
    return Workspace(result_bytes={0: 0})


def _safe_softmax(args: Sequence[Any], result: Tensor) -> Workspace:
    """It holds which elements are minus infinity, and of which rows all are."""
    rows = result.numel() // max(1, result.shape[args[1]]) if result.shape else 1
    return Workspace(result.numel() + rows)


def _interpolation(taps: int) -> Rule:
    """It holds a place and a weight of each tap, for each position along each axis."""

    def rule(args: Sequence[Any], result: Tensor) -> Workspace:
        held = taps * (PLACE_BYTES + args[0].element_size()) * sum(result.shape[2:])
        return Workspace(held, known=args[0].is_contiguous())

    return rule


def _image_interpolation(taps: int) -> Rule:
    """It computes small images on copies with channels last. Such larger ones of few channels, and others, as they are.

    A result is small where its height and width add up to `SMALL_IMAGE`. By two taps, one thread computes on such
    copies of all images of three channels.
    """

    def rule(args: Sequence[Any], result: Tensor) -> Workspace:
        is_last = args[0].is_contiguous(memory_format=torch.channels_last)
        by_one_thread = taps == 2 and result.shape[1] == FEW_CHANNELS and torch.get_num_threads() == 1
        is_small = sum(result.shape[2:]) <= SMALL_IMAGE
        if is_small or by_one_thread or (is_last and result.shape[1] > FEW_CHANNELS):
            return Workspace(0 if is_last else args[0].nbytes + result.nbytes)
        return _interpolation(taps)(args, result)._replace(known=True)

    return rule


def _pooling_backward(args: Sequence[Any], result: Tensor) -> Workspace:
    """Images in another layout than that of their batch, channels and rows were not measured."""
    return contiguous_copies(args, result)._replace(known=args[1].is_contiguous())


def _mv(args: Sequence[Any], result: Tensor) -> Workspace:
    matrix = args[-2]
    return Workspace(0 if _is_ordered(matrix, single_anywhere=True) else matrix.numel() * matrix.element_size())


def _triangle(args: Sequence[Any], result: Tensor) -> Workspace:
    """A batch of matrices is copied if it is not laid out in order."""
    return contiguous_copies(args, result) if result.ndim > 2 else Workspace()


def _count_nonzero(args: Sequence[Any], result: Tensor) -> Workspace:
    """Along some axes it sums what is not zero, as integers."""
    is_whole = len(args) < 2 or args[1] is None
    return Workspace(0 if is_whole else (1 + PLACE_BYTES) * args[0].numel())


def _ldexp(args: Sequence[Any], result: Tensor) -> Workspace:
    """It holds the powers of two."""
    return Workspace(args[1].numel() * result.element_size())


def _abs(args: Sequence[Any], result: Tensor) -> Workspace:
    """The magnitudes of complex numbers are complex numbers first."""
    return Workspace(args[0].nbytes if args[0].is_complex() else 0)


def _distance(args: Sequence[Any], result: Tensor) -> Workspace:
    return Workspace(elements_bytes(args, result))


def _places(args: Sequence[Any], result: Tensor) -> Workspace:
    """Indices that are not 64 bits wide are copied."""
    return Workspace(0 if args[2].dtype is torch.int64 else PLACE_BYTES * args[2].numel())


def _sort(args: Sequence[Any], result: Sequence[Tensor]) -> Workspace:
    """It holds the places along the axis, which is the only integer among its arguments."""
    axis = next((one for one in args[1:] if type(one) is int), -1)
    return Workspace(PLACE_BYTES * (args[0].shape[axis] if args[0].shape else 1))


def _median(args: Sequence[Any], result: Sequence[Tensor]) -> Workspace:
    """It sorts in part what lies along the axis, or a copy in which that lies in order."""
    input, axis = args[:2]
    is_copied = bool(input.shape) and input.shape[axis] > 1 and input.stride(axis) != 1
    return Workspace(input.numel() * input.element_size() * is_copied)


def _roll(args: Sequence[Any], result: Tensor) -> Workspace:
    """It holds a copy for each axis but the last."""
    axes = args[2] if len(args) > 2 else ()
    return Workspace(max(0, len(axes) - 1) * result.nbytes)


def _repeat(args: Sequence[Any], result: Tensor) -> Workspace:
    """It computes with tensors of the sizes of all axes."""
    return Workspace(4 * PLACE_BYTES * (result.ndim + 1) if result.numel() else 0)


def _scatter_reduce(args: Sequence[Any], result: Tensor) -> Workspace:
    """A mean counts what it adds to each element."""
    return Workspace(result.nbytes + args[3].nbytes + result.numel() if args[4] == "mean" else 0)


def _index_put(args: Sequence[Any], result: Tensor) -> Workspace:
    """The places of a mask are as many as it has true values."""
    return Workspace(known=not any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1]))


CPU_RULES: dict[Any, Rule] = {
    aten._efficientzerotensor.default: _zeros_without_storage,
    aten._safe_softmax.default: _safe_softmax,
    aten.abs.default: _abs,
    aten.count_nonzero.default: _count_nonzero,
    aten.count_nonzero.dim_IntList: _count_nonzero,
    aten.dist.default: _distance,
    aten.gelu_backward.default: _gelu_backward,
    aten.isinf.default: _isinf,
    aten.ldexp.Tensor: _ldexp,
    aten.native_batch_norm.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.index_put.default: _index_put,
    aten.index_put_.default: _index_put,
    aten.repeat.default: _repeat,
    aten.roll.default: _roll,
    aten.scatter_reduce.two: _scatter_reduce,
    **dict.fromkeys((aten.median.dim, aten.nanmedian.dim), _median),
    **dict.fromkeys((aten.sort.default, aten.sort.stable), _sort),
    **dict.fromkeys(
        (
            aten.gather.default,
            aten.scatter.src,
            aten.scatter.value,
            aten.scatter_.src,
            aten.scatter_add.default,
            aten.scatter_add_.default,
        ),
        _places,
    ),
    **dict.fromkeys((aten.mv.default, aten.addmv.default), _mv),
    **dict.fromkeys((aten.tril.default, aten.triu.default), _triangle),
    **dict.fromkeys(
        (
            aten.max_pool2d_with_indices_backward.default,
            aten.avg_pool2d_backward.default,
            aten._adaptive_avg_pool2d_backward.default,
        ),
        _pooling_backward,
    ),
    **dict.fromkeys(
        (
            aten._upsample_nearest_exact2d.default,
            aten.upsample_nearest2d.default,
        ),
        _image_interpolation(1),
    ),
    aten.upsample_bilinear2d.default: _image_interpolation(2),
    **dict.fromkeys(
        (
            aten._upsample_nearest_exact1d.default,
            aten._upsample_nearest_exact3d.default,
            aten.upsample_nearest1d.default,
            aten.upsample_nearest3d.default,
        ),
        _interpolation(1),
    ),
    **dict.fromkeys((aten.upsample_linear1d.default, aten.upsample_trilinear3d.default), _interpolation(2)),
    aten.upsample_bicubic2d.default: _interpolation(4),
}


# Element-wise operators compute in one dtype, and reductions in the dtype of their result. On a CPU they take copies of
# operands that are not in it. A CUDA device converts numbers one by one.
MASKED = {aten.where.packet, aten.masked_fill.packet, aten.masked_fill_.packet}  # whose masks are not converted
REDUCTIONS = {
    aten.all.packet,
    aten.any.packet,
    aten.cumprod.packet,
    aten.cumsum.packet,
    aten.linalg_vector_norm.packet,
    aten.mean.packet,
    aten.nansum.packet,
    aten.prod.packet,
    aten.sum.packet,
}
LOSSES = {  # with the place of the argument that says how they are reduced
    aten.binary_cross_entropy.packet: 3,
    aten.binary_cross_entropy_with_logits.packet: 4,
    aten.huber_loss.packet: 2,
    aten.mse_loss.packet: 2,
    aten.smooth_l1_loss.packet: 2,
    aten.soft_margin_loss.packet: 2,
}
MEAN = 1  # such a reduction


def converted_bytes(func: Any, args: Sequence[Any], result: Any) -> int:
    """The bytes of operands of a call that are copied in another dtype."""
    if not isinstance(result, Tensor):
        return 0
    if result.dtype in (torch.bfloat16, torch.float16):  # a mean of these is taken, and made, in float32
        if func.overloadpacket is aten.mean.packet:
            return _copied_bytes((args[0], result), torch.float32)
        if func.overloadpacket in LOSSES:
            is_mean = (*args, MEAN)[min(len(args), LOSSES[func.overloadpacket])] == MEAN
            elements = elements_bytes(args, result) // result.element_size()
            return FLOAT_BYTES * elements if is_mean else 0
        if func.overloadpacket is aten.sum.packet and not _is_one_axis(args[0], args[1] if len(args) > 1 else None):
            sums = int(result.numel()) if result.numel() > 1 else 0
            return FLOAT_BYTES * (int(args[0].numel()) + sums)
    if func.overloadpacket in REDUCTIONS:
        is_norm = args[0].is_complex() and not result.is_complex()  # its magnitudes are taken while it is read
        return 0 if is_norm else _copied_bytes(args[:1], result.dtype)
    if not is_elementwise(func):
        return 0
    operands: Sequence[Any] = [one for one in args if isinstance(one, (Tensor, float, int))]
    tensors = [one for one in operands if isinstance(one, Tensor)]
    if func.overloadpacket in MASKED:
        operands = tensors = [one for one in tensors if one.dtype is not torch.bool]
    if not tensors:
        return 0
    dtype = _dtype(operands, result)
    written = tensors[:1] if schema_of(func).is_mutable else []
    return _copied_bytes((*tensors, *written), dtype)


def _dtype(operands: Sequence[Any], result: Tensor) -> torch.dtype:
    """The dtype in which an element-wise operator computes: floats for a result in floats, whatever its operands."""
    _, dtype = elementwise_dtypes(*operands, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT)
    return result.dtype if result.is_floating_point() and not (dtype.is_floating_point or dtype.is_complex) else dtype


def _is_one_axis(tensor: Tensor, dims: Sequence[int] | None) -> bool:
    """Whether the elements along some axes, or along all, lie at equal distances in memory, in whatever order."""
    chosen = {dim % tensor.ndim for dim in dims} if dims and tensor.ndim else set(range(tensor.ndim))
    layout = enumerate(zip(tensor.stride(), tensor.shape))
    axes = sorted((stride, size) for axis, (stride, size) in layout if size > 1 and axis in chosen)
    return all(outer == inner * size for (inner, size), (outer, _) in itertools.pairwise(axes))


def _copied_bytes(tensors: Sequence[Tensor], dtype: torch.dtype) -> int:
    return sum(dtype.itemsize * one.numel() for one in tensors if one.dtype != dtype)
