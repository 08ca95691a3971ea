"""What a program holds after a fix: the results and what is saved, in all turns of a loop."""

import pytest
import torch
from torch import Tensor, nn

import effops

features, words = torch.randn(256, 16), torch.randn(20_000, 16, requires_grad=True)
labels = torch.randint(0, 20_000, (256,))
LOGITS = 4 * 256 * 20_000  # bytes of those of all turns


def logits_in_parts(features: Tensor, words: Tensor) -> list[Tensor]:
    found = []
    for part in features.split(8):
        logits = torch.tanh(part[:, None] - words).square().sum(-1)
        found.append(logits)
    return found


def loss_of_list(features: Tensor, words: Tensor, labels: Tensor) -> Tensor:
    parts = logits_in_parts(features, words)
    return sum(nn.functional.cross_entropy(one, own) for one, own in zip(parts, labels.split(8)))


def loss_of_whole(features: Tensor, words: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(torch.cat(logits_in_parts(features, words)), labels)


def loss_in_turns(features: Tensor, words: Tensor, labels: Tensor) -> Tensor:
    total = torch.zeros(())
    for part in features.split(8):
        logits = torch.tanh(part[:, None] - words).square().sum(-1)
        total = total + logits.amax(-1).sum()
    return total


def product_in_parts(features: Tensor, words: Tensor) -> list[Tensor]:
    found = []
    for part in features.split(64):
        found.append(torch.tanh(part @ words.T))
    return found


def loss_of_products(features: Tensor, words: Tensor, labels: Tensor) -> Tensor:
    parts = product_in_parts(features, words)
    return sum(nn.functional.cross_entropy(one, own) for one, own in zip(parts, labels.split(64)))


def finding(loss: object, *given: Tensor, **options: object) -> object:
    found = effops.lint(loss, *given, **options).findings
    return max(found, key=lambda one: one.now_bytes)


@pytest.mark.parametrize("loss", [loss_of_list, loss_of_whole])
def test_results_that_are_held_stay_after_a_fix_of_each_turn(loss: object) -> None:
    """The fix of one turn was told as 0.6 MiB, where the logits of all turns stay: for a caller, or up to a `cat`."""
    found = finding(loss, features, words, labels)
    assert found.fix is not None
    assert found.fix.how == "loop"
    assert "checkpoint(part_of, words, part" in found.fix.code
    assert found.after_bytes == found.fix.after_bytes
    assert LOGITS <= found.after_bytes <= 1.1 * LOGITS
    assert found.now_bytes == 16 * LOGITS


def test_results_that_are_let_go_do_not_count() -> None:
    found = finding(loss_in_turns, features, words, labels)
    assert found.fix is not None
    assert found.now_bytes == 16 * LOGITS
    assert found.after_bytes == found.now_bytes / 32


def test_a_part_that_runs_a_loop_holds_all_of_its_turns() -> None:
    """The parts of the fix have several turns of the user's loop, of which backward holds all of a part at once."""
    wide = torch.randn(4096, 16)
    found = finding(loss_of_products, wide, words, torch.randint(0, 20_000, (4096,)))
    assert found.fix is not None
    part = int(found.fix.code.rpartition(".split(")[2].partition(")")[0])
    assert part > 64
    assert found.after_bytes == 4 * part * 20_000


def test_results_of_all_turns_are_told_where_one_tensor_counts() -> None:
    """Without gradients the turns keep nothing but their results."""
    found = finding(logits_in_parts, features, words.detach(), least="1 MiB")
    assert found.now_bytes == 16 * LOGITS // 32
    assert found.fix is not None
    assert f"the results of all turns, {LOGITS / 2**20:.1f} MiB, stay" in found.fix.why


def test_results_that_are_left_without_a_fix() -> None:
    found = finding(loss_of_list, features, words, labels, fixes=False)
    assert found.fix is None
    assert LOGITS <= found.after_bytes <= 1.001 * LOGITS
