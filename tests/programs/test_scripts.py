"""Scripts on fake tensors: what they may do, what is skipped, and which lines are named that cannot be followed."""

import io
import json
import os
import random
import re
import sys
import tempfile
import textwrap

import numpy
import pytest
import torch

import effops
from effops.commands.main import main
from effops.programs.capture import places
from effops.programs.capture.assumed_values import CannotFollow
from effops.programs.capture.writes import RefusedWriteError
from effops.programs.large.findings import LintReport
from effops.programs.large_lines import report_of_block
from effops.programs.scripts import ScriptEndedError, run_script

IMPORTS = "import math, os, sys\nimport torch\nfrom torch import nn\nfrom torch.nn import functional as F\n"
STEP = """
model = nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
loss = model(torch.randn(3, 4)).square().mean()
loss.backward()
"""
LARGE = "product = torch.randn(64, 1, 64) * torch.randn(4096, 64)\nscores = product.sum(-1)\n"  # 64 MiB for 1 MiB


@pytest.fixture(autouse=True)
def throw_away(tmp_path, monkeypatch):
    """The throw-away folder is one below the test's, so that the rest of it is none."""
    folder = tmp_path / "throw_away"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture
def script(tmp_path):
    def write(text, name="script.py"):
        path = tmp_path / name
        path.write_text(IMPORTS + textwrap.dedent(text))
        return str(path)

    return write


def line_of(path, text):
    """The place of the line of a script that has a text."""
    with open(path) as file:
        return f"{path}:{next(number for number, line in enumerate(file, 1) if text in line)}"


TRAINING = """
from torch.utils.data import DataLoader, TensorDataset, random_split
import numpy as np
from tqdm import tqdm
from helper import width

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4096, width).cuda())
        nn.init.trunc_normal_(self.weight)
        self.out = nn.Linear(4096, 10)

    def forward(self, given):
        return self.out((given.unsqueeze(1) * self.weight).sum(-1))

def main():
    device = "cuda"
    images = torch.from_numpy(np.random.randn(100, width).astype("float32"))
    data, _ = random_split(TensorDataset(images, torch.randint(0, 10, (100,))), [80, 20])
    loader = DataLoader(data, batch_size=64, shuffle=True, num_workers=2, pin_memory=True, persistent_workers=True)
    model = torch.compile(Model().to(device))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=10)
    scaler = torch.amp.GradScaler("cpu")
    correct = 0
    for epoch in range(10):
        for images, labels in tqdm(loader, file=sys.stdout):
            images, labels = images.cuda(), labels.to(device, non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                result = model(images)
                loss = F.cross_entropy(result, labels)
            print(loss, f"{loss.item():.3f}", loss.item() > 1, *sys.argv[1:])
            if not math.isfinite(loss.item()):
                sys.exit(1)
            correct += (result.argmax(1) == labels).sum().item()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            torch.save(model.state_dict(), "checkpoint.pt")
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            print("after the first step")

if __name__ == "__main__":
    main()
"""


def test_a_training_loop(script, tmp_path, capsys):
    """It ends after a step: data is loaded, values are not asked, no checkpoint is written, and nothing is left."""
    (tmp_path / "helper.py").write_text("width = 64\n")
    path = script(TRAINING)
    argv, folders, states = sys.argv, list(sys.path), (random.getstate(), numpy.random.get_state()[1].tolist())
    run = run_script(path, ["--rate", "1"])
    printed = capsys.readouterr().out
    assert "nan False --rate 1" in printed
    assert "after the first step" not in printed
    assert run.steps == 1
    assert not (tmp_path / "checkpoint.pt").exists()
    assert [(what, str(place)) for what, place in run.skipped] == [
        ("torch.save 'checkpoint.pt'", line_of(path, "torch.save"))
    ]
    assert not run.written
    places = {(what.split()[0], str(place)) for what, place in run.assumed}
    assert ("numbers", line_of(path, "print(loss, ")) in places
    assert ("what", line_of(path, "torch.compile")) in places
    (finding,) = report_of_block(run.observed, run.values, 2**20, 8.0).findings
    assert str(finding.place) == line_of(path, "given.unsqueeze(1)")
    assert finding.now_bytes == 64 * 4096 * 64 * 4
    loaded = [one for one in run.observed.recorder.records if one.operator == "DataLoader"]
    assert [one.nbytes for one in loaded] == [64 * 64 * 4, 64 * 8]
    assert (argv, folders) == (sys.argv, sys.path)
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == states
    assert "helper" not in sys.modules
    assert torch.save.__module__ == "torch.serialization"


