"""A compiled graph that PyTorch kept on disk is not used by another version of the code."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import effops

# One gradient is compiled twice, and shown with how often a graph was taken from the disk and how often none
# was found. The first graph is forgotten, so that the second compilation asks the disk as a new process does.
PROGRAM = """
import torch, effops
from torch._dynamo.utils import counters

loc, x = (torch.nn.functional.normalize(torch.arange(1.0, 13).view(4, 3).sin(), dim=-1) for _ in range(2))
scale = torch.ones(4, requires_grad=True)
for _ in range(2):
    torch._dynamo.reset()
    counters.clear()
    scale.grad = None
    compiled = torch.compile(lambda *args: effops.power_spherical_log_prob(*args, variant="chunked"))
    compiled(loc, scale, x).sum().backward()
    seen = counters["aot_autograd"]
    print(scale.grad.sum().item(), seen["autograd_cache_hit"], seen["autograd_cache_miss"])
"""


@pytest.mark.slow
def test_a_compiled_graph_does_not_outlive_the_rules_in_it(tmp_path: Path) -> None:
    """In two processes with one cache, each of which compiles twice: the code, and one whose rule doubles gradients."""
    package = tmp_path / "effops"
    shutil.copytree(Path(effops.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__", "kernels"))
    environment = os.environ | {
        "PYTHONPATH": str(tmp_path),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
    }

    def run() -> list[tuple[float, str]]:
        command = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        shown = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
        return [(float(gradient), hits) for gradient, hits in shown]

    (gradient, hits), again = run()
    assert hits == "0 1"
    assert again == (gradient, "1 0")
    rule = package / "dispatch" / "custom_op.py"
    source = rule.read_text()
    right = "        gradients = self.pull_back(ctx, dout, self.flat(ctx.needs_input_grad))\n"
    assert source.count(right) == 1
    doubled = f"{right}        gradients = [None if one is None else 2 * one for one in gradients]\n"
    rule.write_text(source.replace(right, doubled))
    assert run() == [(2 * gradient, "0 1"), (2 * gradient, "1 0")]
