"""Probes: what an operator allocates inside, and how its results lie, found by running that one operator on this CPU.

A probe gives the operator tensors of the same shapes, strides and dtypes, and follows the allocator meanwhile. What it
finds is remembered in the process. A convolution that is too large is probed with smaller batches, which tell how its
workspace grows with the batch. How results lie is found with a small batch, where the operator takes one.
"""

import itertools
import math
import statistics
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from effops.numerics.shapes import broadcast_shapes
from effops.prediction.allocations import Workspace
from effops.prediction.convolutions import backend_of, unfolded_bytes
from effops.prediction.operations import CONTRACTION, operations
from effops.prediction.outcomes import OperatorCall
from effops.pytorch.calls import tree_leaves, tree_map_only
from effops.pytorch.operators import aten
from effops.pytorch.prediction import (
    ProfilerConfig,
    ProfilerState,
    _disable_current_modes,
    _disable_profiler_legacy,
    _enable_profiler_legacy,
    _ExperimentalConfig,
    is_profiled,
    schema_of,
)

# What may run takes about a tenth of a second on two cores, but for kernels that are slow.
MOST_BYTES = 2**28  # of operands and results, and of the unfolded input of a convolution
MOST_OPERATIONS = 2**32  # of a contraction
MOST_OPERATIONS_AT_ONCE = 2**35  # of a convolution of few images, about a second, where smaller batches do not tell
QUICK_BYTES = 2**24  # more is left to small batches, where they tell
SMALL_BATCHES = 2, 3, 4
LEAST_BATCH, MOST_BATCH = 2, 32  # of a convolution: a batch of one goes to other kernels
LEAST_PROBED, MOST_PROBED = 3, 4  # batches, each larger by one
POWER_OPERATIONS = 64  # about what a power costs
BATCHES = {aten.convolution.default: (0,), aten.convolution_backward.default: (0, 1)}  # arguments that have one
# Operators that draw numbers on other devices.
WITHOUT_DROPOUT = {aten._scaled_dot_product_flash_attention_for_cpu.default}
# Operators that were seen to allocate more than their results on a CPU, with torch 2.13, by no rule that is known.
# A probe tells what the first ones allocate.
PROBED = {
    aten._cdist_forward.default,
    aten._chunk_cat.default,
    aten._euclidean_dist.default,
    aten._fft_c2c.default,
    aten._fft_c2r.default,
    aten._fft_r2c.default,
    aten._native_multi_head_attention.default,
    aten._scaled_mm.default,
    aten._scaled_mm_v2.default,
    aten._transformer_encoder_layer_fwd.default,
    aten._trilinear.default,
    aten.affine_grid_generator.default,
    aten.bucketize.Tensor,
    aten.channel_shuffle.default,
    aten.col2im.default,
    aten.histc.default,
    aten.im2col.default,
    aten.kthvalue.default,
    aten.mvlgamma.default,
    aten.native_channel_shuffle.default,
    aten.renorm.default,
    aten.searchsorted.Tensor,
    aten.unfold_backward.default,
}
# Of these a probe does not: values decide, or the formula of their gradient goes another way while modes observe it.
UNKNOWN = {
    aten._cholesky_solve_helper.default,
    aten._embedding_bag.default,
    aten._embedding_bag_forward_only.default,
    aten._linalg_det.default,
    aten._linalg_eigh.default,
    aten._linalg_eigvals.default,
    aten._linalg_slogdet.default,
    aten._linalg_solve_ex.default,
    aten._linalg_svd.default,
    aten._unsafe_masked_index.default,
    aten._unsafe_masked_index_put_accumulate.default,
    aten._upsample_bicubic2d_aa.default,
    aten._upsample_bilinear2d_aa.default,
    aten.cholesky.default,
    aten.cholesky_solve.default,
    aten.index_copy.default,
    aten.index_reduce.default,
    aten.isin.Tensor_Tensor,
    aten.linalg_cholesky_ex.default,
    aten.linalg_eig.default,
    aten.linalg_householder_product.default,
    aten.linalg_inv_ex.default,
    aten.linalg_ldl_factor_ex.default,
    aten.linalg_ldl_solve.default,
    aten.linalg_lu.default,
    aten.linalg_lu_factor_ex.default,
    aten.linalg_matrix_exp.default,
    aten.linalg_pinv.atol_rtol_float,
    aten.linalg_pinv.atol_rtol_tensor,
    aten.lu_unpack.default,
    aten.masked_scatter.default,
    aten.masked_scatter_backward.default,
    aten.multinomial.default,
    aten.segment_reduce.default,
    aten.soft_margin_loss_backward.default,
}
NOT_PROBED = UNKNOWN | {
    # Values decide what these allocate.
    aten._grouped_mm.default,
    aten.index_put.default,
    aten.index_put_.default,
    # It reads what the forward pass has left in memory of its own layout.
    aten.mkldnn_rnn_layer_backward.default,
}


