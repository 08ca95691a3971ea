"""Counts the kernels that Triton would compile for stages of on_device.sh, without a GPU: nothing is compiled or run.

A driver that only names an H100 stands in for the real one, so that Triton itself tells the launches apart.

    python bench/device/compilations.py [STAGE...]
    python bench/device/compilations.py --choose 165      choose the tests of kernels that few compilations serve
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton

ROOT = Path(__file__).resolve().parents[2]
CHOSEN = ROOT / "tests" / "kernels" / "few_compilations.txt"
Compilation = tuple[str, str]  # the name of a kernel, and all that Triton compiles it for
COMPILED: dict[str, set[Compilation]] = {}  # by the test that asks for it, or "" outside of tests
RUNNING = [""]


def use_fake_driver() -> None:
    """Let launches of kernels add to `COMPILED` and do nothing else: Triton finds nothing compiled, and asks `note`."""
    driver = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: triton.backends.compiler.GPUTarget("cuda", 90, 32),
    )
    triton.runtime.driver.set_active(driver)
    triton.knobs.runtime.interpret = False  # whatever the environment will say
    triton.knobs.runtime.jit_cache_hook = note


def note(*, key: str, fn: Any, **other: Any) -> bool:
    """Triton's hook before it compiles; returns that there is nothing left to do."""
    COMPILED.setdefault(RUNNING[0], set()).add((fn.name, key))
    return True


def pytest_runtest_setup(item: Any) -> None:
    """pytest's hook, for which this module is a plugin: what is compiled from here on is this test's."""
    RUNNING[0] = item.nodeid
    COMPILED[item.nodeid] = set()


def of_tests(*options: str) -> None:
    """The tests of kernels, without their assertions: results are not computed. `python -O` leaves out the others."""
    import pytest

    torch.testing.assert_close = lambda *args, **options: None
    folder = str(ROOT / "tests" / "kernels")
    quiet = ["-q", "-p", "no:cacheprovider", "--assert=plain", "-W", "ignore", "-k", "_kernels.py"]
    code = pytest.main([*quiet, *options, folder], plugins=[sys.modules[__name__]])
    if code:
        raise RuntimeError(f"pytest ended with {code}; every test must pass where nothing is asserted")


def of_calls(stage: str) -> None:
    """The calls that a stage makes, on tensors of the CPU."""
    from effops.dispatch import requirements

    requirements.INTERPRETED = True
    import kernel_calls

    for _ in kernel_calls.run(kernel_calls.SETS[stage], torch.device("cpu")):
        pass


COUNTED: Mapping[str, Callable[[], None]] = {
    "memcheck": lambda: of_calls("risky"),
    "founding": lambda: of_calls("founding"),
    "ncu": lambda: of_calls("profiled"),
    "kernels": lambda: of_tests("--few-compilations"),
}


def choose(most: int) -> list[str]:
    """Tests that ask for at most so many compilations: of each function the cheapest, then those that add least."""
    of_tests()
    cases = dict(COMPILED)
    chosen: list[str] = []
    have: set[Compilation] = set()
    covered: set[str] = set()
    while cases:
        case = min(cases, key=lambda case: (function_of(case) in covered, len(cases[case] - have)))
        added = cases.pop(case) - have
        if len(have) + len(added) <= most:
            chosen.append(case)
            have |= added
        covered.add(function_of(case))
    return sorted(chosen)


def function_of(case: str) -> str:
    return case.partition("[")[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(COUNTED)}; default: all")
    parser.add_argument("--choose", type=int, metavar="N", help=f"write tests for N compilations to {CHOSEN.name}")
    parser.add_argument("--choose-here", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--list", action="store_true", help="print what is compiled as JSON, for one stage")
    options = parser.parse_args()
    stages = options.stages or list(COUNTED)
    if options.choose:
        CHOSEN.write_text("\n".join(json.loads(output_of("--choose-here", str(options.choose)))) + "\n")
        return 0
    if options.list or options.choose_here:
        use_fake_driver()
    if options.choose_here:
        print(json.dumps(choose(options.choose_here)))
        return 0
    if options.list:
        COUNTED[stages[0]]()
        print(json.dumps(sorted(set().union(*COMPILED.values()))))
        return 0
    together: set[Compilation] = set()
    for stage in stages:
        found = listed(stage)
        together |= found
        print(f"{stage}: {len(found)}")
        for name, count in Counter(name for name, _ in found).most_common():
            print(f"  {count:4d} {name}")
    print(f"together: {len(together)}")
    return 0


def listed(stage: str) -> set[Compilation]:
    """What a stage compiles."""
    return {tuple(entry) for entry in json.loads(output_of("--list", stage))}


def output_of(*options: str) -> str:
    """The last line of this script's output in a process of its own: Triton compiles or interprets for a whole life."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-O", __file__, *options]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(options)}: exit code {done.returncode}; it printed\n{done.stdout[-3000:]}")
    return done.stdout.splitlines()[-1]


if __name__ == "__main__":
    sys.exit(main())
