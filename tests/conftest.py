"""Tests run on CUDA where there is a device, else on the CPU with Triton's interpreter."""

import importlib.util
import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
# Of the workers of `pytest -n`, which start later: threads that spin while they wait take each other's cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@pytest.fixture(scope="session", autouse=True)
def language_patched_once_a_launch() -> Iterator[None]:
    """Half of the interpreter's time is patching triton.language anew in every call of a device function."""
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        yield
        return
    interpreter = importlib.import_module("triton.runtime.interpreter")
    run_grid, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    patched = set()

    def run_grid_afresh(grid, *args, **kwargs):
        patched.clear()
        return run_grid(grid, *args, **kwargs)

    def patch_once(function):
        if function.__module__ in patched:
            return interpreter._LangPatchScope()
        patched.add(function.__module__)
        return patch(function)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter.GridExecutor, "__call__", run_grid_afresh)
        monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
        yield


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
