"""Functions are short: a measure of the source that can only get better.

The length of a function is the number of its lines from `def` (decorators not counted) to its end, without its
docstring and without blank lines. A function inside another is part of it, and is counted by itself, too.
"""

from __future__ import annotations

import ast
import statistics
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src"

MEDIAN, NINTH_DECILE, LONGEST = 8, 20, 60
"""The limits, in lines."""


def functions(text: str) -> Iterator[tuple[str, int]]:
    """The functions of a source, each with its length."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            counted = set(range(node.lineno, (node.end_lineno or node.lineno) + 1)) - _docstring(node)
            yield node.name, sum(1 for number in counted if lines[number - 1].strip())


def _docstring(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[int]:
    """The numbers of the lines of a docstring."""
    first = node.body[0]
    if ast.get_docstring(node) is None or first.lineno == node.lineno:
        return set()
    return set(range(first.lineno, (first.end_lineno or first.lineno) + 1))


def all_functions() -> list[tuple[int, str]]:
    """All functions of the package with their lengths, the longest first."""
    found = [
        (length, f"{file.relative_to(SOURCE)}: {name}")
        for file in sorted(SOURCE.rglob("*.py"))
        for name, length in functions(file.read_text(encoding="utf-8"))
    ]
    return sorted(found, reverse=True)


def report() -> str:
    """The median, the ninth decile and the twenty longest functions, in words."""
    found = all_functions()
    lengths = [length for length, _ in found]
    longest = "\n".join(f"{length:4} {name}" for length, name in found[:20])
    median, tenth = statistics.median(lengths), statistics.quantiles(lengths, n=10)[-1]
    return f"{len(found)} functions, median {median:g}, ninth decile {tenth:g}; the longest:\n{longest}"


def test_a_length_counts_neither_docstrings_nor_blank_lines() -> None:
    text = '''
@decorator
def outer(
    a: int,
) -> int:
    """Says something.

    And more.
    """
    # why

    def inner() -> int: return a
    return inner()

class Class:
    def method(self) -> None: "a docstring"
'''
    assert dict(functions(text)) == {"outer": 6, "inner": 1, "method": 1}


def test_functions_are_short() -> None:
    lengths = [length for length, _ in all_functions()]
    assert statistics.median(lengths) <= MEDIAN, report()
    assert statistics.quantiles(lengths, n=10)[-1] <= NINTH_DECILE, report()
    assert max(lengths) <= LONGEST, report()
