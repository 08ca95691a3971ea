"""`effops.record`: what it lists, for which callers, and what it predicts of the calls afterwards."""

import asyncio
import gc
import threading
import weakref

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import effops
from effops.dispatch.devices import RUN_ON, never_run_on
from effops.dispatch.op import find_op
from effops.reference import reference_of, tried_ops

FUNCTION = effops.power_spherical_log_prob
UNSEEN = r"effops\.record cannot see the calls of compiled code"


def sampled(op, generator):
    reference = reference_of(op)
    args = reference.sample_case(next(iter(reference.cases)), generator=generator)
    return tuple(arg.requires_grad_(arg.is_floating_point()) for arg in args)


@pytest.fixture
def pair(generator):
    return torch.randn(3, 1, 4, generator=generator), torch.randn(5, 4, generator=generator)


def test_a_training_step(generator, pair):
    args = reference_of(FUNCTION).sample((5, 4), (5,), (3, 1, 4), generator=generator)
    args = tuple(arg.requires_grad_() for arg in args)
    with effops.record() as calls:
        for _ in range(2):
            FUNCTION(*args, variant="einsum").sum().backward()
        effops.broadcast_dot(*pair)
        effops.explain(effops.broadcast_dot, *pair)  # it calls no op
    effops.broadcast_dot(*pair)
    assert [(call.op, call.variant) for call in calls] == [
        *[("power_spherical_log_prob", "einsum")] * 2,
        ("broadcast_dot", "chunked"),
    ]
    assert calls[0].shapes == {"loc": (5, 4), "scale": (5,), "x": (3, 1, 4)}
    assert [call.dtype for call in calls] == [torch.float32] * 3
    _, header, twice, once = str(calls).splitlines()
    assert header.split() == ["calls", "op", "variant", "dtype", "output", "saved", "temporary", "shapes"]
    assert twice.split()[:6] == ["2", "power_spherical_log_prob", "einsum", "float32", "60", "B"]
    assert twice.endswith("loc (5, 4), scale (5,), x (3, 1, 4)")
    assert once.split()[:5] == ["1", "broadcast_dot", "chunked", "float32", "60"]


def test_no_call():
    with effops.record() as calls:
        pass
    assert (calls, str(calls)) == ([], "no op was called")


@pytest.mark.parametrize("op", tried_ops().values(), ids=tried_ops())
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_an_op_is_one_call_and_costs_what_explain_says(op, autocast, generator):
    args = sampled(op, generator)
    with torch.autocast("cpu", enabled=autocast):
        reports = effops.explain(op.function, *args).variants
    for name in op.preference:
        report = reports[name]
        with torch.autocast("cpu", enabled=autocast):
            if not report.supported or name in ("compile", "flex", "triton"):
                continue
            with effops.record() as calls:
                op(*args, variant=name).sum().backward()
        (call,) = calls
        assert (call.op, call.variant) == (op.name, name)
        assert list(call.shapes.values()) == [tuple(arg.shape) for arg in args]
        predicted = report.output_bytes, report.saved_bytes, report.temporary_bytes, report.flops, report.unknown
        assert call.cost == predicted


def test_bytes_are_those_of_the_call_and_not_of_the_question(generator):
    args = sampled(find_op(FUNCTION), generator)
    with effops.record() as calls:
        FUNCTION(*args, variant="einsum")
        with torch.no_grad():
            FUNCTION(*args, variant="einsum")
    with torch.no_grad(), torch.autocast("cpu"):
        assert calls[0].cost.saved_bytes > 0 == calls[1].cost.saved_bytes


def test_it_keeps_no_tensor_and_draws_no_number(generator):
    query = torch.randn(2, 3, 4, generator=generator)
    kept = weakref.ref(query)
    with effops.record() as calls:
        effops.attention(query, query, query, dropout_p=0.5, variant="chunked")
    state = torch.get_rng_state()
    del query
    gc.collect()
    assert kept() is None
    assert "attention" in str(calls)
    assert torch.equal(torch.get_rng_state(), state)


