"""`effops memory`: what each subcommand shows and writes, and what it says of bad input."""

import argparse
import json
import re
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
model = torch.nn.Linear(4, 4)

class Net(torch.nn.Linear):
    pass
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


@pytest.mark.slow
def test_max_batch(memory, content):
    arguments = ["max-batch", *ARCHITECTURE, "--budget", "600KiB", "--power-of-two"]
    found = max_batch_size(workload(), "600KiB", power_of_two=True)
    written = content(*arguments)
    assert written["batch_size"] == found.batch_size
    assert written["predicted_peak_bytes"] == found.predicted_peak_bytes <= 600 * 1024 < written["next_peak_bytes"]
    assert memory(*arguments)[1].rstrip() == str(found)


@pytest.mark.slow
def test_max_batch_predicts_the_forms_of_cuda(content):
    arguments = "--device", "cuda", "--budget", "600KiB", "--budget-means", "tensors", "--power-of-two"
    written = content("max-batch", *ARCHITECTURE, *arguments)
    assert written["predicted_peak_bytes"] == anatomy(workload(), written["batch_size"], device="cuda").peak_bytes
    assert written["predicted_peak_bytes"] < anatomy(workload(), written["batch_size"]).peak_bytes  # of dropout's masks


def test_max_batch_counts_what_a_device_holds(content, own):
    arguments = ["max-batch", "--workload", "own_workloads:given", "--device", "cuda", "--power-of-two"]
    device = content(*arguments, "--budget", "40MiB", "--context", "10MiB")
    tensors = content(*arguments, "--budget", "40MiB", "--budget-means", "tensors")
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


@pytest.mark.slow
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


