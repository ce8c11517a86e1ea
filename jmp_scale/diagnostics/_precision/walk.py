"""Walks through a traced program and applies the rules, equation by equation."""

import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from jax.extend.core import JaxprEqn, Var

from ... import _jaxpr
from ..._autocast.derivatives import CAST
from ..._jaxpr import Atom, Loop, Program, bare, dtype_name, open_jaxpr
from ..._policy import is_half
from ..._types import PyTree
from .._findings import Finding
from .._source import Place, place_of
from . import facts
from .facts import Equation, Fact
from .rules import findings_of, half_carry

# These primitives have a jaxpr of scalars that combines two elements.
_COMBINE = ("reduce", "scatter", "select_and", "arg")
_KERNELS = ("core_map", "pallas_call")  # their jaxprs process blocks of arrays
_CONTROL = ("cond", "scan", "while")


class Walk:
    """One walk through one traced program, in which constants became 0 at `lost` lines.

    In a `differentiated` program the rules apply only to equations that JAX transposed.
    """

    def __init__(
        self,
        program: _jaxpr.ClosedProgram,
        caller: Place,
        lost: list[Place],
        differentiated: bool = False,
    ):
        self.found: list[Finding] = []
        self.operations: list[Equation] = []
        self.unread: dict[tuple[str, str], None] = {}  # opaque operations, lines
        self.infinite: set[str] = set()  # half dtypes of constants that are infinite
        self.autocasts = False  # whether `autocast` casts products
        self._lost = lost
        self._differentiated = differentiated
        no_equation: Any = None  # contains a whole program
        outer = Equation(no_equation, lambda: caller)
        self._run(program, map(facts.of_type, bare(program).invars), outer)

    def _run(
        self, jaxpr: Program, given: Iterable[Fact], outer: Equation
    ) -> list[Fact]:
        """Returns the facts of a jaxpr's outputs from the facts of its inputs."""
        inner, consts = open_jaxpr(jaxpr)
        known: dict[Var, Fact] = dict(zip(inner.invars, given, strict=True))
        for variable, value in zip(inner.constvars, consts, strict=True):
            known[variable] = self._constant(variable, value)

        def fact_of(atom: Atom) -> Fact:
            is_known = isinstance(atom, Var)
            return known[atom] if is_known else self._constant(atom, atom.val)

        for eqn in inner.eqns:
            ins = [fact_of(atom) for atom in eqn.invars]
            read = dict.fromkeys(v for fact in ins for v in fact.growth)
            outs = self._pass(eqn, ins, outer)
            for variable, out in zip(eqn.outvars, outs, strict=True):
                known[variable] = replace(out, growth={**read, **out.growth})
        return [fact_of(atom) for atom in inner.outvars]

    def _constant(self, atom: Atom, value: PyTree) -> Fact:
        if is_half(dtype_name(atom)) and _jaxpr.has_infinite_entries(value):
            self.infinite.add(dtype_name(atom))
        return facts.of_constant(atom, value)

    def _pass(self, eqn: JaxprEqn, ins: list[Fact], outer: Equation) -> list[Fact]:
        # JAX marks the backward pass in name scopes only. Of transposed equations only
        # sums can be at fault; other problems are reported at the forward line.
        backward = outer.backward or "transpose(" in str(eqn.source_info.name_stack)
        place = functools.cache(lambda: place_of(eqn, outer.place()))
        equation = Equation(eqn, place, backward, outer.times, ins)
        loop = _jaxpr.loop_of(eqn)
        inside = equation._replace(times=outer.times * _jaxpr.repeats(eqn))
        if loop is not None:
            return self._loop(inside, loop)
        programs = [] if equation.name in _KERNELS else _jaxpr.subjaxprs(eqn)
        if programs and not equation.name.startswith(_COMBINE):
            return self._nested(inside, programs)
        if equation.name not in _jaxpr.known_primitives():
            self._leave(equation)
        return self._operation(equation)

    def _leave(self, equation: Equation) -> None:
        if "debug" not in equation.name:
            line = equation.place().where or "an unknown line"
            self.unread[equation.name, line] = None

    def _operation(self, equation: Equation) -> list[Fact]:
        self.operations.append(equation)
        outs = facts.transfer(equation)
        if not outs or (self._differentiated and not equation.backward):
            return outs
        if outs[0].epsilon == 0 and self._is_no_epsilon(equation):
            outs = [replace(outs[0], epsilon=None)]
        self.found.extend(findings_of(equation))
        return outs

    def _is_no_epsilon(self, equation: Equation) -> bool:
        """Whether a 0 begins Python's `sum([x])`, or a relu, and is no lost epsilon."""
        firsts = equation.ins if equation.name == "max" else equation.ins[:1]
        begins = all(fact.epsilon is None for fact in equation.ins)
        is_usual = begins and any(fact.bounds.single == 0 for fact in firsts)
        # The place is found last, because finding it for all would take minutes.
        return is_usual and equation.place()[:2] not in [x[:2] for x in self._lost]

    def _nested(self, equation: Equation, programs: list[Program]) -> list[Fact]:
        eqn, name = equation.eqn, equation.name
        if read := _jaxpr.bodies(eqn):
            self.autocasts |= _jaxpr.name_of_call(eqn) == CAST
            operands = [equation.ins[i] for i in read[0].places]
            results = [self._run(body.program, operands, equation) for body in read]
            outs = zip(*results, strict=True)
            return [functools.reduce(facts.join, each) for each in outs]
        for program in programs:
            self._run(program, map(facts.of_type, bare(program).invars), equation)
        if name in _CONTROL or name not in _jaxpr.known_primitives():
            self._leave(equation)
        return [facts.of_type(v) for v in eqn.outvars]

    def _loop(self, equation: Equation, loop: Loop) -> list[Fact]:
        ins = equation.ins[loop.offset :]
        end = loop.consts + loop.carry
        scanned = zip(ins[end:], bare(loop.body).invars[end:], strict=True)
        # Facts about the first carry (a zero) do not hold in other iterations.
        starts = [replace(facts.of_type(v), growth={v: ()}) for v in loop.carries]
        slices = [replace(fact, growth={**fact.growth, v: None}) for fact, v in scanned]
        outs = self._run(loop.body, [*ins[: loop.consts], *starts, *slices], equation)
        if equation.backward or not self._differentiated:
            for carry, out in zip(loop.carries, outs, strict=False):
                growth = out.growth.get(carry)
                self.found.extend(half_carry(carry, growth, loop, equation.backward))
        ends = [facts.join(a, b) for a, b in zip(starts, outs, strict=False)]
        return [replace(fact, growth={}) for fact in [*ends, *outs[loop.carry :]]]
