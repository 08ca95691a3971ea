"""The examples of every docstring run as they stand, with `torch` and `effops` imported."""

import doctest
import importlib
from pathlib import Path

import pytest
import torch

import effops

ROOT = Path(__file__).parents[1]
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((ROOT / "effops").rglob("*.py"))
    if ">>>" in path.read_text()
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    globs = {"torch": torch, "effops": effops}
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for example in doctest.DocTestFinder().find(importlib.import_module(name), extraglobs=globs):
        runner.run(example, clear_globs=False)  # Dynamo takes its own names out of them, and complains if they are gone
    found = runner.summarize()
    assert found.attempted
    assert not found.failed
