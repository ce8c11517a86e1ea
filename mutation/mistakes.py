"""Mistakes in calls, of which programs in JAX mostly consist, for cosmic-ray."""

from collections.abc import Callable, Iterator
from typing import Any

from cosmic_ray.operators.operator import Operator
from parso.python.tree import Keyword

Found = Iterator[tuple[Any, Callable[[], Any]]]  # parts of a source, and the mistake

PAIRS = (
    "maximum minimum, max min, pmax pmin, all any, isfinite isnan, zeros ones, "
    "log2 exp2, zeros_like ones_like, float32 float16, inexact floating, real imag"
)
NAMES = dict(pair.split() for pair in PAIRS.split(", "))
NAMES |= {new: old for old, new in NAMES.items()}


def wrong_name(node: Any) -> Found:
    if node.type == "name" and node.value in NAMES:
        yield node, lambda: setattr(node, "value", NAMES[node.value])


def swapped_branches(node: Any) -> Found:
    if node.type == "arglist" and len(node.children) >= 5:
        a, b = node.children[2:5:2]
        called = node.get_first_leaf().get_previous_leaf().get_previous_leaf().value
        if ("where" in called or "select" in called) and b.type != "argument":
            yield a, lambda: node.children.__setitem__(slice(2, 5, 2), [b, a])


def missing_keyword(node: Any) -> Found:
    for i, child in enumerate(node.children[1:] if node.type == "arglist" else ()):
        if child.type == "argument" and child.children[1] == "=":
            yield child, lambda i=i: node.children.__delitem__(slice(i, i + 2))


def missing_call(node: Any) -> Found:
    """One whose result nobody reads, as a check of arguments."""
    call = node.children[0] if node.type == "simple_stmt" else None
    if call and call.type == "atom_expr" and call.children[-1].type == "trailer":
        nothing = Keyword("pass", call.start_pos, call.get_first_leaf().prefix)
        yield call, lambda: node.children.__setitem__(0, nothing)


def operator(find: Callable[[Any], Found]) -> type[Operator]:
    """An operator of cosmic-ray, of what `find` yields for a node."""

    class Mistake(Operator):
        def mutation_positions(self, node: Any) -> Iterator[Any]:
            return ((place.start_pos, place.end_pos) for place, _ in find(node))

        def mutate(self, node: Any, index: int) -> Any:
            [*find(node)][index][1]()
            return node

        @classmethod
        def examples(cls) -> tuple[()]:
            return ()

    return Mistake


OPERATORS = {
    find.__name__: operator(find)
    for find in (wrong_name, swapped_branches, missing_keyword, missing_call)
}
