"""Fixtures of the tests of kernels, and what is different for them on a device."""

import os
from pathlib import Path

import pytest
import torch

FEW = Path(__file__).with_name("few_compilations.txt")


def pytest_addoption(parser):
    parser.addoption("--few-compilations", action="store_true", help=f"the tests of kernels in {FEW.name} alone")


def pytest_collection_modifyitems(config, items):
    """With --few-compilations keep the cases that `bench/device/compilations.py --choose` found.

    Triton compiles a kernel anew for other sizes of 1, other multiples of 16 and other dtypes: minutes on a device.
    """
    if not config.getoption("few_compilations", False):
        return
    few = set(FEW.read_text().splitlines())
    missing = few - {item.nodeid for item in items} if len(config.args) == 1 else set()
    if missing:
        raise pytest.UsageError(f"{FEW.name} names {min(missing)}, which is no test; choose anew")
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in few])
    items[:] = [item for item in items if item.nodeid in few]


@pytest.fixture(autouse=True)
def device_still_works(request):
    """After a test wait for the device. An error that stays for the life of the process ends the worker."""
    yield
    if not torch.cuda.is_available():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"{request.node.nodeid}: {error}", flush=True)
        if hasattr(request.config, "workerinput"):
            os._exit(3)  # xdist reports the test, and starts another worker
        pytest.exit(f"{request.node.nodeid}: {error}", returncode=3)


@pytest.fixture
def whole_sums(monkeypatch):
    """Each sum in one program, which goes through all of its tiles: sums of tests are short and would be split."""
    from effops.kernels import launch

    monkeypatch.setattr(launch, "BUSY", 1)
