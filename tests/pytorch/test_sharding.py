"""DTensors through every op: equal to one process, nothing sent, in threads and in real processes of a gloo group."""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.attention.bias import causal_lower_right

import effops
from effops import power_spherical_log_prob
from effops.dispatch.op import find_op
from effops.measure import Pass, memory
from effops.reference import error_ratio, gradient_error_ratio, reference_of

from ..support.calls import on_this_python

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.append(str(BENCH / "studies"))
sharded = importlib.import_module("sharded")

OP = find_op("power_spherical_log_prob")
MIXTURE = find_op("power_spherical_mixture_log_prob")
REFERENCE, MIXTURE_REFERENCE = reference_of(OP), reference_of(MIXTURE)
P, R, S = Partial(), Replicate(), Shard
Placements = tuple[Placement, ...]


class Layout(NamedTuple):
    """Placements, over the axes of a mesh, of loc, scale and x, of the result and of the three gradients."""

    args: tuple[Placements, ...]
    result: Placements
    gradients: tuple[Placements, ...]


# loc (M, T, D), scale (M, T), x (N, 1, T, D) -> (N, M, T)
SHAPES = {
    "even": ((8, 8, 6), (8, 8), (8, 1, 8, 6)),
    "uneven": ((5, 7, 6), (5, 7), (3, 1, 7, 6)),
    "fewer than devices": ((2, 3, 6), (2, 3), (3, 1, 3, 6)),
    "empty": ((0, 4, 6), (0, 4), (3, 1, 4, 6)),
}
LAYOUTS = {
    "rows": Layout(((R,), (R,), (S(0),)), (S(0),), ((P,), (P,), (S(0),))),
    "components": Layout(((S(0),), (S(0),), (R,)), (S(1),), ((S(0),), (S(0),), (P,))),
    "batch": Layout(((S(1),), (S(1),), (S(2),)), (S(2),), ((S(1),), (S(1),), (S(2),))),
    "batch, loc and scale sliced": Layout(((R,), (R,), (S(2),)), (S(2),), ((S(1),), (S(1),), (S(2),))),
    "batch by the scale alone": Layout(((R,), (S(1),), (R,)), (S(2),), ((S(1),), (S(1),), (S(2),))),
    "replicated": Layout(((R,), (R,), (R,)), (R,), ((R,), (R,), (R,))),
    "batch and components": Layout(
        ((S(1), S(0)), (S(1), S(0)), (S(2), R)), (S(2), S(1)), ((S(1), S(0)), (S(1), S(0)), (S(2), P))
    ),
    "components and rows, scale sliced": Layout(
        ((S(0), R), (R, R), (R, S(0))), (S(1), S(0)), ((S(0), P), (S(0), P), (P, S(0)))
    ),
    "batch twice, scale sliced": Layout(
        ((S(1), S(1)), (S(1), R), (S(2), S(2))), (S(2), S(2)), ((S(1), S(1)), (S(1), S(1)), (S(2), S(2)))
    ),
    "rows on one axis": Layout(((R, R), (R, R), (R, S(0))), (R, S(0)), ((R, P), (R, P), (R, S(0)))),
}


