"""Three tiers of tests: the default answers within minutes, a commit must pass `--ci`, `--exhaustive` runs by hand.

Whether a test is in a tier follows from a hash of its own name, so that a new test moves no other. A test that is
given by its path or its id is in every tier. Of a test marked `turns(count)`, one in `count` of its compiled cases is
in `--ci`, and a part of these in the default.
"""

import zlib

import pytest
import torch

# By default, one test in so many of those that a marker says are slow. The first marker found counts.
ONE_IN = {"ahead_of_time": 8, "compiled": 24, "interpreted": 16, "sharded": 8, "slow": 8}
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
        turns = item.get_closest_marker("turns")
        if turns and turn(item.name, *turns.args):
            item.add_marker("exhaustive")
    elif name == "test_ahead_of_time":
        item.add_marker("ahead_of_time")
    elif name == "test_sharding":
        item.add_marker("sharded")
    elif not torch.cuda.is_available() and (folder == "kernels" or "triton" in named):
        item.add_marker("interpreted")


def is_in_tier(item: pytest.Item) -> bool:
    if item.config.option.exhaustive:
        return True
    if item.get_closest_marker("exhaustive"):
        return False
    counts = [count for marker, count in ONE_IN.items() if item.get_closest_marker(marker)]
    if item.config.option.ci or not counts:
        return True
    turns = item.get_closest_marker("turns") if item.get_closest_marker("compiled") else None
    return turn(item.name, counts[0] * (turns.args[0] if turns else 1)) == 0


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
    runs = {item: is_in_tier(item) or is_named(item) for item in items}
    config.hook.pytest_deselected(items=[item for item in items if not runs[item]])
    items[:] = [item for item in items if runs[item]]


def workers(config: pytest.Config, cores: int) -> int:
    """How many processes `-n auto` starts: none for tests that were given by their id."""
    by_id = bool(config.args) and all("::" in argument for argument in config.args)
    return 0 if by_id else min(cores, MOST_WORKERS)
