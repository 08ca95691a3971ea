"""What is real comes back from a run on fake tensors as it was."""

from __future__ import annotations

import _thread
import copy
import io
import pickle
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch._inductor.compile_worker.timer import Timer
from torch.amp import GradScaler

import effops
from effops.programs.capture.ended import EscapedTensor


class Training:
    """A model with buffers, and all that trains it; one step has been done for real."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10)
        self.scaler = GradScaler("cpu", init_scale=2.0)
        self.x = torch.randn(8, 4)
        self.step()

    def loss(self) -> Tensor:
        loss: Tensor = self.model(self.x).square().mean()
        return loss

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()

    def tensors(self) -> list[Tensor]:
        parameters = list(self.model.parameters())
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        gradients = [one.grad for one in parameters if one.grad is not None]
        return [*parameters, *self.model.buffers(), *gradients, *states, self.x]

    def plain(self) -> list[Any]:
        """All else."""
        states = [self.scheduler.state_dict(), self.scaler.state_dict(), self.optimizer.state_dict()["param_groups"]]
        return copy.deepcopy([*states, *(module.training for module in self.model.modules())])


def exchange_data(training: Training) -> None:
    for one in training.model.parameters():
        one.data = one.data * 2
    training.model[1].running_mean.data = torch.zeros(4)


def exchange_gradients(training: Training) -> None:
    for one in training.model.parameters():
        one.grad = torch.zeros_like(one)


def change_in_place(training: Training) -> None:
    with torch.no_grad():
        for one in training.tensors():
            one.mul_(0)


def keep_more(training: Training) -> None:
    training.model[0].register_buffer("more", torch.zeros(2))
    training.model[0].last = training.model[0](training.x)
    training.model[1].running_mean = torch.zeros(4)


STEPS: dict[str, Callable[[Training], Any]] = {
    "a step": Training.step,
    "backward": lambda training: training.loss().backward(),
    "zero_grad alone": lambda training: training.optimizer.zero_grad(),
    "gradients to zero": lambda training: training.optimizer.zero_grad(set_to_none=False),
    "other data": exchange_data,
    "other gradients": exchange_gradients,
    "half": lambda training: training.model.half(),
    "in place": change_in_place,
    "the buffers": lambda training: training.model(training.x),
    "kept by modules": keep_more,
    "optimizer": lambda training: training.optimizer.step(),
    "scheduler": lambda training: training.scheduler.step(),
    "scaler": lambda training: training.scaler.update(5.0),
    "state of the optimizer": lambda training: training.optimizer.state.clear(),
    "parameters of the optimizer": lambda training: training.optimizer.add_param_group(
        {"params": [nn.Parameter(torch.zeros(2))]}
    ),
}


@pytest.mark.parametrize("step", STEPS)
def test_training_is_untouched(step: str) -> None:
    training = Training()
    older = training.loss()  # its graph asks for the versions of what it has saved
    tensors, plain = training.tensors(), training.plain()
    values, versions = [one.clone() for one in tensors], [one._version for one in tensors]
    with effops.budget("1 GiB"):
        STEPS[step](training)
    found = training.tensors()
    assert list(map(id, found)) == list(map(id, tensors))
    assert [one._version for one in found] == versions
    for one, value in zip(found, values, strict=True):
        assert type(one) in (Tensor, nn.Parameter)
        assert torch.equal(one, value)
    assert training.plain() == plain
    assert not hasattr(training.model[0], "last")
    assert not hasattr(training.model[0], "more")
    older.backward()
    training.step()
    assert all(bool(one.isfinite().all()) for one in training.tensors())


def test_the_first_step_of_an_optimizer_leaves_no_state() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = GradScaler("cpu")
    with effops.budget("1 GiB") as report:
        scaler.scale(model(torch.zeros(3, 2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert len(optimizer.state) == 2
    assert report.assumed
    assert not optimizer.state
    assert [one.grad for one in model.parameters()] == [None, None]
    assert scaler._scale is None


def random_states() -> tuple[Any, ...]:
    return random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def draw() -> None:
    torch.manual_seed(1)
    torch.rand(3), nn.Linear(2, 2)
    random.random()
    numpy.random.random()


def test_a_view_that_pytorch_forbids_to_use_does_no_harm() -> None:
    """Whoever keeps one alive anywhere, as an exception's traceback does, could lint nothing."""
    base = torch.ones(3, requires_grad=True) * 1
    with torch.no_grad():
        view = base[:]
    base.mul_(2)
    with pytest.raises(RuntimeError, match="no_grad"):
        _ = view.is_leaf
    assert effops.lint(torch.neg, torch.ones(3)) is not None