def test_recorders_nest(pair):
    with effops.record() as outer:
        effops.broadcast_dot(*pair)
        with effops.record() as inner:
            effops.broadcast_dot(*pair, variant="naive")
        effops.broadcast_dot(*pair, variant="einsum")
    effops.broadcast_dot(*pair)
    assert [call.variant for call in outer] == ["chunked", "naive", "einsum"]
    assert [call.variant for call in inner] == ["naive"]


def test_it_ends_with_an_exception(pair):
    kept = []

    def failing():
        with effops.record() as calls:
            kept.append(calls)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        failing()
    effops.broadcast_dot(*pair)
    assert kept == [[]]


def test_a_call_that_raises_is_not_listed(pair):
    with effops.record() as calls:
        with pytest.raises(ValueError, match="has no variant"):
            effops.broadcast_dot(*pair, variant="tritn")
        with pytest.raises(ValueError, match="broadcast_dot"):
            effops.broadcast_dot(pair[0], pair[1][:, :3])
    assert calls == []


def test_it_is_per_thread(pair):
    found = {}
    inside = threading.Barrier(2, timeout=30)

    def work(name):
        with effops.record() as calls:
            inside.wait()
            effops.broadcast_dot(*pair, variant=name)
            inside.wait()
        found[name] = [call.variant for call in calls]

    threads = [threading.Thread(target=work, args=(name,)) for name in ("einsum", "naive")]
    with effops.record() as here:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {"einsum": ["einsum"], "naive": ["naive"]}
    assert here == []


def test_it_is_per_task(pair):
    async def task(name, steps):
        with effops.record() as calls:
            for _ in range(steps):
                await asyncio.sleep(0)
            effops.broadcast_dot(*pair, variant=name)
            await asyncio.sleep(0)
        return [call.variant for call in calls]

    async def main():
        return await asyncio.gather(task("einsum", 1), task("naive", 3), task("chunked", 2))

    assert asyncio.run(main()) == [["einsum"], ["naive"], ["chunked"]]


def test_a_checkpoint_calls_again(pair):
    a, b = (tensor.requires_grad_() for tensor in pair)
    with effops.record() as calls:
        checkpoint(effops.broadcast_dot, a, b, use_reentrant=False).sum().backward()
    assert [call.op for call in calls] == ["broadcast_dot"] * 2


def test_transforms_and_traces(pair):
    def recorded(a, b):
        with effops.record() as calls:
            out = effops.broadcast_dot(a, b)
        found.append(calls)
        return out.sum()

    found = []
    torch.func.grad(recorded)(*pair)
    torch.vmap(recorded, in_dims=(0, None))(*pair)
    make_fx(recorded)(*pair)
    whole, example = {"a": (3, 1, 4), "b": (5, 4)}, {"a": (1, 4), "b": (5, 4)}
    assert [calls[0].shapes for calls in found] == [whole, example, whole]
    assert [calls[0].cost.output_bytes for calls in found] == [60, 20, 60]
    make_fx(recorded, tracing_mode="symbolic")(*pair)
    assert found[-1][0].cost is None
    assert " - " in str(found[-1])


def test_a_sharded_call_is_one_call(pair):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = DeviceMesh("cpu", [0])
        a, b = (DTensor.from_local(tensor, mesh, [Replicate()]) for tensor in pair)
        with effops.record() as calls:
            effops.broadcast_dot(a, b, variant="einsum")
    finally:
        dist.destroy_process_group()
    assert [(call.variant, call.shapes) for call in calls] == [("einsum", {"a": (3, 1, 4), "b": (5, 4)})]
    assert calls[0].cost.output_bytes == 60


