"""The place of an instruction: its lines and its expression, which every Python tells alike."""

import runpy
import sys

import pytest

from effops.programs.capture.places import raised_at

# The body of a function of `x`, which is None, and what raises there: its first line, its last line and its source.
BODIES = {
    "return max(\n    x + 1,\n    1)": (3, 3, "x + 1"),
    "return max(1, (x\n    + 1))": (2, 3, "x + 1"),
    "return ('é', x + 1)": (2, 2, "x + 1"),
    "return (str\n    .join('é', x)\n    .lower())": (3, 3, "join('é', x)"),
    "return (str\n    .encode('é', errors=x)\n    .lower())": (3, 3, "encode('é', errors=x)"),
    "k = 1; x += k; k = 2": (2, 2, "x += k"),
    "return [k\n    for k in [1]\n    if k > 0 and (k < 0 or k @\n    1)]": (4, 5, "k @ 1"),
    "with open(__file__):\n    try: k = 1\n    finally: k = x + 1\n    return k": (4, 4, "x + 1"),
    "while True:\n    if x is None and not 2 * (\n        3 - x): break": (4, 4, "3 - x"),
    "return (lambda y: y - x)(1)": (2, 2, "y - x"),
}


def raising(tmp_path, body):
    file = tmp_path / "program.py"
    indented = body.replace("\n", "\n    ")
    file.write_text(f"def program(x):\n    {indented}\n", encoding="utf-8")
    with pytest.raises((AttributeError, TypeError)) as error:
        runpy.run_path(str(file))["program"](None)
    return raised_at(error.value)


@pytest.mark.parametrize("body", BODIES)
def test_expressions(body, tmp_path):
    """On Python 3.10 it was the line on which an expression begins, and all that stands on it."""
    place = raising(tmp_path, body)
    assert (place.line, place.last_line, place.source) == BODIES[body]


def test_an_expression_that_python_3_10_cannot_tell_from_another(tmp_path):
    """Its code has no columns, so that two lambdas of a line that do the same look alike."""
    line = "return [(lambda y: y - x)(y) for y in (1,)] + [(lambda z: z - x)(2)]"
    assert raising(tmp_path, line).source == ("y - x" if sys.version_info >= (3, 11) else line)


@pytest.mark.parametrize("text", ["y = x * 1\n", "await x\n", "y = x +\n", f"y = {'x + ' * 5000}x\n", ""])
def test_a_file_that_is_not_the_source_of_its_code(text, tmp_path):
    """As one that was written anew after it was imported, or that is empty or holds no Python."""
    file = tmp_path / "program.py"
    file.write_text(text)
    with pytest.raises(TypeError) as error:
        exec(compile("y = None + x", str(file), "exec"), {"x": 1})
    place = raised_at(error.value)
    assert place.line == 1
    assert sys.version_info >= (3, 11) or place.source == text.strip()


def test_a_name_with_a_large_number(tmp_path):
    """Python 3.10 says that its instruction is the one before, which extends the number."""
    names = "; ".join(f"x.name_{number}" for number in range(300))
    assert raising(tmp_path, f"if x: {names}\nreturn x, x.last").source == "x.last"
