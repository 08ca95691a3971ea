"""The examples of memory: what they print, at sizes that are quick."""

import importlib.util
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_bytes_a_parameter_are_the_published_ones(capsys):
    load("memory_tables").parameters()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [float(row[-2]) for row in rows] == [4, 6, 8, 2, 4, 4, 18, 6]
    for *_, published, predicted in rows:
        assert float(predicted) == pytest.approx(float(published), rel=0.02)


def test_an_unknown_table_is_an_error(monkeypatch):
    monkeypatch.setattr("sys.argv", ["memory_tables.py", "bret"])
    with pytest.raises(SystemExit, match=r"expected tables of batches, .*; got bret"):
        load("memory_tables").main()


def test_generation_by_beam_search_is_predicted_to_the_byte(capsys, monkeypatch):
    module = load("memory_generation")
    sizes = {"WORDS": 50, "WIDTH": 16, "HEADS": 2, "LAYERS": 2, "PROMPT": 12, "GENERATED": 4, "BEAMS": 3, "BATCH": 2}
    for name, size in sizes.items():
        monkeypatch.setattr(module, name, size)
    module.main()
    out = capsys.readouterr().out
    assert "measured (+0.000%)" in out
    assert "generation state" in out
    assert f"{2 * 4 * 2 * 16 * 2 * 3 * (12 + 3):,} bytes" in out
