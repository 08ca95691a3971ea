"""What is different on a CUDA device: the forms of functions, and what it holds beside the tensors of a step.

`ASSUMPTIONS` names what each part rests on.
"""

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from effops.prediction.allocations import round_up
from effops.prediction.timeline import Timeline
from effops.pytorch.calls import tree_map_only
from effops.pytorch.operators import aten
from effops.pytorch.prediction import _engine_run_backward

MIB = 2**20
CUDA_BLOCK_BYTES = 512
CONTEXT_BYTES = 600 * MIB
CUBLAS_WORKSPACE_BYTES = 4096 * 1024 * 2 + 16 * 1024 * 8
ASSUMPTIONS = {
    "rounding": f"each tensor takes a multiple of {CUDA_BLOCK_BYTES} bytes",
    "cuBLAS workspace": "its default, :4096:2:16:8",
    "allocator": "segments that PyTorch's caching allocator reserves, replayed allocation by allocation",
    "context": "kernels and driver; 600 MiB unless `context_bytes` says what the first kernel leaves occupied",
    "kernels": "of a CPU but for dropout and attention, without the workspaces of oneDNN and of cuDNN",
    "autocast": "by the lists of CUDA, with softmax, normalisations, losses and sums in float32",
    "cuDNN workspace": "a convolution's operands and results in another layout; some algorithms need more",
}
# What CUDA's autocast computes in float32, by the names of functions and methods. The first ones have a `dtype`, and
# read numbers of another one; the others get copies.
BY_DTYPE = {"cumprod", "cumsum", "log_softmax", "prod", "softmax", "sum"}
BY_COPIES = {
    "__rpow__",
    "acos",
    "asin",
    "binary_cross_entropy_with_logits",
    "cdist",
    "cosh",
    "cosine_embedding_loss",
    "cosine_similarity",
    "cross_entropy",
    "dist",
    "erfinv",
    "exp",
    "expm1",
    "group_norm",
    "hinge_embedding_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "layer_norm",
    "linalg_matrix_norm",
    "linalg_vector_norm",
    "log",
    "log10",
    "log1p",
    "log2",
    "logsumexp",
    "margin_ranking_loss",
    "mse_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "nll_loss",
    "norm",
    "normalize",
    "pdist",
    "poisson_nll_loss",
    "pow",
    "reciprocal",
    "renorm",
    "rms_norm",
    "rsqrt",
    "sinh",
    "smooth_l1_loss",
    "soft_margin_loss",
    "softmin",
    "softplus",
    "tan",
    "triplet_margin_loss",
}
NARROW = torch.bfloat16, torch.float16
RECURRENT_FUNCTIONS = torch.gru, torch.lstm, torch.rnn_relu, torch.rnn_tanh


class Block(NamedTuple):
    """A piece of a segment."""

    size: int
    start: int
    small: bool


class CachingAllocator:
    """The segments of `torch.cuda`'s caching allocator with its default settings, for one stream.

    Requests are rounded to 512 bytes. Those of up to 1 MiB are cut from segments of 2 MiB, those below 10 MiB from
    segments of 20 MiB. Larger ones get segments of their own, rounded to 2 MiB. The smallest free block that fits is
    taken, and cut unless too little is left. Nothing goes back to the device.
    """

    def __init__(self) -> None:
        self.reserved_bytes = self.address = 0
        self.pools: dict[bool, list[Block]] = {True: [], False: []}  # free blocks, small or not, in order of size

    def allocate(self, nbytes: int) -> Block:
        size = max(CUDA_BLOCK_BYTES, round_up(nbytes, CUDA_BLOCK_BYTES))
        small = size <= MIB
        pool = self.pools[small]
        index = bisect.bisect_left(pool, (size,))
        if index < len(pool):
            block = pool.pop(index)
        else:
            segment = 2 * MIB if small else 20 * MIB if size < 10 * MIB else round_up(size, 2 * MIB)
            block = Block(segment, self.address, small)
            self.address += segment + 1  # one off, so that blocks of two segments are never neighbours
            self.reserved_bytes += segment
        left = block.size - size
        if left < CUDA_BLOCK_BYTES if small else left <= MIB:
            return block
        bisect.insort(pool, Block(left, block.start + size, small))
        return Block(size, block.start, small)

    def release(self, block: Block) -> None:
        """Merge the block with its free neighbours."""
        pool, end = self.pools[block.small], block.start + block.size
        merged = [block, *(free for free in pool if free.start == end or free.start + free.size == block.start)]
        for neighbour in merged[1:]:
            pool.remove(neighbour)
        size, start = sum(one.size for one in merged), min(one.start for one in merged)
        bisect.insort(pool, Block(size, start, block.small))


