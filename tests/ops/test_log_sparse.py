"""What is peculiar to log_sparse_attention: its pattern and settings, its work and memory, autocast."""

import itertools
import math

import pytest
import torch
from torch._dynamo.utils import counters

import effops
from effops.blocks.log_sparse import Pattern
from effops.measure import Pass, memory
from effops.ops.attention.log_sparse import allowed, op
from effops.reference import reference_of

REFERENCE = reference_of(op)

SETTINGS = [
    (1, 7, None),
    (3, None, 0.5),
    (2, 9, None),
    (1, 1, -1.0),
    (20, None, None),
    (40, 50, None),
    (500, None, None),
]


def offsets_by_definition(length, local, restart):
    base = {*range(local), *(local - 1 + 2**k for k in range(length.bit_length()))}
    return [distance for distance in range(length) if (distance if restart is None else distance % restart) in base]


@pytest.mark.parametrize("length", [0, 1, 2, 7, 64, 130])
def test_pattern(length):
    for local, restart in itertools.product((1, 2, 3, 64, 200), (None, 1, 2, 5, 64, 129, 200)):
        if restart is not None and local > restart:
            continue
        expected = offsets_by_definition(length, local, restart)
        assert Pattern(local, restart).offsets(length) == expected
        distance = torch.arange(-length, length)
        assert distance[allowed(distance, local, restart)].tolist() == expected


def test_published_counts():
    assert Pattern(1, None).pairs(256) == 2049
    assert Pattern(1, None).pairs(1024) == 10241


def test_infinite_scores_of_the_nearest_keys():
    """The first block of offsets has nothing for a row: it was NaN, where keys further back have finite scores."""
    query, key, value = torch.ones(300, 2), torch.ones(300, 2), torch.arange(600.0).view(300, 2)
    key[200:] = -math.inf
    found, expected = (op(query, key, value, 40, variant=variant) for variant in ("chunked", "naive"))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("shapes", [((2, 200, 5), (2, 200, 5), (2, 200, 3)), ((3, 1, 70, 4), (2, 70, 4), (70, 4))])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("variant", [name for name in op.variants if name not in ("compile", "flex")])
def test_settings(variant, settings, shapes, device, generator):
    """Offsets alone and close together, in blocks and in the rows that are left."""
    if variant == "triton" and device == "cpu" and (len(shapes[0]) > 3 or settings not in SETTINGS[1:3]):
        pytest.skip("interpreted: two patterns, of one shape")
    args = REFERENCE.sample(*shapes, device=device, generator=generator)
    obstacle = op.variants[variant].obstacle(op.prepare(*args))
    if obstacle:
        pytest.skip(f"{variant} {obstacle}")
    leaves = [arg.clone().requires_grad_() for arg in args]
    call = op.prepare(*args, *settings)
    out = effops.log_sparse_attention(*leaves, *settings, variant=variant)
    assert REFERENCE.bounds(call).error_ratio(out) <= 1
    dout = torch.randn(out.shape, generator=generator).to(device)
    gradients = torch.autograd.grad(out, leaves, dout)
    for bounds, gradient in zip(REFERENCE.gradient_bounds(call, dout), gradients, strict=True):
        assert bounds.error_ratio(gradient) <= 1


def flex(*args, **options):
    return effops.log_sparse_attention(*args, **options, variant="flex")


@pytest.mark.turns(2)
@pytest.mark.compiled
@pytest.mark.parametrize("settings", [(1, None, None), (3, 140, -2.0)], ids=str)
def test_flex(settings, device, generator):
    """Several blocks, of which the last has few rows; compiled once for the first sizes, and once for all others."""
    compiled = []
    for heads, length in (((2,), 300), ((3, 2), 1100), ((4,), 257)):
        shapes = [(*heads[1:], length, 16), (*heads[:1], *(1,) * len(heads[1:]), length, 16), (length, 5)]
        args = REFERENCE.sample(*shapes, device=device, generator=generator)
        obstacle = op.variants["flex"].obstacle(op.prepare(*args))
        if obstacle:
            pytest.skip(f"flex {obstacle}")
        call = op.prepare(*args, *settings)
        run = Pass(lambda *args: flex(*args, **dict(zip(("local", "restart", "scale"), settings))), args)
        measured = memory(run)
        out = run.function(*args)
        assert REFERENCE.bounds(call).error_ratio(out) <= 1
        assert out.is_contiguous()
        compiled.append(counters["stats"]["unique_graphs"])
        if device == "cpu":
            predicted = effops.explain(op.name, *args, *settings).variants["flex"]
            assert predicted.output_bytes == measured.output_bytes
            assert abs(predicted.temporary_bytes - measured.temporary_bytes) <= max(
                2**12, 0.01 * measured.temporary_bytes
            )
    assert compiled[0] < compiled[1] == compiled[2]


