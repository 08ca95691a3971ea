"""Every op in a training step: checkpoints, autocast, threads, data parallelism, CUDA graphs."""

import functools
import threading
import time

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import effops
from effops.dispatch.call import call
from effops.dispatch.choice import choose
from effops.reference import error_ratio, gradient_error_ratio

from ..support.calls import OPS, arguments, leaves, on_this_python, same


@pytest.mark.parametrize("how", ["reentrant", "not reentrant", "compiled"])
@pytest.mark.parametrize("op", OPS)
def test_checkpoint(op, how, device, generator):
    args = arguments(op, device, generator, dtype=torch.float32)
    copies = leaves(args)

    def function(*args):
        return checkpoint(lambda *args: op(*args), *args, use_reentrant=how == "reentrant")

    if how == "compiled":
        torch._dynamo.reset()
        function = torch.compile(function, backend="aot_eager", fullgraph=True)
    out = function(*copies)
    dout = torch.randn(out.shape, generator=generator).to(device)
    out.backward(dout)
    assert gradient_error_ratio(op, args, dout, tuple(copy.grad for copy in copies)) <= 1


# Under autocast einsum multiplies in autocast's dtype, as PyTorch's does.
OF_FLOAT32 = [param for param in OPS if param.id != "einsum"]


def choice(op, args):
    return choose(op, op.prepare(*args), None).name


@pytest.mark.turns(5)
@pytest.mark.parametrize(
    "compiled", [pytest.param(False, id="eager"), pytest.param(True, id="compiled", marks=pytest.mark.compiled)]
)
@pytest.mark.parametrize("op", OF_FLOAT32)
def test_autocast_rounds_no_operand(op, compiled, device, generator):
    """In eager mode and compiled, entered outside and inside, forward and backward.

    Attention rounds its operands first, as PyTorch's does, and then nothing more.
    """
    torch._dynamo.reset()
    # That for 16-bit operands throughout: in float32, or compiled, the automatic choice may be another.
    rounded = arguments(op, device, generator, dtype=torch.bfloat16)
    chosen = torch.compile(choice, backend="eager", fullgraph=True) if compiled else choice
    run = functools.partial(call, op, variant=chosen(op, rounded))
    for dtype in (torch.float32, torch.bfloat16):
        args = arguments(op, device, generator, dtype=dtype)
        with torch.autocast(device, dtype=torch.bfloat16):
            prepared = op.prepare(*args)
        operands = prepared.tensors[: len(args)]
        expected = run(*(operand.float() for operand in operands)).to(prepared.dtype)

        def inside(*args):
            with torch.autocast(device, dtype=torch.bfloat16):
                return run(*args)

        function = torch.compile(inside, backend="inductor", fullgraph=True) if compiled else inside
        outer = torch.compile(lambda *args: run(*args), fullgraph=True) if compiled else inside
        with torch.autocast(device, dtype=torch.bfloat16):
            outside = outer(*args)
        copies = leaves(args)
        out = function(*copies)
        same((out, outside), (expected, expected), rtol=0, atol=0)
        out.sum().backward()
        ones = torch.ones_like(out)
        gradients = tuple(copy.grad.to(operand.dtype) for copy, operand in zip(copies, operands, strict=True))
        assert gradient_error_ratio(op, operands, ones, gradients) <= 1


@pytest.mark.parametrize("op", OF_FLOAT32)
def test_autocast_rounds_nothing_in_double_backward(op, device, generator):
    args = arguments(op, device, generator, dtype=torch.float32)
    with torch.autocast(device, dtype=torch.bfloat16):
        args = leaves(op.prepare(*args).tensors[: len(args)])  # as attention rounds them

    def second():
        gradients = torch.autograd.grad(call(op, *args).sum(), args, create_graph=True)
        return torch.autograd.grad(sum((gradient**2).sum() for gradient in gradients), args)

    expected = second()
    with torch.autocast(device, dtype=torch.bfloat16):
        found = second()
    same(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("op", OPS)
def test_threads_with_variants_of_their_own(op, device, generator):
    """Each thread's results are the bits of the variant that it named, however the threads interleave."""
    names = [name for name in on_this_python(("chunked", "einsum", "naive", "torchscript")) if name in op.variants]
    args = arguments(op, device, generator, dtype=torch.float32)
    expected = {name: op(*args, variant=name) for name in names}
    found = {name: [] for name in names}
    barrier = threading.Barrier(len(names))

    def work(name):
        barrier.wait()
        with effops.use_variant(name):
            for _ in range(50):
                found[name].append(op(*args))

    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in names:
        assert len(found[name]) == 50
        assert all(torch.equal(out, expected[name]) for out in found[name])


@pytest.mark.parametrize("op", OPS)
def test_distributed_data_parallel(op, device, generator, tmp_path):
    class Learned(torch.nn.Module):
        def __init__(self, args):
            super().__init__()
            self.learned = torch.nn.ParameterList(args[:-1])

        def forward(self, last):
            return op(*self.learned, last)

    args = arguments(op, device, generator, dtype=torch.float32)
    backend = "nccl" if device == "cuda" else "gloo"
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        module = torch.nn.parallel.DistributedDataParallel(Learned(args))
        out = module(args[-1])
        dout = torch.randn(out.shape, generator=generator).to(device)
        out.backward(dout)
    finally:
        # Whoever destroys a group waits for gloo's thread and holds the interpreter's lock. The thread needs that lock
        # to drop its last work, soon after the work is done.
        time.sleep(0.2)
        torch.distributed.destroy_process_group()
    gradients = (*(parameter.grad for parameter in module.parameters()), None)
    assert gradient_error_ratio(op, args, dout, gradients) <= 1


@pytest.mark.parametrize("op", OPS)
def test_cuda_graph(op, device, generator):
    if device != "cuda":
        pytest.skip("needs a CUDA device")
    args = leaves(arguments(op, device, generator, dtype=torch.float32))
    dout = torch.randn(op.prepare(*args).shape, generator=generator).to(device)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.autograd.grad(op(*args), args, dout)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(*args)
        gradients = torch.autograd.grad(out, args, dout)
    fresh = arguments(op, device, generator, dtype=torch.float32)
    with torch.no_grad():
        for arg, value in zip(args, fresh):
            arg.copy_(value)
    graph.replay()
    assert error_ratio(op, fresh, out) <= 1
    assert gradient_error_ratio(op, fresh, dout, gradients) <= 1
