"""Three tiers of tests: the default answers within minutes, a commit must pass `--ci`, `--exhaustive` runs by hand.

The default leaves out what repeats: it has one case of each kind, and few of the slow ones. Which these are follows
from the names of a function's cases alone, so that a new test moves none of another function. A test that is given by
its path or its id is in every tier. Of a test marked `turns(count)`, one in `count` of its compiled cases is in `--ci`,
and of one marked `turns(count, interpreted=many)` one in `many` of the interpreted ones. Of a test marked `each_value`,
`--ci` has so few of the compiled cases, and of the interpreted ones, that each value of each parameter still occurs.
With `each_value(all=True)` it has so few of the others too.
"""

import itertools
import zlib
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

# A marker says why a test is slow; of several, the one with the highest number counts. The default has at most one slow
# test of a function: the first whose turn it is, of so many. It has none of a function with quick tests.
ONE_IN = {"ahead_of_time": 8, "compiled": 8, "interpreted": 1, "sharded": 1, "slow": 8}
MOST_WORKERS = 8  # each takes more than a GiB


def turn(name: str, count: int) -> int:
    """A number below `count` that follows from the name alone."""
    return zlib.crc32(name.encode()) % count


def mark(item: pytest.Item) -> None:
    """Mark what a test's folder and its parameters tell of it."""
    folder, name = item.path.parent.name, item.path.stem
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    named = [one for group in parameters for one in (group if isinstance(group, tuple) else (group,))]
    if {"compile", "flex"} & {one for one in named if isinstance(one, str)}:
        item.add_marker("compiled")
    elif name == "test_ahead_of_time":
        item.add_marker("ahead_of_time")
    elif name == "test_sharding":
        item.add_marker("sharded")
    elif not torch.cuda.is_available() and (folder == "kernels" or "triton" in named):
        item.add_marker("interpreted")
    turns = item.get_closest_marker("turns")
    if turns and turn(item.name, count_of_turns(item, turns)):
        item.add_marker("exhaustive")


def count_of_turns(item: pytest.Item, turns: pytest.Mark) -> int:
    """How many cases like this one take turns in `--ci`."""
    compiled = turns.args[0] if item.get_closest_marker("compiled") else 1
    return int(compiled * (turns.kwargs.get("interpreted", 1) if item.get_closest_marker("interpreted") else 1))


def slowness(item: pytest.Item) -> int:
    """How many slow tests take turns with this one; 0 for a quick test."""
    counts = [count for marker, count in ONE_IN.items() if item.get_closest_marker(marker)]
    turns = item.get_closest_marker("turns") if item.get_closest_marker("compiled") else None
    return max(counts) * (turns.args[0] if turns else 1) if counts else 0


def parameter_words(item: pytest.Item) -> list[str]:
    """The words that tell a case's parameters, each with its place."""
    parameters = item.nodeid.partition("[")[2].removesuffix("]")
    return [f"{place} {word}" for place, word in enumerate(parameters.split("-"))]


def kinds(item: pytest.Item) -> set[tuple[str, ...]]:
    """What a test is a case of: its function; if it is quick, also each half of the words that tell its parameters."""
    function, words = item.nodeid.partition("[")[0], parameter_words(item)
    halves = itertools.combinations(words, max(1, len(words) // 2)) if not slowness(item) else ()
    return {(function,), *((function, *half) for half in halves)}


def without_repeats(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """One case of each kind. Quick ones come first."""
    chosen, known = set(), set()
    for item in sorted(items, key=lambda item: (slowness(item) > 0, zlib.crc32(item.name.encode()))):
        has_turn = not slowness(item) or turn(item.name, slowness(item)) == 0
        if has_turn and not kinds(item) <= known:
            chosen.add(item)
            known |= kinds(item)
    return chosen


def covering(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Few of a function's cases, with each value of each parameter; with each pair of values if three of them vary."""
    words = {item: parameter_words(item) for item in items}
    counts = Counter(itertools.chain.from_iterable(words.values()))
    varying = {word.partition(" ")[0] for word, count in counts.items() if count < len(items)}
    size = 2 if len(varying) > 2 else 1
    has = {item: set(itertools.combinations(words[item], min(size, len(words[item])))) for item in items}
    cases: dict[tuple[str, ...], list[pytest.Item]] = {}
    for item in sorted(items, key=lambda item: zlib.crc32(item.name.encode())):
        for one in has[item]:
            cases.setdefault(one, []).append(item)
    chosen, known = set(), set()
    for rare in sorted(cases, key=lambda one: (len(cases[one]), one)):
        if rare not in known:
            best = max(cases[rare], key=lambda item: len(has[item] - known))
            chosen.add(best)
            known |= has[best]
    return chosen


def repeated(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """The cases of functions marked `each_value` that `--ci` leaves out."""
    groups: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        marker = item.get_closest_marker("each_value")
        how = next((how for how in ("compiled", "interpreted") if item.get_closest_marker(how)), "")
        if marker and (how or marker.kwargs.get("all")):
            groups.setdefault((item.nodeid.partition("[")[0], how), []).append(item)
    return {item for group in groups.values() for item in set(group) - covering(group)}


def tier(config: pytest.Config, items: Sequence[pytest.Item]) -> set[pytest.Item]:
    if config.option.exhaustive:
        return set(items)
    of_every_commit = [item for item in items if not item.get_closest_marker("exhaustive")]
    left_out = repeated(of_every_commit)
    of_every_commit = [item for item in of_every_commit if item not in left_out]
    return set(of_every_commit) if config.option.ci else without_repeats(of_every_commit)


def is_named(item: pytest.Item) -> bool:
    """Whether the command line gives the test, its file or its folder."""
    config = item.config
    paths = {(config.invocation_params.dir / argument.partition("::")[0]).resolve() for argument in config.args}
    everything = {config.rootpath, config.rootpath / "tests"}
    return any(path in (item.path, *item.path.parents) for path in paths - everything)


def deselect(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests of the tier, and those that were named."""
    for item in items:
        mark(item)
    runs = tier(config, items) | {item for item in items if is_named(item)}
    config.hook.pytest_deselected(items=[item for item in items if item not in runs])
    items[:] = [item for item in items if item in runs]


def workers(config: pytest.Config, cores: int) -> int:
    """How many processes `-n auto` starts: none for tests that were given by their id."""
    by_id = bool(config.args) and all("::" in argument for argument in config.args)
    return 0 if by_id else min(cores, MOST_WORKERS)
