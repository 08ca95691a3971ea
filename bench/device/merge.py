"""Merges the results.json of the jobs of on_device.sh on one device into RESULTS/<device>/<date>.json; prints its path.

python bench/device/merge.py JOB_DIR... [--results bench/results]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", type=Path, nargs="+", metavar="JOB_DIR", help="where a results.json is")
    parser.add_argument("--results", type=Path, default=Path("bench/results"))
    options = parser.parse_args()
    content = merged([json.loads((job / "results.json").read_text()) for job in options.jobs])
    path = options.results / slug(content["header"]["device"]) / f"{file_date(content['header']['date'])}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(path)
    return 0


def merged(jobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The header of the first job, the stages of all in order, and their rows by themselves."""
    for key in "device", "commit":
        found = {job["header"][key] for job in jobs}
        if len(found) > 1:
            names = ", ".join(sorted(map(str, found)))
            raise ValueError(f"merge: the jobs must have one {key}; got {names}; merge each by itself")
    stages = [stage for job in jobs for stage in job["stages"]]
    rows = [row for stage in stages for row in stage["report"].pop("rows", [])]
    return {"header": jobs[0]["header"], "stages": stages, "rows": rows}


def slug(name: str) -> str:
    """A device's name as a folder: 'NVIDIA H200' -> 'nvidia-h200'."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def file_date(date: str) -> str:
    """An ISO date in UTC as a file name: '2026-01-02T03:04:05+00:00' -> '2026-01-02T030405Z'."""
    return date.replace(":", "").replace("+0000", "Z")


if __name__ == "__main__":
    sys.exit(main())
