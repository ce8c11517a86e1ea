"""A select between old and new state that copies nothing on a CPU.

Two kernels read a leaf of the old state if it is selected after the update: the one that
writes the new leaf, and the one that computes the updates. XLA:CPU runs them in either
order, and so copies every donated leaf first. If a leaf is selected right where it is
computed, all that follows reads the selected value: the new one on a finite step, and on
a skipped step an old one, of which nothing is kept. The compilers for TPUs and GPUs make
one kernel of it in any case and need none of this.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

# The operand at which a result is infinite or NaN though the operand is finite.
_SINGULAR = {"div": 1, "rem": 1, "rsqrt": 0, "log": 0, "log1p": 0, "pow": 0, "cbrt": 0}
_POINTWISE = {"sqrt", "convert_element_type", "broadcast_in_dim", "reshape", "copy"}


def select_where_computed(
    applied: jax.Array, jaxpr: Any, consts: list[Any], inputs: list[Any], old: list[Any]
) -> tuple[list[Any], list[Any]]:
    """Evaluates an update, with each leaf of its new state selected where it is computed.

    Args:
      applied: bool[], whether the step is applied.
      jaxpr: the update; its last outputs are the new state.
      consts: its constants.
      inputs: its arguments.
      old: the leaves of the old state, in the order of the new ones.

    Returns:
      (other outputs, leaves of the selected state).
    """
    count = len(jaxpr.outvars) - len(old)
    old_of = _selected_early(jaxpr, jaxpr.outvars[count:], old)
    values = dict(
        zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True)
    )
    for equation in jaxpr.eqns:
        results = _evaluate(jaxpr, equation, values)
        for var, value in zip(equation.outvars, results, strict=True):
            values[var] = (
                jnp.where(applied, value, old_of[var]) if var in old_of else value
            )

    leaves = [values[v] if _is_var(v) else v.val for v in jaxpr.outvars]
    state = []
    for var, new, leaf in zip(jaxpr.outvars[count:], leaves[count:], old, strict=True):
        is_selected = new is leaf or (_is_var(var) and old_of.get(var) is leaf)
        state.append(new if is_selected else jnp.where(applied, new, leaf))
    return leaves[:count], state


def _evaluate(jaxpr: Any, equation: Any, values: dict[Any, Any]) -> list[Any]:
    """The results of one equation, computed as a jaxpr of its own."""
    invars = [v for v in equation.invars if _is_var(v)]
    alone = jaxpr.replace(
        constvars=[], invars=invars, outvars=equation.outvars, eqns=[equation]
    )
    return core.jaxpr_as_fun(core.ClosedJaxpr(alone, []))(*[values[v] for v in invars])


def _is_var(var: Any) -> bool:
    return not isinstance(var, core.Literal)


def _selected_early(
    jaxpr: Any, state_vars: list[Any], old: list[Any]
) -> dict[Any, jax.Array]:
    """The old leaf for each variable of `jaxpr` that is selected where it is computed.

    Not the scalars: Adam divides by 1 - b1^count, and must not see the count of 0 of a
    skipped first step. And nothing that makes a division by zero of an old value, which
    checkify would report (Adafactor's, test_checkify_is_quiet_on_a_skipped_step).
    """
    defined = {id(var) for equation in jaxpr.eqns for var in equation.outvars}
    old_of = {
        var: leaf
        for var, leaf in zip(state_vars, old, strict=True)
        if id(var) in defined and leaf.ndim
    }
    while True:  # what is not selected early passes on what it was computed from
        analysis = _Analysis(set(old_of))
        analysis.run(jaxpr, [_Origins()] * len(jaxpr.invars))
        if not analysis.unsafe:
            return old_of
        old_of = {v: leaf for v, leaf in old_of.items() if v not in analysis.unsafe}


class _Origins(NamedTuple):
    """The early-selected variables that a value depends on.

    Those in `guarded` had a positive constant added, such as Adam's epsilon, since.
    """

    raw: frozenset[Any] = frozenset()
    guarded: frozenset[Any] = frozenset()

    def both(self) -> frozenset[Any]:
        return self.raw | self.guarded


class _Analysis:
    """Finds the variables of which an old value could make a division by zero."""

    def __init__(self, selected: set[Any]) -> None:
        self.selected = selected
        self.unsafe: set[Any] = set()

    def run(self, jaxpr: Any, inputs: list[_Origins]) -> list[_Origins]:
        """What the outputs of a jaxpr depend on."""
        known = dict(zip(jaxpr.invars, inputs, strict=True))
        positive = set()  # variables that hold a positive constant

        def of(var: Any) -> _Origins:
            return known.get(var, _Origins()) if _is_var(var) else _Origins()

        def is_positive(var: Any) -> bool:
            return var in positive if _is_var(var) else bool(np.all(var.val > 0))

        for equation in jaxpr.eqns:
            operands = [of(v) for v in equation.invars]
            name = equation.primitive.name
            if name in _POINTWISE and is_positive(equation.invars[0]):
                positive |= set(equation.outvars)
            if not any(o.both() for o in operands):
                results = [_Origins()] * len(equation.outvars)
            elif name in ("add", "add_any", "max") and any(
                map(is_positive, equation.invars)
            ):
                results = [_Origins(guarded=_union(operands))]
            elif name in _POINTWISE:
                results = [operands[0]]
            else:
                results = self._results(equation, name, operands)
            for var, result in zip(equation.outvars, results, strict=True):
                is_selected = var in self.selected
                known[var] = _Origins(frozenset([var])) if is_selected else result
        return [of(v) for v in jaxpr.outvars]

    def _results(self, equation: Any, name: str, operands: list[_Origins]) -> list[Any]:
        everything = _Origins(_union(operands))
        inner = [p for p in equation.params.values() if hasattr(p, "jaxpr")]
        if name in _SINGULAR:
            self.unsafe |= operands[_SINGULAR[name]].raw
        elif name == "integer_pow" and equation.params["y"] < 0:
            self.unsafe |= operands[0].raw
        elif len(inner) == 1 and len(inner[0].jaxpr.invars) == len(operands):
            # In a loop everything may depend on everything.
            inputs = [everything] * len(operands) if name == "scan" else operands
            results = self.run(inner[0].jaxpr, inputs)
            if len(results) == len(equation.outvars):
                return results
        elif inner:
            self.unsafe |= everything.raw
        return [everything] * len(equation.outvars)


def _union(origins: list[_Origins]) -> frozenset[Any]:
    return frozenset().union(*(o.both() for o in origins))
