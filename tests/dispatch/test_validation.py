"""`effops.validate()`: which values are wrong for each op, and whom the context holds for."""

import asyncio
import math
import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import effops
from effops.numerics.directions import random_directions
from effops.reference import reference_of, tried_ops

OPS = [pytest.param(op, id=op.name) for op in tried_ops().values()]
WIDE = random_directions((4, 5)), random_directions((7, 1, 5))
WIDE[1][0, 0] = torch.eye(5)[0]  # of length 1 exactly, in any dtype
LOC, X = (vectors.float() for vectors in WIDE)
SCALE, WEIGHTS = torch.full((4,), 2.0), torch.full((4,), 0.25)


def log_prob(x):
    return effops.power_spherical_log_prob(LOC, SCALE, x)


def good_arguments(op, generator):
    case = next(iter(reference_of(op).cases))
    return reference_of(op).sample_case(case, generator=generator)


@pytest.mark.parametrize("op", OPS)
def test_every_operand_of_every_op(op, generator):
    """Right values give what they give without it. One NaN in any operand raises, and names the operand."""
    args = good_arguments(op, generator)
    expected = op(*args)
    with effops.validate():
        assert torch.equal(op(*args), expected)
    for place, name in enumerate(op.core_dims):
        if place >= len(args) or not args[place].is_floating_point():
            continue
        wrong = list(args)
        wrong[place] = args[place].clone()
        wrong[place].view(-1)[-1] = math.nan
        op(*wrong)
        with effops.validate(), pytest.raises(ValueError, match=f"^{op.name}: `{name}` must .*; got nan"):
            op(*wrong)


SPHERICAL = effops.power_spherical_log_prob, effops.von_mises_fisher_log_prob
MIXTURES = effops.power_spherical_mixture_log_prob, effops.von_mises_fisher_mixture_log_prob


@pytest.mark.parametrize("function", SPHERICAL)
def test_directions(function):
    with effops.validate():
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            loc, x = (vectors.to(dtype) for vectors in WIDE)
            function(loc, SCALE, x)
        for args, message in (
            (
                (LOC, SCALE, 2 * X),
                r"`x` must have length 1 .*; got 2 at \(0, 0\), 7 of 7 are wrong; give .*\(x, dim",
            ),
            (
                (LOC * 1.01, SCALE, X),
                r"`loc` must have length 1 along its last .*; got 1\.0.* at \(0,\), 4 of 4",
            ),
            ((LOC, -1.0, X), r"must be finite and at least 0; got -1, 1 of 1 is wrong"),
            ((LOC, math.inf, X), r"must be finite and at least 0; got inf"),
        ):
            with pytest.raises(ValueError, match=message):
                function(*args)
        assert function(LOC, 0.0, X).isfinite().all()


@pytest.mark.parametrize("function", MIXTURES)
def test_mixtures(function):
    with effops.validate():
        function(WEIGHTS.log(), LOC, SCALE, X)
        function(torch.zeros(4), LOC, SCALE, X)
        function(torch.tensor([0.0, -math.inf, 0.0, 1.0]), LOC, SCALE, X)
        function(torch.ones(1), LOC, SCALE, X)  # the same for all components: no weight of one component
        for args, message in (
            ((WEIGHTS, LOC, SCALE, X), r"`log_weights` must be logarithms, .*; got 1,.*; give weights.log\(\)"),
            ((WEIGHTS.expand(7, 4), LOC, SCALE, X), r"`log_weights` must be logarithms, .*; got 1 at \(0,\), 7 of 7"),
            ((WEIGHTS + math.inf, LOC, SCALE, X), "`log_weights` must have values below infinity"),
            (
                (SCALE, LOC, WEIGHTS.log(), X),
                "at least 0; got -1.38629.*; the order is log_weights, loc, .*, x; here `log_weights` is positive",
            ),
            (
                (LOC, SCALE, X, WEIGHTS.log()),
                "`loc` must have length 1 .*; the order is log_weights, .*; here `log_weights` has length 1 along",
            ),
            ((WEIGHTS.log(), 2 * LOC, SCALE, X), r"`loc` must have length 1 .*; give torch\.nn\.functional\.normalize"),
            ((WEIGHTS.log(), LOC * math.nan, SCALE, X), "`loc` must .*; got nan .*; look for what made NaN"),
        ):
            with pytest.raises(ValueError, match=message):
                function(*args)
        along_first = WEIGHTS.reshape(4, 1), LOC.unsqueeze(1), 2.0, X.squeeze(1)
        with pytest.raises(ValueError, match=r"not weights that add up to 1 along dim=-2; got 1 at \(0,\)"):
            function(*along_first, 0)