@pytest.mark.slow
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
        (["max-batch", *ARCHITECTURE, "--budget", "64"], "expected a unit behind the number; got '64'"),
        (["max-batch", *ARCHITECTURE, "--budget=-1GiB"], "expected at least 0 bytes; got '-1GiB'"),
        (["max-batch", *ARCHITECTURE, "--budget", "1GiB", "--context", "64"], "--context: expected a unit behind the"),
        (["max-batch", *ARCHITECTURE, "--budget", "1GiB", "--budget-means", "device"], 'give device="cuda"'),
        (["anatomy", *ARCHITECTURE, "--batch-size", "0"], "`batch_size` must be at least 1; got 0"),
        (
            ["anatomy", *ARCHITECTURE, "--batch-size", "2", "--heads", "3"],
            "argument --d-model, --heads: `d_model` must be a multiple of heads=3 and of 2; got 8; give heads=2",
        ),
        (["anatomy", "--architecture", "tst", "--batch-size", "2", "--heads", "7"], "give heads=8, or d_model=70\n"),
        (
            ["anatomy", "--architecture", "tst", "--batch-size", "2", "--layers", "0"],
            "argument --layers: `layers` must be at least 1; got 0; leave it out for 8\n",
        ),
        (
            ["anatomy", *ARCHITECTURE, "--batch-size", "2", "--json", "/"],
            "argument --json: expected a file that can be",
        ),
        (
            ["anatomy", "--architecture", "bert-large", "--d-ff", "3", "--batch-size", "2"],
            "argument --d-ff: expected none",
        ),
        (
            ["anatomy", "--workload", "own_workloads:number", "--batch-size", "2"],
            "returns one; got an object of class int",
        ),
        (
            ["anatomy", "--workload", "own_workloads:model", "--batch-size", "2"],
            "argument --workload: expected an effops.memory.Workload, or a function that returns one; got an object of "
            "class Linear from 'own_workloads:model'; write effops.memory.Workload(model=lambda: ..., batch=",
        ),
        (
            ["anatomy", "--workload", "own_workloads:Net", "--batch-size", "2"],
            "returns one; got the class Net from 'own_workloads:Net'; write effops.memory.Workload(model=",
        ),
        (
            ["sweep", "--workload", "own_workloads:workload", "--axis", "widht=1", "--batch-size", "2"],
            "argument --axis: 'own_workloads:workload': it takes width; got `widht`; did you mean \"width\"?",
        ),
        (["sweep", *ARCHITECTURE, "--axis", "widht=1", "--batch-size", "2"], 'got widht; did you mean "d_model"?'),
        (["anatomy", "--workload", "own_workloads:missing", "--batch-size", "2"], "expected MODULE:NAME of a workload"),
        (["anatomy", "--workload", "re:missing", "--batch-size", "2"], "where there is none; "),
        (["anatomy", "--workload", "own_workload:missing", "--batch-size", "2"], "or an installed package\n"),
        (["anatomy", "--workload", "own_workloads", "--batch-size", "2"], "expected MODULE:NAME of a workload"),
        (["anatomy", "--workload", "no_such_module:x", "--batch-size", "2"], "No module named 'no_such_module'"),
        (["anatomy", "--workload", "own_workloads:given", "--heads", "3", "--batch-size", "2"], "argument --heads"),
        (  # it named --heads, which was not given
            ["sweep", "--architecture", "tst", "--axis", "heads=3,5", "--batch-size", "2"],
            "argument --axis heads: `d_model` must be a multiple of heads=3",
        ),
        (["sweep", *ARCHITECTURE, "--axis", "layers", "--batch-size", "2"], "expected NAME=VALUE,VALUE"),
        (
            ["sweep", *ARCHITECTURE, "--axis", "layers=two", "--batch-size", "2"],
            "argument --axis layers: expected integers; got 'two'; write them with commas, as layers=2,4,8\n",
        ),
        (
            ["sweep", *ARCHITECTURE, "--axis", "seq-len=64:128", "--batch-size", "2"],
            "--axis seq-len: expected integers",
        ),
        (["sweep", *ARCHITECTURE, "--axis", "layers=1,1.5", "--batch-size", "2"], "expected integers; got 1.5; write"),
        (
            ["sweep", *ARCHITECTURE, "--axis", "dropout=no", "--batch-size", "2"],
            "--axis dropout: expected numbers; got",
        ),
        (
            ["sweep", *ARCHITECTURE, "--axis", "attention=fusd", "--batch-size", "2"],
            "got 'fusd'; did you mean \"fused\"",
        ),
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
    assert err.splitlines()[-1].startswith(f"effops memory {arguments[0]}: ")  # after lines of progress
    assert "Traceback" not in err


PLOT = ["anatomy", *ARCHITECTURE, "--batch-size", "3", "--plot"]


def must_not_run(*arguments, **options):
    raise AssertionError("what can be checked comes first")


