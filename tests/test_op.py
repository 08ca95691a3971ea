"""Dispatch: the choice of a variant, `use_variant` in every kind of caller, `explain`, errors."""

import asyncio
import dataclasses
import threading

import pytest
import torch

import effops
from effops.op import current_variant, find_op, ops

FUNCTION = effops.power_spherical_log_prob
OP = find_op(FUNCTION)


@pytest.fixture
def args(generator):
    return OP.sample((5, 4), (5,), (3, 1, 4), generator=generator)


@pytest.fixture
def ran(monkeypatch):
    """Names of the variants that ran, in order."""
    names = []
    for name, variant in OP.variants.items():

        def run(call, name=name, run=variant.run):
            names.append(name)
            return run(call)

        monkeypatch.setitem(
            OP._variants, name, type(variant)(name, run, variant.cost, variant.needs, variant.automatic)
        )
    return names


def test_public_names():
    assert set(effops.__all__) >= {"power_spherical_log_prob", "explain", "use_variant", "variants"}
    assert effops.variants(FUNCTION) == list(OP.preference)
    assert set(OP.preference) == {"naive", "einsum", "torchscript", "compile", "chunked", "triton"}


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
    with pytest.raises(ValueError, match="has no variant 'tritn'; choose from triton, chunked"):
        FUNCTION(*args, variant="tritn")
    with pytest.raises(ValueError, match="no op has a variant 'tritn'"):
        effops.use_variant("tritn")
    with pytest.raises(ValueError, match=r"is no op of effops; choose from .*power_spherical_log_prob"):
        effops.variants(torch.add)


def test_a_named_variant_that_cannot_run_raises(args, monkeypatch):
    def needs(call):
        return "needs a blue moon, got none"

    chunked = OP.variants["chunked"]
    monkeypatch.setitem(OP._variants, "chunked", dataclasses.replace(chunked, needs=[needs]))
    with pytest.raises(NotImplementedError, match=r'log_prob\(variant="chunked"\) needs a blue moon, got none; leave'):
        FUNCTION(*args, variant="chunked")
    explanation = effops.explain(FUNCTION, *args)
    assert explanation.chosen == "compile"
    assert not explanation.variants["chunked"].supported
    assert explanation.variants["chunked"].reason == "needs a blue moon, got none"
    assert "needs a blue moon" in str(explanation)


def test_auto_never_hides_an_exception(args, monkeypatch):
    def fails(call):
        raise RuntimeError("out of cheese")

    chunked = OP.variants["chunked"]
    monkeypatch.setitem(OP._variants, "chunked", dataclasses.replace(chunked, run=fails))
    with pytest.raises(RuntimeError, match="out of cheese"):
        FUNCTION(*args)


def test_an_import_error_is_the_reason(args, monkeypatch):
    from effops import jit

    monkeypatch.setattr(jit, "INTERPRETED", True)
    monkeypatch.setattr(jit, "_import_error", lambda module: f"ImportError: no {module}")
    report = effops.explain(FUNCTION, *args).variants["triton"]
    assert not report.supported
    assert report.reason.endswith("cannot be imported: ImportError: no effops.kernels.pairs")


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
    for op in ops().values():
        assert set(op.variants) == set(op.preference)
        assert callable(getattr(effops, op.name))
