"""The statements of a user's function from the line that makes what is large to the line that reduces it."""

from __future__ import annotations

import ast
import builtins
import functools
import linecache
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, TypeGuard

from torch.distributions import Distribution

from effops.programs.capture.scopes import Described, Fields, Scope, described

FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda
# What a slice may hold. Other statements, and stores into objects, do more than to make new tensors.
STATEMENTS = ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.If, ast.For, ast.With, ast.FunctionDef
SIMPLE = ast.Expr, ast.Assert, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return
COMPREHENSIONS = ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp
TRIANGLES = {"tril", "triu", "generate_square_subsequent_mask"}
DEVICES = {"device", "dtype"}  # fields that stay the same where a name is assigned again
REFUSED_CALLS = {
    "print",
    "open",
    "exec",
    "eval",
    "input",
    "setattr",
    "save",
    "save_pretrained",
    "backward",
    "step",
    "lint",
}


@dataclass(frozen=True, eq=False)
class Slice:
    """Statements that stand side by side in a function, as a function of the names that they read.

    `results` are the names that are used afterwards; none if the statements end with a return.
    """

    statements: Sequence[ast.stmt]
    scope: Scope
    results: tuple[str, ...]
    rest: Sequence[ast.stmt] = ()  # what the last statement does with the results, where it was taken apart
    use: ast.stmt | None = None  # what does more than to make tensors of the last result, as a call of `print`

    @property
    def free(self) -> tuple[str, ...]:
        """The names that are read before they are assigned, without those of the module and of Python."""
        return tuple(name for name in read_first(self.statements) if name in self.scope.names or self._is_global(name))

    def _is_global(self, name: str) -> bool:
        return isinstance(self.value(name), (Described, Fields))

    def value(self, name: str) -> Any:
        """What a name stood for; NotImplemented if that is unknown. An object has the fields that are read."""
        known = self.scope.names
        value = known[name] if name in known else described(self.scope.surroundings.get(name, NotImplemented))
        if not isinstance(value, Fields) or issubclass(value.kind, Distribution):
            return value
        nodes = [node for one in self.statements for node in ast.walk(one)]
        reads = [node for node in nodes if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == name]
        if len(reads) < sum(isinstance(node, ast.Name) and node.id == name for node in nodes):
            return value  # it is used as a whole
        fields = {node.attr for node in reads}
        return Fields(value.kind, {name: one for name, one in value.values.items() if name in fields})

    def definition(self, statements: Sequence[ast.stmt], name: str = "part_of", free: Sequence[str] = ()) -> str:
        """Statements with the same results, as the source of a function."""
        body = list(statements)
        if self.results:
            body.append(ast.parse(f"return {', '.join(self.results)}").body[0])
        text = "\n".join(ast.unparse(ast.fix_missing_locations(one)) for one in body)
        return f"def {name}({', '.join(free or self.free)}):\n" + "\n".join(f"    {row}" for row in text.splitlines())

    def with_use(self, statements: Sequence[ast.stmt]) -> Sequence[ast.stmt]:
        """Statements with the same results, and what uses the last of them."""
        if self.use is None:
            return statements
        *before, last = statements
        if isinstance(last, ast.Assign) and [ast.unparse(one) for one in last.targets] == [self.results[-1]]:
            whole = _Replaced(self.results[-1], last.value).visit(copied(self.use))
            return [*before, whole]
        return [*statements, self.use]


class _Replaced(ast.NodeTransformer):
    """Puts an expression in the place of a name."""

    def __init__(self, name: str, value: ast.expr) -> None:
        self.name, self.value = name, value

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.value if node.id == self.name else node


def slices(first: Scope, last: Scope) -> Iterator[Slice]:
    """The slices from the statement of one place to that of another in the same function, the shortest first."""
    function = function_of(first.code)
    if function is None:
        return
    block = _block(function, first.place.line, last.place.last_line)
    if block is None:
        return
    statements, inside_loop = block
    begin, end = _index(statements, first.place.line), _index(statements, last.place.line)
    if begin is None or end is None:
        return
    begin, end = min(begin, end), max(begin, end)
    for stop in range(end, min(end + 3, len(statements))):  # a later statement may make less
        starts = [_start(statements, begin, stop, first, has) for has in (False, True)]
        for start in dict.fromkeys(starts):
            found = statements[start : stop + 1]
            if not all(map(is_plain, found[:-1])):
                return
            if not is_plain(found[-1]):
                yield from _before_use(found, first, last.place.source, function)
                return
            results = _results(found, function, inside_loop)
            if results is None:
                continue
            triangles = _triangles(found, function, first)
            if triangles:
                all_of = [*triangles, *found]
                yield Slice(all_of, first, _results(all_of, function, inside_loop) or results)
            yield Slice(found, first, results)


