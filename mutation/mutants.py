"""Small mistakes in the source of a module, at places drawn with a seed.

Most are those of cosmic-ray. Its replacements that no programmer would make by mistake
(`<<` for `+`, `is` for `<`) are left out, and so are annotations, decorators and error
messages. The others are mistakes in calls, of which programs in JAX mostly consist.
"""

import ast
import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

# What cosmic-ray puts in the place of an operator, within these groups only.
GROUPS = (
    {"Add", "Sub", "Mul", "Div"},
    {"FloorDiv", "Mod", "Mul"},
    {"Pow", "Mul"},
    {"BitAnd", "BitOr", "BitXor"},
    {"Lt", "LtE", "Gt", "GtE", "Eq", "NotEq"},
    {"Is", "IsNot"},
    {"In", "NotIn"},
)
NAMES = {
    "maximum": "minimum",
    "max": "min",
    "pmax": "pmin",
    "all": "any",
    "isfinite": "isnan",
    "zeros_like": "ones_like",
    "zeros": "ones",
    "float32": "float16",
    "inexact": "floating",
    "log2": "exp2",
    "real": "imag",
}
NAMES |= {new: old for old, new in NAMES.items()}


class Mutant(NamedTuple):
    """One mistake: its place, its kind, and the source with it."""

    line: int
    column: int
    kind: str
    make: Callable[[], str]


def sample(source: str, count: int, seed: int) -> list[Mutant]:
    """One mutant per place, of `count` places, in the order of the source."""
    generator = random.Random(seed)
    excluded = _excluded(source)
    places: dict[tuple, list[Mutant]] = {}
    for mutant in [*_of_cosmic_ray(source), *_of_jax(source)]:
        place = mutant.line, mutant.column
        if not any(low <= place < high for low, high in excluded):
            family = mutant.kind.split("_")[0]
            places.setdefault((*place, family), []).append(mutant)
    chosen = [generator.choice(places[place]) for place in sorted(places)]
    chosen = generator.sample(chosen, min(count, len(chosen)))
    return sorted(chosen, key=lambda mutant: mutant[:3])


def _of_cosmic_ray(source: str) -> Iterator[Mutant]:
    nodes, lines = list(ast_nodes(get_ast(source))), source.splitlines()
    for name in operator_names():
        kind = name.partition("/")[2]
        operator_class = get_operator(name)
        if not _is_plausible(kind) or operator_class.arguments():
            continue
        operator = operator_class()
        places = [x for node in nodes for x, _ in operator.mutation_positions(node)]
        for i, (line, column) in enumerate(places):
            make = functools.partial(mutate_code, source, operator, i)
            if not lines[line - 1].startswith("*,", column):  # of a signature
                yield Mutant(line, column, f"{kind}_{i}", make)


def _is_plausible(kind: str) -> bool:
    family, *operators = kind.split("_")
    if family in ("ReplaceBinaryOperator", "ReplaceComparisonOperator"):
        return any(set(operators) <= group for group in GROUPS)
    return family != "RemoveDecorator"


def _of_jax(source: str) -> Iterator[Mutant]:
    """Mistakes in calls: a wrong function, swapped branches, a missing argument."""
    for node in ast.walk(ast.parse(source)):
        for start, end, text, kind in _edits(source, node):
            code = source[:start] + text + source[end:]
            with contextlib.suppress(SyntaxError):
                ast.parse(code)
                make = functools.partial(str, code)
                yield Mutant(node.lineno, node.col_offset, kind, make)


def _edits(source: str, node: ast.AST) -> Iterator[tuple[int, int, str, str]]:
    if isinstance(node, ast.Attribute) and node.attr in NAMES:
        _, end = _span(source, node)
        start = end - len(node.attr)
        yield start, end, NAMES[node.attr], "ReplaceName"
    if isinstance(node, ast.Name) and node.id in NAMES:
        yield *_span(source, node), NAMES[node.id], "ReplaceName"
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if ("where" in name or "select" in name) and len(node.args) >= 3:
            (a, b), (c, d) = (_span(source, x) for x in node.args[1:3])
            swapped = source[c:d] + source[b:c] + source[a:b]
            yield a, d, swapped, "SwapBranches"
        for i, keyword in enumerate(node.keywords):
            start, end = _span(source, keyword)
            if keyword.arg and len(node.args) + i > 0:
                start = source[:start].rindex(",")
                yield start, end, "", f"RemoveKeyword{i}"
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield *_span(source, node), "pass", "RemoveCall"


def _span(source: str, node: ast.AST) -> tuple[int, int]:
    lines = source.splitlines(keepends=True)

    def offset(line: int, column: int) -> int:
        prefix = lines[line - 1].encode()[:column].decode()
        return sum(map(len, lines[: line - 1])) + len(prefix)

    return (
        offset(node.lineno, node.col_offset),
        offset(node.end_lineno, node.end_col_offset),
    )


def _excluded(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where a mistake changes no behaviour: annotations, decorators, messages."""
    nodes: list[ast.AST | None] = []
    for node in ast.walk(ast.parse(source)):
        nodes += [getattr(node, "annotation", None), getattr(node, "returns", None)]
        nodes += getattr(node, "decorator_list", [])
        if isinstance(node, (ast.Raise, ast.JoinedStr)) or _is_union_of_types(node):
            nodes.append(node)
    return [
        ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))
        for node in nodes
        if node is not None
    ]


def _is_union_of_types(node: ast.AST) -> bool:
    value = getattr(node, "value", None)
    return (
        isinstance(node, ast.Assign)
        and isinstance(value, ast.BinOp)
        and isinstance(value.op, ast.BitOr)
    )


def meaning(code: str) -> str:
    """Equal for equal programs, and empty for what is not one."""
    try:
        return ast.dump(ast.parse(code))
    except SyntaxError:
        return ""