@pytest.mark.parametrize(
    ("option", "file", "message"),
    [
        ("--plot", "x.foo", "expected a file with one of the endings .*, png, .*; got 'x.foo'\n"),
        ("--plot", "x.pgn", "expected .*; got 'x.pgn'; did you mean \"png\""),
        ("--plot", "nodir/x.png", "expected a file that can be written; got 'nodir/x.png': there is no folder 'nodir'"),
        ("--plot", "folder.png", "expected .*; got 'folder.png': it is a folder; name another"),
        ("--plot", "-", "expected .*; got '-': it names standard output, which the text takes; name another"),
        ("--plot", "", "expected .*; got '': it has no name; name another"),
        ("--json", "", "expected .*; got '': it has no name; name another, or - for"),
        ("--json", "nodir/x", "expected .*; got 'nodir/x': there is no folder 'nodir'; name another, or - for"),
    ],
)
@pytest.mark.parametrize("command", ["anatomy", "sweep"])
def test_files_are_checked_first(memory, monkeypatch, tmp_path, command, option, file, message):
    """The errors came after all the work, and the table was lost."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    monkeypatch.setattr(module, command, must_not_run)
    axis = ["--axis", "layers=1"] if command == "sweep" else []
    code, out, err = memory(command, *ARCHITECTURE, *axis, "--batch-size", "3", option, file)
    assert (code, out) == (2, "")
    assert re.match(f"effops memory {command}: argument {option}: {message}", err), err
    assert {path.name for path in tmp_path.iterdir()} == {"folder.png"}


def test_matplotlib_is_asked_for_first(memory, monkeypatch):
    monkeypatch.setattr(module, "anatomy", must_not_run)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, out, err = memory(*PLOT, "step.png")
    assert (code, out) == (2, "")
    assert err.startswith("effops memory anatomy: argument --plot: needs the package matplotlib")


def test_a_table_is_shown_where_files_fail_nevertheless(memory, monkeypatch, tmp_path):
    """A disk may be full, which nobody can ask before. Whatever can be written is."""

    def fails(found, path):
        raise OSError("No space left on device")

    monkeypatch.setattr(module, "plot_anatomy", fails)
    code, out, err = memory(*PLOT, str(tmp_path / "step.png"), "--json", str(tmp_path / "step.json"))
    assert code == 2
    assert out.rstrip() == str(anatomy(workload(), 3))
    assert "argument --plot: expected a file that can be written; got " in err
    assert json.loads((tmp_path / "step.json").read_text())["batch_size"] == 3


def test_progress_is_told_in_lines(memory, content, own):
    """These commands were silent for minutes."""
    step = ["--workload", "own_workloads:workload"]
    code, out, err = memory("max-batch", *step, "--budget", "10KiB")
    assert code == 0
    sizes = [int(line.removeprefix("predicting a step of batch size ")) for line in err.splitlines()]
    assert sizes[0] == 1
    assert f"budget of 10.0 KiB (tensors): {max(size for size in sizes if size + 1 in sizes)}\n" in out
    code, _, err = memory("max-batch", *step, "--budget", "1KiB", "--mode", "probe", "--power-of-two")
    assert code == 0
    assert set(err.splitlines()) >= {"running a step of batch size 1", "running a step of batch size 2"}
    code, out, err = memory("advise", *step, "--batch-size", "4", "--budget", "500B")
    assert code == 0
    lines = err.splitlines()
    assert lines[0] == "predicting the step as it is"
    assert {"predicting mixed precision", "predicting optimizer Adafactor", "predicting batch size 2"} < set(lines)
    assert len(lines) == len(set(lines))
    code, out, err = memory("sweep", *step, "--axis", "width=4,8", "--batch-size", "2")
    assert err.splitlines() == [f"width={width}: predicting a step of batch size 2" for width in (4, 8)]
    assert memory("anatomy", *step, "--batch-size", "2")[2] == "predicting a step of batch size 2\n"
    assert memory("anatomy", *step, "--batch-size", "2", "--measure")[2].endswith("size 2 and running it\n")


def test_typing_errors_of_names(memory, own, capsys):
    step = ["anatomy", "--batch-size", "2"]
    for arguments, near in (
        (["--workload", "own_workloads:wrkload"], "own_workloads:workload"),
        (["--workload", "own_workload:given"], "own_workloads:given"),
        (["--workload", "own_workloads.py:given"], "own_workloads:given"),
    ):
        code, _, err = memory(*step, *arguments)
        assert code == 2
        assert err.endswith(f'; did you mean "{near}"?\n')
    for place in ("own_workloads:givn", "own_workloads"):
        choices = "; choose from own_workloads:workload, own_workloads:given; did you mean"
        assert choices in memory(*step, "--workload", place)[2]
    _, _, err = memory("sweep", *ARCHITECTURE, "--axis", "layes=1,2", "--batch-size", "2")
    assert err.endswith('got layes; did you mean "layers"?\n')
    for arguments, near in (
        (["--architecture", "tts"], "tst"),
        (["--architecture", "bert_large"], "bert-large"),
        ([*ARCHITECTURE, "--attention", "fusd"], "fused"),
        ([*ARCHITECTURE, "--device", "cud"], "cuda"),
        ([*ARCHITECTURE, "--device", "gpu"], "cuda"),
        ([*ARCHITECTURE, "--autocast", "bfloat"], "bfloat16"),
    ):
        with pytest.raises(SystemExit):
            memory(*step, *arguments)
        assert capsys.readouterr().err.endswith(f'; did you mean "{near}"?\n')
    with pytest.raises(SystemExit):
        memory("max-bach")
    assert capsys.readouterr().err.endswith('; did you mean "max-batch"?\n')


def test_what_a_workload_file_raises_is_said_with_its_line(memory, own, tmp_path):
    """A library that it imports was missing, and neither file nor line was named."""
    file = tmp_path / "needs_more.py"
    file.write_text("import torch\nimport no_such_library\n")
    code, _, err = memory("anatomy", "--workload", "needs_more:workload", "--batch-size", "2")
    assert code == 2
    assert "'needs_more:workload' must import what is installed; got: No module named 'no_such_library'" in err
    assert err.endswith(f"; raised in {file}, line 2\n")
    later = tmp_path / "needs_more_later.py"
    later.write_text(OWN.replace("torch.nn.Linear(width, width)", "__import__('no_such_library')"))
    code, _, err = memory("anatomy", "--workload", "needs_more_later:given", "--batch-size", "2")
    assert code == 2
    told = f"Workload: it raised ModuleNotFoundError in {later}, line 7: No module named 'no_such_library'"
    assert err.splitlines()[1:] == [f"effops memory anatomy: {told}"]
    code, _, err = memory("anatomy", "--workload", "own_workloads:given", "--batch-size", "0")
    assert err.endswith("\neffops memory anatomy: `batch_size` must be at least 1; got 0; give a larger one\n")


def test_every_option_has_its_phrase(capsys):
    parser = argparse.ArgumentParser()
    module.add_commands(parser)
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    for name, command in commands.choices.items():
        for action in command._actions:
            assert action.help, (name, action.option_strings)
            assert (action.metavar == "N") <= (action.type is int), (name, action.option_strings)
    text = " ".join(commands.choices["anatomy"].format_help().split())
    assert "naive, fused, log_sparse: of the tst architectures; eager, sdpa: of bert-large" in text


def test_devices_without_a_driver(memory, monkeypatch):
    pynvml = pytest.importorskip("pynvml")

    def fails():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", fails)
    code, _, err = memory("devices")
    assert code == 2
    assert err.startswith("effops memory devices: needs an NVIDIA driver")  # it was told as an error of a workload


def test_a_missing_extra_is_named(memory, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, _, err = memory("anatomy", "--architecture", "bert-large", "--batch-size", "2")
    assert code == 2
    assert 'pip install -c constraints.txt -e ".[bert]"' in err


BROKEN = {
    "x = 1\ndef f(: pass\n": "got SyntaxError in {file}, line 2: invalid syntax: def f(: pass; mend it",
    "import torch\n\nraise KeyError('x')\n": "got KeyError in {file}, line 3: 'x'; mend it",
    "from own_workloads import nothing\n": "got ImportError in {file}, line 1: cannot import name 'nothing'",
}


@pytest.mark.parametrize("text", BROKEN)
def test_a_workload_whose_module_cannot_be_imported(memory, own, tmp_path, monkeypatch, text):
    """It was a traceback of 35 lines."""
    file = tmp_path / "broken_workloads.py"
    file.write_text(text)
    monkeypatch.delitem(sys.modules, "broken_workloads", raising=False)
    code, out, err = memory("anatomy", "--workload", "broken_workloads:workload", "--batch-size", "2")
    assert (code, out) == (2, "")
    (line,) = err.splitlines()  # importing is no predicting
    start = "effops memory anatomy: argument --workload: 'broken_workloads:workload' must be importable; "
    assert line.startswith(start + BROKEN[text].format(file=file))


FAILING = """
import dataclasses
import own_workloads

