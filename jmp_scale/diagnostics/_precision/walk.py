"""Walks through a traced program and applies the rules, equation by equation.

Facts are passed into nested jaxprs with their arguments. Facts about a loop's carries
are those that hold in every iteration.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from ... import _jaxpr
from ..._autocast.marks import CAST
from ..._jaxpr import Atom, Loop, Program, dtype_name, fits, is_literal, open_jaxpr
from ..._policy import is_half
from .._source import Place, place_of
from .equation import Equation, Fact, Finding, SourceLine
from .facts import join, of_atom, of_constant, transfer
from .rules import faults, half_carry

# These primitives have a jaxpr of scalars that combines two elements.
_COMBINE = ("reduce", "scatter", "select_and", "arg")
_KERNELS = ("core_map", "pallas_call")  # their jaxprs process blocks of arrays


class Walk:
    """One walk through one traced program, in which constants became 0 at `lost` lines.

    In a `differentiated` program the rules apply only to equations that JAX transposed.
    """

    def __init__(self, lost: set[SourceLine], differentiated: bool = False):
        self.found: list[Finding] = []
        self.products: list[Equation] = []  # matrix products and convolutions
        self.unread: list[tuple[str, Place]] = []  # opaque operations
        self.infinite: set[str] = set()  # half dtypes of constants that are infinite
        self.autocasts = False  # whether `autocast` casts products
        self._lost = lost
        self._differentiated = differentiated

    def through(self, program: ClosedJaxpr, caller: Place) -> "Walk":
        """Walks through a program."""
        facts = [of_atom(v) for v in open_jaxpr(program)[0].invars]
        no_equation: Any = None  # contains a whole program
        self._run(program, facts, Equation(no_equation, lambda: caller))
        return self

    def _run(
        self, jaxpr: Program, facts: Sequence[Fact], outer: Equation
    ) -> list[Fact]:
        """Returns the facts of a jaxpr's outputs from the facts of its inputs."""
        inner, consts = open_jaxpr(jaxpr)
        by_variable: dict[Var, Fact] = dict(zip(inner.invars, facts, strict=True))
        constants = [*zip(inner.constvars, consts, strict=True)]
        literals = (v for eqn in inner.eqns for v in eqn.invars if is_literal(v))
        for atom, value in [*constants, *((v, v.val) for v in literals)]:
            if is_half(dtype_name(atom)) and _jaxpr.has_infinite_entries(value):
                self.infinite.add(dtype_name(atom))
        for variable, value in constants:
            by_variable[variable] = of_constant(value, dtype_name(variable))

        def fact_of(atom: Atom) -> Fact:
            return of_atom(atom) if isinstance(atom, Literal) else by_variable[atom]

        for eqn in inner.eqns:
            ins = [fact_of(atom) for atom in eqn.invars]
            carries = frozenset[Var]().union(*(fact.carries for fact in ins))
            outs = self._pass(eqn, ins, outer)
            for variable, out in zip(eqn.outvars, outs, strict=True):
                by_variable[variable] = replace(out, carries=carries)
        return [fact_of(atom) for atom in inner.outvars]

    def _pass(self, eqn: JaxprEqn, ins: list[Fact], outer: Equation) -> list[Fact]:
        # JAX marks the backward pass in name scopes only. Of transposed equations only
        # sums can be at fault; other problems are reported at the forward line.
        backward = outer.backward or "transpose(" in str(eqn.source_info.name_stack)
        place = functools.cache(lambda: place_of(eqn, outer.place()))
        equation = Equation(eqn, place, backward, outer.times, ins)
        loop = _jaxpr.loop_of(eqn)
        if loop is not None:
            return self._loop(equation, loop)
        bodies = [] if equation.name in _KERNELS else _jaxpr.subjaxprs(eqn)
        if bodies and not equation.name.startswith(_COMBINE):
            return self._nested(equation, bodies)
        if equation.name not in _jaxpr.known_primitives():
            self._leave_unread(equation)
        return self._operation(equation)

    def _leave_unread(self, equation: Equation) -> None:
        if "debug" not in equation.name and not self._differentiated:
            self.unread.append((equation.name, equation.place()))

    def _operation(self, equation: Equation) -> list[Fact]:
        facts = transfer(equation.eqn, equation.ins)
        outs = [replace(fact, maker=equation) for fact in facts]
        if equation.name in _jaxpr.PRODUCTS:
            self.products.append(equation)
        if not outs or (self._differentiated and not equation.backward):
            return outs
        # The place is found last, because finding it for all would take minutes.
        starts = outs[0].epsilon == 0 and all(f.epsilon is None for f in equation.ins)
        firsts = equation.ins if equation.name == "max" else equation.ins[:1]
        is_usual = starts and any(fact.single == 0 for fact in firsts)
        if is_usual and equation.line not in self._lost:
            # `0 + x` is Python's `sum([x])`, `max(x, 0)` is a relu: no lost epsilon.
            outs = [replace(outs[0], epsilon=None)]
        self.found.extend(faults(equation))
        return outs

    def _nested(self, equation: Equation, bodies: list[Program]) -> list[Fact]:
        eqn, ins = equation.eqn, equation.ins
        # Shapes in a shard_map are those of one device, but all devices compute.
        equation = equation._replace(times=equation.times * _jaxpr.mesh_size(eqn))
        outputs = len(eqn.outvars)
        if equation.name == "cond" and all(
            fits(b, len(ins) - 1, outputs) for b in bodies
        ):
            results = [self._run(body, ins[1:], equation) for body in bodies]
            return [functools.reduce(join, each) for each in zip(*results, strict=True)]
        is_call = equation.name not in ("cond", "scan", "while")
        if is_call and len(bodies) == 1 and fits(bodies[0], len(ins), outputs):
            self.autocasts |= _jaxpr.name_of_call(eqn) == CAST
            return self._run(bodies[0], ins, equation)
        for body in bodies:
            inner, _ = open_jaxpr(body)
            self._run(body, [of_atom(v) for v in inner.invars], equation)
        if not is_call or equation.name not in _jaxpr.known_primitives():
            self._leave_unread(equation)
        return [of_atom(v) for v in eqn.outvars]

    def _loop(self, equation: Equation, loop: Loop) -> list[Fact]:
        # Facts of slices, or of stacked arrays, have another array.
        ins = [replace(fact, maker=None) for fact in equation.ins]
        consts = ins[loop.offset :][: loop.consts]
        rest = ins[loop.offset + loop.consts :]
        # Facts about the first carry (a zero) do not hold in other iterations.
        carry = [replace(of_atom(v), carries=frozenset([v])) for v in loop.carries]
        inside = equation._replace(times=equation.times * (loop.trips or 1))
        outs = self._run(loop.body, [*consts, *carry, *rest[loop.carry :]], inside)
        if equation.backward or not self._differentiated:
            for start, variable, out in zip(carry, loop.carries, outs, strict=False):
                backward = equation.backward
                self.found.extend(half_carry(variable, start, out, loop, backward))
        ends = [join(a, b) for a, b in zip(carry, outs, strict=False)]
        return [replace(fact, maker=None) for fact in [*ends, *outs[loop.carry :]]]
