"""Dispatch: the choice of a variant, `use_variant` in every kind of caller, `explain`, errors."""

import asyncio
import dataclasses
import functools
import inspect
import pickle
import threading

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import effops
from effops.dispatch.choice import current_variant
from effops.dispatch.op import find_op
from effops.reference import reference_of, tried_ops

FUNCTION = effops.power_spherical_log_prob
OP = find_op(FUNCTION)


@pytest.fixture
def args(generator):
    return reference_of(OP).sample((5, 4), (5,), (3, 1, 4), generator=generator)


@pytest.fixture
def ran(monkeypatch):
    """Names of the variants that ran, in order."""
    names = []
    for name, variant in OP.variants.items():

        def run(call, name=name, run=variant.run):
            names.append(name)
            return run(call)

        monkeypatch.setitem(
            OP.variants, name, type(variant)(name, run, variant.cost, variant.requires, variant.automatic)
        )
    return names


def test_public_names():
    assert set(effops.__all__) >= {"power_spherical_log_prob", "explain", "use_variant", "variants"}
    assert effops.variants(FUNCTION) == list(OP.preference)
    assert set(OP.preference) == {"naive", "einsum", "torchscript", "compile", "chunked", "cpp", "triton"}


def test_chunked_is_the_choice_on_a_cpu(args, ran):
    FUNCTION(*args)
    FUNCTION(*args, variant="einsum")
    assert ran == ["chunked", "einsum"]
    assert effops.explain(FUNCTION, *args).chosen == "chunked"


def test_use_variant_nests_and_ends(args, ran):
    with effops.use_variant("einsum"):
        FUNCTION(*args)
        with effops.use_variant("naive"):
            FUNCTION(*args)
            FUNCTION(*args, variant="chunked")
        FUNCTION(*args)
    FUNCTION(*args)
    assert ran == ["einsum", "naive", "chunked", "einsum", "chunked"]


def test_use_variant_ends_with_an_exception():
    with pytest.raises(RuntimeError), effops.use_variant("einsum"):
        raise RuntimeError
    assert current_variant() is None


def test_use_variant_is_per_thread():
    seen = {}
    inside = threading.Barrier(2)

    def work(name):
        with effops.use_variant(name):
            inside.wait()
            seen[name] = current_variant()
            inside.wait()

    threads = [threading.Thread(target=work, args=(name,)) for name in ("einsum", "naive")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"einsum": "einsum", "naive": "naive"}
    assert current_variant() is None


def test_use_variant_is_per_task():
    async def task(name):
        with effops.use_variant(name):
            await asyncio.sleep(0)
            before = current_variant()
            await asyncio.sleep(0)
            return before, current_variant()

    async def outside():
        await asyncio.sleep(0)
        return current_variant()

    async def main():
        return await asyncio.gather(task("einsum"), outside(), task("naive"))

    assert asyncio.run(main()) == [("einsum", "einsum"), None, ("naive", "naive")]


def test_one_use_variant_entered_by_several_tasks_and_threads():
    shared = effops.use_variant("einsum")
    left = []

    async def task(steps):
        with shared:
            for _ in range(steps):
                await asyncio.sleep(0)
            with shared:
                left.append(current_variant())
        left.append(current_variant())

    async def main():
        with effops.use_variant("naive"):
            await asyncio.gather(task(1), task(3), task(2))  # they leave in another order than they entered
            left.append(current_variant())

    def work():
        asyncio.run(main())
        with shared:
            inside.wait()
            asyncio.run(main())
        inside.wait()

    inside = threading.Barrier(3, timeout=30)
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    with shared:
        inside.wait()
    inside.wait()
    for thread in threads:
        thread.join()
    asyncio.run(main())
    assert sorted(left) == ["einsum"] * 15 + ["naive"] * 20
    assert current_variant() is None
    torch._dynamo.reset()
    assert torch.compile(chosen_name, backend="eager", fullgraph=True)(torch.zeros(())) == 0  # no entry is left behind


def test_compiled_and_one_object_entered_twice_inside():
    torch._dynamo.reset()

    def function(x):
        shared = effops.use_variant("einsum")
        with shared, effops.use_variant("naive"), shared:
            inside = chosen_name(x)
        return inside, chosen_name(x)

    compiled = torch.compile(function, backend="eager", fullgraph=True)
    assert compiled(torch.zeros(())) == (index("einsum"), 0)
    with effops.use_variant("naive"):
        assert compiled(torch.zeros(())) == (index("einsum"), index("naive"))


def chosen_name(x):
    """A traceable function of the variant in force."""
    names = [None, *OP.preference]
    return x + names.index(current_variant())


def index(name):
    return [None, *OP.preference].index(name)


