"""`effops memory`: what each subcommand shows and writes, and what it says of bad input."""

import json
import sys

import pytest
import torch

from effops.commands import main as cli
from effops.commands import memory as module
from effops.memory import Workload, advise, anatomy, estimate_transformer, max_batch_size
from effops.memory.models import Configuration, workload_parts

SIZES = {"d_model": 8, "layers": 1, "heads": 2, "d_ff": 16, "seq_len": 16}
ARCHITECTURE = ["--architecture", "encoder_only_tst"]
ARCHITECTURE += [word for name, size in SIZES.items() for word in (f"--{name.replace('_', '-')}", str(size))]
OWN = """
import torch
from effops.memory import Workload

def workload(width=4):
    return Workload(
        model=lambda: torch.nn.Linear(width, width),
        batch=lambda size: torch.randn(size, width),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=torch.optim.SGD,
    )

given = workload()
number = 3
"""


def workload(**changes):
    parts = workload_parts("encoder_only_tst", Configuration(**{**SIZES, "attention": "naive"}))
    return Workload(**{**parts, **changes})


@pytest.fixture
def memory(capsys):
    """Runs a subcommand; gives the exit code, its output and what it says of errors."""

    def run(*arguments):
        code = cli.main(["memory", *arguments])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def content(memory):
    """The JSON of a subcommand that must succeed."""

    def run(*arguments):
        code, out, err = memory(*arguments, "--json", "-")
        assert code == 0, err
        return json.loads(out)

    return run


@pytest.fixture
def own(monkeypatch, tmp_path):
    """A module of the current directory."""
    (tmp_path / "own_workloads.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_workloads", raising=False)


def test_max_batch(memory, content):
    arguments = ["max-batch", *ARCHITECTURE, "--budget", "600KiB", "--power-of-two"]
    found = max_batch_size(workload(), "600KiB", power_of_two=True)
    written = content(*arguments)
    assert written["batch_size"] == found.batch_size
    assert written["predicted_peak_bytes"] == found.predicted_peak_bytes <= 600 * 1024 < written["next_peak_bytes"]
    assert memory(*arguments)[1].rstrip() == str(found)


def test_max_batch_predicts_the_forms_of_cuda(content):
    written = content("max-batch", *ARCHITECTURE, "--device", "cuda", "--budget", "600KiB", "--power-of-two")
    assert written["predicted_peak_bytes"] == anatomy(workload(), written["batch_size"], device="cuda").peak_bytes
    assert written["predicted_peak_bytes"] < anatomy(workload(), written["batch_size"]).peak_bytes  # of dropout's masks


def test_max_batch_counts_what_a_device_holds(content, own):
    arguments = ["max-batch", "--workload", "own_workloads:given", "--device", "cuda", "--power-of-two"]
    device = content(*arguments, "--budget", "40MiB", "--budget-means", "device", "--context", "10MiB")
    tensors = content(*arguments, "--budget", "40MiB")
    assert 10 * 2**20 < device["predicted_peak_bytes"] <= 40 * 2**20
    assert device["batch_size"] < tensors["batch_size"]


def test_anatomy_with_the_options_of_a_step(content, tmp_path):
    options = ["--autocast", "bfloat16", "--checkpoint", "--accumulation-steps", "2", "--measure"]
    picture = tmp_path / "step.svg"
    written = content("anatomy", *ARCHITECTURE, "--batch-size", "3", *options, "--plot", str(picture))
    expected = anatomy(workload(autocast=torch.bfloat16, checkpoint=True, accumulation_steps=2), 3)
    assert written["peak_bytes"] == expected.peak_bytes
    assert written["categories"] == expected.categories
    assert written["instants"] == expected.instants
    assert written["operations"]["forward"]["contractions"] == expected.operations["forward", "contractions"]
    assert written["unknown"] == list(expected.unknown) == []
    assert expected.peak_bytes == pytest.approx(written["measured"]["peak_bytes"], rel=0.005)
    unprobed = content("anatomy", *ARCHITECTURE, "--batch-size", "3", *options[:-1], "--no-probe")
    computes_narrow = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert unprobed["unknown"] == ["aten::addmm", "aten::bmm", "aten::mm"] * computes_narrow  # oneDNN's scratchpads
    assert picture.read_text().startswith("<?xml")


def test_anatomy_is_a_table(memory, tmp_path):
    file = tmp_path / "anatomy.json"
    code, out, _ = memory("anatomy", *ARCHITECTURE, "--batch-size", "3", "--json", str(file))
    assert code == 0
    assert out.rstrip() == str(anatomy(workload(), 3))
    assert json.loads(file.read_text())["batch_size"] == 3


def test_advise_knows_the_other_attentions_of_an_architecture(content, monkeypatch):
    asked = {}

    def recorded(*arguments, **options):
        asked.update(options)
        return advise(*arguments, **{**options, "alternatives": {}})

    monkeypatch.setattr(module, "advise", recorded)
    written = content("advise", *ARCHITECTURE, "--batch-size", "3", "--devices", "2", "--budget", "1 GiB")
    assert written["peak_bytes"] == anatomy(workload(), 3).peak_bytes
    assert written["fits"]
    assert {"ZeRO stage 3, 2 devices", "mixed precision"} < {method["name"] for method in written["methods"]}
    fused, log_sparse = asked["alternatives"].values()
    parts = workload_parts("encoder_only_tst", Configuration(**SIZES, attention="log_sparse"))
    assert len(log_sparse.batch(2)) == len(parts["batch"](2)) == len(fused.batch(2)) - 1  # it takes no mask
    assert fused.model().encoder.layers[0].self_attention.kind == "fused"


