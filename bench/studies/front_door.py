"""How long README's two commands take in an empty directory: from the clone to the first table, and to the end.

python bench/studies/front_door.py --json FILE

Each command runs in a clone of its own, as it stands in README. `warm` takes packages from pip's cache; `cold` asks
pip's index for each, so that it tells of that index and its network too; the first command alone is timed so, since
both install much the same. The first run fills the cache.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from parts.arguments import file_to_write
from parts.report import header, heading, write_json

from effops.commands.main import Parser

ROOT = Path(__file__).parents[2]
TABLE = "Speed-up"  # a title of the first op's table
CACHES = "warm", "cold"
LINE = "{:<6}{:>12}{:>10}  {}"
TITLES = "wheels", "first table", "end", "command"


@dataclass(frozen=True)
class Row:
    """A command: seconds from the clone to the first table, if it prints one, and to the end."""

    command: str
    wheels: str
    first_table_s: float | None
    end_s: float
    exit_code: int


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="bench/studies/front_door.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--wheels", action="append", choices=CACHES, help="default: warm, and the first one cold too")
    parser.add_argument("--command", type=int, action="append", choices=(1, 2), help="default: both")
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="write header and rows there")
    options = parser.parse_args(arguments)
    head = header(torch.device("cpu"), None)
    print(heading(head, 100))
    print(LINE.format(*TITLES), flush=True)
    rows: list[Row] = []
    for number, command in enumerate(commands(), 1):
        for wheels in options.wheels or (CACHES if number == 1 else CACHES[:1]):
            if options.command is None or number in options.command:
                rows.append(timed(command, wheels))
                row = rows[-1]
                first = "" if row.first_table_s is None else f"{row.first_table_s:.0f} s"
                failed = f", exit code {row.exit_code}" if row.exit_code else ""
                print(LINE.format(wheels, first, f"{row.end_s:.0f} s", command.split()[-1] + failed), flush=True)
                if options.json:
                    write_json(options.json, head, rows)
    return int(any(row.exit_code for row in rows))


def commands() -> list[str]:
    """README's two commands, which stand above its first heading."""
    top = (ROOT / "README.md").read_text().partition("\n## ")[0]
    return re.findall(r"^ {4}(\S.*)$", top, re.MULTILINE)


def timed(command: str, wheels: str) -> Row:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    environment |= {"PYTHONUNBUFFERED": "1"} | ({"PIP_NO_CACHE_DIR": "1"} if wheels == "cold" else {})
    first_table_s = None
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        subprocess.run(["git", "clone", "--quiet", ROOT, "effops"], cwd=folder, check=True)
        with subprocess.Popen(
            ["bash", "-c", command],
            cwd=Path(folder, "effops"),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            for line in process.stdout or ():
                if first_table_s is None and TABLE in line:
                    first_table_s = round(time.perf_counter() - start, 1)
        return Row(command, wheels, first_table_s, round(time.perf_counter() - start, 1), process.returncode)


if __name__ == "__main__":
    sys.exit(main())