def test_compiled_first_then_entered():
    torch._dynamo.reset()
    compiled = torch.compile(chosen_name, backend="eager", fullgraph=True)
    x = torch.zeros(())
    assert compiled(x) == 0
    for name in ("einsum", "naive", "einsum"):
        with effops.use_variant(name):
            assert compiled(x) == index(name)
    assert compiled(x) == 0


def test_compiled_and_entered_inside():
    torch._dynamo.reset()

    def function(x):
        with effops.use_variant("einsum"):
            inside = chosen_name(x)
        return inside, chosen_name(x)

    compiled = torch.compile(function, backend="eager", fullgraph=True)
    with effops.use_variant("naive"):
        assert compiled(torch.zeros(())) == (index("einsum"), index("naive"))
    assert compiled(torch.zeros(())) == (index("einsum"), 0)
    assert current_variant() is None


def test_compiled_in_another_thread_sees_its_own():
    torch._dynamo.reset()
    compiled = torch.compile(chosen_name, backend="eager", fullgraph=True)
    seen = []
    with effops.use_variant("naive"):
        assert compiled(torch.zeros(())) == index("naive")
        thread = threading.Thread(target=lambda: seen.append(compiled(torch.zeros(()))))
        thread.start()
        thread.join()
    assert seen == [0]


def test_compiled_inside_a_task_raises_and_is_never_stale():
    torch._dynamo.reset()
    compiled = torch.compile(chosen_name, backend="eager", fullgraph=True)
    assert compiled(torch.zeros(())) == 0

    async def main():
        with effops.use_variant("einsum"):
            compiled(torch.zeros(()))

    with pytest.raises(Exception, match="use_variant inside an asyncio task"):
        asyncio.run(main())
    assert compiled(torch.zeros(())) == 0


def test_compiled_ops_follow_use_variant(args, ran):
    torch._dynamo.reset()
    compiled = torch.compile(lambda *args: FUNCTION(*args), backend="eager")
    compiled(*args)
    for name in ("einsum", "naive", "einsum"):
        with effops.use_variant(name):
            compiled(*args)
    compiled(*args)
    assert ran == ["chunked", "einsum", "naive", "einsum", "chunked"]


def test_unknown_variant(args):
    with pytest.raises(ValueError, match="has no variant 'tritn'; choose from triton, cpp, chunked"):
        FUNCTION(*args, variant="tritn")
    with pytest.raises(ValueError, match="no op has a variant 'tritn'"):
        effops.use_variant("tritn")
    with pytest.raises(ValueError, match=r"must be an op of effops; got `add`; .*; ops are .*power_spherical_log_prob"):
        effops.variants(torch.add)


def test_a_named_variant_that_cannot_run_raises(args, monkeypatch):
    def needs(call):
        return "needs a blue moon, got none"

    chunked = OP.variants["chunked"]
    monkeypatch.setitem(OP.variants, "chunked", dataclasses.replace(chunked, requires=[needs]))
    with pytest.raises(NotImplementedError, match=r'log_prob\(variant="chunked"\) needs a blue moon, got none; leave'):
        FUNCTION(*args, variant="chunked")
    with (
        effops.use_variant("chunked"),
        pytest.raises(NotImplementedError, match=r'log_prob in use_variant\("chunked"\) needs a blue moon'),
    ):
        FUNCTION(*args)
    explanation = effops.explain(FUNCTION, *args)
    assert explanation.chosen == "compile"
    assert not explanation.variants["chunked"].supported
    assert explanation.variants["chunked"].reason == "needs a blue moon, got none"
    assert "needs a blue moon" in str(explanation)


def test_auto_never_hides_an_exception(args, monkeypatch):
    def fails(call):
        raise RuntimeError("out of cheese")

    chunked = OP.variants["chunked"]
    monkeypatch.setitem(OP.variants, "chunked", dataclasses.replace(chunked, run=fails))
    with pytest.raises(RuntimeError, match="out of cheese"):
        FUNCTION(*args)


def test_an_import_error_is_the_reason(args, monkeypatch):
    from effops.dispatch import requirements

    monkeypatch.setattr(requirements, "INTERPRETED", True)
    monkeypatch.setattr(requirements, "_import_error", lambda module: f"ImportError: no {module}")
    report = effops.explain(FUNCTION, *args).variants["triton"]
    assert not report.supported
    assert report.reason.endswith("cannot be imported: ImportError: no effops.kernels.pairs")


@pytest.mark.parametrize("op", tried_ops().values(), ids=tried_ops())
def test_an_explanation_can_be_sent(op, generator):
    """To another process, which may have other devices: it holds texts and numbers, and no op."""
    explanation = effops.explain(op.function, *reference_of(op).sample_case("founding", generator=generator))
    sent = pickle.loads(pickle.dumps(explanation))
    assert sent == explanation
    assert str(sent) == str(explanation)


