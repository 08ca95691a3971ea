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


@pytest.mark.ahead_of_time
def test_shipped_kernels_compile_and_fit():
    """On every architecture: no spilled register, shared and tensor memory within the limits, something stored."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = str(Path(__file__).with_name("kernels_aot.py"))
    workers = [
        subprocess.Popen([sys.executable, script, str(i), "2"], env=environment, stdout=subprocess.PIPE, text=True)
        for i in range(2)
    ]
    outputs = [worker.communicate()[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0]
    entries = [json.loads(line) for output in outputs for line in output.splitlines()]
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