def _triangles(found: Sequence[ast.stmt], function: ast.AST, scope: Scope) -> list[ast.stmt]:
    """Earlier statements that make a mask of numbers alone, as `mask = torch.ones(n, n).tril()`: so its form is known.

    They may stand far above, as before a loop over layers. Each name is assigned once, and read by what is given alone.
    """
    nodes = list(ast.walk(function))
    times = Counter(node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load))
    times.update(node.arg for node in nodes if isinstance(node, ast.arg))
    made = {name: one for one in _certain(function, found[0].lineno) for name in assigned([one])}
    chosen: list[ast.stmt] = []

    def is_number(name: str, statement: ast.stmt) -> bool:
        """Whether a name stands for the same there as now, and no element of a tensor is read."""
        fields = [node.attr for node in ast.walk(statement) if _is_field_of(node, name)]
        reads = [node for node in ast.walk(statement) if isinstance(node, ast.Name) and node.id == name]
        is_described = isinstance(scope.names.get(name), Described)
        if is_described and (len(fields) < len(reads) or not set(fields) <= {*DEVICES, "size", "shape"}):
            return False
        return times[name] <= 1 or (len(fields) == len(reads) and set(fields) <= DEVICES)

    def take(name: str) -> bool:
        one = made.pop(name, None)
        if one is None:
            return name in assigned(chosen)
        if not isinstance(one, ast.Assign) or times[name] != 1 or not is_plain(one):
            return False
        if not all(is_number(other, one) or take(other) for other in read_first([one])):
            return False
        chosen.append(one)
        return True

    for name in read_first(found):
        begin = len(chosen)
        if isinstance(scope.names.get(name), Described) and not (take(name) and _has_triangle(chosen[begin:])):
            del chosen[begin:]
    inside = {id(node) for one in (*chosen, *found) for node in ast.walk(one)}
    outside = {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in inside}
    if outside & set(assigned(chosen)):
        return []
    return sorted(chosen, key=lambda one: one.lineno)


def _is_field_of(node: ast.AST, name: str) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name


def _has_triangle(statements: Sequence[ast.stmt]) -> bool:
    calls = [node for one in statements for node in ast.walk(one) if isinstance(node, ast.Call)]
    return any(getattr(one.func, "attr", getattr(one.func, "id", "")) in TRIANGLES for one in calls)


def _certain(tree: ast.AST, line: int) -> Iterator[ast.stmt]:
    """The statements of a function that ran before one of its lines, whatever branches were taken."""
    for _, value in ast.iter_fields(tree):
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
            index = _index(value, line)
            if index is not None:
                yield from value[:index]
                yield from _certain(value[index], line)


