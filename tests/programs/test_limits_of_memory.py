"""effops.budget: the bytes of a call, when it raises, and when it predicts anew."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import relu

import effops
import effops_pytest
from effops.programs.capture.assumed_values import CannotFollow
from effops.programs.limits_of_memory import MOST_SIGNATURES, MemoryReport, budget, predict

from ..test_corpus import ALL

ROOT = Path(__file__).parents[2]
budgets = importlib.import_module("corpus.budgets")  # which the corpus has put on the path


def distances(points: Tensor, centres: Tensor) -> Tensor:
    return (points[:, None] - centres).square().sum(-1)


class Counted:
    """Counts how often a function runs, on fake tensors or for real."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, *args: object, **kwargs: object) -> Tensor:
        self.times += 1
        return torch.zeros(2)


def test_what_counts() -> None:
    """Differences and their squares are there at once. The sum of squares is returned, arguments are the caller's."""
    report = predict(distances, torch.zeros(100, 64), torch.zeros(10, 64))
    assert report.peak_bytes == 2 * 4 * 100 * 10 * 64
    assert report.returned_bytes == 4 * 100 * 10
    assert report.lines[0].place is not None
    assert report.lines[0].place.source == "(points[:, None] - centres).square()"


def test_what_backward_keeps_counts_and_gradients_do_not() -> None:
    weight = torch.ones(1000, requires_grad=True)
    assert predict(lambda x: x.exp().sum(), weight).peak_bytes == 4000  # kept
    assert predict(lambda x: x.exp(), weight).peak_bytes == 0  # kept, and returned
    report = predict(lambda x: x.mul(2).sum().backward(), weight)
    assert report.returned_bytes == 4000
    assert weight.grad is None


