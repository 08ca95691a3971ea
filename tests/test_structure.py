"""What may import what, folder by folder."""

import ast
import graphlib
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = """text pytorch kernels: nothing
numerics: text pytorch
blocks: numerics text pytorch
prediction: numerics text pytorch
measure: prediction text pytorch
dispatch: prediction numerics text pytorch
ops: dispatch prediction blocks numerics text pytorch
reference: ops dispatch blocks numerics text pytorch
distributions nn patch transformers: ops dispatch numerics text pytorch
memory: ops prediction nn measure text pytorch
programs: ops prediction dispatch blocks numerics measure text pytorch"""
# All import their own folder, commands all.
ROWS = {name: line for line in TABLE.splitlines() for name in line.partition(":")[0].split()}
PATHS = [path.relative_to(ROOT) for top in ("effops", "kernels") for path in (ROOT / top).rglob("*.py")]
NODES = {path: list(ast.walk(ast.parse((ROOT / path).read_text()))) for path in PATHS}
PARTS = {path: ("effops", *path.with_suffix("").parts)[path.parts[0] == "effops" :] for path in PATHS}
FILES = {".".join(parts).removesuffix(".__init__"): path for path, parts in PARTS.items()}


def imports(module, path):
    """(module, line, what is imported, inside a function); lazy imports and those for type checking count too."""
    lazy = {inner for node in NODES[path] if isinstance(node, ast.FunctionDef) for inner in ast.walk(node)}
    for node in NODES[path]:
        names = [alias.name for alias in getattr(node, "names", []) if isinstance(alias, ast.alias)]
        if isinstance(node, ast.ImportFrom):
            names = [".".join([*PARTS[path][: -node.level or 0], node.module or name, name]) for name in names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [str(part.value) for part in ast.walk(node.args[0]) if isinstance(part, ast.Constant)][:1]
        for name in names:
            starts = [file for file in FILES if f"{name}.".startswith(f"{file}.")]  # it may name what is in a module
            yield from [(module, node.lineno, file, node in lazy) for file in sorted(starts, key=len)[-1:]]


FOUND = sorted({found for module, path in FILES.items() for found in imports(module, path)})


def test_imports():
    wrong = []
    for module, line, target, lazy in FOUND:
        folder, imported = (f"{name}..".split(".")[1] for name in (module, target))
        rule = ROWS.get(folder, f"{folder}: not in the table")
        allowed = folder in ("", "__main__", "commands", imported) or imported in rule.partition(":")[2].split()
        if imported == "kernels" != folder:  # requirements.py asks whether they can be imported
            rule, at = "kernels are imported inside functions, in files named triton.py or cpp.py", FILES[module].name
            allowed = lazy and at in ("triton.py", "cpp.py", "requirements.py")
        wrong += [f"{FILES[module]}:{line} imports {target}; {rule}"] * (not allowed)
    assert not wrong, "\n".join(["", *wrong])


# Modules of PyTorch that are not in its documentation, with names that are not private.
UNDOCUMENTED = {
    "torch.amp.autocast_mode",
    "torch.autograd.profiler_util",
    "torch.cuda.amp.common",
    "torch.fx.node",
    "torch.fx.traceback",
    "torch.utils.collect_env",
    "torch.utils.flop_counter",
    "torch.utils.hooks",
}
# Of argparse, transformers, sys, tuples, syntax trees and threads.
NOT_PYTORCH = {"_actions", "_attn_implementation", "_getframe", "_replace", "_fields", "_target"}
BY_NAME = {"getattr", "hasattr", "setattr", "mock.patch.object"}


def is_private(name):
    """Whether a part of a dotted name is private. Operators of ATen are looked up by name."""
    return not name.startswith(("aten.", "onednn.")) and any(
        part.startswith("_") and not part.startswith("__") for part in name.split(".")
    )


def private_names(path, own):
    """(line, name) of the private interfaces of PyTorch that a module uses, and of those that it does not document.

    `own` are names that modules of its folder give to something.
    """
    for node in NODES[path]:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None)
            names = [f"{module}.{alias.name}" if module else alias.name for alias in node.names]
            for name in names:
                undocumented = name in UNDOCUMENTED or name.rpartition(".")[0] in UNDOCUMENTED
                if name.startswith("torch.") and (is_private(name) or undocumented):
                    yield node.lineno, name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            name = ast.unparse(node)
            is_own = node.attr in own | NOT_PYTORCH or ast.unparse(node.value) in ("self", "cls")
            if name in UNDOCUMENTED or (is_private(node.attr) and is_private(name) and not is_own):
                yield node.lineno, name
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in BY_NAME:
            name = getattr(node.args[1], "value", None)
            if isinstance(name, str) and is_private(name) and name not in own | NOT_PYTORCH:
                yield node.lineno, name


def test_private_interfaces():
    """Each stands where the next version of PyTorch can be looked up: in effops/pytorch/, by the feature it is for."""
    own = defaultdict(set)
    for path, nodes in NODES.items():
        for node in nodes:
            name = next((getattr(node, field) for field in ("name", "id", "attr") if hasattr(node, field)), None)
            if name and not isinstance(node, ast.alias) and not isinstance(getattr(node, "ctx", None), ast.Load):
                own[path.parent].add(name)
    wrong = [
        f"{path}:{line} uses {name}: import it in effops/pytorch/"
        for path in PATHS
        if path.parts[0] == "effops" and path.parts[1] != "pytorch"
        for line, name in private_names(path, own[path.parent])
    ]
    assert not wrong, "\n".join(["", *wrong])


def test_circles():
    folders = {name: path.parent if name.count(".") > 1 else path for name, path in FILES.items()}
    for names in (FILES, folders):
        edges = [(str(names[module]), str(names[target])) for module, _, target, _ in FOUND]
        graph = {one: {target for source, target in edges if source == one != target} for one, _ in edges}
        graphlib.TopologicalSorter(graph).prepare()
