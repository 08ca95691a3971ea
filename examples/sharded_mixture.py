"""A mixture whose components are shared among processes: each holds its own, and all get the log density of the whole.

Run it by `torchrun --nproc-per-node 2 examples/sharded_mixture.py`.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.functional import normalize

import effops
from effops.measure import Pass, memory

COMPONENTS, POINTS, DIMENSION = 8192, 2048, 64
SHARDED, REPLICATED = [Shard(0)], [Replicate()]


def loss(log_weights: Tensor, loc: Tensor, scale: Tensor, x: Tensor) -> Tensor:
    return -effops.power_spherical_mixture_log_prob(log_weights, loc, scale, x.unsqueeze(1)).mean()


def operands() -> tuple[Tensor, ...]:
    """Log weights, directions and concentrations of all components, and the points; alike in every process."""
    torch.manual_seed(0)
    return (
        torch.randn(COMPONENTS).log_softmax(0),
        normalize(torch.randn(COMPONENTS, DIMENSION), dim=-1),
        1 + 20 * torch.rand(COMPONENTS),
        normalize(torch.randn(POINTS, DIMENSION), dim=-1),
    )


def step(mesh: DeviceMesh, log_weights: Tensor, loc: Tensor, scale: Tensor, x: Tensor) -> list[Tensor]:
    """The loss, and this process's gradients of its components, from its own shards."""
    shards = [
        DTensor.from_local(one, mesh, SHARDED, shape=(COMPONENTS, *one.shape[1:]), stride=one.stride())
        for one in (log_weights, loc, scale)
    ]
    found = loss(*shards, DTensor.from_local(x, mesh, REPLICATED)).full_tensor()
    return [found.detach(), *torch.autograd.grad(found, (log_weights, loc, scale))]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, count = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (count,))
    *parameters, x = operands()
    own = [distribute_tensor(one, mesh, SHARDED).to_local().clone().requires_grad_() for one in parameters]
    value, *gradients = step(mesh, *own, x)

    whole = [one.requires_grad_() for one in parameters]
    expected = loss(*whole, x)
    shards = (distribute_tensor(one, mesh, SHARDED).to_local() for one in torch.autograd.grad(expected, whole))
    difference = max(((one - other).norm() / other.norm()).item() for one, other in zip(gradients, shards))
    held = sum(one.nbytes for one in own)
    taken = memory(Pass(lambda *given: step(mesh, *given), (*own, x))).temporary_bytes
    text = (
        f"rank {rank}: {len(own[1]):,} of {COMPONENTS:,} components in {held:,} bytes; its gradients take as many\n"
        f"  a step takes {taken:,} bytes beside these, measured; log densities of all pairs would take "
        f"{4 * POINTS * len(own[1]):,}\n"
        f"  loss {value:.5f}, in one process {expected:.5f}; a gradient is off by {difference:.1e} of its norm"
    )
    for turn in range(count):
        if turn == rank:
            print(text, flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
