"""Random calls of every op: right, or a clear error. The calls are drawn in `draw.py`, and the law is in `law.py`."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, seed, settings

import effops
from effops.dispatch.op import find_op

from .draw import Operand, RandomCall, random_calls
from .law import Tally, hold

SLICES = 200  # of all calls, each with random numbers of its own
RUNS = 50  # of a slice; the default makes the first ones
# Calls of a run. After ten, hypothesis would vary each call five times, and leave its op, variant and transform as they
# are: short runs are of more kinds.
CALLS = 10
MOST_REFUSED = 0.02  # of the calls that the plain expression accepts


def pytest_generate_tests(metafunc):
    if "number" in metafunc.fixturenames:
        metafunc.parametrize("number", range(SLICES if metafunc.config.option.exhaustive else 1))


def test_calls(number, request, record_property):
    option, tally = request.config.option, Tally()

    @settings(
        max_examples=CALLS,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(random_calls())
    def check(call):
        hold(call, tally)

    for run in range(RUNS if option.ci or option.exhaustive else 3):
        seed(number * RUNS + run)(check)()
    record_property("tally", str(tally))
    print(tally)
    assert tally.share_refused <= MOST_REFUSED, str(tally)


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