def test_sweep(content, memory, tmp_path):
    axes = ["--axis", "seq-len=8,16", "--axis", "architecture=encoder_only_tst,tst"]
    picture = tmp_path / "sweep.svg"
    written = content("sweep", *ARCHITECTURE, *axes, "--batch-size", "2", "--plot", str(picture))
    assert written["quantity"] == "peak"
    assert written["base"] == {"seq_len": 16, "architecture": "encoder_only_tst"}
    assert written["axes"]["seq_len"][1] == {"value": 16, "result": anatomy(workload(), 2).peak_bytes}
    assert picture.exists()
    code, out, _ = memory("sweep", *ARCHITECTURE, "--axis", "seq-len=8,16", "--budget", "600 KiB")
    assert code == 0
    assert "largest batch with a budget of 600.0 KiB" in out


def test_estimate(content, memory):
    sizes = ["--blocks", "8", "--heads", "8", "--head-dim", "8", "--batch-size", "32", "--seq-len", "256"]
    rough = estimate_transformer(8, 8, 8, 32, 256, torch.float64)
    written = content("estimate", *sizes, "--dtype", "float64")
    assert written["total_bytes"] == rough.total_bytes
    assert written["readings"] == rough.readings
    code, out, _ = memory("estimate", *sizes, "--formula", "detailed", "--attention", "fused", "--no-dropout")
    assert code == 0
    assert "statistics of attention" in out
    assert "dropout masks" not in out


def test_workloads_of_ones_own(content, own):
    for place in ("own_workloads:given", "own_workloads:workload"):
        written = content("max-batch", "--workload", place, "--budget", "10KiB")
        assert written["batch_size"] == content("max-batch", "--workload", place, "--budget", "10KiB")["batch_size"] > 0
    written = content("sweep", "--workload", "own_workloads:workload", "--axis", "width=4,8", "--batch-size", "2")
    narrow, wide = written["axes"]["width"]
    assert narrow["result"] < wide["result"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["max-batch", *ARCHITECTURE, "--budget", "1KiB"], "`budget` must hold a step of batch size 1"),
        (["max-batch", *ARCHITECTURE, "--budget", "1 furlong"], "expected a number and B, KB"),
        (["max-batch", *ARCHITECTURE, "--budget", "1GiB", "--budget-means", "device"], 'give device="cuda"'),
        (["anatomy", *ARCHITECTURE, "--batch-size", "0"], "`batch_size` must be at least 1; got 0"),
        (["anatomy", *ARCHITECTURE, "--batch-size", "2", "--heads", "3"], "`d_model` must be a multiple of heads=3"),
        (
            ["anatomy", *ARCHITECTURE, "--batch-size", "2", "--json", "/"],
            "argument --json: expected a file that can be",
        ),
        (
            ["anatomy", "--architecture", "bert-large", "--d-ff", "3", "--batch-size", "2"],
            "argument --d-ff: expected none",
        ),
        (["anatomy", "--workload", "own_workloads:number", "--batch-size", "2"], "returns one; got int"),
        (["anatomy", "--workload", "own_workloads:missing", "--batch-size", "2"], "expected MODULE:NAME of a workload"),
        (["anatomy", "--workload", "own_workloads", "--batch-size", "2"], "expected MODULE:NAME of a workload"),
        (["anatomy", "--workload", "no_such_module:x", "--batch-size", "2"], "No module named 'no_such_module'"),
        (["anatomy", "--workload", "own_workloads:given", "--heads", "3", "--batch-size", "2"], "argument --heads"),
        (["sweep", *ARCHITECTURE, "--axis", "layers", "--batch-size", "2"], "expected NAME=VALUE,VALUE"),
        (
            ["sweep", *ARCHITECTURE, "--axis", "depth=1,2", "--batch-size", "2"],
            "expected an option of the architecture",
        ),
        (
            ["sweep", "--workload", "own_workloads:given", "--axis", "width=1,2", "--batch-size", "2"],
            "expected 'own_workloads:given' to be a function of width; got Workload",
        ),
    ],
)
def test_bad_input_gives_a_message_and_exit_code_2(memory, own, arguments, message):
    code, _, err = memory(*arguments)
    assert code == 2
    assert message in err
    assert err.startswith(f"effops memory {arguments[0]}: ")
    assert "Traceback" not in err


def test_devices_without_a_driver(memory, monkeypatch):
    pynvml = pytest.importorskip("pynvml")

    def fails():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", fails)
    code, _, err = memory("devices")
    assert code == 2
    assert "needs an NVIDIA driver" in err


def test_a_missing_extra_is_named(memory, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, _, err = memory("anatomy", "--architecture", "bert-large", "--batch-size", "2")
    assert code == 2
    assert 'pip install -c constraints.txt -e ".[bert]"' in err


@pytest.mark.parametrize("arguments", [[], ["max-batch"], ["anatomy", "--architecture", "tst", "--workload", "a:b"]])
def test_wrong_arguments_exit_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(["memory", *arguments])
    assert exit.value.code == 2
    assert "usage: effops memory" in capsys.readouterr().err
