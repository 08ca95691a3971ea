"""What Python reads of tensors while a program is followed: values that are known are right, and others raise."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import effops
from effops import memory
from effops.programs.capture.assumed_values import CannotFollow
from effops.programs.scripts import run_script

VALUES = [100.0, 2.0, 3.0, 4.0]
READS: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda t: t.detach().numpy().tolist(),
    "force": lambda t: t.numpy(force=True).tolist(),
    "asarray": lambda t: numpy.asarray(t.detach(), dtype="float64").tolist(),
    "array": lambda t: numpy.array([t.detach().numpy(), t]).tolist()[1],
    "tolist": lambda t: t.tolist(),
    "dlpack": lambda t: numpy.from_dlpack(t.detach()).tolist(),
    "capsule": lambda t: torch.from_dlpack(torch.utils.dlpack.to_dlpack(t.detach())).tolist(),
    "int": lambda t: [float(int(one)) for one in t],
    "int of item": lambda t: [float(int(one.item())) for one in t],
    "int of float": lambda t: [float(int(float(one))) for one in t],
    "round": lambda t: [float(round(one.item())) for one in t],
    "floor": lambda t: [float(math.floor(one.item())) for one in t],
    "floor of a tensor": lambda t: [float(math.floor(one)) for one in t],
    "ceil": lambda t: [float(math.ceil(one.item())) for one in t],
    "trunc": lambda t: [float(math.trunc(one.item())) for one in t],
    "ratio": lambda t: [float(one.item().as_integer_ratio()[0]) for one in t],
    "range": lambda t: [float(len(range(int(one)))) for one in t],
    "index": lambda t: [float(len(torch.zeros(200)[: one.long()])) for one in t],
    "arange": lambda t: [float(len(torch.arange(one))) for one in t],
    "a tensor of numbers": lambda t: torch.tensor([one.item() for one in t]).long().tolist(),
}


def grown(t: Tensor) -> Tensor:
    return t.mul_(torch.rand(4))


SOURCES: dict[str, Callable[[Tensor], Tensor]] = {
    "an argument": lambda t: t,
    "computed": lambda t: t * 1,
    "a changed argument": grown,
    "random": lambda t: t * torch.rand(4),
}
KNOWN = "an argument", "computed"


@pytest.mark.parametrize("name", READS)
def test_values_are_right_or_cannot_be_followed(name: str) -> None:
    """An array was memory that nothing had written to; NaN and what an argument was before raised nothing, or else."""
    read = READS[name]
    for source, made in SOURCES.items():
        found: list[Any] = []

        def program(t: Tensor, made: Any = made, found: Any = found) -> None:
            found.append(read(made(t)))

        argument = torch.tensor(VALUES)
        if source in KNOWN:
            effops.lint(program, argument)
            assert found == [VALUES]
        else:
            with pytest.raises(CannotFollow, match=rf"lint: .* at {__file__}:\d+: .*; "):
                effops.lint(program, argument)
        assert argument.tolist() == VALUES
        assert read(argument) == VALUES  # afterwards all is PyTorch's own


def lint_function(program: Callable[[Tensor], Any], t: Tensor) -> None:
    effops.lint(program, t)


def lint_block(program: Callable[[Tensor], Any], t: Tensor) -> None:
    with effops.lint():
        program(t)


def budget_check(program: Callable[[Tensor], Any], t: Tensor) -> None:
    effops.budget("1 GiB").check(program, t)


def budget_decorator(program: Callable[[Tensor], Any], t: Tensor) -> None:
    effops.budget("1 GiB")(program)(t)


def budget_block(program: Callable[[Tensor], Any], t: Tensor) -> None:
    with effops.budget("1 GiB"):
        program(t)


CONTEXTS = lint_function, lint_block, budget_check, budget_decorator, budget_block
UNKNOWN: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda t: t.numpy(),
    "int": lambda t: t[: int(t.sum())],
    "round": lambda t: round(t.mean().item()),
    "address": lambda t: t.data_ptr(),
    "address of storage": lambda t: t.untyped_storage().data_ptr(),
    "capsule": lambda t: torch._C._to_dlpack(t),
    "byte": lambda t: t.untyped_storage()[0],
    "typed": lambda t: t.storage().tolist(),
    "pickle": lambda t: pickle.dumps(t),
    "save": lambda t: torch.save(t, io.BytesIO()),
}


@pytest.mark.parametrize("context", CONTEXTS)
def test_everywhere(context: Callable[..., None]) -> None:
    for name, read in UNKNOWN.items():
        with pytest.raises(CannotFollow, match=rf"(lint|budget): .* at {__file__}:\d+: .*; ") as error:
            context(lambda t, read=read: read(t * torch.rand(4)), torch.ones(4))
        assert error.value.args, name
    sizes: list[int] = []
    context(lambda t: sizes.append(int(t.numpy().max())), torch.full((4,), 100.0))
    assert set(sizes) == {100}


def test_the_fixture(memory_budget: Any) -> None:
    report = memory_budget("1 MiB", lambda t: torch.zeros(int(t.numpy().max()), 3), torch.full((4,), 100.0))
    assert report.returned_bytes == 1200
    with pytest.raises(CannotFollow, match=r"budget: an integer .*int\(t\.sum\(\)\)"):
        memory_budget("1 MiB", lambda t: torch.zeros(int(t.sum()), 3), torch.ones(5000))


def test_a_script(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    made = "import numpy, torch\nt = torch.rand(4)\n"
    for line in ("numpy.from_dlpack(t)", "t.data_ptr()", "round(t.sum().item())", "t.storage().tolist()"):
        path.write_text(made + line)
        with pytest.raises(CannotFollow, match=rf"lint: .* at {path}:3: "):
            run_script(str(path), name="lint")
    path.write_text(f"{made}k = int(torch.full((4,), 100.0).numpy().max())\nassert k == 100")
    run_script(str(path))


def test_arguments_stay_as_they_are() -> None:
    """What is written to an array of an argument would change the argument, or be missing in it."""

    def writes(t: Tensor) -> None:
        t.numpy()[0] = 5

    argument = torch.tensor(VALUES)
    with pytest.raises(CannotFollow, match=r"lint: an array of an argument .* t\.numpy\(\)\[0\]; .*\.copy\(\)"):
        effops.lint(writes, argument)
    with pytest.raises(ValueError, match="read-only"):  # the program's own
        effops.lint(lambda: numpy.broadcast_to(numpy.ones(1), 3).__setitem__(0, 1))

    def shares(t: Tensor) -> Any:
        numpy.from_dlpack(t).tolist()
        return t.tolist()  # who has the memory might have written to it

    with pytest.raises(CannotFollow, match=r"\.tolist\(\) of a tensor"):
        effops.lint(shares, argument)
    with pytest.raises(RuntimeError, match=r"Can't call numpy\(\) on Tensor that requires grad"):
        effops.lint(lambda t: t.numpy(), argument.clone().requires_grad_())
    assert argument.tolist() == VALUES
    array = numpy.zeros(3)
    effops.lint(lambda: array.__setitem__(0, torch.zeros(3).numpy()[1] + 7))
    assert array[0] == 7


def test_copies_of_arguments() -> None:
    def copies(t: Tensor) -> Tensor:
        copied = copy.deepcopy(t)
        assert copied.tolist() == VALUES
        return copied.mul_(2)

    assert effops.budget("1 KiB").check(copies, torch.tensor(VALUES)).returned_bytes == 16


def test_an_integer_that_the_program_catches() -> None:
    """NaN raised a ValueError, which a program that expects one took for its own."""

    def parsed(t: Tensor) -> int:
        try:
            return int(t.sum().item())
        except ValueError:
            return 0

    with pytest.raises(CannotFollow, match=r"int\(t\.sum\(\)\.item\(\)\)"):
        effops.lint(parsed, torch.randn(5000))
    with pytest.raises(ValueError, match="cannot convert float NaN to integer"):  # its own, of no tensor
        effops.lint(lambda: int(float("nan")))


CHECKED: dict[str, Callable[[int], Any]] = {
    "index": lambda number: torch.zeros(3)[number],
    "slice": lambda number: torch.zeros(3)[:number],
    "shape": lambda number: torch.zeros((2, number)),
    "view": lambda number: torch.zeros(4).view(2, number),
    "steps": lambda number: torch.arange(0, 5, number),
    "range": lambda number: torch.linspace(0, 1, number),
    "integers": lambda number: torch.as_tensor(number, dtype=torch.long),
    "deviation": lambda number: torch.normal(0.0, number, (3,)),
    "share": lambda number: torch.ones(3).quantile(number),
    "probability": lambda number: torch.nn.functional.dropout(torch.ones(3), number),
}


@pytest.mark.parametrize("use", CHECKED.values(), ids=CHECKED)
def test_numbers_that_operators_check(use: Callable[[int], Any]) -> None:
    """PyTorch's own errors told of NaN, or of a wrong type, which the program had not given."""

    def program(t: Tensor) -> Any:
        return use(t.argmax().item())

    with pytest.raises(CannotFollow, match=rf"lint: .*(number|integer).* at {__file__}:\d+: .*"):
        effops.lint(program, torch.randn(5000))


