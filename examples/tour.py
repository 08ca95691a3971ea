"""A tour in cells: a step that takes too much, its line, an op or tiles instead, a budget in a test, the largest batch.

The cells begin with `# %%`, as editors and Jupyter's tools take them. Run all of them by `python examples/tour.py`.
"""

# %% A step: a mixture of 1,024 normal densities in 64 dimensions is fitted to points.
import math

import torch
from torch import Tensor, nn

import effops
from effops.measure import Pass, memory
from effops.memory import Workload, max_batch_size

COMPONENTS, FEATURES, POINTS = 1024, 64, 4096


class Mixture(nn.Module):
    """`forward(points)` gives the mean negative log likelihood of densities of width 1."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(COMPONENTS, FEATURES))
        self.logits = nn.Parameter(torch.zeros(COMPONENTS))

    def forward(self, points: Tensor) -> Tensor:
        distances = (points[:, None] - self.centres).square().sum(-1)
        log_prob = -distances / 2 - FEATURES / 2 * math.log(2 * math.pi)
        return -torch.logsumexp(self.logits.log_softmax(-1) + log_prob, dim=-1).mean()


torch.manual_seed(0)
points, model = torch.randn(POINTS, FEATURES), Mixture()

# %% What would it take? Nothing is computed: lint follows forward and backward pass on tensors without memory.
report = effops.lint(model, points)
print(report)
print(f"the step as it is: {report.peak_bytes:,} bytes, predicted\n")

# %% A budget refuses it before anything runs. The error names the lines.
try:
    effops.budget("64 MiB").check(model, points)
except effops.MemoryBudgetExceeded as error:
    print(f"{error}\n")


# %% A named op instead: the same mixture, of which it never holds all pairs.
class LeanMixture(Mixture):
    def forward(self, points: Tensor) -> Tensor:
        return -effops.normal_mixture_log_prob(self.logits.log_softmax(-1), self.centres, 1.0, points[:, None]).mean()


lean = LeanMixture()
lean.load_state_dict(model.state_dict())
print(f"losses of 100 points: {model(points[:100]):.4f} as it is, {lean(points[:100]):.4f} by the op")


def step(loss: nn.Module, points: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss(points), tuple(loss.parameters()))


taken = memory(Pass(lambda points: step(lean, points), (points,))).temporary_bytes
print(f"the step by the op: {taken:,} bytes beside operands and gradients, measured\n")


# %% Where there is no op, tiles: a heavy-tailed kernel, in the code that one writes, within 16 MiB.
@effops.tiled(budget="16 MiB")
def potential(points: Tensor, centres: Tensor) -> Tensor:
    """How much of each centre's weight reaches the points."""
    return (1 / (1 + (points[:, None] - centres).square().sum(-1))).sum(0).log().mean()


centres = lean.centres.detach().requires_grad_()
print(effops.explain(potential, points, centres))
kernel = Pass(lambda points, centres: torch.autograd.grad(potential(points, centres), centres), (points, centres))
print(f"the kernel in tiles: {memory(kernel).temporary_bytes:,} bytes beside operands and gradients, measured\n")


# %% A budget in a test, so that it stays so: pytest gives the fixture `memory_budget`.
def test_the_step_is_lean(memory_budget) -> None:
    memory_budget("8 MiB", step, LeanMixture(), torch.empty(POINTS, FEATURES))


report = effops.budget("8 MiB").check(step, lean, points)  # what the fixture does
print(f"the test's step: {report.peak_bytes:,} bytes of 8 MiB, predicted\n")

# %% The largest batch that trains within 256 MiB, by either form: predicted.
for module in (Mixture, LeanMixture):
    workload = Workload(
        model=module,
        batch=lambda size: torch.randn(size, FEATURES),
        loss=lambda model, points: model(points),
        optimizer=torch.optim.Adam,
    )
    found = max_batch_size(workload, "256 MiB")
    print(f"{module.__name__}: {found.batch_size:,} points take {found.predicted_peak_bytes:,} bytes, predicted")
