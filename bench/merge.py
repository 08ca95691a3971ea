"""Merges what the stages of on_device.sh left into one file, OUT_DIR/<device>/<date>.json, and prints its path."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from report import header

LOG_LINES = 30


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path, help="where stages.tsv (name, outcome, seconds), NAME.log and *.json are")
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    options = parser.parse_args()
    content = merged(options.work)
    path = options.out / slug(content["header"]["device"]) / f"{file_date(content['header']['date'])}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(path)
    return 0


def merged(work: Path) -> dict[str, Any]:
    """The header of the first benchmark, the stages in order, the rows of all benchmarks."""
    parts = [json.loads(path.read_text()) for path in sorted(work.glob("*.json"))]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lines = (work / "stages.tsv").read_text().splitlines()
    return {
        "header": parts[0]["header"] if parts else header(device, None),
        "stages": [stage(work, *line.split("\t")) for line in lines],
        "rows": [row for part in parts for row in part["rows"]],
    }


def stage(work: Path, name: str, outcome: str, seconds: str) -> dict[str, Any]:
    """A stage with the last line of its log, or with more of them if it failed."""
    log = work / f"{name}.log"
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    kept = lines[-1:] if outcome == "ok" else lines[-LOG_LINES:]
    return {"name": name, "outcome": outcome, "seconds": int(seconds), "log": kept}


def slug(name: str) -> str:
    """A device's name as a folder: 'NVIDIA H200' -> 'nvidia-h200'."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def file_date(date: str) -> str:
    """An ISO date in UTC as a file name: '2026-01-02T03:04:05+00:00' -> '2026-01-02T030405Z'."""
    return date.replace(":", "").replace("+0000", "Z")


if __name__ == "__main__":
    sys.exit(main())
