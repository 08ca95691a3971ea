"""Kernels compiled ahead of time, for architectures that are not here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
from effops.kernels import launch

SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}


PARTS = 8


@pytest.mark.parametrize("which", ["those that differ", pytest.param("all", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("part", range(PARTS))
def test_shipped_kernels_compile_and_fit(part, which):
    """On every architecture: no spilled register, shared and tensor memory within the limits, something stored."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name("kernels_aot.py")), str(part), str(PARTS), which]
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    entries = [json.loads(line) for line in output.splitlines()]
    assert {entry["architecture"] for entry in entries} == set(launch.ARCHITECTURES)
    bad = [
        entry
        for entry in entries
        if entry["spill_bytes"] > 0
        or entry["shared_bytes"] > SHARED_BYTES[entry["architecture"]]
        or entry["tmem"] > 512
        or entry["stores"] == 0
    ]
    assert not bad, "\n".join(map(str, bad))
