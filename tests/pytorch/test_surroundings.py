"""Every op and variant inside what programs set around a call: defaults, checkpoints, hooks, overlaps, threads."""

import functools
import gc
import itertools
import threading
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import effops
import effops.memory
from effops import broadcast_dot
from effops.reference import reference_of, tried_ops

from ..support.calls import OPS, arguments, on_this_python, same

pytestmark = pytest.mark.turns(6, interpreted=3)  # what is compiled takes half a minute
torch.fx.wrap("broadcast_dot")
CALLS = [
    pytest.param((op, variant), id=f"{op.name}-{variant}")
    for op, variant in itertools.product(
        tried_ops().values(), ("sdpa", "chunked", "triton", "compile", "einsum", "torchscript", "naive")
    )
    if variant in op.variants
]
DROPOUT = [name for name in on_this_python(effops.variants(effops.attention)) if name not in ("compile", "triton")]


@pytest.fixture(params=CALLS)
def call(request):
    """A function of tensors, and arguments of its smallest case that is not a single pair."""
    op, variant = request.param
    reference = reference_of(op)
    case = next(case for case in ("one point", "single", *reference.cases) if case in reference.cases)
    if variant != "triton":
        case = next(iter(reference.cases))
    args = reference.sample_case(case, dtype=torch.float32, generator=torch.Generator().manual_seed(0))
    if obstacle := op.variants[variant].obstacle(op.prepare(*args)):
        pytest.skip(f"{variant} {obstacle}")
    # TorchScript turns the exception with which a checkpoint stops early into an error of its own.
    with set_checkpoint_early_stop(variant != "torchscript"):
        yield functools.partial(op, variant=variant), args


def leaves(args):
    return tuple(arg.detach().clone().requires_grad_() for arg in args)


def gradients(function, args):
    """The result and the gradients of a function of fresh leaves."""
    args = leaves(args)
    out = function(*args)
    out.sum().backward()
    return out, *(arg.grad for arg in args)


def is_compiled(function):
    return function.keywords["variant"] == "compile"


def assert_same(found, expected, tolerance=0.0):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
        assert one.device == other.device


class Defaults:
    """A default device without values, and another default dtype."""

    def __enter__(self):
        torch.set_default_dtype(torch.float64)
        self.device = torch.device("meta")
        self.device.__enter__()

    def __exit__(self, *error):
        self.device.__exit__(*error)
        torch.set_default_dtype(torch.float32)


def test_defaults_change_nothing(call):
    function, args = call
    expected = gradients(function, args)
    out_of = torch.ones_like(expected[0])
    own = leaves(args)
    with Defaults():
        out = function(*own)
        found = torch.autograd.grad(out, own, out_of)
    assert_same((out, *found), expected)


@pytest.mark.parametrize("variant", DROPOUT)
def test_defaults_change_no_dropout(variant):
    def dropped(q):
        torch.manual_seed(3)
        return effops.attention(q, q, q, dropout_p=0.4, variant=variant)

    q = torch.randn(1, 2, 6, 8)
    expected = gradients(dropped, (q,))
    ones, (own,) = torch.ones_like(q), leaves((q,))
    with Defaults():
        out = dropped(own)
        found = torch.autograd.grad(out, own, ones)
    assert_same((out, *found), expected)


class Counted(torch.nn.Module):
    """Counts how often its forward pass runs."""

    def __init__(self, function):
        super().__init__()
        self.function, self.runs = function, 0

    def forward(self, *args):
        self.runs += 1
        return self.function(*args)


@pytest.mark.turns(12, interpreted=3)
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "hooks"])
@pytest.mark.parametrize("depth", [1, 2])
def test_checkpoint_runs_each_block_as_often_as_for_an_operation_of_pytorch(call, reentrant, depth):
    function, args = call

    def runs(function):
        counted = Counted(function)

        def inner(*args):
            return checkpoint(counted, *args, use_reentrant=reentrant)

        found = gradients(inner if depth == 1 else lambda *a: checkpoint(inner, *a, use_reentrant=reentrant), args)
        return counted.runs, found

    count, found = runs(function)
    # The first pass of a reentrant checkpoint needs no gradients, for which Inductor makes other code.
    assert_same(found, gradients(function, args), 1e-6 if reentrant and is_compiled(function) else 0.0)
    assert count == runs(lambda *args: sum(arg.sin().sum() for arg in args))[0]


def test_checkpoint_of_a_pass_that_is_differentiated(call):
    function, args = call

    def second(function):
        own = leaves(args)
        first = torch.autograd.grad(function(*own).square().sum(), own, create_graph=True)
        return torch.autograd.grad(sum(one.sum() for one in first), own, allow_unused=True, materialize_grads=True)

    checkpointed = functools.partial(checkpoint, function, use_reentrant=False)
    if is_compiled(function):
        with pytest.raises(RuntimeError, match="does not currently support double backward"):
            second(checkpointed)
    else:
        assert_same(second(checkpointed), second(function))


