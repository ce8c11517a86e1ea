"""Transforms jaxprs: extracts equations, inlines calls, sets scopes and products."""

import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.extend.source_info_util import NameStack
from jax.sharding import AxisType, Sharding

from . import _jaxpr
from ._jaxpr import Atom, Program
from ._types import PyTree


def structural_key(jaxpr: Jaxpr) -> Hashable:
    """Returns a key that is equal for equal equations from the same source lines."""
    numbers: dict[Var, int] = {}

    def name(atom: Atom) -> Hashable:
        if isinstance(atom, Literal):
            return atom.aval, np.asarray(atom.val).tobytes()
        return numbers.setdefault(atom, len(numbers))

    facts: list[Hashable] = [(name(v), v.aval) for v in jaxpr.invars]
    for eqn in jaxpr.eqns:
        where = eqn.source_info.traceback, eqn.source_info.name_stack
        params = sorted(eqn.params.items())
        names = [name(v) for v in [*eqn.invars, *eqn.outvars]]
        facts.append((eqn.primitive, eqn.ctx, where, *params, *names))
    return *facts, *map(name, jaxpr.outvars)


def without_common_scope(jaxpr: Jaxpr) -> tuple[NameStack, Jaxpr]:
    """Returns the name scopes of all equations, and the jaxpr without these scopes."""
    stacks = [eqn.source_info.name_stack for eqn in jaxpr.eqns]
    columns = zip(*(stack.stack for stack in stacks), strict=False)
    depth = len([*itertools.takewhile(lambda names: len({*names}) == 1, columns)])
    pairs = zip(jaxpr.eqns, stacks, strict=True)
    eqns = [_jaxpr.with_scopes(eqn, stack[depth:]) for eqn, stack in pairs]
    common = stacks[0][:depth] if stacks else NameStack()
    return common, jaxpr.replace(eqns=eqns)


def with_products(eqn: JaxprEqn, change: Callable[[JaxprEqn], JaxprEqn]) -> JaxprEqn:
    """Changes the products of an equation: itself, or those within."""
    if _jaxpr.name_of(eqn) in _jaxpr.PRODUCTS:
        return change(eqn)
    nested = functools.partial(with_products, change=change)
    mapped = functools.partial(_jaxpr.map_equations, nested)
    return eqn.replace(params=_jaxpr.map_jaxprs(mapped, eqn))


def inlined(
    jaxpr: Program, is_open: Callable[[JaxprEqn], bool]
) -> tuple[Jaxpr, dict[Var, PyTree]]:
    """Inlines calls for which `is_open`; returns the constants by variable, too."""
    constants: dict[Var, PyTree] = {}
    eqns: list[JaxprEqn] = []

    def add(body: Program, inputs: Sequence[Atom], scopes: NameStack) -> list[Atom]:
        inner, values = _jaxpr.open_jaxpr(body)
        fresh = [Var(v.aval) for v in inner.constvars]
        constants.update(zip(fresh, values, strict=True))
        before, after = [*inner.constvars, *inner.invars], [*fresh, *inputs]
        renamed = dict(zip(before, after, strict=True))

        def named(atoms: Sequence[Atom]) -> list[Atom]:
            return [v if isinstance(v, Literal) else renamed[v] for v in atoms]

        for eqn in inner.eqns:
            inputs = named(eqn.invars)
            within = scopes + eqn.source_info.name_stack
            if is_open(eqn):
                inputs = constrained(inputs, eqn, "in_shardings", within)
                outputs = add(_jaxpr.subjaxprs(eqn)[0], inputs, within)
                outputs = constrained(outputs, eqn, "out_shardings", within)
            else:
                outputs = [Var(v.aval) for v in eqn.outvars]
                renewed = eqn.replace(invars=inputs, outvars=outputs)
                eqns.append(_jaxpr.with_scopes(renewed, within))
            renamed.update(zip(eqn.outvars, outputs, strict=True))
        return named(inner.outvars)

    def constrained(
        atoms: Sequence[Atom], call: JaxprEqn, side: str, scopes: NameStack
    ) -> list[Atom]:
        """Shards atoms as a `jit` says of its operands or results."""
        found = [*atoms]
        for i, sharding in enumerate(call.params.get(side, ())):
            atom = found[i]
            if isinstance(atom, Var) and _constrains(sharding):
                constraint = _sharding_constraint(atom, sharding, call)
                eqns.append(_jaxpr.with_scopes(constraint, scopes))
                (found[i],) = constraint.outvars
        return found

    outer = _jaxpr.bare(jaxpr)
    outputs = add(jaxpr, outer.invars, NameStack())
    return excerpt(outer, eqns, outer.invars, outputs), constants


def _constrains(sharding: object) -> bool:
    """Whether a sharding that a `jit` names is more than the types of arrays say."""
    if not isinstance(sharding, Sharding):
        return False  # none is named
    mesh = getattr(sharding, "mesh", None)
    axes: Sequence[AxisType] = getattr(mesh, "axis_types", ())
    return not axes or any(axis != AxisType.Explicit for axis in axes)


def _sharding_constraint(x: Var, sharding: Sharding, call: JaxprEqn) -> JaxprEqn:
    """Returns the equation of a constraint in the context of a call."""
    aval: Any = x.aval
    constrain = functools.partial(jax.lax.with_sharding_constraint, shardings=sharding)
    with call.ctx.manager:
        traced = jax.make_jaxpr(constrain)(jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    (eqn,) = _jaxpr.bare(traced).eqns
    result, where = Var(x.aval), call.source_info
    return eqn.replace(invars=[x], outvars=[result], ctx=call.ctx, source_info=where)


def excerpt(
    jaxpr: Jaxpr,
    eqns: Iterable[JaxprEqn],
    inputs: Iterable[Var],
    outputs: Iterable[Atom],
) -> Jaxpr:
    """Extracts equations of a jaxpr as a jaxpr with these inputs and outputs."""
    return jaxpr.replace(
        constvars=[], invars=[*inputs], outvars=[*outputs], eqns=[*eqns]
    )
