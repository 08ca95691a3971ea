"""Which tests a tier has. The default has one case of each kind, so that it misses no function, op or variant."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from .support import tiers

OPS, VARIANTS = [f"op {i}" for i in range(12)], [f"variant {i}" for i in range(6)]
CASES, DTYPES = [f"case {i}" for i in range(9)], ["float32", "float64", "bfloat16", "float16"]


class Item(SimpleNamespace):
    """What tiers read of a test."""

    __hash__ = object.__hash__

    def get_closest_marker(self, name: str) -> Any:
        return self.markers.get(name)


def item(function: str, *words: str, **markers: Any) -> Item:
    name = f"{function}[{'-'.join(words)}]" if words else function
    return Item(name=name, nodeid=f"tests/test_toy.py::{name}", markers=markers)


def names(items: list[Item], **options: bool) -> list[str]:
    config = SimpleNamespace(option=SimpleNamespace(**{"ci": False, "exhaustive": False, **options}))
    chosen = tiers.tier(config, items)  # type: ignore[arg-type]
    return [one.name for one in items if one in chosen]


def default(items: list[Item]) -> list[str]:
    return names(items)


def test_each_value_of_each_parameter_once() -> None:
    chosen = default([item("test_op", op, variant) for op, variant in itertools.product(OPS, VARIANTS)])
    assert len(OPS) <= len(chosen) <= len(OPS) + len(VARIANTS)
    for word in (*OPS, *VARIANTS):
        assert any(word in name for name in chosen), word


def test_each_pair_of_values_once_where_there_are_four_parameters() -> None:
    parameters = (OPS, VARIANTS, CASES, DTYPES)
    items = [item("test_result", *words) for words in itertools.product(*parameters)]
    chosen = default(items)
    assert len(chosen) < len(items) / 10
    for one, other in itertools.combinations(parameters, 2):
        for pair in itertools.product(one, other):
            assert any(all(word in name for word in pair) for name in chosen), pair


def test_of_several_reasons_the_slowest_counts() -> None:
    alike = [[item(f"test_{i}", sharded=True)] for i in range(40)]
    slow = [[item(f"test_{i}", sharded=True, slow=True)] for i in range(40)]
    assert sum(map(len, map(default, alike))) == 40
    assert sum(map(len, map(default, slow))) <= 10


def test_each_function_once_though_it_is_interpreted_or_sharded() -> None:
    """66 functions had none of their cases in the default, as a hash would have it."""
    markers = ("interpreted", "sharded")
    items = [
        item(f"test_{i}_{marker}", word, **{marker: True}) for i in range(20) for marker in markers for word in "ab"
    ]
    assert len(default(items)) == 40
    assert {name.partition("[")[0] for name in default(items)} == {one.name.partition("[")[0] for one in items}


def test_slow_cases_take_turns() -> None:
    """A function without quick cases has at most one, where it is the turn of one."""
    slow = [item(f"test_{i}", word, slow=True) for i in range(800) for word in "ab"]
    functions = [name.partition("[")[0] for name in default(slow)]
    assert len(functions) == len(set(functions))
    assert 150 < len(functions) < 250  # two of eight turns
    rarer = [item(f"test_{i}", "a", compiled=True, turns=SimpleNamespace(args=(10,))) for i in range(800)]
    assert len(default(rarer)) < 20


def test_a_function_with_quick_cases_has_no_slow_ones() -> None:
    slow = [item("test_both", f"slow {i}", interpreted=True) for i in range(100)]
    quick = [item("test_both", f"quick {i}") for i in range(4)]
    assert default([*slow, *quick]) == [one.name for one in quick]


def test_a_new_test_moves_none_of_another_function() -> None:
    items = [item("test_old", op, variant) for op, variant in itertools.product(OPS, VARIANTS)]
    new = [item("test_new", op, "variant 0") for op in OPS]
    assert default([*new, *items]) == [*(one.name for one in new), *default(items)]


@pytest.mark.parametrize(("option", "more"), [("ci", []), ("exhaustive", ["test_rare[2]"])])
def test_other_tiers_leave_out_no_repeats(option: str, more: list[str]) -> None:
    items = [item("test_op", op, variant) for op, variant in itertools.product(OPS, VARIANTS)]
    items += [item("test_slow", "1", slow=True), item("test_slow", "2", slow=True)]
    found = names([*items, item("test_rare", "2", exhaustive=True)], **{option: True})
    assert sorted(found) == sorted([*(one.name for one in items), *more])


def test_each_value_of_interpreted_cases() -> None:
    """`--ci` has each value of two parameters, and each pair of values of three."""
    markers = {"interpreted": True, "each_value": True}
    items = [item("test_two", op, case, **markers) for op, case in itertools.product(OPS, CASES)]
    found = names(items, ci=True)
    assert len(found) == max(len(OPS), len(CASES))
    assert all(any(word in name for name in found) for word in (*OPS, *CASES))
    assert len(names(items, exhaustive=True)) == len(items)
    items = [item("test_three", *words, **markers) for words in itertools.product(OPS, CASES, DTYPES)]
    found = names(items, ci=True)
    assert len(found) < len(items) / 2
    for one, other in itertools.combinations((OPS, CASES, DTYPES), 2):
        for pair in itertools.product(one, other):
            assert any(all(word in name for word in pair) for name in found), pair


def test_each_value_leaves_out_no_quick_case() -> None:
    """On a machine with a device no kernel is interpreted. `all=True` leaves out quick ones too."""
    for marker, count in (
        (pytest.mark.each_value.mark, len(OPS) * len(CASES)),
        (pytest.mark.each_value(all=True).mark, max(len(OPS), len(CASES))),
    ):
        items = [item("test_two", op, case, each_value=marker) for op, case in itertools.product(OPS, CASES)]
        assert len(names(items, ci=True)) == count


def test_turns_of_compiled_and_of_interpreted_cases() -> None:
    turns = pytest.mark.turns(12, interpreted=3).mark
    for markers, count in (
        ({"compiled": True}, 12),
        ({"interpreted": True}, 3),
        ({"compiled": True, "interpreted": True}, 36),
        ({}, 1),
    ):
        assert tiers.count_of_turns(item("test_one", **markers), turns) == count  # type: ignore[arg-type]
