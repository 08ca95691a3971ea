"""An interface that PyTorch lacks disables the features that need it, which say so, and nothing else."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from effops.pytorch import missing
from effops.pytorch.missing import LACKING, MissingInterfaceError, present, stand_in
from effops.pytorch.operators import MissingOperator, aten

from .taken_away import interfaces

# What tells a plain eager call from one that is traced, transformed, predicted or batched.
NEEDED_BY_CALLS = {
    "calls.FakeTensor",
    "calls._TorchDispatchModeKey",
    "calls._are_functorch_transforms_active",
    "calls._get_dispatch_mode",
    "calls._get_tracing_state",
    "calls._is_alias_of",
    "calls._len_torch_dispatch_stack",
    "calls.dual_level",
    "calls.is_gradtrackingtensor",
    "calls.is_legacy_batchedtensor",
}
INTERFACES = sorted(interfaces())
EXPLAINED = re.compile(r"needs? torch\.[\w.]+_taken_away, which torch .* effops was tested with", re.DOTALL)


def test_few_interfaces_are_needed_by_calls():
    assert len(NEEDED_BY_CALLS) <= 10
    assert set(INTERFACES) >= NEEDED_BY_CALLS


@pytest.mark.compiled
@pytest.mark.turns(15)
@pytest.mark.parametrize("interface", INTERFACES)
def test_an_interface_that_is_taken_away(interface):
    found = subprocess.run(
        [sys.executable, "-m", "tests.pytorch.taken_away", interface],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    module = interface.partition(".")[0]
    outcomes = json.loads(found.stdout)["outcomes"]
    failed = {entry: text for entry, (_, text) in outcomes.items() if text}
    unexplained = {
        entry: text for entry, text in failed.items() if module not in outcomes[entry][0] or not EXPLAINED.search(text)
    }
    assert not unexplained
    if interface not in NEEDED_BY_CALLS:
        assert not [entry for entry in failed if entry.startswith("eager ") or entry in ("import effops", "doctor")]


@pytest.fixture
def lacking():
    before = LACKING[:]
    yield
    LACKING[:] = before


def test_a_stand_in_raises_where_it_is_used(lacking):
    absent = stand_in("tiles", "torch._C._absent")

    class Derived(absent):
        pass

    uses = (
        absent,
        Derived,
        lambda: absent.attribute,
        lambda: absent.__code__,
        lambda: present(absent),
        lambda: isinstance(1, absent),
        lambda: isinstance(1, (str, absent)),
    )
    for use in uses:
        with pytest.raises(MissingInterfaceError, match=r"tiles need torch._C._absent, which torch .* lacks"):
            use()


def test_no_exception_is_a_missing_one(lacking):
    def divide():
        try:
            return 1 / 0
        except stand_in("tiles", "torch._C._absent"):
            return 0

    with pytest.raises(ZeroDivisionError):
        divide()


def test_an_error_says_whether_the_version_was_tested(lacking, monkeypatch):
    monkeypatch.setattr(missing.torch, "__version__", "9.9.0")
    with pytest.raises(MissingInterfaceError, match=r"effops was tested with torch .*, not with 9\.9\.0"):
        stand_in("tiles", "torch._C._absent")()


def test_an_operator_that_is_not_there():
    absent, other = aten.no_such_operator.default, aten.add.no_such_overload
    assert isinstance(absent, MissingOperator)
    assert len({absent, other, aten.add.Tensor}) == 3
    with pytest.raises(MissingInterfaceError, match=r"aten\.no_such_operator\.default"):
        absent(1)


def test_what_is_compared_and_is_there(lacking):
    assert present(len) is len
