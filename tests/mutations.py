"""Break the code in ways that matter, one at a time, and see whether the tests notice.

    python tests/mutations.py                   # those written by hand, under the default tests
    python tests/mutations.py --random 50       # besides, as many mechanical ones, of a seed
    python tests/mutations.py --ci              # which of the missed ones the tests of every commit notice

Tests run in copies of the checkout. It exits with 1 if a mutation is missed. All tests must pass in a copy where
nothing is broken.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COPIED = ("effops", "kernels", "tests", "bench", "docs", "examples", "pyproject.toml", "setup.py", "README.md", ".ci")


class Mutation(NamedTuple):
    """A text of a file, which occurs in it once, and what takes its place."""

    what: str
    file: str
    old: str
    new: str


BY_HAND = [
    Mutation(
        "phi of the PowerSpherical density",
        "effops/ops/densities/power_spherical.py",
        "        t.log_()\n",
        "        t.log1p_()\n",
    ),
    Mutation(
        "its derivative",
        "effops/ops/densities/power_spherical.py",
        "        torch.div(factor, t, out=t)\n",
        "        torch.div(1.001 * factor, t, out=t)\n",
    ),
    Mutation(
        "the strides of a gradient",
        "effops/numerics/layout.py",
        "        return operand.stride()\n",
        "        return operand.contiguous().stride()\n",
    ),
    Mutation(
        "a mask in blocks",
        "effops/blocks/masked.py",
        "terms.triu_(first_stop - start)",
        "terms.triu_(first_stop - start + 1)",
    ),
    Mutation(
        "the layout of a fake result",
        "effops/dispatch/custom_op.py",
        "register_fake(lambda *arguments: empty(split(self.flat(arguments[: self.taken]))))",
        "register_fake(lambda *arguments: empty(split(self.flat(arguments[: self.taken]))).contiguous())",
    ),
    Mutation(
        "a statistic of a logsumexp",
        "effops/blocks/logsumexp.py",
        "    total *= factor\n",
        "    total *= factor * (1 + 1e-4)\n",
    ),
    Mutation(
        "the last block of a walk",
        "effops/blocks/cutting.py",
        "else range(axis.start, axis.stop, extent)\n",
        "else range(axis.start, max(axis.start + 1, axis.stop - 1), extent)\n",
    ),
    Mutation(
        "the dtype of a result",
        "effops/numerics/precision.py",
        "def promote(",
        "def promote(*_: object) -> torch.dtype:\n    return torch.float32\n\n\ndef _promote(",
    ),
    Mutation(
        "predicted bytes",
        "effops/prediction/allocations.py",
        "        self.live_bytes -= self.storages.pop(reference)\n",
        "        self.storages.pop(reference)\n",
    ),
    Mutation(
        "the check of devices",
        "effops/dispatch/arguments.py",
        "def check_devices(",
        "def check_devices(*_: object, **__: object) -> None:\n    return None\n\n\ndef _check_devices(",
    ),
]
MOST_SECONDS = 900  # of a test
FIRST_SECONDS = 100  # of the tests that each mutation first runs alone, importing included
SWAPPED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add}


def mechanical(count: int, seed: int) -> list[Mutation]:
    """Mutations of single operators and constants, drawn from the code that computes."""
    found = []
    for folder in ("blocks", "dispatch", "numerics", "ops"):
        for path in sorted((ROOT / "effops" / folder).rglob("*.py")):
            source, name = path.read_text(), str(path.relative_to(ROOT))
            for node in ast.walk(ast.parse(source)):
                mutated = _mutated(node)
                old = ast.get_source_segment(source, node) if mutated else None
                if mutated and old and source.count(old) == 1:
                    found.append(Mutation(f"{name}:{node.lineno}: {mutated}", name, old, f"({mutated})"))
    return random.Random(seed).sample(found, count)


def _mutated(node: ast.AST) -> str:
    """The source of an expression with another operator or number; empty for other nodes."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
        return ast.unparse(ast.Compare(node.left, [SWAPPED[type(node.ops[0])](), *node.ops[1:]], node.comparators))
    if isinstance(node, ast.BinOp) and type(node.op) in SWAPPED:
        return ast.unparse(ast.BinOp(node.left, SWAPPED[type(node.op)](), node.right))
    return ""


