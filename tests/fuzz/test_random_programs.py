"""Random functions in tiles: the results and gradients of the whole, within the budget, or refused by name."""

import warnings

from .programs_in_tiles import CUT, SMALL, UNSTABLE, hold

PARTS, PROGRAMS = 20, 500  # of a part; the default and CI make the first ones


def pytest_generate_tests(metafunc):
    if "part" in metafunc.fixturenames:
        metafunc.parametrize("part", range(PARTS if metafunc.config.option.exhaustive else 1))


def test_random_programs(part, request):
    option = request.config.option
    count = PROGRAMS if option.exhaustive else 100 if option.ci else 8
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcomes = [hold(number)[0] for number in range(part * PROGRAMS, part * PROGRAMS + count)]
    large = [one for one in outcomes if one != SMALL]
    print({one: outcomes.count(one) for one in set(outcomes)})
    assert large.count(CUT) >= 0.6 * len(large), outcomes
    assert large.count(UNSTABLE) <= 0.05 * len(large) + 1, outcomes