def test_the_program_checks_for_nan_itself() -> None:
    def program(t: Tensor) -> Tensor:
        if not t.sum().item() > 0:
            raise ValueError("the sum is nan")
        return t

    with pytest.raises(ValueError, match="the sum is nan"):
        effops.lint(program, torch.ones(5000))


def test_what_follows_from_numbers_that_are_read() -> None:
    """Values that NaN was part of counted as known: a comparison with it was false, and a branch was taken."""

    def compares(t: Tensor) -> Tensor:
        return t if bool((torch.arange(3) > t.sum().item())[0]) else -t

    def converts(t: Tensor) -> Tensor:
        return torch.zeros(4)[: (torch.ones(1) * t.sum().item()).long()[0]]

    for program in (compares, converts):
        with pytest.raises(CannotFollow, match=r"lint: (a branch on a value|an integer)"):
            effops.lint(program, torch.randn(5000))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("context", CONTEXTS)
def test_a_device_that_is_not_there(context: Callable[..., None]) -> None:
    programs: tuple[Callable[[Tensor], Any], ...] = (
        lambda t: torch.zeros(3, device="cuda"),
        lambda t: t.to("cuda") * 2,
        lambda t: t.cuda(),
        lambda t: torch.nn.Linear(4, 4).to("cuda")(t),
        lambda t: torch.rand_like(t, device="cuda"),
        lambda t: t.to(0),
        lambda t: torch.cuda.synchronize(),
        lambda t: torch.cuda.set_device(0),
        lambda t: torch.Generator("cuda"),
        lambda t: t.pin_memory(),
        lambda t: torch.zeros(3, pin_memory=True),
    )
    told = rf'(lint|budget): a function must .*; got "cuda", .* at {__file__}:\d+: .*; .*`effops lint --device cuda'
    for program in programs:
        with pytest.raises(NotImplementedError, match=told):
            context(program, torch.ones(4))


def test_training_memory() -> None:
    """An array of a real tensor that a model holds was memory that nothing had written to."""
    scales = torch.full((4,), 3.0)

    class Scaled(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * float(scales.numpy().max())

    data = numpy.ones((8, 4), "float32")

    def workload(model: Callable[[], torch.nn.Module]) -> memory.Workload:
        return memory.Workload(
            model=model,
            batch=lambda size: torch.from_numpy(data[:size]),
            loss=lambda model, batch: model(batch).sum(),
            optimizer=torch.optim.SGD,
        )

    assert memory.anatomy(workload(lambda: torch.nn.Linear(4, 4)), 4).peak_bytes
    with pytest.raises(NotImplementedError, match=r"anatomy: module `model` .*; got Tensor\.numpy\(\)"):
        memory.anatomy(workload(lambda: Scaled(4, 4)), 4)