def test_steps(script, capsys):
    path = script(STEP + "for turn in range(5):\n    print('turn', turn)\n    optimizer.step()\n")
    assert run_script(path, steps=3).steps == 3
    assert capsys.readouterr().out.count("turn") == 3
    with pytest.raises(ValueError, match="lint: `--steps` must be at least 1; got 0; leave it out"):
        run_script(path, name="lint", steps=0)


IN_LOOP = """
for turn in range(5):
    optimizer.step()
    # what comes next
    print("in the loop")

    if turn:
        print("more in it")
    count = turn
"""
EVALUATION = """
def evaluate(x):
    return (x * torch.randn(4096, 64)).sum(-1)

print(evaluate(torch.randn(64, 1, 64)))
"""


def test_what_stands_behind_the_last_step_is_told(script, capsys):
    """The report said nothing of an evaluation behind the loop, which was not followed."""

    def note(text, *options):
        path = script(STEP + text, f"script{len(text)}.py")
        assert main(["lint", "--times", "2", *options, path]) == 0
        return path, capsys.readouterr().out

    path, told = note(IN_LOOP)
    step, last = line_of(path, "optimizer.step()"), int(line_of(path, "more in it").rpartition(":")[2])
    name = os.path.basename(path)
    run = f"lines {last - 3} of {name}, {last - 1} to {last} of {name}"
    not_run = f"what stands behind it did not run ({run}); `--steps 2` follows it\n"
    assert told.endswith(f"stopped after optimizer step 1, at {step}: {not_run}")
    assert "stopped" not in note(IN_LOOP, "--steps", "2")[1]
    path, told = note(IN_LOOP + EVALUATION, "--steps", "2")
    last = line_of(path, "print(evaluate").rpartition(":")[2]
    not_run = f"did not run (line {last} of {os.path.basename(path)}); to follow it, give `--steps` more steps than"
    assert not_run in told
    assert "0 findings" in told
    path, told = note(IN_LOOP + EVALUATION, "--steps", "6")
    assert "1 finding" in told
    assert "the script ended after 5 of 6 optimizer steps" in told
    assert "did not run" not in told


def test_fixes_can_be_left_out(script, capsys):
    path = script(
        "import torch\nx, y = torch.randn(512, 1, 64), torch.randn(512, 64)\nprint((x * y).sum(-1).amax(1))\n"
    )
    assert main(["lint", "--least", "1MiB", "--no-fixes", path]) == 0
    told = capsys.readouterr().out
    assert "1 finding;" in told
    assert "no fix" not in told
    assert "in place of" not in told


def test_what_stands_behind_a_step_in_functions(script, tmp_path):
    """The rest of each function that has led to the step counts, and no branch that was not taken."""
    (tmp_path / "loops.py").write_text(
        "class Loop:\n    def fit(self, optimizer):\n        if optimizer:\n            optimizer.step()\n"
        "        else:\n            print('other')\n        done = 1\n        print(done)\n\nprint('module')\n"
    )
    path = script(STEP + "import loops\nfor epoch in range(2):\n    loops.Loop().fit(optimizer)\n    print(epoch)\n")
    stopped = run_script(path).stopped
    assert str(stopped.place) == f"{tmp_path / 'loops.py'}:4"
    assert stopped.lines == ["8 of loops.py", f"{line_of(path, 'print(epoch)').rpartition(':')[2]} of script.py"]
    assert not stopped.in_loop
    assert run_script(path, steps=2).stopped.lines == stopped.lines
    assert run_script(script("torch.ones(3).sum()\n")).stopped is None


def test_a_script_that_catches_everything_and_one_without_steps(script):
    assert (
        run_script(script(STEP + "try:\n    optimizer.step()\nexcept Exception:\n    raise SystemExit(3)\n")).steps == 1
    )
    assert run_script(script("torch.ones(3).sum()\nsys.exit()\n")).steps == 0