def test_random_states_are_untouched() -> None:
    expected = random_states()
    with effops.budget("1 GiB"):
        draw()
    assert expected == random_states()


def start_timer() -> Callable[[], Any]:
    timer = Timer(60, lambda: None)
    timer.sleep_time = 0.001
    timer.record_call()
    return timer.quit


def start_monitor() -> Callable[[], Any]:
    tqdm = pytest.importorskip("tqdm")  # transformers brings it
    stop: Callable[[], Any] = tqdm._monitor.TMonitor(tqdm.tqdm, 0.001).exit
    return stop


@pytest.mark.parametrize("start", [start_monitor, start_timer])
def test_a_thread_that_runs_nothing_of_the_program_draws_nothing(start: Callable[[], Callable[[], Any]]) -> None:
    """After a compilation in the process tqdm's works every 10 s: random states were left changed then."""
    stop = start()
    try:
        expected = random_states()
        with effops.budget("1 GiB"):
            draw()
            time.sleep(0.05)
        assert expected == random_states()
    finally:
        stop()


def test_a_thread_that_has_ended_works_no_more() -> None:
    """Python lists some for ever: those that were started by other means than its own, and asked for their names."""
    listed: list[threading.Thread] = []
    _thread.start_new_thread(lambda: listed.append(threading.current_thread()), ())
    while not listed or Path(f"/proc/self/task/{listed[0].native_id}").exists():
        time.sleep(0.001)
    try:
        expected = random_states()
        with effops.budget("1 GiB"):
            draw()
        assert expected == random_states()
    finally:
        threading._active.pop(listed[0].ident, None)  # type: ignore[attr-defined]


def test_random_states_are_left_where_another_thread_works() -> None:
    """It may draw, and must not draw the same numbers twice."""
    has_begun, has_worked, ends = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        has_begun.wait(60)
        sum(range(100_000))
        has_worked.set()
        ends.wait(60)

    thread = threading.Thread(target=work)
    thread.start()
    expected = random_states()
    try:
        with effops.budget("1 GiB"):
            draw()
            has_begun.set()
            assert has_worked.wait(60)
        assert random_states()[:2] != expected[:2]
    finally:
        ends.set()
        thread.join()


def test_an_iterator_stays_advanced() -> None:
    batches = iter([torch.zeros(1), torch.zeros(2)])
    with effops.budget("1 GiB"):
        next(batches)
    assert len(next(batches)) == 2


def test_a_tensor_that_escapes_raises() -> None:
    with effops.budget("1 GiB"):
        made = torch.ones(3, 2) * 2
    for use in (
        lambda: made + 1,
        lambda: torch.ones(3, 2) + made,
        lambda: made.sum().item(),
        lambda: nn.Linear(2, 1)(made),
        lambda: made.numpy(),
        lambda: numpy.asarray(made),
        lambda: made.tolist(),
        lambda: f"{made:.3f}",
        lambda: copy.deepcopy(made),
        lambda: copy.copy(made),
        lambda: pickle.dumps(made),
        lambda: torch.save(made, io.BytesIO()),
        lambda: torch.from_dlpack(made),
    ):
        with pytest.raises(EscapedTensor, match=r"^budget: a tensor that was made on fake tensors .* \(3, 2\)"):
            use()
