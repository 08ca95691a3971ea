"""Tests run on CUDA where there is a device, else on the CPU with Triton's interpreter."""

import contextlib
import gc
import importlib.util
import os
from collections.abc import Iterator

import pytest
import torch

from .support import interpreter, tiers

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
# Of the workers of `pytest -n`, which start later: threads that spin while they wait take each other's cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption("--ci", action="store_true", help="run what must hold of every commit: most tests")
    group.addoption("--exhaustive", action="store_true", help="run all tests, also those that take turns")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tiers.deselect(config, items)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # modules and tests stay: what collects garbage within a test need not look at them


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    return tiers.workers(config, os.cpu_count() or 1)


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
    with interpreter.quick_interpreter() if is_interpreted else contextlib.nullcontext():
        yield


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def one_thread() -> Iterator[None]:
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)