@dataclass(frozen=True)
class Layout:
    """What a probe keeps of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "Layout":
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def with_batch(self, batch: int, size: int) -> "Layout":
        """The same for a batch of another size, if the first and outermost axis is the batch."""
        if not self.shape or self.shape[0] != batch or self.stride[0] < max(self.stride):
            return self
        return replace(self, shape=(size, *self.shape[1:]))

    @property
    def elements(self) -> int:
        """The number of elements in memory."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride))

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize

    def tensor(self) -> Tensor:
        """Ones, or zeros where they are integers: those are places in another tensor."""
        value = 1 if self.dtype.is_floating_point or self.dtype.is_complex else 0
        memory = torch.full((self.elements,), value, dtype=self.dtype, device="cpu")
        return memory.as_strided(self.shape, self.stride)


def lies_otherwise(call: OperatorCall, result: Any) -> bool:
    """Whether the results of a call may have other strides than `result`, which it has on fake tensors.

    So have those of some operators where an operand is not contiguous, as images with channels last are not.
    """
    schema = schema_of(call.func)
    if schema.is_mutable or any(one.alias_info for one in schema.returns):
        return False
    if all(leaf.is_contiguous() for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor)):
        return False
    return operations(call.func, call.args, call.kwargs, result)[0] != CONTRACTION  # those lie as the fake ones do


def probed(call: OperatorCall, result: Any) -> Workspace | None:
    """The workspace of a call that has `result`, both on fake tensors; None where a probe cannot tell."""
    func = call.func
    if func.namespace != "aten" or func in NOT_PROBED:
        return None
    if torch.Tag.nondeterministic_seeded in func.tags and func not in WITHOUT_DROPOUT:  # a probe draws no numbers
        return None
    given = [leaf for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor)]
    if not given or any(one.layout is not torch.strided or one.is_neg() or one.is_conj() for one in given):
        return None
    args, kwargs = tree_map_only(Tensor, Layout.of, (call.args, call.kwargs))
    settings = torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled
    key = f"{func} {args} {kwargs} {torch.is_grad_enabled()} {settings}"
    with _LOCK:
        if key not in _found:
            if is_profiled():  # operators would be seen that the program does not call
                return None
            _found[key] = _workspace(call, args, kwargs, result)
        return _found[key]


_found: dict[str, Workspace | None] = {}
_LOCK = threading.Lock()  # probes take turns, and find what others have found


def _workspace(call: OperatorCall, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Workspace | None:
    scale = _largest_part(call, result)
    if call.func in BATCHES:
        if scale < 1:
            found = _of_larger_batch(call, args, min(MOST_BATCH, int(scale * args[0].shape[0])))
            if found is not None:
                return found
            scale = _largest_part(call, result, MOST_OPERATIONS_AT_ONCE)
    elif scale < MOST_BYTES / QUICK_BYTES and lies_otherwise(call, result):
        found = _of_small_batches(call, args, kwargs, result)
        if found is not None:
            return found
    ran = _run(call.func, args, kwargs) if scale >= 1 else None
    return None if ran is None else ran.workspace(result)


def _largest_part(call: OperatorCall, result: Any, most_operations: int = MOST_OPERATIONS) -> float:
    """The part of a call that is small enough to run; 1 or more for the whole call."""
    given = [leaf for leaf in tree_leaves((call.args, call.kwargs, result)) if isinstance(leaf, Tensor)]
    nbytes = sum(Layout.of(one).nbytes for one in given)
    if call.func in BATCHES:
        nbytes += unfolded_bytes(call.func, call.args, result)
    return min(MOST_BYTES / max(1, nbytes), most_operations / max(1, _operations(call, result)))


def _operations(call: OperatorCall, result: Any) -> int:
    """How many operations a call makes that takes the time of a contraction; 0 for other calls."""
    if call.func is aten.convolution_backward.default:  # PyTorch counts its groups wrongly
        upstream, input, weight = call.args[:3]
        images = input if call.args[7] else upstream
        return 4 * int(images.numel()) * int(weight[0].numel())
    if call.func is aten._cdist_forward.default:
        return POWER_OPERATIONS * int(result.numel()) * int(call.args[0].shape[-1])
    if call.func is aten._trilinear.default:
        expanded = zip(call.args[:3], call.args[3:6])
        return math.prod(broadcast_shapes(*(_unsqueezed(one.shape, axes) for one, axes in expanded)))
    kind, count = operations(call.func, call.args, call.kwargs, result)
    return count if kind == CONTRACTION else 0


def _unsqueezed(shape: Sequence[int], axes: Sequence[int]) -> tuple[int, ...]:
    sizes = list(shape)
    for axis in sorted(axes):
        sizes.insert(axis, 1)
    return tuple(sizes)


def _of_larger_batch(call: OperatorCall, args: Sequence[Any], fitting: int) -> Workspace | None:
    """The workspace of a convolution, from those of the batches of up to `fitting`, which may run.

    It grows by the same bytes with each item of a batch, but for some batches that occupy more threads. None if it does
    not, or if smaller batches go to other kernels.
    """
    sizes = range(max(LEAST_BATCH, fitting - MOST_PROBED + 1), fitting + 1)
    if len(sizes) < LEAST_PROBED:
        return None
    backend = backend_of(call.func, call.args)
    found: list[tuple[int, int]] = []
    for size in sizes:
        fewer = [
            replace(one, shape=(size, *one.shape[1:])) if place in BATCHES[call.func] else one
            for place, one in enumerate(args)
        ]
        ran = _run(call.func, fewer, call.kwargs, backend=backend)
        if ran is None:
            return None
        found.append((ran.temporary_bytes, ran.early_bytes))
    growth = [(after[0] - before[0], after[1] - before[1]) for before, after in itertools.pairwise(found)]
    usual = statistics.mode(growth)
    if growth.count(usual) < 2:
        return None
    temporary, early = (last + more * (args[0].shape[0] - fitting) for last, more in zip(found[-1], usual))
    return Workspace(temporary, early_bytes=early)


def _of_small_batches(
    call: OperatorCall, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> Workspace | None:
    """The workspace of a call and the strides of its results, from those of small batches.

    The first axis of the largest operand is taken as a batch. None if the call takes no smaller one, or too much memory
    for it, or if what it allocates does not grow by the same bytes with each item.
    """
    operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Layout) and leaf.shape]
    batch = max(operands, key=lambda one: math.prod(one.shape)).shape[0]
    if batch < SMALL_BATCHES[-1]:
        return None
    found: list[Run] = []
    for size in SMALL_BATCHES:
        fewer = tree_map_only(Layout, partial(Layout.with_batch, batch=batch, size=size), (args, kwargs))
        is_small = sum(leaf.nbytes for leaf in tree_leaves(fewer) if isinstance(leaf, Layout)) <= MOST_BYTES
        ran = _run(call.func, *fewer) if is_small else None
        if ran is None:
            return None
        found.append(ran)
    growth = {after.temporary_bytes - before.temporary_bytes for before, after in itertools.pairwise(found)}
    if len(growth) > 1:
        return None
    strides = {}
    for index, (layout, nbytes) in found[-1].results.items():
        fake = tree_leaves(result)[index]
        whole = layout.with_batch(SMALL_BATCHES[-1], batch) if fake.ndim and fake.shape[0] == batch else layout
        if whole.shape != fake.shape or nbytes != layout.nbytes:  # a result of another storage tells nothing of others
            return None
        strides[index] = whole.stride
    return Workspace(found[-1].temporary_bytes + growth.pop() * (batch - SMALL_BATCHES[-1]), result_strides=strides)