def test_explain_allocates_nothing_and_takes_sizes_that_would_not_fit():
    loc = torch.empty(10**6, 1, 128, device="meta")
    x = torch.empty(10**6, 128, device="meta")
    explanation = effops.explain(FUNCTION, loc, torch.empty(10**6, 1, device="meta"), x)
    assert explanation.variants["chunked"].output_bytes == 4 * 10**12
    assert explanation.variants["chunked"].temporary_bytes <= 4 * 2**20
    assert explanation.variants["naive"].temporary_bytes >= 512 * 10**12
    assert "chunked" in str(explanation)
    small = torch.ones(1, 128)
    wide = effops.explain(FUNCTION, small.expand(10**6, 1, 128), 1.0, small.expand(10**6, 128))
    assert wide.variants["einsum"].output_bytes == 4 * 10**12


def test_every_registered_op_is_complete():
    for op in tried_ops().values():
        assert set(op.variants) == set(op.preference)
        assert callable(getattr(effops, op.name))


class OwnFunctions(Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class OwnDispatch(Tensor):
    """A tensor that stands for another one."""

    @staticmethod
    def __new__(cls, inner):
        wrapper = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*(arg.inner if isinstance(arg, cls) else arg for arg in args), **(kwargs or {}))


class Annotated(Tensor):
    """A subclass that overrides nothing."""


