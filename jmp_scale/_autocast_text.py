"""The plan of a program in words: what `autocast` runs, keeps and makes again."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
from jax.typing import DTypeLike

from . import _jaxpr
from . import _operations as ops
from ._autocast_plan import Origin, Plan, Unit, make_plan, needed_for
from ._jaxpr import Var
from ._marks import Names
from ._tree import FlatCall


def plan_text(
    fun: Callable[..., Any], *args: Any, dtype: DTypeLike = "bfloat16"
) -> str:
    """The plan by which `autocast(fun, dtype)` runs, unit by unit.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jmp_scale._autocast_text import plan_text
      >>> x, w = jnp.ones((8, 4)), jnp.ones((4, 4))
      >>> print(plan_text(lambda w, x: jnp.sum(jnp.tanh(x @ w) @ w), w, x))
      0 arguments: a[4, 4], b[8, 4]
      1 half:
          c[8, 4] = dot_general of b, a
      2 half: tanh
          e[8, 4] = dot_general of d, a
          keeps in half: c[8, 4]
          makes again: d[8, 4]
      3 half: reduce_sum
          keeps: f[]
      results: f
    """
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
    read = [*again, *ops.read_by_derivative(unit.jaxpr, softmaxes)]
    saved = needed_for(unit.jaxpr, read, known).intersection(inputs)
    half = kept | (saved & plan.halves) | operands.intersection(inputs)
    full = known | saved
    for title, chosen in (
        ("keeps in half", half - plan.given),
        ("keeps", full - half - plan.given),
        ("makes again", again),
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