@dataclass(frozen=True)
class Run:
    """What one call did: the bytes it allocated within, and the layouts and the storages' bytes of new results."""

    temporary_bytes: int
    early_bytes: int
    results: Mapping[int, tuple[Layout, int]]

    def workspace(self, fake: Any) -> Workspace:
        """The workspace of this call, of which `fake` is the result on fake tensors."""
        result_bytes, strides = {}, {}
        leaves = tree_leaves(fake)
        for index, (layout, nbytes) in self.results.items():
            if not isinstance(leaves[index], Tensor):
                continue
            if leaves[index].untyped_storage().nbytes() != nbytes:
                result_bytes[index] = nbytes
            if leaves[index].shape == layout.shape:
                strides[index] = layout.stride
        return Workspace(self.temporary_bytes, result_bytes, result_strides=strides, early_bytes=self.early_bytes)


def _run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], backend: str | None = None) -> Run | None:
    """Make a call on tensors of these layouts; None if it fails, or is not of the backend that is given."""
    with _disable_current_modes(), torch.autocast("cpu", enabled=False):
        given, options = tree_map_only(Layout, Layout.tensor, (args, kwargs))
        if backend is not None and backend_of(func, given) != backend:
            return None
        # The older one of PyTorch's profilers leaves alone what the newer one has prepared.
        memory_alone = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
        _enable_profiler_legacy(memory_alone)
        try:
            result = func(*given, **options)
        except (RuntimeError, IndexError, ValueError):  # it does not take the values of a probe, or fewer items
            return None
        finally:
            records: Any = _disable_profiler_legacy()
        own = {_address(one) for one in tree_leaves((given, options)) if isinstance(one, Tensor)}
        results = {
            index: (Layout.of(leaf), leaf.untyped_storage().nbytes())
            for index, leaf in enumerate(tree_leaves(result))
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided and _address(leaf) not in own
        }
    memory = (record for thread in records for record in thread if record.kind() == "memory_alloc")
    sizes = [record.cpu_memory_usage() for record in sorted(memory, key=lambda one: one.start_us())]
    held = list(itertools.accumulate(sizes, initial=0))  # a release has a negative size
    largest = max((nbytes for _, nbytes in results.values()), default=0)
    # Records have no addresses. Of several as large as the largest result, the last one is taken to be that.
    before = held[: len(sizes) - sizes[::-1].index(largest)] if largest in sizes else [0]
    return Run(max(held) - held[-1], max(before), results)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
