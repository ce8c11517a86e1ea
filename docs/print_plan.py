"""Prints the plan of a program: what `autocast` runs, saves and recomputes.

`python docs/print_plan.py` prints that of an attention block. It reads private modules.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jmp_scale import _jaxpr
from jmp_scale._autocast.marks import Names
from jmp_scale._autocast.recompute.islands import read_by_derivative
from jmp_scale._autocast.recompute.plan import (
    Origin,
    Plan,
    Unit,
    make_plan,
    needed_for,
)
from jmp_scale._jaxpr import Var
from jmp_scale._tree import FlatCall


def attention(weights, x):
    h = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True))
    q, k, v = h @ weights["q"], h @ weights["k"], h @ weights["v"]
    scores = q @ jnp.swapaxes(k, 1, 2) / 8
    return x + jax.nn.softmax(scores) @ v @ weights["out"]


def main() -> None:
    weights = {name: jnp.ones((64, 64)) for name in ("q", "k", "v", "out")}
    print(plan_text(attention, weights, jnp.ones((4, 128, 64))))


def plan_text(
    fun: Callable[..., Any], *args: Any, dtype: DTypeLike = "bfloat16"
) -> str:
    """The plan by which `autocast(fun, dtype)` runs, unit by unit."""
    flat = FlatCall(fun, args, {})
    jaxpr = jax.make_jaxpr(flat)(*flat.arrays)
    origins = [Origin.PARAMETER] * len(flat.arrays)
    plan = make_plan(jaxpr, origins, dtype, Names(), share_casts=False, join=True)
    return "\n".join(_lines(plan))


def _lines(plan: Plan) -> Iterator[str]:
    names = _Names()
    yield f"0 arguments: {names.with_shapes(plan.jaxpr.invars)}"
    for number, unit in enumerate(plan.units, 1):
        yield from _lines_of_unit(number, unit, plan, names)
    yield f"results: {names.plain(_jaxpr.variables(plan.jaxpr.outvars))}"


def _lines_of_unit(
    number: int, unit: Unit, plan: Plan, names: "_Names"
) -> Iterator[str]:
    inputs, outputs = unit.jaxpr.invars, _jaxpr.variables(unit.jaxpr.outvars)
    primitives = [eqn.primitive.name for eqn in unit.jaxpr.eqns]
    yield f"{number} {unit.kind}: {' '.join(primitives)}".rstrip()
    if unit.kind != "half":
        yield f"    {names.with_shapes(outputs)} from {names.plain(inputs)}"
        return
    for product, wires in unit.products:
        eqn = product.jaxpr.eqns[-1]
        read = names.plain(outputs[i] for i in wires)
        made = names.with_shapes([product.result])
        yield f"    {made} = {eqn.primitive.name} of {read}"
    operands = {outputs[i] for _, wires in unit.products for i in wires[:2]}
    kept, softmaxes, known = (
        {outputs[i] for i in places}
        for places in (unit.kept, unit.softmaxes, unit.known)
    )
    again = operands - {*inputs} - kept
    read = [*again, *read_by_derivative(unit.jaxpr, softmaxes)]
    saved = needed_for(unit.jaxpr, read, known).intersection(inputs)
    half = kept | (saved & plan.halves) | operands.intersection(inputs)
    full = known | saved
    for title, chosen in (
        ("saves in half precision", half - plan.given),
        ("saves", full - half - plan.given),
        ("recomputes", again),
    ):
        in_order = [v for v in dict.fromkeys([*inputs, *outputs]) if v in chosen]
        if in_order:
            yield f"    {title}: {names.with_shapes(in_order)}"


class _Names:
    """Names of variables, in the order in which they are met."""

    def __init__(self) -> None:
        self._names: dict[Var, str] = {}

    def plain(self, variables: Iterable[Var]) -> str:
        return ", ".join(map(self._name, variables))

    def with_shapes(self, variables: Iterable[Var]) -> str:
        return ", ".join(f"{self._name(v)}{[*_jaxpr.shape(v)]}" for v in variables)

    def _name(self, v: Var) -> str:
        return self._names.setdefault(v, _letters(len(self._names)))


def _letters(number: int) -> str:
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    words = (
        "".join(letters)
        for length in itertools.count(1)
        for letters in itertools.product(alphabet, repeat=length)
    )
    return next(itertools.islice(words, number, None))


if __name__ == "__main__":
    main()