def taken_apart(found: Slice, sources: Sequence[str]) -> Slice | None:
    """A slice up to the reducing expressions in its last statement, each with a name; `rest` is what uses them."""
    wanted = set()
    for source in sources:
        if (unparsed := _unparsed(source)) is not None:
            wanted.add(unparsed)
    last = copied(found.statements[-1])
    whole = None if isinstance(last, ast.AugAssign) else getattr(last, "value", None)
    names = [f"part_{number}" for number in range(1, 9)]
    apart = _Apart(wanted, names, whole)
    rest = apart.visit(last)
    if not apart.made or len(apart.made) > len(names):
        return None
    statements = [*found.statements[:-1], *apart.made]
    read = {node.id for node in ast.walk(rest) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    results = [name for name in assigned(statements) if name in read or name in found.results]
    return Slice(statements, found.scope, tuple(results), [rest])


def _before_use(found: Sequence[ast.stmt], scope: Scope, source: str, function: ast.AST) -> Iterator[Slice]:
    """The slice up to an expression inside of a statement that prints it, or stores it in an object.

    Such a statement is not run in a trial.
    """
    *before, last = found
    wanted = _unparsed(source)
    if wanted is None or not isinstance(last, SIMPLE):
        return
    inside = [node for node in _always_evaluated(last) if ast.unparse(node) == wanted]
    name = "taken"
    while name in scope.names or name in scope.surroundings:
        name += "_"
    made = ast.copy_location(ast.parse(f"{name} = {wanted}").body[0], last)
    if not inside or not is_plain(made):
        return
    use = _Named(inside[0], name).visit(copied(last))
    inner = {id(node) for one in before for node in ast.walk(one)}
    nodes = [node for tree in (function, use) for node in ast.walk(tree) if isinstance(node, ast.Name)]
    later = {node.id for node in nodes if id(node) not in inner and not _is_in(node, last)}
    results = [one for one in assigned(before) if one in later]
    yield Slice([*before, made], scope, (*results, name), use=use)


def _unparsed(source: str) -> str | None:
    try:
        return ast.unparse(ast.parse(source, mode="eval"))
    except SyntaxError:  # a part of a line, where Python knows no columns
        return None


def _is_in(node: ast.AST, tree: ast.AST) -> bool:
    return any(one is node for one in ast.walk(tree))


def _always_evaluated(node: ast.AST) -> Iterator[ast.expr]:
    """The expressions in a statement that are evaluated once whenever it runs."""
    if isinstance(node, (ast.Lambda, ast.comprehension, ast.IfExp, ast.BoolOp, *COMPREHENSIONS)):
        return
    if isinstance(node, ast.expr):
        yield node
    for one in ast.iter_child_nodes(node):
        yield from _always_evaluated(one)


class _Named(ast.NodeTransformer):
    def __init__(self, old: ast.expr, name: str) -> None:
        self.old, self.name = old, name

    def visit(self, node: ast.AST) -> Any:
        if getattr(node, "copy_of", node) is self.old:
            return ast.Name(self.name, ast.Load())
        return self.generic_visit(node)


class _Apart(ast.NodeTransformer):
    def __init__(self, wanted: set[str], names: Sequence[str], whole: ast.expr | None) -> None:
        self.wanted, self.names, self.whole = wanted, names, whole
        self.made: list[ast.stmt] = []

    def visit(self, node: ast.AST) -> Any:
        is_last = not isinstance(node, ast.expr) or node is self.whole or len(self.made) == len(self.names)
        if is_last or ast.unparse(node) not in self.wanted:
            return self.generic_visit(node)
        name = self.names[len(self.made)]
        self.made.append(ast.parse(f"{name} = {ast.unparse(node)}").body[0])
        return ast.Name(name, ast.Load())


def _results(found: Sequence[ast.stmt], function: ast.AST, inside_loop: bool) -> tuple[str, ...] | None:
    """The names that are assigned and used afterwards; None if the statements end in an unknown way."""
    returns = [node for one in found for node in _own_nodes(one) if isinstance(node, ast.Return)]
    if returns:
        return () if len(returns) == 1 and returns[0] is found[-1] and returns[0].value is not None else None
    inner = {id(node) for one in found for node in ast.walk(one)}
    later = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and id(node) not in inner}
    before = read_first(found) if inside_loop else ()
    stored = assigned(found)
    used = tuple(name for name in stored if name in later or name in before)
    return used or stored[-1:] or None


def _start(statements: Sequence[ast.stmt], begin: int, stop: int, scope: Scope, has_distributions: bool) -> int:
    """An earlier statement, where a name stands for an object that it makes: a distribution, or a function.

    A distribution can be given as it is, too: it may have been made elsewhere.
    """
    for name in read_first(statements[begin : stop + 1]):
        value = scope.names.get(name, NotImplemented)
        is_known = value is not NotImplemented and not callable(value)
        if is_known and isinstance(value, Fields):
            is_known = has_distributions and issubclass(value.kind, Distribution)
        if not is_known and (name in scope.names or name not in scope.surroundings) and not hasattr(builtins, name):
            for index in reversed(range(begin)):
                if name in assigned(statements[index : index + 1]):
                    return _start(statements, index, stop, scope, has_distributions)
    return begin


def is_plain(statement: ast.stmt) -> bool:
    for node in ast.walk(statement):
        if isinstance(node, ast.stmt) and not isinstance(node, STATEMENTS):
            return False
        if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
            return False
        if isinstance(node, (ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)):
            return False
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", None) or getattr(node.func, "attr", "")
            if name in REFUSED_CALLS:
                return False
    return True


@functools.lru_cache(256)
def _tree(file: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):
        return None


def function_of(code: CodeType) -> ast.AST | None:
    return _function(code.co_filename, code.co_name, code.co_firstlineno)


# The code is no key of the cache: that of two files may be equal, and on Python 3.10 stand on other lines.
@functools.lru_cache(256)
def _function(file: str, name: str, line: int) -> ast.AST | None:
    tree = _tree(file)
    if tree is None or name == "<module>":
        return tree
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS) and getattr(node, "name", "<lambda>") == name:
            decorators = [one.lineno for one in getattr(node, "decorator_list", ())]
            if min([node.lineno, *decorators]) == line:
                return node
    return None


def is_top_level(code: CodeType) -> bool:
    """Whether a function stands in a module or a class: what stands there runs once."""
    waiting: list[ast.AST] = [one for one in [_tree(code.co_filename)] if one is not None]
    found = function_of(code)
    while waiting:
        node = waiting.pop()
        if node is found:
            return True
        waiting += [] if isinstance(node, FUNCTIONS) else ast.iter_child_nodes(node)
    return False