WRITES = {
    "open": "open('log.txt', 'w')",
    "append": "open('log.txt', 'a')",
    "folder": "os.makedirs('runs/1', exist_ok=True)",
    "logging": "import logging; logging.FileHandler('log.txt')",
    "numpy": "import numpy; numpy.save('array.npy', numpy.zeros(3))",
    "remove": "os.remove(__file__)",
    "rename": "os.replace(__file__, 'other.py')",
    "rmtree": "import shutil; shutil.rmtree('kept')",
}
STARTS = {
    "program": "import subprocess; subprocess.run(['true'])",
    "system": "os.system('true')",
}


@pytest.mark.parametrize("name", [*WRITES, *STARTS])
def test_writes_are_refused(script, tmp_path, name):
    """Programs that a script starts were told to "write below" the throw-away folder."""
    (tmp_path / "kept").mkdir()
    path = script({**WRITES, **STARTS}[name] + "  # here\n")
    before = sorted(tmp_path.iterdir())
    message = (
        r"write outside .*; allow it with --allow-writes, or let it write below '.*', as by an argument of the script"
    )
    if name in STARTS:
        message = r"start programs, .*; allow it and what it writes with --allow-writes, or leave that line out"
    with pytest.raises(RefusedWriteError, match=f"lint: a script must not {message}$") as error:
        run_script(path, name="lint")
    assert line_of(path, "# here") in str(error.value)
    assert sorted(tmp_path.iterdir()) == before


def test_writes_that_are_allowed(script, tmp_path):
    """Those in throw-away folders, those of other threads, and all if the user says so."""
    harmless = """
    import tempfile
    with tempfile.TemporaryDirectory() as folder:
        open(folder + "/file", "w").write("x")
    with open("/dev/null", "w"):
        pass
    os.makedirs("kept", exist_ok=True)
    """
    (tmp_path / "kept").mkdir()
    run = run_script(script(harmless))
    assert not run.written
    path = script("open('log.txt', 'w').write('x')\n")
    run = run_script(path, allow_writes=True)
    assert [(name, str(place)) for name, place in run.written] == [(str(tmp_path / "log.txt"), line_of(path, "open("))]
    assert (tmp_path / "log.txt").read_text() == "x"
    (tmp_path / "log.txt").write_text("after a script, anything may be written")


def test_writes_of_threads_of_the_script(script):
    thread = """
    import threading
    failed = []
    def write():
        try:
            open("log.txt", "w")
        except PermissionError as error:
            failed.append(error)
    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    raise failed[0]
    """
    with pytest.raises(RefusedWriteError, match=r"script.py:\d+: open\("):
        run_script(script(thread))


def test_saves_that_are_imported_later(script, tmp_path):
    pytest.importorskip("safetensors")
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("safetensors.torch")}
    try:
        run = run_script(script("from safetensors.torch import save_file\nsave_file({'a': torch.ones(3)}, 'a.st')\n"))
    finally:
        sys.modules.update(before)
    assert [what for what, _ in run.skipped] == ["safetensors.torch.save_file 'a.st'"]
    assert not (tmp_path / "a.st").exists()