@pytest.fixture
def runs():
    """The programs that ran compiled; as a backend of torch.compile it adds to them."""
    torch._dynamo.reset()
    names = []

    def backend(graph, inputs):
        def program(*args):
            names.append("compiled")
            return graph(*args)

        return program

    return names, backend


def test_compiled_calls_are_listed_or_raise(pair, runs):
    ran, backend = runs
    compiled = torch.compile(effops.broadcast_dot, backend=backend)
    strict = torch.compile(lambda a, b: effops.broadcast_dot(a, b), backend=backend, fullgraph=True)
    compiled(*pair)
    strict(*pair)
    for _ in range(2):
        with effops.record() as calls:
            compiled(*pair)
            with pytest.raises(torch._dynamo.exc.Unsupported, match=UNSEEN):
                strict(*pair)
            with torch.compiler.set_stance("force_eager"):
                strict(*pair)
        assert [call.op for call in calls] == ["broadcast_dot"] * 2
    ran.clear()
    strict(*pair)
    assert ran == ["compiled"]  # outside, it runs compiled again


def test_recording_inside_compiled_code_lists_or_raises(pair, runs):
    def recorded(a, b):
        with effops.record() as calls:
            out = effops.broadcast_dot(a, b)
        found.append(calls)
        return out

    found = []
    _, backend = runs
    torch.compile(recorded, backend=backend)(*pair)
    assert [call.op for call in found[-1]] == ["broadcast_dot"]
    torch._dynamo.reset()  # the broken graph would run for the same code
    with pytest.raises(torch._dynamo.exc.Unsupported, match=UNSEEN):
        torch.compile(recorded, backend=backend, fullgraph=True)(*pair)


def test_a_recorder_says_where_its_calls_are():
    """It was shown as an object at an address."""
    recorder = effops.record()
    with recorder:
        pass
    assert "print those of `with effops.record() as calls:`" in f"{recorder}"


@pytest.mark.parametrize("context", [effops.record, effops.validate, effops.use_variant])
def test_what_is_raised_under_fullgraph_is_documented(context):
    """The docstrings named NotImplementedError, which Dynamo replaces."""
    assert "`fullgraph=True`" in context.__doc__
    assert "torch._dynamo.exc.Unsupported" in context.__doc__


def test_explain_says_where_the_choice_was_never_run(pair):
    line = "triton was never run on a CUDA GPU; `effops doctor --full --op broadcast_dot` checks and times it on yours"
    with FakeTensorMode():
        on_cuda = effops.explain(effops.broadcast_dot, *(torch.empty(tensor.shape, device="cuda") for tensor in pair))
    assert on_cuda.never_run_on == "a CUDA GPU"
    assert str(on_cuda).splitlines()[-1] == line
    for device in ("cpu", "meta"):
        elsewhere = effops.explain(effops.broadcast_dot, *(tensor.to(device) for tensor in pair))
        assert elsewhere.never_run_on == ""
        assert "never run" not in str(elsewhere)


def test_explain_names_no_command_that_does_not_look_for_the_device(pair):
    """Of MPS tensors it said that `effops doctor` checks the choice, which looks for CUDA devices alone."""
    with FakeTensorMode():
        on_mps = effops.explain(effops.broadcast_dot, *(torch.empty(tensor.shape, device="mps") for tensor in pair))
    line = "chunked was never run on a device of type mps; compare it with the same call on a CPU"
    assert str(on_mps).splitlines()[-1] == line


def test_a_variant_that_was_run_on_a_device_is_no_longer_named(monkeypatch):
    cuda = torch.device("cuda")
    assert never_run_on("triton", cuda) == "a CUDA GPU"
    monkeypatch.setitem(RUN_ON, "a CUDA GPU", frozenset({"triton"}))
    assert never_run_on("triton", cuda) == ""
    assert never_run_on("einsum", cuda) == "a CUDA GPU"
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert never_run_on("triton", cuda) == "an AMD GPU"
    assert never_run_on("chunked", torch.device("xpu")) == "a device of type xpu"
