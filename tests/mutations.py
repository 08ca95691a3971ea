"""Break the code in ways that matter, one at a time, and see whether the tests notice.

    python tests/mutations.py                   # those written by hand, under the default tests
    python tests/mutations.py --random 50       # besides, as many mechanical ones, of a seed
    python tests/mutations.py --ci              # which of the missed ones the tests of every commit notice

Each mutation runs in a copy of the checkout, until the first test fails. It exits with 1 if one is missed. All tests
must pass in a copy where nothing is broken.
"""

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
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
        "        dot.log_()\n",
        "        dot.log1p_()\n",
    ),
    Mutation(
        "its derivative",
        "effops/ops/densities/power_spherical.py",
        "torch.div(0.5 * factor, dot, out=dot)",
        "torch.div(0.501 * factor, dot, out=dot)",
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
        "weight = weight.masked_fill(excluded, 0)",
        "weight = weight.masked_fill(excluded, 1e-3)",
    ),
    Mutation(
        "the layout of a fake result",
        "effops/dispatch/custom_op.py",
        "register_fake(lambda *arguments: empty(split(arguments)))",
        "register_fake(lambda *arguments: empty(split(arguments)).contiguous())",
    ),
    Mutation(
        "a statistic of a logsumexp",
        "effops/blocks/logsumexp.py",
        "    total *= factor\n",
        "    total *= factor * (1 + 1e-4)\n",
    ),
    Mutation(
        "the last block of a walk",
        "effops/blocks/tiling.py",
        "for i in range(axis.start, axis.stop, extent)]",
        "for i in range(axis.start, max(axis.start + 1, axis.stop - 1), extent)]",
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
MOST_SECONDS = 1800
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


# Runs pytest with tests in a random order, the same in every run: most mutations fail in any of many tests.
SHUFFLED = """
import random, sys, pytest
class Shuffled:
    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        random.Random(0).shuffle(items)
sys.exit(pytest.main(["-n", "0", "-q", "-p", "no:cacheprovider", *sys.argv[1:]], plugins=[Shuffled()]))
"""


class Copy:
    """A copy of the checkout to break."""

    def __init__(self, folder: str) -> None:
        self.path = Path(folder)
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, self.path / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, self.path / name)

    def apply(self, mutation: Mutation) -> None:
        path = self.path / mutation.file
        source = path.read_text()
        if source.count(mutation.old) != 1:
            raise SystemExit(f"{mutation.file} has {mutation.old!r} {source.count(mutation.old)} times; expected once")
        path.write_text(source.replace(mutation.old, mutation.new))

    def run(self, *options: str) -> tuple[bool, list[str]]:
        """Whether all tests pass, and the ids of those that fail."""
        environment = os.environ | {
            "PYTHONPATH": str(self.path),
            "TORCHINDUCTOR_CACHE_DIR": str(self.path / "inductor"),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-c", SHUFFLED, *options]
        try:
            done = subprocess.run(
                command, cwd=self.path, env=environment, capture_output=True, text=True, timeout=MOST_SECONDS
            )
        except subprocess.TimeoutExpired:
            return False, []
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+(?: [^-\s]\S*)*)(?: - .*)?$", done.stdout, re.MULTILINE)
        return done.returncode == 0, failed


def is_caught(*mutations: Mutation) -> bool:
    """Whether a default test fails with the mutations. One that lasts for too long does, too."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(folder)
        for mutation in mutations:
            copy.apply(mutation)
        return not copy.run("-x")[0]


def caught_by_ci(mutations: Sequence[Mutation]) -> list[Mutation]:
    """Those that a test of `--ci` notices: all tests run once with all of them, and what failed with each alone."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(folder)
        for mutation in mutations:
            copy.apply(mutation)
        passed, failed = copy.run("--ci", "-n", "auto")
    if passed:
        return []
    found = []
    for mutation in mutations:
        with tempfile.TemporaryDirectory() as folder:
            copy = Copy(folder)
            copy.apply(mutation)
            if not copy.run("-x", *failed)[0]:
                found.append(mutation)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random", type=int, default=0, metavar="COUNT")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ci", action="store_true")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("only", nargs="*", type=int, help="numbers of the mutations to run")
    chosen = parser.parse_args()
    mutations = BY_HAND + mechanical(chosen.random, chosen.seed)
    missed = []

    def judge(number: int) -> None:
        start = time.monotonic()
        caught = is_caught(mutations[number])
        if not caught:
            missed.append(mutations[number])
        verdict = "caught" if caught else "MISSED"
        print(f"{number:3} {verdict} in {time.monotonic() - start:4.0f} s: {mutations[number].what}", flush=True)

    with ThreadPoolExecutor(chosen.jobs) as pool:
        fails_unbroken = pool.submit(is_caught)
        list(pool.map(judge, chosen.only or range(len(mutations))))
    if fails_unbroken.result():
        raise SystemExit("a test fails in a copy that nothing was changed in: what was caught says nothing")
    print(f"missed: {len(missed)}")
    if chosen.ci and missed:
        for mutation in caught_by_ci(missed):
            print(f"noticed by --ci: {mutation.what}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