def overheads(timeline: Timeline, convolution_bytes: int, context_bytes: int) -> Mapping[str, int]:
    """The bytes occupied beside the tensors at the peak of the last step, by the names of `ASSUMPTIONS`.

    `convolution_bytes` are those of the operands and results of the largest convolution.
    """
    peak_bytes = timeline.peak_bytes
    rounded = [replace(one, nbytes=round_up(one.nbytes, CUDA_BLOCK_BYTES)) for one in timeline.allocations]
    rounded_bytes = replace(timeline, allocations=rounded).peak_bytes
    return {
        "rounding": rounded_bytes - peak_bytes,
        "cuBLAS workspace": CUBLAS_WORKSPACE_BYTES,
        "cuDNN workspace": convolution_bytes,
        "allocator": reserved_bytes(timeline) - rounded_bytes,
        "context": context_bytes,
    }


def reserved_bytes(timeline: Timeline) -> int:
    """The bytes that the caching allocator has reserved at the end of all steps."""
    allocator = CachingAllocator()
    born = {one.born: one for one in timeline.allocations}
    died = {one.died: one.born for one in timeline.allocations if one.died is not None}
    blocks: dict[int, Block] = {}
    for tick in range(timeline.end + 1):
        if died.get(tick) in blocks:
            allocator.release(blocks.pop(died[tick]))
        if tick in born and born[tick].nbytes:
            blocks[tick] = allocator.allocate(born[tick].nbytes)
    return allocator.reserved_bytes


class CudaForms(TorchFunctionMode):
    """Gives functions the form that they have on CUDA, where they save other tensors for backward than on a CPU.

    Dropout saves booleans, and `scaled_dot_product_attention` never holds all pairs. cuDNN computes a recurrent layer
    as a whole. Here such a layer keeps the form of a CPU, and its name is added to `unknown`. Under autocast some
    functions compute in float32 that do not on a CPU.
    """

    def __init__(self, unknown: set[str]) -> None:
        super().__init__()
        self.unknown = unknown

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func in RECURRENT_FUNCTIONS:
            self.unknown.add(f"aten::{func.__name__}")
        if func is torch.nn.functional.dropout:
            return _dropout(*args, **options)
        if func is torch.nn.functional.scaled_dot_product_attention:
            return _attention(*args, **options)
        if torch.is_autocast_enabled("cpu") and getattr(func, "__name__", "") in BY_DTYPE | BY_COPIES:
            return _autocast(func, args, options)
        if func is torch.autograd.backward:
            with self:  # so that what checkpointing computes again has the same forms
                return _backward(*args, **options)
        return func(*args, **options)


def _backward(
    losses: Sequence[Tensor],
    grad_tensors: Sequence[Tensor | None] | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Sequence[Tensor] | None = None,
) -> None:
    """Do what `torch.autograd.backward` does, but leave modes on."""
    upstream = tuple(
        torch.ones_like(loss) if gradient is None else gradient
        for loss, gradient in zip(losses, grad_tensors or [None] * len(losses))
    )
    keep = create_graph if retain_graph is None else retain_graph
    _engine_run_backward(
        tuple(losses), upstream, keep, create_graph, inputs or (), allow_unreachable=True, accumulate_grad=True
    )


def _autocast(func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """What `func` gives under CUDA's autocast."""
    name = getattr(func, "__name__", "")
    given = args[0] if args else options.get("input")
    has_dtype = any(isinstance(one, torch.dtype) for one in (*args, *options.values()))
    if name in BY_DTYPE and isinstance(given, Tensor) and given.dtype in NARROW and not has_dtype:
        axis = options.get("dim", args[1] if len(args) > 1 else None)
        if given.dtype is torch.float16 and "softmax" in name and axis is not None:  # its kernels read float16
            kernel = aten._softmax.default if name == "softmax" else aten._log_softmax.default
            return kernel(given, axis, True)
        return func(*args, **{**options, "dtype": torch.float32})
    if name in BY_COPIES:
        args, options = tree_map_only(Tensor, _widened, (args, options))
    return func(*args, **options)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in NARROW else tensor


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0 or inplace:
        return torch.dropout(input, p, training)
    result: Tensor = torch.native_dropout(input, p, training)[0]
    return result


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    batch = query.shape[:-2]
    if enable_gqa:
        key, value = (tensor.repeat_interleave(query.shape[-3] // tensor.shape[-3], -3) for tensor in (key, value))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            numbers = torch.zeros_like(attn_mask, dtype=query.dtype)
            attn_mask = numbers.masked_fill_(attn_mask.logical_not(), -math.inf)
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    if query.ndim != 4:
        query, key, value = (tensor.reshape(1, -1, *tensor.shape[-2:]) for tensor in (query, key, value))
        attn_mask = None if attn_mask is None else attn_mask.reshape(1, -1, *attn_mask.shape[-2:])
    saves = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    result: Tensor = aten._scaled_dot_product_efficient_attention.default(
        query, key, value, attn_mask, saves, dropout_p, is_causal, scale=scale
    )[0]
    return result.reshape(*batch, *result.shape[-2:])