def shapes(model, batch):
    return model(batch[:, 1:]).sum()

def names(model, batch):
    return {}["loss"]

def asserts(model, batch):
    assert batch.shape[-1] == 5, "4 features"

class Wrong(Exception):
    pass

def raises(model, batch):
    raise Wrong("4 features")

losses = shapes, names, asserts, raises
shaped, named, asserted, of_its_own = (dataclasses.replace(own_workloads.given, loss=loss) for loss in losses)
without_size = dataclasses.replace(own_workloads.given, batch=lambda: 3)

def sized(width):
    return own_workloads.workload([][width])
"""
FAILURES = {
    "shaped": r"Workload: loss\(model, batch\) raised RuntimeError in {file}, line 6: a and b must have same reduction",
    "named": r"Workload: loss\(model, batch\) raised KeyError in {file}, line 9: loss$",
    "asserted": r"Workload: loss\(model, batch\) raised AssertionError in {file}, line 12: 4 features$",
    "of_its_own": r"Workload: it raised Wrong in {file}, line 18: 4 features$",
    "without_size": r"Workload: batch\(batch_size\) raised TypeError: .* write batch=lambda batch_size: torch.randn\(",
    "sized": r"argument --workload: 'failing_workloads:sized': it takes width; got no `width`; give each of these,",
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_workload_that_fails_is_told_in_one_line(memory, own, tmp_path, monkeypatch, name):
    """A traceback followed, and before it PyTorch's log of the operator."""
    file = tmp_path / "failing_workloads.py"
    file.write_text(FAILING)
    monkeypatch.delitem(sys.modules, "failing_workloads", raising=False)
    code, out, err = memory("anatomy", "--workload", f"failing_workloads:{name}", "--batch-size", "2")
    assert (code, out) == (2, "")
    (line,) = err.splitlines()[name != "sized" :]
    assert re.match("effops memory anatomy: " + FAILURES[name].format(file=file), line), line