def test_flex_refuses_what_it_cannot_do(device, generator):
    args = REFERENCE.sample((2, 9, 3), (2, 9, 3), (2, 9, 3), device=device, generator=generator)
    for change, message in (
        (lambda arg: arg.clone().requires_grad_(), "computes no gradients"),
        (lambda arg: arg.bfloat16(), "needs float32 tensors.*; got torch.bfloat16"),
        (lambda arg: arg.double(), "needs float32 tensors.*; got torch.float64"),
        (lambda arg: arg[:, :0], "needs at least one head, position and feature"),
        (lambda arg: arg.to("meta"), "needs tensors in memory"),
    ):
        changed = [change(arg) for arg in args]
        with pytest.raises(NotImplementedError, match=message):
            flex(*changed)
        assert effops.explain(effops.log_sparse_attention, *changed).chosen != "flex"
    with pytest.raises(NotImplementedError, match=r"cannot be transformed by torch\.func"):
        torch.func.vmap(flex)(*args)
    with pytest.raises(NotImplementedError, match="needs tensors in memory"):
        torch.compile(flex, backend="eager")(*args)


@pytest.mark.parametrize("settings", [(1, None), (4, 9)], ids=str)
def test_derivatives_of_settings(settings, device, generator):
    args = REFERENCE.sample((150, 3), (150, 3), (150, 2), dtype=torch.float64, device=device, generator=generator)
    leaves = [arg.requires_grad_() for arg in args]

    def function(*args):
        return effops.log_sparse_attention(*args, *settings)

    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("scale", [1e3, 1e-30, 0.0])
def test_large_scores(scale, device, generator):
    args = REFERENCE.sample((100, 5), (100, 5), (100, 5), device=device, generator=generator)
    for settings in ((1, None, scale), (20, None, scale)):
        out = effops.log_sparse_attention(*args, *settings)
        assert out.isfinite().all()
        assert REFERENCE.bounds(op.prepare(*args, *settings)).error_ratio(out) <= 1


@pytest.mark.parametrize("settings", [(1, None), (20, None), (1, 16)], ids=str)
def test_a_bad_position_reaches_only_those_that_attend_to_it(settings, device, generator):
    """But for its value where offsets stand close together: there it is multiplied by the zeros of others."""
    query, key, value = REFERENCE.sample((200, 5), (200, 5), (200, 5), device=device, generator=generator)
    key[150] = math.nan
    if settings == (1, None):
        value[150] = math.nan
    out = effops.log_sparse_attention(query, key, value, *settings)
    distance = torch.arange(200) - 150
    assert torch.equal(out.isnan().any(-1).cpu(), allowed(distance, *settings))


@pytest.mark.parametrize("settings", [(1, None), (64, None), (1, 16)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory(settings, dtype, device, generator):
    """The same at any length: a dense form has scores of 32 MiB here."""
    args = REFERENCE.workload(H=2, L=2048, E=64, dtype=dtype, device=device, generator=generator)
    measured = memory(Pass(lambda *args: op(*args, *settings, variant="chunked"), args))
    predicted = effops.explain(op.name, *args, *settings).variants["chunked"]
    assert measured.temporary_bytes <= 4 * 2**20
    assert abs(predicted.temporary_bytes - measured.temporary_bytes) <= max(2**16, 0.1 * measured.temporary_bytes)


def test_work_grows_as_the_pairs():
    def operations(length):
        args = REFERENCE.workload(H=1, L=length, E=8, device="meta")
        return effops.explain(op.name, *args).variants["chunked"].flops

    assert operations(16384) / operations(2048) == Pattern(1, None).pairs(16384) / Pattern(1, None).pairs(2048)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_autocast_is_that_of_sdpa(dtype, device, generator):
    args = REFERENCE.sample((1, 2, 9, 4), (1, 2, 9, 4), (1, 2, 9, 4), dtype=dtype, device=device, generator=generator)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = effops.log_sparse_attention(*args)
        assert out.dtype == torch.nn.functional.scaled_dot_product_attention(*args).dtype
    rounded = dtype if dtype == torch.float64 else torch.bfloat16
    assert torch.equal(out, effops.log_sparse_attention(*(arg.to(rounded) for arg in args)))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": torch.ones(5)}, ValueError, "`query` must have at least 2 dimensions"),
        ({"query": [1.0]}, TypeError, "`query` must be a tensor"),
        ({"value": torch.ones(6, 3, dtype=torch.int32)}, TypeError, "`value` must be real floating point"),
        ({"key": torch.ones(6, 3)}, ValueError, "last dimension of `key` must equal that of `query`"),
        ({"value": torch.ones(5, 3)}, ValueError, "`value` must have as many positions as `query`.*pad or cut"),
        (
            {"key": torch.ones(3, 6, 4)},
            ValueError,
            "batch axes.* must broadcast; got query.*; expand them, repeat_interleave the heads",
        ),
        ({"local": 0}, ValueError, "`local` must be at least 1; got 0"),
        ({"local": 1.5}, TypeError, "`local` must be an integer; got float"),
        ({"restart": 0}, ValueError, "`restart` must be at least 1; got 0"),
        ({"restart": True}, TypeError, "`restart` must be an integer; got bool"),
        ({"local": 4, "restart": 3}, ValueError, "`local` must be at most `restart`.*local=4, restart=3"),
        ({"scale": torch.ones(())}, TypeError, "`scale` must be a number or None; got Tensor"),
    ],
)
def test_bad_arguments(change, error, message):
    arguments = {"query": torch.ones(2, 6, 4), "key": torch.ones(2, 6, 4), "value": torch.ones(2, 6, 3), **change}
    with pytest.raises(error, match=f"log_sparse_attention: {message}"):
        effops.log_sparse_attention(**arguments)
