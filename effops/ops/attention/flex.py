"""Log-sparse attention by PyTorch's FlexAttention, which computes every block that has a pair of the pattern."""

import torch
from torch import Tensor

from effops.blocks.log_sparse import Pattern, allowed
from effops.dispatch.custom_op import is_plain, requires_grad
from effops.dispatch.jit import compile_by_signature
from effops.ops.attention.call import LogSparseCall

BLOCK = 128  # positions of a block, the default of FlexAttention


def requires_flex(call: LogSparseCall) -> str:
    if not is_plain(call.tensors):
        return "needs tensors in memory, neither traced nor transformed: it is compiled by itself"
    dtypes = {tensor.dtype for tensor in call.tensors}
    if dtypes != {torch.float32}:
        got = ", ".join(sorted(map(str, dtypes)))
        return f"needs float32 tensors, for FlexAttention rounds weights to 16 bits and takes no float64; got {got}"
    if requires_grad(call.tensors):
        return "computes no gradients, for FlexAttention has none on a CPU"
    if any(tensor.numel() == 0 for tensor in call.tensors):
        return "needs at least one head, position and feature"
    if call.device.type == "cpu" and torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return "needs a CPU with AVX2"
    return ""


def forward(call: LogSparseCall) -> Tensor:
    query, key, value = _operands(call)
    counts, indices = _blocks(call.pattern, query)
    features = query.shape[-1], value.shape[-1]
    return _compiled(query, key, value, counts, indices, *call.pattern, call.factor, *features).view(call.shape)


def _operands(call: LogSparseCall) -> list[Tensor]:
    """The tensors in the layout that the kernel is compiled for.

    Their batch axis stays the batch axis. As an axis of heads, the kernel would be compiled for each size of it.
    """
    return [tensor.detach().contiguous().unsqueeze(1) for tensor in call.matrices]


def _blocks(pattern: Pattern, query: Tensor) -> tuple[Tensor, Tensor]:
    """The blocks of keys that each block of queries has pairs with: how many, and which."""
    count = -(-query.shape[-2] // BLOCK)
    offsets = pattern.offsets(query.shape[-2])
    apart = sorted({d for offset in offsets for d in (offset // BLOCK, -(-offset // BLOCK)) if d < count})
    keys = torch.arange(count, device=query.device).unsqueeze(-1) - torch.tensor(apart, device=query.device)
    indices = torch.zeros(1, 1, count, count, dtype=torch.int32, device=query.device)
    indices[..., : len(apart)] = keys.clamp(min=0)
    return (keys >= 0).sum(-1, dtype=torch.int32).view(1, 1, count), indices


@compile_by_signature
def _compiled(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    counts: Tensor,
    indices: Tensor,
    local: int,
    restart: int | None,
    scale: float,
    *features: int,
) -> Tensor:
    """The compiled kernel. `features` are arguments since the kernel is compiled for each number of features."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    def mask(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return allowed(row - column, local, restart)

    length = query.shape[-2]
    blocks = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=BLOCK, mask_mod=mask, seq_lengths=(length, length))
    out = flex_attention(query, key, value, block_mask=blocks, scale=scale)
    assert isinstance(out, Tensor)
    return out


def allocate(call: LogSparseCall) -> Tensor:
    """Allocate what the forward pass allocates on a CPU, since its kernel cannot run on fake tensors.

    It allocates copies of keys and values and, for each thread, blocks of pairs and of rows.
    """
    query, key, value = _operands(call)
    block = min(BLOCK, query.shape[-2])
    thread = block * (2 * block + 2 + 2 * query.shape[-1] + value.shape[-1])
    buffers = torch.empty_like(key), torch.empty_like(value), query.new_empty(torch.get_num_threads() * thread)
    out = torch.empty_like(value)
    del buffers
    return out.view(call.shape)
