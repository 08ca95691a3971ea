"""Take a private interface of PyTorch away, import effops, and call every public entry point.

`python -m tests.pytorch.taken_away [MODULE.NAME ..]` prints a line of JSON for each interface, by default for all: what
came of each entry point. An empty text is a success. Each interface is tried in a process of its own, a fork of one
that has imported PyTorch.
"""

import ast
import contextlib
import importlib.abc
import importlib.util
import io
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "effops" / "pytorch"
PUBLIC = {"Distribution", "Module", "Node", "Tensor", "UntypedStorage", "cuda", "forward_ad", "ops", "profiler"}
EAGER = ["calls"]
PREDICTED = [*EAGER, "prediction", "dynamo"]
FOLLOWED = [*PREDICTED, "capture"]


def interfaces():
    """MODULE.NAME for each private interface: the module of effops.pytorch, and the name that it has there."""
    from effops.pytorch.missing import interfaces_of, named_by

    for path in sorted(FOLDER.glob("*.py")):
        if "take_apart(__name__" in path.read_text():
            for statement in interfaces_of(path.read_text()):
                name, _ = named_by(statement)
                if name not in PUBLIC:
                    yield f"{path.stem}.{name}"


class TakenAway(ast.NodeTransformer):
    """The source of a module, in which one interface has a name that PyTorch lacks."""

    def __init__(self, name):
        self.name, self.count = name, 0

    def visit_ImportFrom(self, node):
        for alias in node.names:
            if (alias.asname or alias.name) == self.name:
                alias.name, alias.asname = f"{alias.name}_taken_away", self.name
                self.count += 1
        return node

    def visit_Assign(self, node):
        if ast.unparse(node.targets[0]) == self.name:
            value = node.value
            if isinstance(value, ast.Call):
                value.args[1].value += "_taken_away"
            else:
                value.attr += "_taken_away"
            self.count += 1
        return node


class Lacking(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Loads one module of effops.pytorch as it is where PyTorch lacks an interface."""

    def __init__(self, interface):
        self.module, self.name = interface.split(".")

    def find_spec(self, name, path=None, target=None):
        if name == f"effops.pytorch.{self.module}":
            return importlib.util.spec_from_loader(name, self, origin=str(FOLDER / f"{self.module}.py"))
        return None

    def get_source(self, name):
        transformed = TakenAway(self.name)
        tree = transformed.visit(ast.parse((FOLDER / f"{self.module}.py").read_text()))
        assert transformed.count == 1
        return ast.unparse(tree)


def rows(x, y):
    return (x[:, None] - y).square().sum(-1).exp().sum(1)


SCRIPT = """
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters())
for _ in range(3):
    optimizer.zero_grad()
    x = torch.rand(300, 8)
    (x[:, None] - model(x)).square().sum(-1).exp().mean().backward()
    optimizer.step()
