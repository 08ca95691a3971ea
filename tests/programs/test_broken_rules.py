"""The check of the first call notices broken rules and loops: a sample of what `broken_rules.py` breaks."""

import logging
import warnings

import pytest

from .broken_rules import CAUGHT, EQUAL, RAISED, SILENT, WRONG, outcome_of_text, results_of
from .loop_texts import TEXTS


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.ERROR)  # of shapes that do not fit, while a broken rule is planned
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", ["cumsum.default", "gather.default", "amax.default"])
def test_broken_rules_are_noticed(name):
    right, wrong = results_of(name)
    assert [end for _, (end, _) in right if end == EQUAL]
    assert not [one for one in right if one[1][0] in WRONG]
    assert [one for one in wrong if one.outcome in (CAUGHT, RAISED)]
    assert not [one for one in wrong if one.outcome == SILENT]


@pytest.mark.parametrize("what", ["gradients are not added up", "the offset of numbers", "any becomes all"])
def test_broken_loops_are_noticed(what):
    (text,) = [one for one in TEXTS if one.what == what]
    name = text.programs[0]
    assert outcome_of_text(None, name)[0] == EQUAL
    assert outcome_of_text(text, name)[0] in (CAUGHT, RAISED)