@pytest.mark.parametrize(
    ("amount", "message"),
    [
        (["6", "GiB"], 'unrecognized arguments: GiB; write "6GiB" as one word'),
        (["6GiB", "--modus", "predict"], 'unrecognized arguments: --modus predict; for --modus did you mean "--mode"?'),
    ],
)
def test_amounts_that_are_taken_apart(amount, message, capsys):
    with pytest.raises(SystemExit) as exited:
        cli.main(["memory", "max-batch", *ARCHITECTURE, "--budget", *amount])
    assert exited.value.code == 2
    assert capsys.readouterr().err.endswith(f"{message}\n")


def test_an_amount_below_0(capsys):
    """The argparse of Python 3.14 takes it for the value; that of earlier ones takes it for an option, and exits."""
    command = ["memory", "max-batch", *ARCHITECTURE, "--budget", "-1GiB"]
    if sys.version_info >= (3, 14):
        assert cli.main(command) == 2
        expected = "at least 0 bytes"
    else:
        with pytest.raises(SystemExit, match="2"):
            cli.main(command)
        expected = "one argument, not below 0"
    told = f"budget`?: expected {expected}; got '-1GiB'; write it without the sign\n$"
    assert re.search(told, capsys.readouterr().err)


@pytest.mark.parametrize("arguments", [[], ["max-batch"], ["anatomy", "--architecture", "tst", "--workload", "a:b"]])
def test_wrong_arguments_exit_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(["memory", *arguments])
    assert exit.value.code == 2
    assert "usage: effops memory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["memory", "max-batch", "--bugdet", "6G"], 'are required: --budget; for --bugdet did you mean "--budget"?'),
        (["lint", "--fail-ovr", "3G", "a.py"], 'arguments: --fail-ovr; for --fail-ovr did you mean "--fail-over"?'),
        (["lint", "-m", "a"], "effops lint: error: unrecognized arguments: -m"),
    ],
)
def test_mistyped_options_are_told_by_their_command(arguments, message, capsys):
    """The usage was that of `effops`."""
    with pytest.raises(SystemExit):
        cli.main(arguments)
    told = capsys.readouterr().err
    assert told.endswith(f"{message}\n")
    assert f"usage: effops {arguments[0]}" in told