# Runs pytest with tests in a random order, the same in every run, and writes the ids of those that fail into a file.
SHUFFLED = """
import random, sys, pytest
class Watched:
    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        random.Random(0).shuffle(items)
    def pytest_runtest_logreport(self, report):
        if report.failed:
            print(report.nodeid, file=open("failed.txt", "a"))
    pytest_collectreport = pytest_runtest_logreport
sys.exit(pytest.main(["-n", "0", "-q", "-p", "no:cacheprovider", *sys.argv[1:]], plugins=[Watched()]))
"""
# A test that does not end fails.
ENDING = ("-o", f"faulthandler_timeout={MOST_SECONDS}", "-o", "faulthandler_exit_on_timeout=true")


class Copy:
    """A copy of the checkout with mutations. One whose text another has changed is left out of `mutations`."""

    def __init__(self, folder: str, mutations: Sequence[Mutation]) -> None:
        self.path = Path(folder)
        left_out = shutil.ignore_patterns("__pycache__", "test_mutations.py")  # which would notice each of them
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, self.path / name, ignore=left_out)
            else:
                shutil.copy(ROOT / name, self.path / name)
        self.mutations = [mutation for mutation in mutations if self._apply(mutation)]

    def _apply(self, mutation: Mutation) -> bool:
        path = self.path / mutation.file
        source = path.read_text()
        path.write_text(source.replace(mutation.old, mutation.new))
        return mutation.old in source

    def run(self, *options: str, seconds: float | None = None) -> bool | None:
        """Whether all tests pass; None if the time does not suffice."""
        environment = os.environ | {
            "PYTHONPATH": str(self.path),
            "TORCHINDUCTOR_CACHE_DIR": str(self.path / "inductor"),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-c", SHUFFLED, *ENDING, *options]
        try:
            done = subprocess.run(command, cwd=self.path, env=environment, capture_output=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return None
        return done.returncode == 0

    def failed(self) -> list[str]:
        """The ids of the tests that failed."""
        path = self.path / "failed.txt"
        return sorted(set(path.read_text().splitlines())) if path.exists() else []


def passes(mutations: Sequence[Mutation], *options: str, seconds: float | None = None) -> bool | None:
    with tempfile.TemporaryDirectory() as folder:
        return Copy(folder, mutations).run(*options, seconds=seconds)


def noticed(mutations: Sequence[Mutation], jobs: int, *options: str) -> Iterator[Mutation]:
    """Those that a test notices, of the tests that the options choose.

    Most mutations fail many tests, so each is first tried alone for a while. Then all tests run with all of the others
    at once, and each of these alone runs the tests that failed, until none of them is to blame.
    """
    with ThreadPoolExecutor(jobs) as pool:

        def caught(mutations: Sequence[Mutation], *options: str, seconds: float | None = None) -> Iterator[Mutation]:
            results = pool.map(lambda one: passes([one], "-x", *options, seconds=seconds), mutations)
            return (mutation for mutation, passed in zip(mutations, results) if passed is False)

        remaining = list(mutations)
        for mutation in caught(mutations, *options, seconds=FIRST_SECONDS):
            remaining.remove(mutation)
            yield mutation
        while remaining:
            with tempfile.TemporaryDirectory() as folder:
                together = Copy(folder, remaining)
                together.run("-n", str(jobs), *options)
                failed = together.failed()
            found = list(caught(together.mutations, *options, *failed)) if failed else []
            yield from found
            settled = found or together.mutations
            remaining = [mutation for mutation in remaining if mutation not in settled]


def tell(tests: str, mutations: Sequence[Mutation], jobs: int, *options: str) -> list[Mutation]:
    """Print which mutations the tests notice as soon as it is known, and return those that they miss."""
    missed, start = list(mutations), time.monotonic()
    for mutation in noticed(mutations, jobs, *options):
        missed.remove(mutation)
        print(f"{time.monotonic() - start:6.0f} s: {tests} notice {mutation.what}", flush=True)
    for mutation in missed:
        print(f"{tests} MISS {mutation.what}")
    print(f"{tests} notice {len(mutations) - len(missed)} of {len(mutations)}", flush=True)
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random", type=int, default=0, metavar="COUNT")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ci", action="store_true")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    chosen = parser.parse_args()
    mutations = BY_HAND + mechanical(chosen.random, chosen.seed)
    for mutation in mutations:
        if (ROOT / mutation.file).read_text().count(mutation.old) != 1:
            raise SystemExit(f"{mutation.file} must have once: {mutation.old!r}")
    tiers = {"the default tests": ()} | ({"the tests of every commit": ("--ci",)} if chosen.ci else {})
    for tests, options in tiers.items():
        if not passes([], "-n", str(chosen.jobs), *options):
            raise SystemExit(f"{tests} fail in a copy that nothing was changed in")
        mutations = tell(tests, mutations, chosen.jobs, *options)
    return int(bool(mutations))


if __name__ == "__main__":
    sys.exit(main())
