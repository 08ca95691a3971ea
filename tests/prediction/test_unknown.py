"""What a prediction does not know is named wherever its result is shown."""

import json

import pytest
import torch
from torch import nn

import effops
from effops.commands import main as cli
from effops.memory import Workload, anatomy
from effops.prediction import inside

NAME = "aten::index_put"  # the values of a mask decide what it allocates


def masked(model, x):
    found = model(x)
    return found.index_put((found > 0,), torch.zeros(())).sum()


def workload_of_width(width: int = 5) -> Workload:
    return Workload(
        lambda: nn.Linear(7, width),
        lambda size: torch.randn(size, 7),
        masked,
        torch.optim.SGD,
    )


@pytest.fixture(scope="module")
def custom():
    """An operator of which PyTorch knows the result's layout alone."""
    library = torch.library.Library("unheard_of", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x + x, "CPU")
    library.impl("twice", torch.empty_like, "Meta")
    yield torch.ops.unheard_of.twice
    library._destroy()


@pytest.mark.parametrize(
    "predict",
    [
        lambda workload: anatomy(workload, 3),
        lambda workload: effops.memory.max_batch_size(workload, "100 KB"),
        lambda workload: effops.memory.advise(workload, 2),
        lambda workload: effops.memory.sweep(workload_of_width, {"width": [3, 5]}, batch_size=3),
        lambda workload: effops.memory.sweep(workload_of_width, {"width": [3, 5]}, "100 KB"),
    ],
)
def test_unknown_operators_are_named(predict):
    found = predict(workload_of_width())
    assert found.unknown == (NAME,)
    assert f"not known, and not counted: what {NAME} allocates inside" in str(found)


def test_explain_marks_attention_that_packs_keys(monkeypatch):
    """As on a CPU where oneDNN multiplies in bfloat16."""
    monkeypatch.setattr(inside, "_onednn_dtypes", lambda: frozenset({torch.bfloat16}))
    for length, dtype, name in (
        (64, torch.bfloat16, "aten::_scaled_dot_product_flash_attention_for_cpu"),
        (63, torch.bfloat16, ""),
        (64, torch.float32, ""),
    ):
        found = effops.explain(effops.attention, *torch.ones(3, 2, 3, length, 16, dtype=dtype))
        unknown = {"sdpa": name} if name else {}
        assert {variant: report.unknown for variant, report in found.variants.items() if report.unknown} == {
            **unknown,
            "compile": "TorchInductor",  # always
        }
        for one in unknown.values():
            assert f"not known, and not counted: what {one} allocates inside" in str(found)
        assert ("not known" in str(found), str(found).count(" or more")) == (bool(unknown), len(unknown))
        assert str(found).count("about ") == 1


def test_unknown_operators_are_in_json(tmp_path, monkeypatch):
    (tmp_path / "of_mine.py").write_text(
        "import torch\nfrom effops.memory import Workload\n"
        "def masked(model, x):\n    return x.index_put((x > 0,), torch.zeros(()))\n"
        "workload = Workload(torch.nn.Identity, lambda size: torch.randn(size, 3), generate=masked)\n"
    )
    monkeypatch.chdir(tmp_path)
    options = ["--workload", "of_mine:workload", "--batch-size", "3", "--json", "found.json"]
    assert cli.main(["memory", "anatomy", *options]) == 0
    assert json.loads((tmp_path / "found.json").read_text())["unknown"] == [NAME]


def test_what_is_known_is_not_named():
    workload = Workload(
        lambda: nn.Linear(7, 5), lambda size: torch.randn(size, 7), lambda model, x: model(x).sum(), torch.optim.Adam
    )
    found = anatomy(workload, 3)
    assert found.unknown == ()
    assert "not known" not in str(found)
    assert not any(kind == "uncounted" for _, kind in found.operations)  # as marks of the profiler once were


def test_operators_of_others_are_not_known(custom):
    workload = Workload(lambda: nn.Linear(7, 5), lambda size: torch.randn(size, 7), generate=lambda m, x: custom(m(x)))
    assert anatomy(workload, 3).unknown == ("unheard_of::twice",)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_of_cuda_are_not_known(layer):
    """Predictions for CUDA once had the workspace of oneDNN."""
    workload = Workload(
        lambda: layer(7, 5),
        lambda size: torch.randn(11, size, 7),
        lambda model, x: model(x)[0].sum(),
        torch.optim.SGD,
    )
    cpu, cuda = (anatomy(workload, 3, device=device) for device in ("cpu", "cuda"))
    assert cpu.unknown == ()
    assert f"aten::{layer.__name__.lower()}" in [name.removesuffix("_tanh") for name in cuda.unknown]
    if layer is nn.LSTM:
        assert cuda.peak_bytes < cpu.peak_bytes


def test_rules_of_a_cpu_are_not_those_of_cuda():
    workload = Workload(lambda: nn.Conv2d(9, 5, 3), lambda size: torch.randn(size, 9, 9, 11))
    found = anatomy(workload, 3, device="cuda")
    assert found.unknown == ("aten::convolution",)
    assert found.peak_bytes == found.categories["weights"] + 4 * 3 * (9 * 9 * 11 + 5 * 7 * 9)
    assert found.overheads["cuDNN workspace"] == 4 * (3 * (9 * 9 * 11 + 5 * 7 * 9) + 5 * (9 * 3 * 3 + 1))
    assert "cuDNN workspace" in str(found)