def _block(function: ast.AST, first: int, last: int, inside_loop: bool = False) -> tuple[list[ast.stmt], bool] | None:
    """The innermost list of statements that holds two lines, and whether it is run again and again."""
    if isinstance(function, ast.Lambda):
        found = ast.copy_location(ast.Return(function.body), function.body)
        return [found], False
    for _, value in ast.iter_fields(function):
        if not isinstance(value, list) or not value or not isinstance(value[0], ast.stmt):
            continue
        begin, end = _index(value, first), _index(value, last)
        if begin is None or end is None:
            continue
        here = inside_loop or isinstance(function, (ast.For, ast.While))
        is_scope = isinstance(value[begin], (*FUNCTIONS, ast.ClassDef))
        deeper = None if is_scope else _block(value[begin], first, last, here)
        return deeper or (value, here)
    return None


def _index(statements: Sequence[ast.stmt], line: int) -> int | None:
    for index, one in enumerate(statements):
        if one.lineno <= line <= (one.end_lineno or one.lineno):
            return index
    return None


def statement_lines(file: str, line: int) -> list[str]:
    """The lines of the statement that holds a line, without the body of one that has a body."""
    statements: list[ast.stmt] = [one for one in ast.walk(_tree(file) or ast.Pass()) if isinstance(one, ast.stmt)]
    holding = [one for one in statements if _index([one], line) is not None]
    first, last = line, line
    if holding:
        inmost = max(holding, key=lambda one: one.lineno)
        body = getattr(inmost, "body", None) or [inmost]
        first, last = inmost.lineno, (inmost.end_lineno or line) if body[0] is inmost else body[0].lineno - 1
    return [linecache.getline(file, number) for number in range(first, max(last, line) + 1)]


def _own_nodes(statement: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a statement without those of functions that it defines."""
    yield statement
    if isinstance(statement, FUNCTIONS):
        return
    for one in ast.iter_child_nodes(statement):
        yield from _own_nodes(one)


def assigned(statements: Sequence[ast.stmt]) -> tuple[str, ...]:
    """The names that statements assign, in their order."""
    found: dict[str, None] = {}
    for one in statements:
        for node in _own_nodes(one):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and not _is_of_comprehension(one, node):
                found[node.id] = None
            elif isinstance(node, ast.FunctionDef):
                found[node.name] = None
    return tuple(found)


def _is_of_comprehension(statement: ast.stmt, name: ast.Name) -> bool:
    return any(
        name is node
        for one in ast.walk(statement)
        if isinstance(one, ast.comprehension)
        for node in ast.walk(one.target)
    )


def read_first(statements: Sequence[ast.stmt]) -> tuple[str, ...]:
    """The names that statements read before they assign them."""
    known: set[str] = set()
    found: dict[str, None] = {}
    for one in statements:
        bound = {
            node.id
            for inner in ast.walk(one)
            if isinstance(inner, ast.comprehension)
            for node in ast.walk(inner.target)
            if isinstance(node, ast.Name)
        }
        for inner in ast.walk(one):
            if isinstance(inner, FUNCTIONS):
                arguments = inner.args
                bound |= {name.arg for name in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
                bound |= set(assigned(inner.body)) if isinstance(inner.body, list) else set()
        is_loop = isinstance(one, (ast.For, ast.If, ast.With))
        stored = set(assigned([one])) if is_loop else set()
        for node in ast.walk(one):
            is_read = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
            if isinstance(one, ast.AugAssign) and node is one.target:
                is_read = True
            if is_read and node.id not in known | bound | stored:  # type: ignore[attr-defined]
                found[node.id] = None  # type: ignore[attr-defined]
        known |= set(assigned([one]))
    return tuple(found)


def without_imports(statements: Sequence[ast.stmt]) -> tuple[list[ast.stmt], tuple[str, ...]]:
    """Statements without the imports in them, and the sources of these. Users write theirs at the top of a file."""
    apart = _WithoutImports()
    kept = [apart.visit(copied(one)) for one in statements]
    return [one for one in kept if one is not None], tuple(dict.fromkeys(apart.imports))


class _WithoutImports(ast.NodeTransformer):
    def __init__(self) -> None:
        self.imports: list[str] = []

    def visit_Import(self, node: ast.Import) -> None:
        self.imports.append(ast.unparse(node))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.imports.append(ast.unparse(node))


def copied(node: Any) -> Any:
    """A copy of the tree whose expressions know the node that they are copies of."""
    if isinstance(node, ast.AST):
        new = type(node)(**{name: copied(value) for name, value in ast.iter_fields(node)})
        new.copy_of = getattr(node, "copy_of", node)  # type: ignore[attr-defined]
        return ast.copy_location(new, node)
    return [copied(one) for one in node] if isinstance(node, list) else node