@pytest.fixture
def threads() -> Iterator[Callable[..., None]]:
    """Runs a function once in each of several threads, which form a process group."""
    pg = importlib.import_module("torch.testing._internal.distributed.multi_threaded_pg")

    def run(count: int, function: Callable[..., None], *args: Any) -> None:
        errors: list[BaseException] = []
        store = dist.HashStore()

        def thread(rank: int) -> None:
            dist.init_process_group("threaded", store=store, rank=rank, world_size=count)
            try:
                function(*args)
            except BaseException as error:
                errors.append(error)
                pg.ProcessLocalGroup.exception_handle(error)
            finally:
                dist.destroy_process_group()

        workers = [threading.Thread(target=thread, args=(rank,), daemon=True) for rank in range(count)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(timeout=30)
            assert not worker.is_alive(), "a collective waits for ever"
        if errors:
            raise errors[0]

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    pg._install_threaded_pg()
    yield run
    pg.ProcessLocalGroup.reset()
    pg._uninstall_threaded_pg()
    torch.autograd.set_multithreading_enabled(True)
    torch._C._distributed_c10d._set_thread_isolation_mode(False)


def mesh_of(dims: int) -> DeviceMesh:
    """A mesh over all processes with that many axes."""
    count = dist.get_world_size()
    return init_device_mesh("cpu", (count,) if dims == 1 else (-(-count // 2), min(2, count)))


def sample(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return REFERENCE.sample(*shapes, dtype=dtype, generator=torch.Generator().manual_seed(0))


def distributed(tensor: Tensor, mesh: DeviceMesh, placements: Placements) -> DTensor:
    """The shards of a tensor that every process has, sent by none."""
    return distribute_tensor(tensor.detach(), mesh, placements, src_data_rank=None)


def check_layout(name: str, shapes: str, variant: str | None = None) -> None:
    """Values and gradients are right, placed as expected, and were found without a collective."""
    layout = LAYOUTS[name]
    mesh = mesh_of(len(layout.result))
    args = sample(SHAPES[shapes])
    plain = power_spherical_log_prob(*args)
    dout = torch.randn(plain.shape, generator=torch.Generator().manual_seed(1))
    leaves = [distributed(arg, mesh, placements).requires_grad_() for arg, placements in zip(args, layout.args)]
    upstream = distributed(dout, mesh, layout.result)
    with CommDebugMode() as collectives:
        result = power_spherical_log_prob(*leaves, variant=variant)
        gradients = torch.autograd.grad(result, leaves, upstream)
    assert collectives.get_total_counts() == 0
    assert isinstance(result, DTensor)
    assert result.placements == layout.result
    assert tuple(gradient.placements for gradient in gradients) == layout.gradients
    assert error_ratio(OP, args, result.full_tensor()) <= 1
    assert gradient_error_ratio(OP, args, dout, tuple(gradient.full_tensor() for gradient in gradients)) <= 1
    if shapes == "even" and variant is None:
        assert result.stride() == plain.stride()


# log_weights (M,), loc (M, 6), scale (M,), x (9, 1, 6) -> (9,)
MIXTURE_LAYOUTS = {
    "components": Layout((S(0), S(0), S(0), R), R, (S(0), S(0), S(0), P)),
    "points": Layout((R, R, R, S(0)), S(0), (P, P, P, S(0))),
    "components, weights sliced": Layout((R, S(0), S(0), R), R, (S(0), S(0), S(0), P)),
}


def check_mixture() -> None:
    """Along the components the statistics are combined, by two reductions forward; backward sends nothing."""
    mesh = mesh_of(1)
    for count in (8, 5, 1, 0):
        args = MIXTURE_REFERENCE.sample(
            (count,), (count, 6), (count,), (9, 1, 6), generator=torch.Generator().manual_seed(0)
        )
        for variant in ("chunked", "einsum"):
            for layout in MIXTURE_LAYOUTS.values():
                if count == 1 and layout.args[1] == S(0):
                    continue  # an axis of size 1 broadcasts, and cannot be sharded
                placed = [distributed(arg, mesh, (p,)).requires_grad_() for arg, p in zip(args, layout.args)]
                with CommDebugMode() as collectives:
                    result = MIXTURE(*placed, variant=variant)
                assert collectives.get_total_counts() == (2 if layout.result == R else 0)
                dout = torch.randn(9, generator=torch.Generator().manual_seed(1))
                with CommDebugMode() as collectives:
                    gradients = torch.autograd.grad(result, placed, distributed(dout, mesh, (layout.result,)))
                assert collectives.get_total_counts() == 0
                assert result.placements == (layout.result,)
                assert tuple(gradient.placements[0] for gradient in gradients) == layout.gradients
                assert error_ratio(MIXTURE, args, result.full_tensor()) <= 1
                full = tuple(gradient.full_tensor() for gradient in gradients)
                assert gradient_error_ratio(MIXTURE, args, dout, full) <= 1


def check_densities_that_overflow() -> None:
    """Gradients are NaN where all densities do, and not where those of one process do, nor without any weight."""
    mesh, normal = mesh_of(1), find_op("normal_mixture_log_prob")
    shapes = (3, 8), (8, 6), (8, 1), (3, 1, 6)
    weights, loc, scale, x = reference_of(normal).sample(*shapes, generator=torch.Generator().manual_seed(0))
    x[1:] = 1e20
    weights[2] = -torch.inf
    near = loc.clone()
    near[-1] = 1e20
    for means, variants, is_known in ((loc, ("chunked", "naive"), False), (near, ("chunked",), True)):
        args = weights, means, scale, x
        for variant in variants:
            placed = [distributed(arg, mesh, (p,)).requires_grad_() for arg, p in zip(args, (S(1), S(0), S(0), R))]
            result = normal(*placed, variant=variant)
            gradients = torch.autograd.grad(result.sum(), placed)
            full = tuple(gradient.full_tensor() for gradient in gradients)
            assert error_ratio(normal, args, result.full_tensor()) <= 1
            assert gradient_error_ratio(normal, args, torch.ones(3), full) <= 1
            assert full[0].isnan().any(-1).tolist() == [False, not is_known, False]


def check_variants() -> None:
    for variant in on_this_python(("einsum", "torchscript", "naive")):
        check_layout("rows", "uneven", variant)
        with effops.use_variant(variant):
            check_layout("components", "uneven")
    mesh = mesh_of(1)
    args = [distributed(arg, mesh, (R,)) for arg in sample(SHAPES["even"])]
    with pytest.raises(ValueError, match="no variant 'tritn'"):
        power_spherical_log_prob(*args, variant="tritn")


def check_scales_without_axes() -> None:
    """A number is no tensor to distribute; the gradient of a 0-d scale is a pending sum."""
    mesh = mesh_of(1)
    loc, _, x = sample(SHAPES["uneven"])
    placed = distributed(loc, mesh, (R,)), distributed(x, mesh, (S(0),))
    result = power_spherical_log_prob(placed[0], 3, placed[1])
    assert error_ratio(OP, (loc, 3, x), result.full_tensor()) <= 1
    scale = torch.tensor(3.0)
    leaf = distributed(scale, mesh, (R,)).requires_grad_()
    power_spherical_log_prob(placed[0], leaf, placed[1]).sum().backward()
    assert leaf.grad.placements == (P,)
    dout = torch.ones(result.shape)
    assert gradient_error_ratio(OP, (loc, scale, x), dout, (None, leaf.grad.full_tensor(), None)) <= 1


def check_axes_of_size_one() -> None:
    """An axis of size 1 in all arguments may be sharded as any other: all but the first process have nothing."""
    mesh = mesh_of(1)
    args = sample(((1, 6), (1,), (3, 1, 6)))
    leaves = [distributed(arg, mesh, (p,)).requires_grad_() for arg, p in zip(args, (S(0), S(0), R))]
    result = power_spherical_log_prob(*leaves)
    gradients = torch.autograd.grad(result.sum(), leaves)
    assert error_ratio(OP, args, result.full_tensor()) <= 1
    full = tuple(gradient.full_tensor() for gradient in gradients)
    assert gradient_error_ratio(OP, args, torch.ones(3, 1), full) <= 1


def check_argument_still_on_its_way() -> None:
    mesh = mesh_of(1)
    args = sample(SHAPES["even"])
    loc, scale, x = (distributed(arg, mesh, (S(0),)) for arg in args)
    x = x.redistribute(placements=[R], async_op=True)
    assert error_ratio(OP, args, power_spherical_log_prob(loc, scale, x).full_tensor()) <= 1


def check_double_backward() -> None:
    mesh = mesh_of(1)
    args = sample(SHAPES["uneven"], torch.float64)

    def second_gradients(leaves: list[Tensor]) -> tuple[Tensor, ...]:
        result = power_spherical_log_prob(*leaves)
        first = torch.autograd.grad((result * result).sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum((gradient * gradient).sum() for gradient in first), leaves)

    expected = second_gradients([arg.clone().requires_grad_() for arg in args])
    for name in ("rows", "components", "batch, loc and scale sliced"):
        placements = LAYOUTS[name].args
        found = second_gradients([distributed(arg, mesh, p).requires_grad_() for arg, p in zip(args, placements)])
        for gradient, right in zip(found, expected):
            torch.testing.assert_close(gradient.full_tensor(), right, rtol=1e-10, atol=1e-10 * float(right.abs().max()))


class Components(nn.Module):
    """The log density of each point under each of several components, of which a step changes the parameters."""

    def __init__(self) -> None:
        super().__init__()
        loc, scale, _ = sample(((6, 5), (6,), (1, 5)), torch.float64)
        self.loc, self.scale = nn.Parameter(loc), nn.Parameter(scale.log())

    def forward(self, x: Tensor) -> Tensor:
        loc = self.loc / self.loc.norm(dim=-1, keepdim=True)
        return power_spherical_log_prob(loc, self.scale.exp(), x)


def points() -> Tensor:
    return sample(((1, 5), (1,), (8, 1, 5)), torch.float64)[2]


def check_step(model: nn.Module, result: Tensor) -> None:
    """A step of stochastic gradient descent on the mean of the result leads where it leads in one process."""
    alone = Components()
    for each, loss in ((alone, alone(points()).mean()), (model, result.mean())):
        loss.backward()
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), alone.get_parameter(name), rtol=1e-12, atol=1e-12)


def shard_parameters(model: nn.Module, mesh: DeviceMesh) -> None:
    for name, parameter in list(model.named_parameters()):
        model.register_parameter(name, nn.Parameter(distributed(parameter, mesh, (S(0),))))


def own_points() -> Tensor:
    """This process's part of the points, for data parallelism over all processes."""
    return points().chunk(dist.get_world_size())[dist.get_rank()]


def check_tensor_parallel_model() -> None:
    mesh, model = mesh_of(1), Components()
    shard_parameters(model, mesh)
    check_step(model, model(distributed(points(), mesh, (R,))))


def check_fsdp_model() -> None:
    mesh, model = mesh_of(1), Components()
    fully_shard(model, mesh=mesh)
    check_step(model, model(own_points()))


def check_fsdp_and_tensor_parallel_model() -> None:
    count = dist.get_world_size()
    mesh = init_device_mesh("cpu", (-(-count // 2), min(2, count)), mesh_dim_names=("data", "components"))
    model = Components()
    shard_parameters(model, mesh["components"])
    fully_shard(model, mesh=mesh["data"])
    x = points().chunk(mesh.size(0))[mesh.get_local_rank("data")]
    check_step(model, model(DTensor.from_local(x, mesh["components"], [R])))


REFUSED = {
    "rows against components": (((S(0),), (R,), (S(0),)), "`loc` along axis 1, `x` along axis 0 for mesh axis 0"),
    "the contracted dimension": (
        ((S(2),), (R,), (R,)),
        r"`loc` of shape \(5, 7, 6\) .* Shard\(0\), Shard\(1\); got Shard",
    ),
    "what broadcasts": (
        ((R,), (R,), (S(1),)),
        r"`x` of shape .* Replicate\(\), Shard\(0\), Shard\(2\); got Shard\(dim=1",
    ),
    "a pending sum": (((R,), (P,), (R,)), r"`scale` of shape .* got Partial\(sum\) along mesh axis 0"),
    "slices of other shards": (
        ((R, S(0)), (S(0), S(0)), (R, R)),
        "`loc` must be sharded along mesh axis 0 too",
    ),
}


def check_refused(name: str) -> None:
    """What would have to be gathered is refused before anything is sent."""
    placements, message = REFUSED[name]
    mesh = mesh_of(len(placements[0]))
    args = [
        DTensor.from_local(arg, mesh, own) if P in own else distributed(arg, mesh, own)
        for arg, own in zip(sample(SHAPES["uneven"]), placements)
    ]
    with CommDebugMode() as collectives, pytest.raises(ValueError, match=f"^power_spherical_log_prob: .*{message}"):
        power_spherical_log_prob(*args)
    assert collectives.get_total_counts() == 0


def check_mixed() -> None:
    mesh = mesh_of(1)
    loc, scale, x = sample(SHAPES["uneven"])
    loc = distributed(loc, mesh, (R,))
    with pytest.raises(ValueError, match="`scale` must be a DTensor, as `loc` is; got a plain tensor"):
        power_spherical_log_prob(loc, scale, x)
    other = init_device_mesh("cpu", (dist.get_world_size(), 1))
    with pytest.raises(ValueError, match="must be on one mesh; got `loc` on DeviceMesh"):
        power_spherical_log_prob(loc, 1.0, distributed(x, other, (R, R)))
    with pytest.raises(ValueError, match=r"batch shapes must broadcast; got loc \(5, 7\) \+ \(D,\), scale \(6,\)"):
        power_spherical_log_prob(loc, distributed(torch.ones(6), mesh, (S(0),)), distributed(x, mesh, (R,)))


CHECKS: dict[str, Callable[[], None]] = {
    **{f"{layout}, {shapes}": partial(check_layout, layout, shapes) for shapes in SHAPES for layout in LAYOUTS},
    **{f"refuses {name}": partial(check_refused, name) for name in REFUSED},
    "refuses a mixture": check_mixed,
    "variants": check_variants,
    "mixtures": check_mixture,
    "densities that overflow": check_densities_that_overflow,
    "scales without axes": check_scales_without_axes,
    "axes of size one": check_axes_of_size_one,
    "an argument still on its way": check_argument_still_on_its_way,
    "double backward": check_double_backward,
    "a tensor-parallel model": check_tensor_parallel_model,
    "an FSDP model": check_fsdp_model,
    "an FSDP and tensor-parallel model": check_fsdp_and_tensor_parallel_model,
}


@pytest.mark.sharded
@pytest.mark.parametrize(
    "name",
    # Threads share DTensor's cache of how to gather, which here differs from process to process.
    [name for name in CHECKS if "batch twice" not in name or name.endswith(", even")],
)
def test_in_threads(threads: Callable[[int, Callable[[], None]], None], name: str) -> None:
    threads(4, CHECKS[name])


def check_bytes_sent() -> None:
    """The system counts no byte written in forward and backward, and what a ring needs to sum up a gradient."""
    mesh = mesh_of(1)
    args = sample(((300, 7, 6), (300, 7), (8, 1, 7, 6)))
    leaves = [distributed(arg, mesh, p).requires_grad_() for arg, p in zip(args, LAYOUTS["rows"].args)]
    start = sharded.sent_bytes()
    result = power_spherical_log_prob(*leaves)
    gradient, *_ = torch.autograd.grad(result, leaves, result.detach())
    assert sharded.sent_bytes() == start
    gradient.redistribute(placements=[R])
    needed = 2 * (mesh.size() - 1) / mesh.size() * args[0].nbytes
    assert needed <= sharded.sent_bytes() - start <= 1.1 * needed


def check_benchmark() -> None:
    """What the model of the benchmark says is what a process of it needs, but for the temporaries of the op."""
    split = sharded.Split(components=2, positions=dist.get_world_size() // 2)
    for row in sharded.measured(split, 1, {"M": 16, "T": 1024, "D": 128}):
        assert row.predicted_peak_bytes <= row.peak_bytes <= 1.1 * row.predicted_peak_bytes
        assert row.predicted_sent_bytes <= row.sent_bytes <= 1.1 * row.predicted_sent_bytes


def check_compiled() -> None:
    """At several sizes, which later ones leave open."""
    mesh = mesh_of(1)
    compiled = torch.compile(power_spherical_log_prob, backend="aot_eager", fullgraph=True)
    for shapes in (SHAPES["even"], tuple(tuple(2 * size if size > 1 else 1 for size in s) for s in SHAPES["even"])):
        args = sample(shapes)
        leaves = [distributed(arg, mesh, p).requires_grad_() for arg, p in zip(args, LAYOUTS["rows"].args)]
        result = compiled(*leaves)
        gradients = torch.autograd.grad(result.sum(), leaves)
        assert error_ratio(OP, args, result.full_tensor()) <= 1
        full = tuple(gradient.full_tensor() for gradient in gradients)
        assert gradient_error_ratio(OP, args, torch.ones(result.shape), full) <= 1


def check_mixture_memory() -> None:
    """Components sharded: each process needs its shard and 8 MiB, and sends at most four times the output's bytes."""
    mesh, count = mesh_of(1), dist.get_world_size()
    args = MIXTURE_REFERENCE.workload(M=128, T=128, D=64, generator=torch.Generator().manual_seed(0))
    shards = [distributed(arg, mesh, (placement,)) for arg, placement in zip(args, (S(0), S(1), S(1), R))]
    work = Pass(lambda *local: MIXTURE(*shards).to_local(), tuple(shard.to_local() for shard in shards))
    measured = memory(work)
    assert measured.peak_bytes <= measured.input_bytes + measured.output_bytes + 8 * 2**20
    start = sharded.sent_bytes()
    result = MIXTURE(*shards)
    sent = sharded.sent_bytes() - start
    assert 0 < sent <= 4 * result.to_local().nbytes
    assert sent <= 1.1 * 2 * 2 * (count - 1) / count * result.to_local().nbytes  # two sums by a ring


PROCESS_CHECKS = {
    "bytes sent": check_bytes_sent,
    "benchmark": check_benchmark,
    "compiled": check_compiled,
    "mixture memory": check_mixture_memory,
}


def in_process() -> dict[str, str]:
    """The checks that fail in this process, and how."""
    failed = {}
    for name, check in {**CHECKS, **PROCESS_CHECKS}.items():
        try:
            check()
        except Exception:
            failed[name] = traceback.format_exc()
    return failed


def attention_is_that_of_one_process() -> None:
    """Batch along one axis of the mesh, heads along the other; what broadcasts is whole everywhere."""
    mesh = mesh_of(2)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(4, 6, 5, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    mask, weight = (torch.randn(size, generator=generator, dtype=torch.float64) for size in ((5, 5), (8,)))
    last = causal_lower_right(3, 5)
    split, whole = (S(0), S(1)), (R, R)
    calls: list[tuple[Callable[..., Tensor], tuple[Tensor, ...], tuple[Placements, ...]]] = [
        (effops.attention, (query, key, value), (split, split, split)),
        (effops.attention, (query, key, value, mask), (split, split, split, whole)),
        (partial(effops.attention, is_causal=True), (query, key, value), (split, split, split)),
        (partial(effops.attention, attn_mask=last), (query[..., :3, :], key, value), (split, split, split)),
        (
            partial(effops.additive_attention, attn_mask=last),
            (query[..., :3, :], key, value, weight),
            (*[split] * 3, whole),
        ),
        (partial(effops.attention, enable_gqa=True), (query, key[:, :2], value[:, :2]), (split, split, split)),
        (effops.attention_weights, (query, key), (split, whole)),
        (effops.attention_scores, (query, key), ((S(0), R), whole)),
        (effops.additive_attention_scores, (query, key, weight), (split, split, whole)),
        (effops.additive_attention, (query, key, value, weight), (split, split, split, whole)),
        (effops.log_sparse_attention, (query, key, value), (split, split, split)),
    ]
    for function, args, placements in calls:
        leaves = [arg.clone().requires_grad_() for arg in args]
        expected = function(*leaves)
        gradients = torch.autograd.grad(expected.square().sum(), leaves)
        shards = [distribute_tensor(arg.clone(), mesh, one).requires_grad_() for arg, one in zip(args, placements)]
        with CommDebugMode() as communication:
            found = function(*shards)
            found_gradients = torch.autograd.grad(found.square().sum(), shards)
        assert communication.get_total_counts() == 0
        assert isinstance(found, DTensor)
        assert found.placements == placements[0]
        torch.testing.assert_close(found.full_tensor(), expected)
        for one, other in zip(found_gradients, gradients):
            torch.testing.assert_close(one.full_tensor(), other)


@pytest.mark.sharded
def test_attention_over_sharded_batch_and_heads(threads: Callable[[int, Callable[[], None]], None]) -> None:
    threads(4, attention_is_that_of_one_process)


@pytest.mark.slow
@pytest.mark.sharded
@pytest.mark.parametrize("count", [2, 4])
def test_in_processes(count: int) -> None:
    for failed in sharded.run_processes(count, in_process, timeout_s=100):
        assert not failed, "\n".join(f"{name}:\n{error}" for name, error in failed.items())


def test_an_op_that_does_not_tell_its_core_dims(
    threads: Callable[[int, Callable[[], None]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def call() -> None:
        with pytest.raises(NotImplementedError, match="takes no DTensors; gather them"):
            power_spherical_log_prob(*(distributed(arg, mesh_of(1), (R,)) for arg in sample(SHAPES["even"])))

    monkeypatch.setattr(OP, "core_dims", {})
    threads(2, call)


def test_plain_tensors_are_traced_whole() -> None:
    """Whether a DTensor is among the arguments is asked in code that torch.compile can follow."""
    args = sample(SHAPES["even"])
    compiled = torch.compile(power_spherical_log_prob, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*args), power_spherical_log_prob(*args))


def test_plain_tensors_do_not_import_sharding() -> None:
    code = (
        "import sys, torch, effops; v = torch.eye(3); effops.power_spherical_log_prob(v, 1.0, v); print(*sys.modules)"
    )
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "effops.dispatch.sharding" not in modules