"""


def entry_points():
    """Each public entry point: its name, the modules of effops.pytorch that it may need, and a call."""
    import torch

    import effops
    from effops.commands.main import main
    from effops.dispatch.requirements import requires_torchscript
    from effops.reference import reference_of, tried_ops

    def pairs(gradients=True):
        return [torch.rand(size, 8, requires_grad=gradients) for size in (300, 200)]

    def eager(op):
        reference = reference_of(op)
        for kind in (torch.float32, torch.float64):
            args = reference.sample_case(
                next(iter(reference.cases)), dtype=kind, device="cpu", generator=torch.Generator().manual_seed(0)
            )
            args = [one.detach().requires_grad_() for one in args]
            op(*args).sum().backward()

    def command(*words):
        def run():
            out, errors = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
                try:
                    code = main(list(words))
                except SystemExit as end:
                    code = end.code
            if code:
                raise RuntimeError(f"code {code}: {errors.getvalue()}{out.getvalue()}")

        return run

    def distribution():
        from effops import distributions

        loc = torch.nn.functional.normalize(torch.rand(5, 3), dim=-1)
        for one in (
            distributions.PowerSpherical(loc, torch.ones(5)),
            distributions.VonMisesFisher(loc, torch.ones(5)),
            distributions.HypersphericalUniform(3),
        ):
            one.log_prob(one.rsample())

    def budget():
        with effops.budget("1 GiB"):
            rows(*pairs())

    def linted():
        with effops.lint() as report:
            rows(*pairs())
        str(report)

    def training():
        import effops.memory

        return effops.memory.Workload(
            lambda: torch.nn.Linear(8, 8),
            lambda size: torch.rand(size, 8),
            lambda model, x: model(x).sum(),
            lambda parameters: torch.optim.SGD(parameters, 0.1),
        )

    def memory():
        import effops.memory

        effops.memory.anatomy(training(), 4)
        effops.memory.max_batch_size(training(), "1 MiB")
        effops.memory.advise(training(), 4)

    def measured():
        from effops import measure

        work = measure.Pass(rows, tuple(pairs(False)))
        measure.times({"rows": work}, repeats=1)
        measure.memory(work)
        measure.profile({"rows": work})

    def transformed():
        one, other = torch.rand(3, 4), torch.rand(3, 4)
        torch.func.vmap(effops.broadcast_dot)(torch.rand(2, 3, 4), torch.rand(2, 3, 4))
        torch.func.jvp(effops.broadcast_dot, (one, other), (other, one))
        torch.func.grad(lambda left: effops.broadcast_dot(left, other).sum())(one)

    def registered():
        from transformers import GPT2Config, GPT2Model

        effops.register_transformers()
        sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 9}
        config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, attn_implementation="effops")
        GPT2Model(config)(torch.zeros(1, 4, dtype=torch.int64))

    def sharded():
        from torch import distributed
        from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,))
        loc = distribute_tensor(torch.rand(4, 3), mesh, [Shard(0)])
        effops.broadcast_dot(loc, distribute_tensor(torch.rand(4, 3), mesh, [Shard(0)]))

    def in_context():
        with effops.use_variant("einsum"), effops.validate(), effops.record():
            effops.broadcast_dot(*(one[:100] for one in pairs()))

    def script(*words):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "train.py")
            path.write_text(SCRIPT)
            command("lint", *words, str(path))()

    loc, scale, x = torch.rand(4, 3), torch.ones(4), torch.rand(4, 3)
    for op in tried_ops().values():
        yield f"eager {op.name}", EAGER, lambda op=op: eager(op)
    yield "distributions", EAGER, distribution
    yield "nn", EAGER, lambda: effops.nn.MultiheadAttention(8, 2)(*[torch.rand(2, 3, 8)] * 3)
    yield "contexts", EAGER, in_context
    yield "variants", EAGER, lambda: effops.variants(effops.attention)
    yield "transforms", EAGER, transformed
    yield "transformers", EAGER, registered
    if not requires_torchscript(None):
        yield "torchscript", EAGER, lambda: effops.broadcast_dot(loc, x, variant="torchscript")
    yield "doctor", EAGER, command("doctor")
    yield "explain", PREDICTED, lambda: str(effops.explain(effops.power_spherical_log_prob, loc, scale, x))
    yield "lint", FOLLOWED, lambda: str(effops.lint(rows, *pairs(), least="64 KiB"))
    yield "lint of a context", FOLLOWED, linted
    yield "lint of a script", FOLLOWED, script
    yield "budget", FOLLOWED, budget
    yield "compare", [*FOLLOWED, "measure"], lambda: str(effops.compare(rows, rows, *pairs()))
    yield "measure", [*PREDICTED, "measure"], measured
    yield "memory", [*FOLLOWED, "measure"], memory
    sizes = "blocks", "heads", "head-dim", "batch-size", "seq-len"
    yield "closed form", [], command("memory", "estimate", *(word for name in sizes for word in (f"--{name}", "4")))
    yield "compile", [*PREDICTED, "compiled"], lambda: effops.broadcast_dot(loc, x, variant="compile")
    yield "torch.compile", EAGER, lambda: torch.compile(effops.broadcast_dot, backend="eager")(loc, x)
    yield "tiled", [*FOLLOWED, "tiles"], lambda: effops.tiled(rows, budget="64 KiB")(*pairs()).sum().backward()
    yield "sharding", [*EAGER, "sharding"], sharded


def outcomes(interface):
    """What came of each entry point, with the modules that it may need."""
    if interface:
        sys.meta_path.insert(0, Lacking(interface))
    found = {}
    try:
        import effops  # noqa: F401

        for name, needs, run in entry_points():
            try:
                run()
                found[name] = needs, ""
            except BaseException as error:
                found[name] = needs, "".join(traceback.format_exception(error))[-4000:]
    except BaseException as error:
        found["import effops"] = [], "".join(traceback.format_exception(error))[-4000:]
    return found


def main():
    names = sys.argv[1:] or list(interfaces())
    import torch._dynamo
    import torch._inductor.compile_fx  # noqa: F401
    import transformers.models.gpt2  # noqa: F401

    for name in [one for one in sys.modules if one.partition(".")[0] == "effops"]:
        del sys.modules[name]
    for name in names:
        reading, writing = os.pipe()
        if not os.fork():
            os.close(reading)
            with open(writing, "w") as out:
                json.dump(outcomes("" if name == "nothing" else name), out)
            os._exit(0)
        os.close(writing)
        with open(reading) as answer:
            text = answer.read()
        os.wait()
        print(json.dumps({"interface": name, "outcomes": json.loads(text) if text else "crashed"}), flush=True)


if __name__ == "__main__":
    main()