def test_arguments_in_another_order():
    """They gave NaN, and the advice to normalise them."""
    square = random_directions((5, 5)).float()
    with effops.validate():
        with pytest.raises(ValueError, match=r"`x` must .*; the order is loc, scale, x; here `scale` has length 1"):
            effops.power_spherical_log_prob(square, X, torch.full((5,), 2.0))
        with pytest.raises(ValueError, match=r"`scale` must .*; the order is .*; here `log_weights` is positive"):
            effops.normal_mixture_log_prob(SCALE, LOC, WEIGHTS.log().unsqueeze(-1), X)
        with pytest.raises(ValueError, match=r"`scale` must be finite and above 0; .*; give a standard deviation"):
            effops.normal_mixture_log_prob(WEIGHTS.log(), LOC, -1.0, X)


def test_normal_scales():
    for scale in (0.0, -1.0, math.inf):
        with (
            effops.validate(),
            pytest.raises(ValueError, match=r"`scale` must be finite and above 0; .*(give a|inf .*; look for)"),
        ):
            effops.normal_log_prob(LOC, scale, X)


def test_masks_of_attention():
    query, allowed = torch.ones(2, 5, 4), torch.ones(5, 5).tril()
    with effops.validate():
        for mask in (None, allowed.bool(), allowed.log(), torch.zeros(5, 5)):
            effops.attention(query, query, query, mask)
        with pytest.raises(
            ValueError, match=r"`attn_mask` must be boolean, .*; got zeros and ones alone; give attn_mask.bool\(\)"
        ):
            effops.attention(query, query, query, allowed)
        with pytest.raises(ValueError, match="`attn_mask` must have values below infinity"):
            effops.attention_scores(query, query, 1 / (1 - allowed))


def is_checked():
    try:
        log_prob(2 * X)
    except ValueError:
        return True
    return False


def test_nests_and_ends():
    shared = effops.validate()
    assert not is_checked()
    with shared, effops.validate():
        with shared:
            assert is_checked()
        assert is_checked()
    with pytest.raises(RuntimeError), shared:
        raise RuntimeError
    assert not is_checked()


def test_is_per_thread_and_task():
    seen = []
    with effops.validate():
        thread = threading.Thread(target=lambda: seen.append(is_checked()))
        thread.start()
        thread.join()
    assert seen == [False]

    async def inside(entered, done):
        with effops.validate():
            entered.set()
            await done.wait()
            return is_checked()

    async def outside(entered, done):
        await entered.wait()
        found = is_checked()
        done.set()
        return found

    async def both():
        entered, done = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(inside(entered, done), outside(entered, done))

    assert asyncio.run(both()) == [True, False]


def test_it_may_be_left_in_another_thread():
    """As a generator that is closed there leaves it."""
    validation, found = effops.validate(), []

    def leave():
        validation.__exit__(None, None, None)
        found.append(is_checked())

    validation.__enter__()
    assert is_checked()
    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert found == [False]
    assert not is_checked()


CHECKED_OR_REFUSED = r"`x` must have length 1|effops\.validate\(\) needs values"


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_code_checks_or_raises_and_is_never_stale(fullgraph):
    compiled = torch.compile(log_prob, backend="eager", fullgraph=fullgraph)
    expected = log_prob(2 * X)
    for _ in range(2):
        assert torch.equal(compiled(2 * X).nan_to_num(), expected.nan_to_num())
        with effops.validate(), pytest.raises(Exception, match=CHECKED_OR_REFUSED):
            compiled(2 * X)

    def entered_inside(x):
        with effops.validate():
            return log_prob(x)

    with pytest.raises(Exception, match=CHECKED_OR_REFUSED):
        torch.compile(entered_inside, backend="eager", fullgraph=fullgraph)(2 * X)
    assert not is_checked()


def test_transforms():
    def total(x):
        return log_prob(x).sum()

    with effops.validate():
        torch.func.grad(total)(X)
        with pytest.raises(ValueError, match="`x` must have length 1"):
            torch.func.grad(total)(2 * X)
        for transformed in (log_prob, torch.func.grad(total)):
            with pytest.raises(NotImplementedError, match=r"needs values, which torch\.func\.vmap hides"):
                torch.func.vmap(transformed)(X)


def test_tensors_without_values():
    with effops.validate():
        effops.broadcast_dot(torch.empty(3, device="meta"), torch.empty(3, device="meta"))
        with FakeTensorMode():
            effops.broadcast_dot(torch.empty(3), torch.empty(3))
        assert effops.explain(effops.power_spherical_log_prob, LOC, SCALE, 2 * X).chosen