class Unwrapped(Tensor):
    """A subclass whose results are plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl


class OwnParameter(torch.nn.Parameter):
    pass


OVERRIDING = {
    "__torch_function__": (lambda tensor: tensor.as_subclass(OwnFunctions), "use .as_subclass(torch.Tensor)"),
    "__torch_dispatch__": (OwnDispatch, "use the plain tensor that it stands for"),
}
HARMLESS = {
    "subclass": lambda tensor: tensor.as_subclass(Annotated),
    "unwrapped subclass": lambda tensor: tensor.as_subclass(Unwrapped),
    "parameter": lambda tensor: torch.nn.Parameter(tensor, requires_grad=False),
    "subclass of parameter": lambda tensor: OwnParameter(tensor, requires_grad=False),
    "buffer": torch.nn.Buffer,
}
MASKED = [op for op in tried_ops().values() if "attn_mask" in inspect.signature(op.function).parameters]
ARGUMENTS = [
    pytest.param(op, name, id=f"{op.name}-{name}")
    for op in tried_ops().values()
    for name in op.core_dims
    if name in inspect.signature(op.function).parameters
]


def tensors(op, generator, wanted):
    """The tensor arguments of a call in order, by name; a mask only if it is wanted."""
    reference = reference_of(op)
    args = reference.sample_case(next(iter(reference.cases)), generator=generator)
    named = dict(zip(op.core_dims, args))
    if wanted == "attn_mask":
        shape = named["query"].shape[-2], named["key"].shape[-2]
        named["attn_mask"] = torch.ones(shape, dtype=torch.bool)
    return named


def refused(op, named, wanted, method, remedy):
    """Assert that the public function and `explain` refuse the argument, and say what to do."""
    for call in (op.function, functools.partial(effops.explain, op.function)):
        with pytest.raises(TypeError) as error:
            call(*named.values())
        message = str(error.value)
        assert message.startswith(f"{op.name}: `{wanted}` must be a plain tensor; got ")
        assert f"{type(named[wanted]).__qualname__}, which overrides {method}; " in message
        assert remedy in message


@pytest.mark.parametrize("method", OVERRIDING)
@pytest.mark.parametrize(("op", "wanted"), ARGUMENTS)
def test_a_subclass_with_a_meaning_of_its_own_is_refused(op, wanted, method, generator):
    make, remedy = OVERRIDING[method]
    named = tensors(op, generator, wanted)
    with_subclass = named | {wanted: make(named[wanted])}
    for autocast in (False, True):
        with torch.autocast("cpu", enabled=autocast):
            refused(op, with_subclass, wanted, method, remedy)


@pytest.mark.parametrize("method", OVERRIDING)
@pytest.mark.parametrize("wanted", ["query", "key", "value", "attn_mask"])
def test_a_subclass_is_refused_before_heads_are_grouped(wanted, method, generator):
    make, remedy = OVERRIDING[method]
    query, key, value = (torch.randn(heads, 5, 4, generator=generator) for heads in (4, 2, 2))
    named = {"query": query, "key": key, "value": value, "attn_mask": torch.ones(4, 5, 5, dtype=torch.bool)}
    with pytest.raises(TypeError, match=f"attention: `{wanted}` must be a plain tensor") as error:
        effops.attention(**named | {wanted: make(named[wanted])}, enable_gqa=True)
    assert remedy in str(error.value)


@pytest.mark.parametrize("kind", HARMLESS)
@pytest.mark.parametrize(("op", "wanted"), ARGUMENTS)
def test_a_harmless_subclass_is_taken(op, wanted, kind, generator):
    named = tensors(op, generator, wanted)
    expected = op.function(*named.values())
    named[wanted] = HARMLESS[kind](named[wanted])
    result = op.function(*named.values())
    torch.testing.assert_close(result.as_subclass(Tensor), expected, rtol=0, atol=0)


@pytest.mark.parametrize("op", tried_ops().values(), ids=tried_ops())
def test_fake_tensors_are_taken(op, generator):
    named = tensors(op, generator, "attn_mask" if op in MASKED else None)
    expected = op.function(*named.values())
    with FakeTensorMode() as mode:
        result = op.function(*map(mode.from_tensor, named.values()))
    assert result.shape == expected.shape


def attended(op, generator, queries, keys):
    """The tensor arguments of an attention over so many queries and keys, by name."""
    shapes = {"query": (2, queries, 4), "key": (2, keys, 4), "value": (2, keys, 3), "weight": (4,)}
    names = [name for name in op.core_dims if name in shapes]
    return {name: torch.randn(shapes[name], generator=generator).requires_grad_() for name in names}


@pytest.mark.parametrize(
    ("bias", "queries", "keys"),
    [
        (causal_upper_left, 5, 5),
        (causal_upper_left, 4, 7),
        (causal_upper_left, 7, 4),
        (causal_lower_right, 5, 5),
        (causal_lower_right, 4, 7),
        (causal_lower_right, 1, 7),
        (causal_lower_right, 7, 4),
    ],
)
@pytest.mark.parametrize("op", MASKED, ids=lambda op: op.name)
def test_a_causal_bias_is_a_triangle_without_a_mask(op, bias, queries, keys, generator):
    """What a mask of the triangle gives, in every variant, with gradients; 0 for a row without keys."""
    named = attended(op, generator, queries, keys)
    call = op.prepare(**named, attn_mask=bias(queries, keys))
    assert (call.is_causal, call.masked, call.mask.numel()) == (True, False, 0)
    triangle = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries if bias is causal_lower_right else 0)
    expected = op.function(**named, attn_mask=triangle, variant="naive")
    dout = torch.where(expected.isfinite(), torch.randn(expected.shape, generator=generator), 0)
    right = torch.autograd.grad(expected, named.values(), dout)
    taken = [name for name, variant in op.variants.items() if not variant.obstacle(call)]
    assert {"chunked", "naive", "compile"} <= set(taken)
    if (queries, keys) != (4, 7):
        taken.remove("compile")  # once, since it takes seconds
    for variant in (None, *taken):
        found = op.function(**named, attn_mask=bias(queries, keys), variant=variant)
        torch.testing.assert_close(found, expected)
        for one, other in zip(torch.autograd.grad(found, named.values(), dout), right):
            torch.testing.assert_close(one, other)
    with pytest.raises(ValueError, match=r"must be a CausalBias of \(queries, keys\)"):
        op.function(**named, attn_mask=bias(queries + 1, keys))


def test_pytorch_has_no_kernel_for_the_lower_right_corner(generator):
    query, key = torch.randn(2, 4, 3, generator=generator), torch.randn(2, 7, 3, generator=generator)
    with pytest.raises(
        NotImplementedError, match=r'variant="sdpa".* needs the upper left corner, .*takes "(cpp|chunked)"'
    ):
        effops.attention(query, key, key, causal_lower_right(4, 7), variant="sdpa")


def test_a_causal_bias_and_other_arguments(generator):
    query, key = (torch.randn(2, heads, 5, 4, generator=generator) for heads in (4, 2))
    found = effops.attention(query, key, key, causal_lower_right(5, 5), enable_gqa=True)
    assert torch.equal(found, effops.attention(query, key, key, is_causal=True, enable_gqa=True))
    with pytest.raises(ValueError, match="`is_causal` and `attn_mask` exclude each other"):
        effops.attention(query, query, query, causal_upper_left(5, 5), is_causal=True)
    layer = effops.nn.MultiheadAttention(4, 2)
    with pytest.raises(TypeError, match="give it as attn_mask of an attention of effops"):
        layer(*[torch.randn(5, 4)] * 3, attn_mask=causal_upper_left(5, 5))


def test_a_refused_subclass_is_named_when_compiled():
    torch._dynamo.reset()
    a = torch.ones(3, 4)
    compiled = torch.compile(effops.broadcast_dot, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="broadcast_dot: `a` must be a plain tensor"):
        compiled(a.as_subclass(OwnFunctions), a)
    for kind in ("parameter", "subclass of parameter", "buffer"):
        assert torch.equal(compiled(HARMLESS[kind](a), a), torch.full((3,), 4.0))