def test_a_new_optimizer_state_counts() -> None:
    model = nn.Linear(100, 10, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)

    def step(x: Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()

    assert predict(step, torch.zeros(1, 100)).peak_bytes >= 2 * 4 * 100 * 10
    assert not optimizer.state


def test_it_raises_before_anything_runs() -> None:
    ran = []

    @effops.budget("1 MiB")
    def recorded(points: Tensor, centres: Tensor) -> Tensor:
        result = distances(points, centres)
        ran.append(type(result))
        return result

    points, centres = torch.randn(1000, 64), torch.randn(100, 64)
    with pytest.raises(effops.MemoryBudgetExceeded) as caught:
        recorded(points, centres)
    assert Tensor not in ran
    text = str(caught.value)
    assert "recorded must take at most 1.0 MiB beyond its arguments and results; it would take 48.8 MiB" in text
    assert f"48.8 MiB  {__file__}:{distances.__code__.co_firstlineno + 1}  (points[:, None] - centres).square()" in text
    assert "effops.lint" in text
    torch.testing.assert_close(recorded(points[:10], centres[:5]), distances(points[:10], centres[:5]))


def test_what_operators_allocate_inside_counts_for_their_line() -> None:
    values = torch.zeros(64, 1000, dtype=torch.bfloat16)

    def softmax(x: Tensor) -> None:
        x.cumsum(1).square().sum()
        torch.mm(x, x.mT)

    report = predict(softmax, values)
    assert all(line.place is not None and line.place.file == __file__ for line in report.lines)


CALLS = {
    "the same": lambda x: ((x,), {}),
    "shape": lambda x: ((x[:1],), {}),
    "strides": lambda x: ((x.mT,), {}),
    "dtype": lambda x: ((x.double(),), {}),
    "requires_grad": lambda x: ((x.clone().requires_grad_(),), {}),
    "by name": lambda x: ((), {"x": x}),
    "value": lambda x: ((x, 3), {}),
    "another value": lambda x: ((x, 4), {}),
    "type of a value": lambda x: ((x, 4.0), {}),
    "in a container": lambda x: (([x, {"mask": x > 0}],), {}),
    "another container": lambda x: (([x, {"mask": x}],), {}),
}


def test_it_predicts_once_a_signature() -> None:
    counted = Counted()
    checked = effops.budget("1 GiB")(counted)
    x = torch.zeros(4, 4)
    for times, make in enumerate(CALLS.values(), 1):
        for _ in range(2):
            args, kwargs = make(x)
            checked(*args, **kwargs)
        assert counted.times == 3 * times  # two real runs and one on fake tensors


def test_what_pytorch_is_set_to_belongs_to_the_signature() -> None:
    counted = Counted()
    checked = effops.budget("1 GiB")(counted)
    model, x = nn.Sequential(nn.Linear(2, 2), nn.Dropout()), torch.zeros(2, 2)
    settings = [
        torch.no_grad(),
        torch.inference_mode(),
        torch.autocast("cpu", torch.bfloat16),
        torch.autocast("cpu", torch.float16),
    ]
    checked({"models": [model]}, x)
    for setting in settings:
        with setting:
            checked({"models": [model]}, x)
    model[1].eval()
    checked({"models": [model]}, x)
    model[0].weight.requires_grad_(False)
    checked({"models": [model]}, x)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        checked({"models": [model]}, x)
    finally:
        torch.set_num_threads(threads)
    assert counted.times == 2 * 8
    checked({"models": [model]}, x)
    assert counted.times == 2 * 8 + 1


def test_a_method_and_the_modules_of_its_object() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.models, self.times = [nn.Dropout()], 0

        @effops.budget("1 MiB")
        def step(self, x: Tensor) -> Tensor:
            self.times += 1
            return self.models[0](x)

    trainer, x = Trainer(), torch.zeros(2)
    trainer.step(x)
    trainer.step(x)
    assert trainer.times == 3
    trainer.models[0].eval()
    trainer.step(x)
    assert trainer.times == 5


def test_remembered_signatures_are_bounded() -> None:
    checked = effops.budget("1 GiB")(Counted())
    remembered = next(cell.cell_contents for cell in checked.__closure__ or () if isinstance(cell.cell_contents, dict))
    remembered.update({number: MemoryReport() for number in range(MOST_SIGNATURES)})
    checked(torch.zeros(2))
    assert len(remembered) == MOST_SIGNATURES


def test_a_block() -> None:
    model = nn.Linear(1000, 1000)
    limit = effops.budget("1 MiB")
    with pytest.raises(effops.MemoryBudgetExceeded, match=r"the block must take at most 1\.0 MiB") as caught, limit:
        relu(model(torch.empty(1000, 1000))).sum()
    place = caught.value.report.lines[0].place
    assert place is not None
    assert place.source == "relu(model(torch.empty(1000, 1000)))"
    assert place.line == caught.traceback[0].lineno + 2
    with effops.budget("1 MiB") as report:
        hidden = model(torch.empty(1000, 1000))  # the input is kept for backward, and is there at the end
    assert report.peak_bytes == 0
    assert report.returned_bytes == 2 * hidden.nbytes
    with pytest.raises(KeyError), effops.budget("1 MiB"):
        raise KeyError


def test_blocks_and_functions_inside_of_a_block() -> None:
    with effops.budget("1 GiB"):
        effops.budget("1 B")(distances)(torch.empty(10, 2), torch.empty(10, 2))  # unchecked
        with pytest.raises(RuntimeError, match="use one block alone"), effops.budget("1 MiB"):
            pass


@pytest.mark.parametrize("limit", [0, "0 MiB", None, "much", "-1", -1, float("nan"), True])
def test_limits_that_are_none(limit: object) -> None:
    with pytest.raises(ValueError, match=r"^budget: `limit`"):
        effops.budget(limit)  # type: ignore[arg-type]


def test_amounts() -> None:
    assert effops.budget("6 GB").limit_bytes == effops.budget(6e9).limit_bytes == 6 * 10**9


def test_mistakes() -> None:
    with pytest.raises(ValueError, match=r'got distances; write `@effops.budget\("64 MiB"\)`'):
        effops.budget(distances)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected a function to decorate; got 3"):
        effops.budget("1 MiB")(3)  # type: ignore[type-var]
    with pytest.raises(TypeError, match="must return its results; got a generator"):

        @effops.budget("1 MiB")
        def batches():  # type: ignore[no-untyped-def]
            yield torch.zeros(2)

    with pytest.raises(TypeError, match="must not be iterators; got a list_iterator"):
        effops.budget("1 MiB")(torch.stack)(iter([torch.zeros(2)]))
    with pytest.raises(CannotFollow, match=r"budget: a branch on a value .*test_limits_of_memory.py:\d+: "):
        predict(lambda x: x if x.exp().sum() > 1000 else -x, torch.zeros(10_000))


def test_two_threads() -> None:
    """One thread trains for real while another is inside of a block."""
    torch.manual_seed(0)
    expected = _trained(3)
    inside, has_trained = threading.Event(), threading.Event()
    points = torch.zeros(100, 64, requires_grad=True)

    def predict_meanwhile() -> None:
        with budget("1 GiB"):
            distances(points, torch.rand(10, 64)).sum().backward()
            inside.set()
            has_trained.wait(60)
            distances(points, torch.rand(10, 64)).sum().backward()

    torch.manual_seed(0)
    thread = threading.Thread(target=predict_meanwhile)
    thread.start()
    assert inside.wait(60)
    found = _trained(3)
    has_trained.set()
    thread.join()
    assert points.grad is None
    for one, other in zip([*found[:-1], torch.get_rng_state()], expected, strict=True):
        assert torch.equal(one, other)


def _trained(steps: int) -> list[Tensor]:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    rates = torch.tensor(scheduler.get_last_lr())
    return [*model.parameters(), *(one.grad for one in model.parameters()), *states, rates, torch.get_rng_state()]


TOY = """
import torch

def scores(points, centres):
    return {expression}

def test_memory(memory_budget):
    report = memory_budget("64 MiB", scores, torch.empty(4000, 64), torch.empty(1000, 64))
    assert report.peak_bytes < 2**26
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("expression", "passes"), [("points @ centres.mT", True), ("(points[:, None] * centres).sum(-1)", False)]
)
def test_the_fixture_of_a_toy_project(tmp_path: Path, expression: str, passes: bool) -> None:
    file = tmp_path / "test_toy.py"
    file.write_text(TOY.format(expression=expression))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "effops_pytest", str(file)]
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # an installed effops would register it once more
    found = subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True)
    assert found.returncode == (0 if passes else 1), found.stdout
    if not passes:
        assert f"976.6 MiB  {file}:5  points[:, None] * centres" in found.stdout


@pytest.mark.parametrize(
    "arguments", [(torch.relu, "64 MiB"), ("64 MiB", torch.ones(3)), ("64 MiB",)], ids=["swapped", "called", "block"]
)
def test_arguments_of_the_fixture(arguments: tuple[Any, Any]) -> None:
    """The remedy was a decorator's, or none."""
    with pytest.raises(TypeError, match=r'write memory_budget\("64 MiB", fn, \*args\), without calling the function'):
        effops_pytest.check(*arguments)


def test_the_plugin_imports_torch_on_use_only() -> None:
    code = "import sys, effops_pytest; assert 'torch' not in sys.modules and 'effops' not in sys.modules"
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, cwd=ROOT)


