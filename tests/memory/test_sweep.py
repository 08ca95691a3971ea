"""Sweeps of a model's sizes, and pictures of memory."""

import doctest
import importlib
import sys

import pytest
import torch
from torch import nn

import effops
from effops.memory import Workload, anatomy, max_batch_size, plot_anatomy, sweep


def workload_of(width, layers):
    return Workload(
        model=lambda: nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))),
        batch=lambda size: torch.randn(size, width),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=torch.optim.SGD,
    )


def test_each_axis_is_varied_alone_around_the_base():
    found = sweep(workload_of, {"width": [4, 8], "layers": [1, 3]}, batch_size=6, base={"width": 8})
    assert found.base == {"width": 8, "layers": 1}
    assert found.axes == {
        "width": {width: anatomy(workload_of(width, 1), 6).peak_bytes for width in (4, 8)},
        "layers": {layers: anatomy(workload_of(8, layers), 6).peak_bytes for layers in (1, 3)},
    }
    assert "peak with batch size 6, each axis varied alone around width=8, layers=1" in str(found)


def test_largest_batches_are_those_of_max_batch_size():
    found = sweep(workload_of, {"width": [8, 64], "layers": [1]}, "8 KiB", power_of_two=True)
    assert found.axes["width"][8] == max_batch_size(workload_of(8, 1), "8 KiB", power_of_two=True).batch_size > 0
    assert found.axes["width"][64] == 0  # the weights alone take more
    assert found.budget_bytes == 8192
    assert "x 0.00" in str(found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({"width": [8]},), "give `budget` for the largest batch or `batch_size` for the peak; got None, None"),
        (({"width": [8]}, "1 GiB", 3), "got '1 GiB', 3"),
        (({"width": []}, "1 GiB"), "`axes` must have at least one axis, each with values"),
        (({}, "1 GiB"), "`axes` must have at least one axis, each with values"),
    ],
)
def test_what_cannot_be_swept_is_an_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        sweep(workload_of, *arguments)


def test_a_base_that_is_no_axis_is_an_error():
    with pytest.raises(ValueError, match="`base` must name axes, width; got depth"):
        sweep(workload_of, {"width": [8]}, "1 GiB", base={"depth": 3})


def test_pictures(tmp_path):
    step, sizes = tmp_path / "step.svg", tmp_path / "sizes.svg"
    plot_anatomy(anatomy(workload_of(8, 2), 6), step)
    sweep(workload_of, {"width": [4, 8], "layers": [1, 3]}, batch_size=6).plot(sizes)
    assert step.read_text().count("<!-- forward -->") == 1
    for label in ("saved activations", "optimizer states", "backward", "peak"):
        assert (f"<!-- {label} -->" in step.read_text()) == (label != "optimizer states")  # SGD has none
    for label in ("width", "layers", "peak, MiB"):
        assert f"<!-- {label} -->" in sizes.read_text()


def test_pictures_without_matplotlib_are_an_error(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(
        ImportError, match=r'plot_anatomy: needs the package matplotlib.*pip install .*-e "\.\[bench\]"'
    ):
        plot_anatomy(anatomy(workload_of(8, 2), 6), tmp_path / "step.png")


def test_examples():
    module = importlib.import_module("effops.memory.sweep")  # the package has the function by that name
    results = doctest.testmod(module, extraglobs={"effops": effops, "torch": torch})
    assert results.attempted
    assert not results.failed
