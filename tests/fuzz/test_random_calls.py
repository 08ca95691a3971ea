"""Random calls of every op: right, or a clear error, in the bytes that are predicted.

The calls are drawn in `draw.py`, and the law is in `law.py`.
"""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, seed, settings

import effops
from effops.dispatch.op import find_op

from .draw import Operand, RandomCall, random_calls
from .law import Tally, hold, hold_bytes

SLICES = 200  # of all calls, each with random numbers of its own
RUNS = 50  # of a slice; the default and `--ci` make the first ones
RUNS_OF_EVERY_COMMIT = 25
# Calls of a run. After ten, hypothesis would vary each call five times, and leave its op, variant and transform as they
# are: short runs are of more kinds.
CALLS = 10
RUNS_OF_LARGE = 5  # of a slice, all of them in `--ci`, of calls with many blocks, whose bytes alone are compared
MOST_REFUSED = 0.02  # of the calls that the plain expression accepts
MOST_MARKED = 0.01  # of the predictions of bytes


def pytest_generate_tests(metafunc):
    if "number" in metafunc.fixturenames:
        metafunc.parametrize("number", range(SLICES if metafunc.config.option.exhaustive else 1))


@pytest.fixture
def runs(number, request):
    """How many runs of random calls, of those that a slice has, and the number of the first."""
    option = request.config.option

    def chosen(count, of_every_commit, by_default):
        runs = count if option.exhaustive else of_every_commit if option.ci else by_default
        return range(number * count, number * count + runs)

    return chosen


def holding(law, tally, **drawn):
    """A run of random calls, all of which a law must hold of."""

    @settings(
        max_examples=CALLS,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(random_calls(**drawn))
    def check(call):
        law(call, tally)

    return check


def test_calls(runs, record_property):
    tally = Tally()
    for run in runs(RUNS, RUNS_OF_EVERY_COMMIT, 3):
        seed(run)(holding(hold, tally))()
    record_property("tally", str(tally))
    print(tally)
    assert tally.share_refused <= MOST_REFUSED, str(tally)


def test_predicted_bytes(runs, record_property):
    """They were others where operands had unusual strides, expanded axes or two dtypes, and where values were rare."""
    tally = Tally()
    for run in runs(RUNS, RUNS_OF_EVERY_COMMIT, 3):
        seed(run)(holding(hold_bytes, tally))()
    record_property("tally", str(tally))
    print(tally)
    assert tally.share_marked <= MOST_MARKED, str(tally)


@pytest.mark.slow
def test_predicted_bytes_of_many_blocks(runs):
    for run in runs(RUNS_OF_LARGE, RUNS_OF_LARGE, 1):
        seed(run)(holding(hold_bytes, Tally(), large=True))()


CALL = RandomCall("broadcast_dot", (Operand((4, 1, 3), wanted=True), Operand((5, 3), wanted=True)), variant="chunked")


def wrong(call):
    return find_op(effops.broadcast_dot).variants["naive"].run(call) + 1e-5


def unclear(call):
    raise RuntimeError("broadcast_dot: something went wrong")


def overwriting(call):
    call.b.data.zero_()
    return find_op(effops.broadcast_dot).variants["naive"].run(call)


def widened(call):
    return find_op(effops.broadcast_dot).variants["naive"].run(call).double()


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (wrong, "the result is off by"),
        (unclear, "something went wrong"),
        (overwriting, "an input was changed"),
        (widened, "the result is off by inf"),
    ],
)
def test_the_law_notices(run, message, monkeypatch):
    hold(CALL, Tally())
    variants = find_op(effops.broadcast_dot).variants
    monkeypatch.setitem(variants, "chunked", replace(variants["chunked"], run=run))
    with pytest.raises(AssertionError, match=message):
        hold(CALL, Tally())


def test_the_law_notices_bytes(monkeypatch):
    hold_bytes(CALL, Tally())
    variants = find_op(effops.broadcast_dot).variants
    chunked = variants["chunked"]

    def cost(call):
        found = chunked.cost(call)
        return found._replace(temporary_bytes=found.temporary_bytes + 100)

    monkeypatch.setitem(variants, "chunked", replace(chunked, cost=cost))
    with pytest.raises(AssertionError, match=r"chunked: .* measured"):
        hold_bytes(CALL, Tally())


def test_refusals_are_counted_by_reason():
    """What the plain expression accepts, and not what it refuses too."""
    tally = Tally()
    integers = replace(CALL, mistake="integers", transform="no_grad")
    hold(integers, tally)
    hold(replace(integers, mistake="a list"), tally)
    assert (tally.calls, tally.accepted) == (2, 1)
    assert tally.refused.total() == 1
    assert "TypeError: .. must be real floating point" in tally.refused
    assert tally.share_refused == 1