@pytest.mark.slow
def test_saved_tensors_are_saved_once_and_held_by_nobody_else(call):
    function, args = call
    own = [arg * 1 for arg in leaves(args)]
    packed, unpacked, storages = {}, [], []

    def pack(tensor):
        storages.append(weakref.ref(tensor.untyped_storage()))
        packed[len(packed)] = tensor.detach().clone()
        return len(packed) - 1

    def unpack(index):
        unpacked.append(index)
        return packed[index]

    with saved_tensors_hooks(pack, unpack):
        out = function(*own)
    expected = gradients(function, own)[1:]
    result = weakref.ref(out.untyped_storage())
    inputs, start = [arg.grad_fn for arg in own], torch.ones_like(out)
    edges = [torch.autograd.graph.GradientEdge(node, 0) for node in inputs]
    del own
    end = torch.autograd.graph.get_gradient_edge(out)
    del out
    if any(one() is not None for one in (result, *storages)):
        gc.collect()  # what cycles hold; it takes a second where many modules are
    assert result() is None
    assert all(storage() is None for storage in storages), "what was packed is held beside the hooks"
    assert_same(torch.autograd.grad(end, edges, start), expected)
    assert len(unpacked) == len(set(unpacked))


def test_saved_on_cpu(call):
    function, args = call
    own = leaves(args)
    with save_on_cpu():
        out = function(*own)
    found = torch.autograd.grad(out, own, torch.ones_like(out))
    expected = gradients(function, args)[1:]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


@pytest.mark.turns(12, interpreted=3)
def test_operands_that_overlap_themselves(call):
    """Windows over one row of numbers, each of which begins where the last one has its second number."""
    function, args = call
    generator = torch.Generator().manual_seed(1)
    for i, arg in enumerate(args):
        if arg.ndim < 2 or min(arg.shape) < 2:
            continue
        base = torch.rand(sum(arg.shape), generator=generator) / arg.shape[-1]
        overlapping = base.as_strided(arg.shape, (1,) * arg.ndim)
        found = gradients_of(function, (*args[:i], overlapping, *args[i + 1 :]))
        expected = gradients_of(function, (*args[:i], overlapping.contiguous(), *args[i + 1 :]))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, equal_nan=True, rtol=1e-4, atol=1e-4)


def test_operands_whose_memory_holds_their_negatives(call):
    """The imaginary part of a conjugate is such a view. Kernels and compiled code read memory, and lost the sign."""
    function, args = call
    out, *expected = gradients_of(function, args)
    own = leaves(args)
    upstream = torch.complex(torch.zeros_like(out), -torch.ones_like(out)).conj().imag
    assert upstream.is_neg()
    same(torch.autograd.grad(function(*own), own, upstream), expected, equal_nan=True)
    for i, arg in enumerate(args):
        negated = torch.complex(torch.zeros_like(arg), -arg).conj().imag
        same(gradients_of(function, (*args[:i], negated, *args[i + 1 :])), [out, *expected], equal_nan=True)


@pytest.mark.parametrize("variant", [None, *DROPOUT])
def test_queries_that_overlap_themselves(variant):
    """PyTorch lays the result of its fused kernels out as the queries, and would write it to the same places."""
    query = torch.randn(2, 40).as_strided((2, 4, 6, 8), (40, 1, 1, 1))
    key = torch.randn(2, 4, 6, 8)
    for args in ((query, key, key), (key, query, key), (key, key, query), (query.transpose(1, 2), key, key)):
        args = args if args[0].shape == key.shape else tuple(arg.transpose(1, 2) for arg in (query, key, key))
        found = gradients_of(lambda *args: effops.attention(*args, variant=variant), args)
        expected = gradients_of(scaled_dot_product_attention, [arg.contiguous() for arg in args])
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


def gradients_of(function, args):
    """As `gradients`, of the tensors as they are."""
    args = [arg.detach().requires_grad_() for arg in args]
    out = function(*args)
    return out, *torch.autograd.grad(out, args, torch.ones_like(out))


@pytest.mark.parametrize("variant", [name for name in DROPOUT if name not in ("torchscript", "einsum")])
@pytest.mark.parametrize("randomness", ["same", "different"])
def test_dropout_of_a_batch_of_examples(variant, randomness):
    q = torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(0)).expand(3, -1, -1, -1)

    def dropped(q):
        return effops.attention(q, q, q, dropout_p=0.5, variant=variant)

    def loss(q):
        return torch.vmap(dropped, randomness=randomness)(q).square().sum()

    is_same = randomness == "same"
    out = torch.vmap(dropped, randomness=randomness)(q)
    assert torch.equal(out[0], out[1]) == is_same
    if variant == "sdpa":
        with pytest.raises(NotImplementedError, match="cannot be transformed"):
            torch.func.grad(loss)(q)
        return
    gradient = torch.func.grad(loss)(q)
    assert torch.equal(gradient[0], gradient[1]) == is_same