REFUSED = {
    "branch": ("if loss > 1:", "    pass", "a branch on a value cannot be followed .*, decide it by shapes"),
    "mask": ("loss = model.weight[model.weight > 1].sum()", "", "boolean mask as an index.*write torch.where"),
    "tolist": (
        "losses = model.weight.tolist()",
        "",
        r".tolist\(\) of a tensor cannot be followed .*one.item\(\) for one in",
    ),
    "numpy": ("array = loss.detach().numpy()", "", r".numpy\(\) of a tensor cannot be followed"),
    "array": ("import numpy; numpy.asarray(loss.detach())", "", r".__array__\(\) of a tensor cannot be followed"),
    "size": ("torch.zeros(loss.argmax().item())", "", "an integer that is read from a tensor .*take it from shapes"),
    "int": ("int(loss.argmax())", "", "take it from shapes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_lines_that_cannot_be_followed(script, name):
    line, rest, message = REFUSED[name]
    path = script(f"{STEP}{line}\n{rest}\n")
    with pytest.raises(CannotFollow, match=f"(?s)lint: .*{message}") as error:
        run_script(path, name="lint")
    assert f"{line_of(path, line)}" in str(error.value)


def test_numbers_are_finite(script):
    """The Trainer of transformers asks so of each loss, and could not be followed."""
    text = "if torch.isnan(loss) or torch.isinf(loss) or not torch.isfinite(loss):\n    sys.exit(1)\n"
    run = run_script(script(STEP + text))
    assert "numbers are taken to be finite" in {what for what, _ in run.assumed}
    with pytest.raises(CannotFollow, match="a branch on a value"):
        run_script(script(STEP + "if loss == loss.square():\n    pass\n"))


def test_a_line_of_a_library_is_named_too(script, tmp_path, monkeypatch):
    """A branch of the Trainer of transformers was named by the line that calls `train()` alone."""
    library = tmp_path / "site-packages"
    library.mkdir()
    (library / "trains.py").write_text("def train(loss):\n    if loss > 1:\n        pass\n")
    monkeypatch.syspath_prepend(library)
    monkeypatch.setattr(places, "LIBRARIES", (*places.LIBRARIES, str(library)))
    places.kind_of.cache_clear()
    monkeypatch.delitem(sys.modules, "trains", raising=False)
    path = script(f"{STEP}import trains\ntrains.train(loss)\n")
    with pytest.raises(CannotFollow) as error:
        run_script(path, name="lint")
    assert f"{line_of(path, 'trains.train(')}: trains.train(loss), which calls " in str(error.value)
    assert "trains.py:2: " in str(error.value)
    assert ", decide it by shapes" in str(error.value)


def test_what_follows_from_numbers(script):
    known = "order = torch.randperm(50).tolist()\nassert sorted(order) == list(range(50))\n"
    known += "assert torch.arange(3).numpy().tolist() == [0, 1, 2]\nassert not torch.isnan(torch.randn(3)).any()\n"
    run_script(script(known))


def test_devices(script):
    """What it calls "cuda" is the predicted device; other devices are refused, and so is what needs a GPU itself."""
    path = script("a = torch.zeros(1000, device='cuda').cuda().to('cuda:0')\nassert a.mean().device.type == 'cpu'\n")
    for device in ("cpu", "cuda"):
        run = run_script(path, device=device)
        assert run.observed.calls[0].makes[0].nbytes == 4000
    path = script("torch.zeros(3).to('mps')\n")
    with pytest.raises(
        NotImplementedError, match=r'lint: a script that is predicted .*; got "mps" in .*, line 5, where'
    ):
        run_script(path, name="lint")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_cuda_as_the_default_device(device, script):
    """It was refused as a device other than the predicted one, as others are. The default is as before afterwards."""
    path = script("torch.set_default_device('cuda')\na = torch.rand(1000)\nb = torch.tensor([1.0, 2.0])\n")
    made = run_script(path, device=device).observed.calls
    assert next(one.makes[0].nbytes for one in made if one.makes) == 4000
    assert torch.rand(2).device.type == "cpu"
    with pytest.raises(NotImplementedError, match=r'must name no other device; got "mps" in .*, line 6'):
        run_script(script("torch.set_default_device('mps')\na = torch.rand(1000)\n"), device=device)
    assert torch.rand(2).device.type == "cpu"
    run_script(script("torch.set_default_device('meta')\ntorch.set_default_dtype(torch.float64)\n"), device=device)
    assert (torch.rand(2).device.type, torch.rand(2).dtype) == ("cpu", torch.float32)
    with torch.device("meta"):
        run_script(path, device=device)
        assert torch.rand(2).device.type == "meta"
    torch.set_default_device("meta")
    try:
        run_script(path, device=device)
        assert torch.rand(2).device.type == "meta"
    finally:
        torch.set_default_device(None)


def test_a_fix_where_cuda_is_the_default_device(script, capsys):
    """Its statements were run alone on the device that the script had left behind, which is not there."""
    text = "x, y = torch.randn(4096, 64), torch.randn(4096, 64)\nd = (x[:, None] * y[None]).sum(-1)\n"
    path = script(f"torch.set_default_device('cuda')\n{text}")
    assert main(["lint", "--device", "cuda", path]) == 0
    assert "broadcast_dot" in capsys.readouterr().out


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_pinned_memory(device, script):
    """PyTorch has no fake form of it. What is pinned and then moved counts once."""
    text = (
        "a = torch.rand(1000).pin_memory().cuda(non_blocking=True)\nb = torch.empty(2000, pin_memory=True).to('cuda')\n"
    )
    assert [one.makes[0].nbytes for one in run_script(script(text), device=device).observed.calls] == [4000, 8000]


def test_exits(script):
    path = script(
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('data')\nparser.parse_args()"
    )
    with pytest.raises(ScriptEndedError, match=r"lint: .*first optimizer step; got exit code 2.*give it the arguments"):
        run_script(path, name="lint")
    with pytest.raises(FileNotFoundError, match=r"lint: a script must be a file .*; got 'none.py'"):
        run_script("none.py", name="lint")


def test_input(script, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("yes\n"))
    run_script(script("assert input('go on? ') == 'yes'\n"))


def test_the_command(script, capsys):
    path = script(f"print('said', sys.argv[1:])\n{LARGE}{STEP}optimizer.step()\n")
    assert main(["lint", "--fail-over", "1GiB", path, "--json", "x"]) == 0
    shown = capsys.readouterr()
    assert line_of(path, "product =") in shown.out
    assert "said ['--json', 'x']" in shown.err
    told = ["--json goes to the script; options of effops stand before it"]
    told.append(f"{path} runs on fake tensors until optimizer step 1")
    assert shown.err.splitlines()[:2] == [f"effops lint: {one}" for one in told]
    assert main(["lint", "--fail-over", "1MiB", path]) == 1
    assert main(["lint", "--fail-over", "much", path]) == 2
    for option in ("--fail-over", "--least"):
        capsys.readouterr()
        assert main(["lint", option, "64", path]) == 2
        assert f"lint: argument {option}: expected a unit behind the number; got '64'; write" in capsys.readouterr().err
        assert main(["lint", f"{option}=-1MiB", path]) == 2
        assert f"argument {option}: expected at least 0 bytes; got '-1MiB'; write it without" in capsys.readouterr().err
    capsys.readouterr()
    assert main(["lint", path, "--fail-over", "1MiB"]) == 2  # it was the script's, and nothing failed
    assert "argument --fail-over: options of effops must stand before the script" in capsys.readouterr().err


MAIN = """
import argparse

def main():
    argparse.ArgumentParser().parse_args()
    points, centres = torch.randn(256, 16), torch.randn(512, 16)
    print((points[:, None] - centres).abs().sum(-1).amin(1).sum().shape)

main()
"""


def test_a_script_whose_main_reads_arguments(script, capsys):
    """A trial of a fix called `main()`, which read the arguments of effops and ended it."""
    assert main(["lint", "--least", "1MiB", script(MAIN)]) == 0
    shown = capsys.readouterr()
    assert "1 finding" in shown.out
    assert "usage" not in shown.err


def test_errors_in_the_command(script, capsys):
    path = script("def fails():\n    return torch.zeros(3) @ torch.zeros(4)\n\nfails()\n")
    assert main(["lint", path]) == 2
    shown = capsys.readouterr().err
    assert "in fails\n    return torch.zeros(3) @ torch.zeros(4)" in shown
    assert "RuntimeError: " in shown
    assert os.path.dirname(effops.__file__) not in shown
    assert "runpy" not in shown
    assert main(["lint", script(STEP + "if loss > 1:\n    pass\n")]) == 2
    shown = capsys.readouterr().err.splitlines()[-1]
    assert shown.startswith("effops lint: a branch on a value cannot be followed")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import torch\nx = (1,\n", "SyntaxError in {path}, line 2: '(' was never closed: x = (1,; mend it"),
        ("if x:\ny = 1\n", "IndentationError in {path}, line 2: expected an indented block .*: y = 1; mend it"),
        ("\nimport slips\n", r"SyntaxError in .*slips.py, line 1: .*: def f\(:.* \(imported at {path}:2\); mend it"),
    ],
)
def test_a_script_that_is_no_python(tmp_path, capsys, text, told):
    """The text of the line was missing, and a module that was imported gave a traceback."""
    (tmp_path / "slips.py").write_text("def f(:\n    pass\n")
    path = tmp_path / "train.py"
    path.write_text(text)
    assert main(["lint", str(path)]) == 2
    _, line = capsys.readouterr().err.splitlines()
    expected = told.replace("(1", r"\(1").replace("'('", r"'\('").format(path=path)
    assert re.fullmatch(rf"effops lint: a script and what it imports must be Python; got {expected}", line), line


def test_a_script_that_is_no_text(tmp_path, capsys):
    """The file was not named."""
    path = tmp_path / "model.bin"
    path.write_bytes(b"x = 1\0\n")
    assert main(["lint", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()[1:]
    assert "must be Python; got" in line
    assert str(path) in line


def test_a_notebook_is_no_script(tmp_path, capsys):
    """Its JSON ran as Python, which does nothing: there were no findings."""
    for name, text, told in (
        ("nb.ipynb", '{"cells": [], "nbformat": 4}', "got the notebook {!r}; save it as one, by `jupyter nbconvert"),
        ("renamed.py", '\n{"cells": [], "metadata": null}', "got the notebook {!r}; save it as one"),
        ("empty.ipynb", "", "got the notebook {!r}; save it as one"),
        ("config.json", "[1, 2]", "got {!r}, which is JSON; name the .py file"),
    ):
        path = tmp_path / name
        path.write_text(text)
        assert main(["lint", str(path)]) == 2
        assert f"effops lint: a script must be Python; {told.format(str(path))}" in capsys.readouterr().err


def test_code_that_a_script_makes_is_its_own(script, capsys):
    assert main(["lint", script("eval('1 +')\n")]) == 2
    assert "Traceback" in capsys.readouterr().err


NO_STEP = "the script ended without an optimizer step; one that trains may lack arguments, after its name"


def test_fewer_steps_than_asked_for(script, capsys):
    assert main(["lint", "--steps", "3", script(f"{STEP}optimizer.step()\n")]) == 0
    assert "ended after 1 of 3 optimizer steps\n" in capsys.readouterr().out


LABELS = """
import torch
from torch.utils.data import DataLoader, Dataset
class Labels(Dataset):
    labels = torch.arange(400).repeat_interleave(16)
    def __len__(self):
        return len(self.labels)
    def __getitem__(self, number):
        return int(self.labels[number])
next(iter(DataLoader(Labels(), 4)))
"""


def test_a_number_of_a_tensor_in_a_dataset(script, capsys):
    """The remedy was of shapes and branches."""
    assert main(["lint", script(LABELS)]) == 2
    told = capsys.readouterr().err
    assert "a number of a tensor: keep the tensor, or have the numbers in NumPy or a list" in told
    assert "int(self.labels[number])" in told


def test_no_script(capsys):
    """ARGS were said to be required too."""
    with pytest.raises(SystemExit):
        main(["lint"])
    assert capsys.readouterr().err.endswith("the following arguments are required: SCRIPT\n")


def test_a_least_size_of_0_names_tensors_of_any_size(script, capsys):
    """It was accepted, and documented nowhere."""
    path = script("product = torch.randn(40, 1, 6) * torch.randn(50, 6)\nscores = product.sum((0, 1))\n")
    assert main(["lint", path]) == 0
    assert "product =" not in capsys.readouterr().out
    assert main(["lint", "--least", "0", path]) == 0
    assert "product =" in capsys.readouterr().out


def test_formats_of_the_command(script, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(LintReport, "to_json", lambda report: {"findings": len(report.findings)}, raising=False)
    monkeypatch.setattr(LintReport, "github", lambda report: "::warning::", raising=False)
    path = script(LARGE)
    assert main(["lint", "--json", "-", path]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {"report": {"findings": 1}, "notes": [NO_STEP]}
    assert main(["lint", "--format", "github", "--json", str(tmp_path / "report.json"), path]) == 0
    assert capsys.readouterr().out.splitlines() == ["::warning::"]
    assert json.loads((tmp_path / "report.json").read_text()) == found
    assert main(["lint", "--format", "github", "--json", "-", path]) == 2
