"""The command that compares CPU time with its budget. How much that is, only the command says."""

import pytest
import torch

from . import cpu_time
from .cpu_time import Used

SPIN = "import time\nwhile time.process_time() < 0.5: pass"
START = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {SPIN!r}]).returncode + 3)"


def test_children_of_the_command_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers of pytest are such: the command itself waits for them."""
    monkeypatch.setattr(cpu_time, "unit_seconds", lambda: 0.25)
    used = cpu_time.measure(["-c", START])
    assert used.seconds >= 0.5
    assert used.units == used.seconds / 0.25
    assert used.code == 3


def test_commands_before_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_time, "unit_seconds", lambda: 1.0)
    so_far = iter([100.0, 107.0])
    monkeypatch.setattr(cpu_time, "seconds_of_children", lambda: next(so_far))
    assert cpu_time.measure(["-c", ""]).units == 7


def test_a_unit_runs_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others' time would not be in it, and the process keeps its threads afterwards."""
    threads: list[int] = []

    def clock() -> float:
        threads.append(torch.get_num_threads())
        return 2.0 * len(threads)

    monkeypatch.setattr(cpu_time.time, "thread_time", clock)
    monkeypatch.setattr(cpu_time, "STEPS", 10)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert cpu_time.unit_seconds() == 2
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert threads == [1, 1]


@pytest.mark.parametrize("what", cpu_time.COMMANDS)
@pytest.mark.parametrize(("share", "code", "expected"), [(0.99, 0, 0), (1.01, 0, 1), (0.5, 2, 2)])
def test_exit_code(
    what: str,
    share: float,
    code: int,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    allowed = cpu_time.budgets()[what][-1]
    monkeypatch.setattr(cpu_time, "measure", lambda command: Used(share * allowed / 2, 0.5, code))
    assert cpu_time.main([what]) == expected
    assert f"{what}: {share * allowed:.0f} units of CPU time, {allowed:.0f} allowed" in capsys.readouterr().out


def wrong_budgets(share: float, before: float, first: float, *later: float) -> list[float]:
    """The budgets that are above what their rule allows: a share of the first figure, then a tenth more each."""
    so_far = [first, *later]
    allowed = [share * before, *(1.1 * budget for budget in so_far)]
    return [budget for budget, most in zip(so_far, allowed) if budget > most]


@pytest.mark.parametrize(("what", "share"), [("tests", 0.6), ("benchmark", 0.5)])
def test_later_work_adds_a_tenth(what: str, share: float) -> None:
    assert wrong_budgets(share, *cpu_time.budgets()[what]) == []


@pytest.mark.parametrize(
    ("budgets", "wrong"),
    [
        ((100, 60), []),
        ((100, 61), [61]),
        ((100, 60, 66, 72.6), []),
        ((100, 60, 67, 73), [67]),
        ((100, 60, 66, 73), [73]),
        ((100, 60, 30, 60), [60]),
    ],
)
def test_more_than_a_tenth_is_seen(budgets: tuple[float, ...], wrong: list[float]) -> None:
    """The files have no later budget yet, so the rule held for whatever it said."""
    assert wrong_budgets(0.6, *budgets) == wrong
