"""Break the code in ways that matter, one at a time, and see whether the tests notice.

    python tests/mutations.py                   # those written by hand, under the default tests
    python tests/mutations.py --ci              # under those of every commit
    python tests/mutations.py --random 50       # besides, as many mechanical ones, of a seed

Each mutation runs in a copy of the checkout, until the first test fails. It exits with 1 if one is missed.
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


def is_caught(mutation: Mutation, options: list[str]) -> bool:
    """Whether a test fails with the mutation."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, copy / name)
        (copy / "effops" / "kernels").symlink_to(copy / "kernels")
        path = copy / mutation.file
        source = path.read_text()
        if source.count(mutation.old) != 1:
            raise SystemExit(f"{mutation.file} has {mutation.old!r} {source.count(mutation.old)} times; expected once")
        path.write_text(source.replace(mutation.old, mutation.new))
        environment = os.environ | {"PYTHONPATH": folder, "TORCHINDUCTOR_CACHE_DIR": str(copy / "inductor")}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *options]
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
        return done.returncode != 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ci", action="store_true")
    parser.add_argument("--random", type=int, default=0, metavar="COUNT")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("only", nargs="*", type=int, help="numbers of the mutations to run")
    chosen = parser.parse_args()
    mutations = BY_HAND + mechanical(chosen.random, chosen.seed)
    missed = 0
    for number in chosen.only or range(len(mutations)):
        start = time.monotonic()
        caught = is_caught(mutations[number], ["--ci"] if chosen.ci else [])
        missed += not caught
        verdict = "caught" if caught else "MISSED"
        print(f"{number:3} {verdict} in {time.monotonic() - start:4.0f} s: {mutations[number].what}", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