@pytest.mark.parametrize("channels", [16, 20])
@pytest.mark.parametrize("groups", [True, False])
def test_what_an_operator_releases_before_its_result_is_there(
    channels: int, groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """oneDNN's copy of the input is gone when a convolution makes its result: predictions were half as high."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    layer = torch.nn.Conv2d(channels, channels, 3, padding=1, groups=channels if groups else 1)
    images = torch.randn(3, channels, 40, 40)
    program = importlib.import_module("corpus.program").Program("layer", "", layer, tuple, {}, {})
    with torch.no_grad():
        measured = importlib.import_module("corpus.budgets").measured_bytes(program, (images,))
        report = predict(layer, images)
    assert abs(report.peak_bytes - measured) <= 5e-3 * measured
    assert [line.place and line.place.file for line in report.lines] == [__file__]


# A broadcast, one that is trained, kernels of all pairs, a step with an optimizer, a recurrent and a convolving layer,
# products some of which are zero, and images of three channels.
PROGRAMS = {
    "squared_distances",
    "gaussian_sum",
    "laplacian_sum",
    "step_of_adam",
    "lstm",
    "depthwise",
    "matched_overlap",
    "enlarged",
}
# What no prediction follows, what takes minutes.
LEFT_OUT = {"mean_of_neighbours": "its values decide", "kernel_sums": "it has thousands of chunks"}
OF_CORPUS = [
    pytest.param(program, id=f"{half}-{program.name}", marks=() if program.name in PROGRAMS else pytest.mark.exhaustive)
    for half, program in ALL
    if program.name not in LEFT_OUT
]


@pytest.mark.slow
@pytest.mark.parametrize("program", OF_CORPUS)
def test_bytes_of_the_corpus(program: Any) -> None:
    found = budgets.compared(program, program.small)
    assert abs(found.predicted_bytes - found.measured_bytes) <= max(64, 5e-3 * found.measured_bytes)
    assert program.name not in PROGRAMS or found.report.peak_bytes > 2**20
