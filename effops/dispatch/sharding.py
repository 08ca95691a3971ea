"""Ops on DTensors: each process runs an op on its own shards, and nothing is gathered. No op is known by name.

Along an axis of the device mesh a call has one role: the axis of the result that is sharded there, or none. If there is
a role, a tensor argument falls into one of three cases:

    it is sharded                             along the role's axis, as it must be: it is taken as it is
    it has the role's axis and is replicated  it is sliced, and its gradient is sharded
    it lacks that axis or broadcasts there    it is taken whole, and its gradient is a pending sum: `Partial`

So neither direction communicates. Only the redistribution of a gradient does, which the caller can do once a step.

Where the role is the axis of a logsumexp, each process has the statistics of its own components. Two reductions across
the mesh, of the size of the result, combine them. The result is then replicated there.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from effops.dispatch.arguments import check_dense, is_causal_bias
from effops.dispatch.choice import choose
from effops.dispatch.op import Op
from effops.dispatch.record import add_to_records
from effops.dispatch.validation import check_values
from effops.numerics.precision import without_autocast
from effops.numerics.shapes import broadcast_shapes
from effops.pytorch.sharding import all_reduce


class ShardedOperand(NamedTuple):
    """A tensor argument, with its dimension for each axis of the result: None where it has none, or broadcasts."""

    name: str
    tensor: DTensor
    dims: tuple[int | None, ...]


def sharded_call(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any], variant: str | None) -> DTensor:
    """The result of an op with DTensors among `args`: a DTensor that is sharded along the axis of each role.

    Raises ValueError where the arguments would have to be gathered.
    """
    if not op.core_dims:
        raise NotImplementedError(f"{op.name} takes no DTensors; gather them with .full_tensor()")
    tensors = _dtensors(op, args)
    mesh = next(iter(tensors.values())).device_mesh
    call = op.prepare(*args, **kwargs)  # errors name the shapes of the whole tensors, not of the shards
    reduced = None if op.logsumexp is None else op.logsumexp(call)
    batch_shapes = {name: tensor.shape[: tensor.ndim - op.core_dims[name]] for name, tensor in tensors.items()}
    batch = broadcast_shapes(*batch_shapes.values())
    operands = [ShardedOperand(name, tensors[name], _dims(shape, batch)) for name, shape in batch_shapes.items()]
    roles = [_role(op.name, operands, mesh_axis) for mesh_axis in range(mesh.ndim)]
    local = {operand.name: _local(op.name, operand, roles) for operand in operands}
    local_args = (*(local.get(name, arg) for name, arg in zip(op.core_dims, args)), *args[len(op.core_dims) :])
    local_call = op.prepare(*local_args, **kwargs)
    check_values(op.name, op.conditions, local_call)
    chosen = choose(op, local_call, variant)
    add_to_records(op, chosen, local_call, local_args)
    with without_autocast(local_call.device):
        if chosen.statistics is not None and reduced in roles:
            statistics = chosen.statistics(local_call)
            for mesh_axis, role in enumerate(roles):
                if role == reduced:
                    statistics = _Combined.apply(statistics, mesh, mesh_axis)
            result = op.finish(local_call, statistics)
        else:
            result = chosen.run(local_call)
    axes = [axis for axis in range(len(batch)) if axis != reduced]
    sizes = {axes.index(role): batch[role] for role in roles if role in axes}
    shape = torch.Size(sizes.get(axis, size) for axis, size in enumerate(result.shape))
    placements = [Shard(axes.index(role)) if role in axes else Replicate() for role in roles]
    sharded: DTensor = _FromLocal.apply(result, mesh, placements, shape)
    return sharded


def _dtensors(op: Op, args: Sequence[Any]) -> dict[str, DTensor]:
    """The tensors among the arguments, by name. They must all be DTensors on one mesh.

    A triangle that PyTorch names is not one of them: it has no values, and every shard has all of its pairs.
    """
    named = zip(op.core_dims, args)
    tensors = {name: arg for name, arg in named if isinstance(arg, Tensor) and not is_causal_bias(type(arg))}
    first, mesh = next((name, tensor.device_mesh) for name, tensor in tensors.items() if isinstance(tensor, DTensor))
    found = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            check_dense(op.name, name, tensor)
            raise ValueError(
                f"{op.name}: `{name}` must be a DTensor, as `{first}` is; got a plain tensor; if every process has "
                f"all of it, give DTensor.from_local({name}, {first}.device_mesh, [Replicate()] * {mesh.ndim})"
            )
        if tensor.device_mesh != mesh:
            raise ValueError(
                f"{op.name}: DTensors must be on one mesh; got `{first}` on {mesh}, `{name}` on {tensor.device_mesh}; "
                "distribute one over the mesh of the other"
            )
        found[name] = tensor
    return found


def _dims(own: Sequence[int], result: Sequence[int]) -> tuple[int | None, ...]:
    """For each axis of the batch shape `result`, the dimension of `own` that has the same size, or None."""
    missing = len(result) - len(own)
    return tuple(
        axis - missing if axis >= missing and own[axis - missing] == size else None for axis, size in enumerate(result)
    )


def _role(function: str, operands: Sequence[ShardedOperand], mesh_axis: int) -> int | None:
    """The axis of the result that is sharded along an axis of the mesh, or None if there is none."""
    roles = {}
    for operand in operands:
        placement = operand.tensor.placements[mesh_axis]
        if isinstance(placement, Shard) and placement.dim in operand.dims:
            roles[operand.name] = operand.dims.index(placement.dim)
        elif not placement.is_replicate():
            dims = [f"Shard({dim})" for dim in operand.dims if dim is not None]
            raise ValueError(
                f"{function}: `{operand.name}` of shape {tuple(operand.tensor.shape)} must be placed as one of "
                f"{', '.join(['Replicate()', *dims])}; got {placement!r} along mesh axis {mesh_axis}; redistribute it"
            )
    if len(set(roles.values())) > 1:
        got = ", ".join(f"`{name}` along axis {role}" for name, role in roles.items())
        raise ValueError(
            f"{function}: arguments must be sharded along the same axis of the result, or replicated; got {got} for "
            f"mesh axis {mesh_axis}; redistribute one of them"
        )
    return next(iter(roles.values()), None)


def _local(function: str, operand: ShardedOperand, roles: Sequence[int | None]) -> Tensor:
    """The part of an operand that this process needs. It is differentiable by the operand."""
    own = operand.tensor.placements
    dims = [None if role is None else operand.dims[role] for role in roles]
    wanted = [Replicate() if dim is None else Shard(dim) for dim in dims]
    for mesh_axis, (given, target) in enumerate(zip(own, wanted)):
        if given != target and target in own[mesh_axis + 1 :]:
            raise ValueError(
                f"{function}: `{operand.name}` must be sharded along mesh axis {mesh_axis} too, as other arguments "
                f"are; got {own}; redistribute it"
            )
    gradient = [
        Partial() if dim is None and role is not None else placement
        for role, dim, placement in zip(roles, dims, wanted)
    ]
    local: Tensor = _ToLocal.apply(operand.tensor, wanted, gradient)
    return local


class _Combined(torch.autograd.Function):
    """The statistics of a logsumexp over all shards along an axis of the mesh, from the statistics of each shard."""

    @staticmethod
    def forward(ctx: Any, statistics: Tensor, mesh: DeviceMesh, mesh_axis: int) -> Tensor:
        maximum, log_total = statistics.unbind(-1)
        highest = all_reduce(maximum, "max", (mesh, mesh_axis))
        share = torch.exp(maximum - torch.where(highest.isfinite(), highest, 0) + log_total)
        total = all_reduce(share, "sum", (mesh, mesh_axis))
        # Where the sum is 0, either weights are 0 or scores have overflowed, which each process finds for its own ones.
        ctx.save_for_backward(torch.where(total == 0, 1, share / total))
        combined = torch.empty_like(statistics)
        combined[..., 0] = highest
        combined[..., 1] = total.log()
        return combined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (share,) = ctx.saved_tensors
        return gradient * share.unsqueeze(-1), None, None


class _ToLocal(torch.autograd.Function):
    """This process's part of a tensor under other placements, for which it is sliced at most.

    `gradient` are the placements of the gradient.
    """

    @staticmethod
    def forward(ctx: Any, tensor: DTensor, placements: Sequence[Placement], gradient: Sequence[Placement]) -> Tensor:
        mesh = tensor.device_mesh
        ctx.mesh, ctx.gradient, ctx.shape = mesh, gradient, tensor.shape
        local = tensor.to_local()
        for mesh_axis, (given, wanted) in enumerate(zip(tensor.placements, placements)):
            if given.is_replicate() and isinstance(wanted, Shard):
                size = local.shape[wanted.dim]
                length = -(-size // mesh.size(mesh_axis))
                start = min(size, length * mesh.get_local_rank(mesh_axis))
                local = local.narrow(wanted.dim, start, min(length, size - start))
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _from_local(gradient, ctx.mesh, ctx.gradient, ctx.shape), None, None


class _FromLocal(torch.autograd.Function):
    """The inverse of `_ToLocal`.

    A gradient that arrives with other placements is redistributed. This can be differentiated again, unlike DTensor's
    own function.
    """

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size
    ) -> DTensor:
        ctx.placements = placements
        return _from_local(local, mesh, placements, shape)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> Any:
        return gradient.redistribute(placements=ctx.placements).to_local(), None, None, None


def _from_local(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size) -> DTensor:
    """The DTensor of a shape. It is dense, and its axes lie in memory in the order that those of `local` have there."""
    axes, given = range(local.ndim), local.stride()
    strides = [1] * local.ndim
    for i, j in itertools.product(axes, axes):  # a tracer with symbolic sizes can compare strides but not sort them
        if given[j] < given[i] or (given[j] == given[i] and j > i):
            strides[i] *= max(1, shape[j])
    return DTensor.from_local(local, mesh, placements, shape=shape, stride=tuple(strides))