def test_dropout_of_each_example_has_a_gradient_by_its_own_mask():
    q, dout = torch.randn(2, 3, 5, 8, dtype=torch.float64), torch.randn(3, 5, 8, dtype=torch.float64)

    def gradient(q):
        out, pull_back = torch.func.vjp(lambda q: effops.attention(q, q, q, dropout_p=0.5, variant="chunked"), q)
        # Values enter linearly: so <dout, out> is what a gradient by them gives back.
        of_values = torch.func.vjp(lambda v: effops.attention(q, q, v, dropout_p=0.5, variant="chunked"), q)
        (found,) = of_values[1](dout)
        return (found * q).sum() - (dout * of_values[0]).sum(), pull_back(dout)[0], out

    left, _, _ = torch.vmap(gradient, randomness="different")(q)
    torch.testing.assert_close(left, torch.zeros(2, dtype=torch.float64))


def test_sdpa_seeds_the_generator_of_its_device_alone(monkeypatch):
    def refuse(*_):
        raise AssertionError("another device's generators were seeded")

    q = torch.randn(1, 2, 5, 8)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", refuse)
    state = torch.get_rng_state()
    effops.attention(q, q, q, dropout_p=0.5, variant="sdpa")
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    effops.attention(q, q, q, dropout_p=0.5, variant="chunked")  # draws a seed too, and nothing more
    assert torch.equal(torch.get_rng_state(), after)


def test_a_scale_that_is_no_number_gives_nan():
    q = torch.randn(1, 2, 5, 8)
    assert effops.attention(q, q, q, scale=float("nan")).isnan().all()
    with pytest.raises(NotImplementedError, match="needs a finite scale"):
        effops.attention(q, q, q, scale=float("nan"), variant="sdpa")


def test_without_features_each_key_has_the_same_weight():
    """PyTorch 2.12 gives zeros in place of the mean of the values."""
    q, k, v = torch.ones(1, 2, 5, 0), torch.ones(1, 2, 7, 0), torch.randn(1, 2, 7, 3)
    assert torch.allclose(effops.attention(q, k, v), v.mean(-2, keepdim=True), rtol=1e-6, atol=1e-6)
    with pytest.raises(NotImplementedError, match="needs features"):
        effops.attention(q, k, v, variant="sdpa")


def test_checkpointed_attention_takes_the_memory_that_pytorch_takes():
    """Four layers, each checkpointed: the largest activation is one layer's."""

    def model(attention):
        class Layer(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.qkv, self.out = torch.nn.Linear(64, 192), torch.nn.Linear(64, 64)

            def forward(self, x):
                query, key, value = self.qkv(x).unflatten(-1, (3, 4, 16)).movedim(-3, 0).transpose(-2, -3)
                return x + self.out(attention(query, key, value).transpose(-2, -3).flatten(-2))

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = torch.nn.ModuleList(Layer() for _ in range(4))

            def forward(self, x):
                for layer in self.layers:
                    x = layer(x)
                return x

        return Model

    def peaks(attention):
        workload = effops.memory.Workload(
            model=model(attention),
            batch=lambda size: torch.randn(size, 512, 64),
            loss=lambda model, batch: model(batch).sum(),
            optimizer=torch.optim.SGD,
            checkpoint=True,
        )
        found = effops.memory.anatomy(workload, 8, measure=True)
        return found.peak_bytes, found.measured.peak_bytes

    predicted, measured = peaks(effops.attention)
    of_pytorch, measured_of_pytorch = peaks(scaled_dot_product_attention)
    assert predicted <= of_pytorch
    assert measured <= measured_of_pytorch


@pytest.mark.parametrize("op", OPS)
def test_fake_tensors_on_a_device_that_is_not_there(op, generator):
    """Attention raised in a build of PyTorch without CUDA: an index starts the device of its tensor."""
    for case in reference_of(op).cases:
        args = arguments(op, "cpu", generator, case, torch.float32)
        expected = op(*args)
        with FakeTensorMode():
            fakes = [torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="cuda") for one in args]
            out = op(*fakes)
        assert (out.device.type, out.shape, out.dtype) == ("cuda", expected.shape, expected.dtype)


def test_symbolic_trace_takes_a_wrapped_function():
    class Scores(torch.nn.Module):
        def forward(self, query):
            return broadcast_dot(query, query)

    query = torch.randn(4, 3)
    assert torch.equal(torch.fx.symbolic_trace(Scores())(query), broadcast_dot(query, query))
    with pytest.raises(TypeError, match=r'torch.fx.wrap\("attention"\)'):
        torch.fx.symbolic_trace(lambda query: effops.attention(query, query, query))


def test_threads(call, request):
    function, args = call
    if request.node.callspec.params["call"][1] == "triton" and not torch.cuda.is_available():
        pytest.skip("Triton's interpreter exchanges Triton's functions for all threads")
    expected, found = gradients(function, args), {}

    def work(number):
        found[number] = gradients(function, args)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(4):
        assert_same(found[number], expected)
