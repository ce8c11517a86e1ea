"""Walks through a traced program and applies the rules, equation by equation.

Facts flow along: into nested jaxprs with what is known about their arguments, and
around loops until what is known about their carries holds in every iteration.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ... import _jaxpr as jaxprs
from ..._jaxpr import (
    Loop,
    dtype_name,
    fits,
    is_literal,
    open_jaxpr,
    words,
)
from .constants import starts_a_sum
from .drafts import Draft, Found, Scope, Step, Visit
from .facts import Fact, is_half, join, of_atom, of_constant, of_dtype, widened
from .loops import counted, half_carries
from .rules import faults, is_narrowed_by_user
from .source import Place, place_of
from .transfer import transfer

# These have a jaxpr of scalars that says how two entries are combined.
_COMBINE = ("reduce", "scatter", "select_and", "arg")
_OPAQUE = words(
    "core_map custom_call ffi_call io_callback pallas_call pure_callback "
    "tpu_custom_call triton_call"
)
_ROUNDS = 3  # of a loop, after which what is known about its carries rarely changes
_CONTROL_FLOW = words("cond scan while")  # no calls, whatever their layout
_RENAMES = words("abs convert_element_type copy neg reshape squeeze transpose")


class Walk:
    """One walk through one traced program.

    Attributes:
      found: what the rules found, in the order of the walk.
      visits: the equations that were passed.
      unread: (primitive, place) of what could not be looked into.
      ruled: rules that found something within functions with derivative rules of their
        own, by the line of the call, where JAX has the operations of these rules.
      infinite_constants: half dtypes of constants that are infinite in the trace.
      clock: position in the program that the walk has come to.
    """

    def __init__(self, mechanical_only: bool = False):
        """Starts a walk; the rules may apply only to what JAX has transposed."""
        self.found: list[Found] = []
        self.visits: list[Visit] = []
        self.unread: list[tuple[str, Place]] = []
        self.ruled: dict[Any, set[str]] = {}
        self.infinite_constants: set[str] = set()
        self.clock = 0
        self._mechanical_only = mechanical_only
        self._silent = 0
        self._names: dict[int, Any] = {}

    def run(self, jaxpr: Any, facts: Sequence[Fact], scope: Scope) -> list[Fact]:
        """What is known about the outputs of a jaxpr, given facts about its inputs."""
        inner, consts = open_jaxpr(jaxpr)
        known = {
            id(variable): of_constant(value, dtype_name(variable))
            for variable, value in zip(inner.constvars, consts, strict=True)
        }
        self._note_infinite(zip(inner.constvars, consts, strict=True))
        known |= {id(v): fact for v, fact in zip(inner.invars, facts, strict=True)}

        def fact_of(atom: Any) -> Fact:
            fact = None if is_literal(atom) else known.get(id(atom))
            return of_atom(atom) if fact is None else fact

        for eqn in inner.eqns:
            literals = [atom for atom in eqn.invars if is_literal(atom)]
            self._note_infinite((atom, atom.val) for atom in literals)
            ins = [fact_of(atom) for atom in eqn.invars]
            outs = self._pass(eqn, ins, scope)
            known |= {id(v): fact for v, fact in zip(eqn.outvars, outs, strict=True)}
        return [fact_of(atom) for atom in inner.outvars]

    def _note_infinite(self, constants: Iterable[tuple[Any, Any]]) -> None:
        for atom, value in constants:
            dtype = dtype_name(atom)
            if is_half(dtype) and jaxprs.has_infinite_entries(value):
                self.infinite_constants.add(dtype)

    def _pass(self, eqn: Any, ins: list[Fact], scope: Scope) -> list[Fact]:
        self.clock += 1
        # JAX marks the backward pass in the names only. Of what it made itself by
        # transposing, only sums (over entries, devices, iterations) can be at fault.
        # Everything else is reported at the forward line.
        transposed = "transpose(" in str(eqn.source_info.name_stack)
        scope = scope._replace(
            outer=_lazily(eqn, scope.outer),
            backward=scope.backward or transposed,
            mechanical=scope.mechanical or transposed,
        )
        name, bodies = eqn.primitive.name, jaxprs.subjaxprs(eqn)
        try:
            if name in _OPAQUE:
                raise NotImplementedError(f"{name} has no jaxpr to read")
            loop = jaxprs.loop_of(eqn)
            if loop is not None:
                return self._loop(eqn, loop, ins, scope)
            if bodies and not name.startswith(_COMBINE):
                before = len(self.found)
                outs = self._nested(eqn, bodies, ins, scope)
                if name.startswith(("custom_jvp", "custom_vjp")):
                    rules = {f.draft.rule for f in self.found[before:]}
                    self.ruled.setdefault(scope.outer()[:2], set()).update(rules)
                return outs
            if name not in jaxprs.known_primitives():
                self._leave_unread(eqn, scope)
            return self._operation(eqn, ins, scope)
        except Exception:
            # Another JAX release may lay the parameters of an equation out differently.
            self._leave_unread(eqn, scope)
            return [of_dtype(dtype_name(v)) for v in eqn.outvars]

    def _leave_unread(self, eqn: Any, scope: Scope) -> None:
        silent = self._silent or self._mechanical_only
        if not silent and "debug" not in eqn.primitive.name:
            self.unread.append((eqn.primitive.name, scope.outer()))

    def _operation(self, eqn: Any, ins: list[Fact], scope: Scope) -> list[Fact]:
        outs = transfer(eqn, ins)
        self._name_results(eqn)
        if self._silent:
            return outs
        if outs and outs[0].guard == 0 and starts_a_sum(eqn, ins, scope.outer):
            outs = [dataclasses.replace(outs[0], guard=None)]
        # Places are found only where something is: to read the frames of every equation
        # would take minutes (test_an_unrolled_transformer_of_12_layers_in_seconds).
        visit = Visit(eqn, scope.outer, scope.backward, scope.times, self.clock)
        self.visits.append(visit)
        if not outs or (self._mechanical_only and not scope.mechanical):
            return outs
        names = [self._name_of(atom) for atom in eqn.invars[:2]]
        same = len(names) == 2 and names[0] == names[1]
        step = Step(eqn, ins, outs[0], scope.outer, scope.mechanical, same)
        cause = max((fact.guarded_at for fact in ins), default=-1)
        for draft in faults(step):
            self._record(draft, eqn, scope, cause)
        if not scope.mechanical and is_narrowed_by_user(step):
            outs = [dataclasses.replace(outs[0], narrowed=step.place().function)]
        return outs

    def _record(self, draft: Draft, eqn: Any, scope: Scope, cause: int = -1) -> None:
        place, name = scope.outer(), eqn.primitive.name
        found = Found(draft, place, name, scope.backward, self.clock, cause)
        self.found.append(found)

    def _name_results(self, eqn: Any) -> None:
        """Gives equal names to results that are made alike from the same value."""
        for variable in eqn.outvars:
            self._names[id(variable)] = object()
        # `h.astype(f32) * h.astype(f32)` are two casts of one value, and a square. JAX
        # does not merge them in the trace.
        if eqn.primitive.name in _RENAMES:
            parameters = str(sorted(eqn.params.items()))
            name = (eqn.primitive.name, parameters, self._name_of(eqn.invars[0]))
            self._names[id(eqn.outvars[0])] = name

    def _name_of(self, atom: Any) -> Any:
        return object() if is_literal(atom) else self._names.get(id(atom), id(atom))

    def _nested(
        self, eqn: Any, bodies: list[Any], ins: list[Fact], scope: Scope
    ) -> list[Fact]:
        # In shard_map shapes are those of one device, but all of them compute.
        scope = scope._replace(times=scope.times * jaxprs.mesh_size(eqn))
        outputs = len(eqn.outvars)
        is_branch = eqn.primitive.name == "cond"
        if is_branch and all(fits(body, len(ins) - 1, outputs) for body in bodies):
            results = [
                self._call(body, eqn.invars[1:], ins[1:], scope) for body in bodies
            ]
            cases = zip(*results, strict=True)
            return [functools.reduce(join, facts) for facts in cases]
        if eqn.primitive.name in _CONTROL_FLOW:
            self._leave_unread(eqn, scope)
        elif len(bodies) == 1 and fits(bodies[0], len(ins), outputs):
            return self._call(bodies[0], eqn.invars, ins, scope)
        elif eqn.primitive.name not in jaxprs.known_primitives():
            self._leave_unread(eqn, scope)
        for body in bodies:
            inner, _ = open_jaxpr(body)
            self.run(body, [of_atom(v) for v in inner.invars], scope)
        return [of_dtype(dtype_name(v)) for v in eqn.outvars]

    def _call(
        self, body: Any, atoms: Sequence[Any], ins: list[Fact], scope: Scope
    ) -> list[Fact]:
        inner, _ = open_jaxpr(body)
        for variable, atom in zip(inner.invars, atoms, strict=True):
            self._names[id(variable)] = self._name_of(atom)
        return self.run(body, ins, scope)

    def _loop(self, eqn: Any, loop: Loop, ins: list[Fact], scope: Scope) -> list[Fact]:
        # A cast before a loop and one back within it are not side by side: every
        # iteration works on the half value.
        ins = [dataclasses.replace(fact, narrowed="") for fact in ins]
        consts = ins[loop.offset :][: loop.consts]
        rest = ins[loop.offset + loop.consts :]
        carry, scanned = self._steady(loop, consts, rest, scope)
        inside = scope._replace(times=scope.times * (loop.trips or 1))
        outs = self.run(loop.body, [*consts, *carry, *scanned], inside)
        condition = eqn.params.get("cond_jaxpr")
        if condition is not None:
            self.run(condition, [*ins[: loop.offset], *carry], inside)
        for draft, adding in half_carries(loop, scope.mechanical):
            if not self._silent and (scope.mechanical or not self._mechanical_only):
                place = _lazily(adding, scope.outer)
                self._record(draft, adding, scope._replace(outer=place))
        ends = [join(a, b) for a, b in zip(carry, outs, strict=False)]
        return [*ends, *outs[loop.carry :]]

    def _steady(
        self, loop: Loop, consts: list[Fact], rest: list[Fact], scope: Scope
    ) -> tuple[list[Fact], list[Fact]]:
        """What is known about carries in every iteration, and of the scanned inputs."""
        start, scanned = rest[: loop.carry], rest[loop.carry :]
        counters = {i: counted(loop, i, fact) for i, fact in enumerate(start)}
        carry = [counters[i] or fact for i, fact in enumerate(start)]
        # What is known about a carry at first (a zero) holds in no other iteration. So
        # the body is walked until its facts stay the same, without findings, and then
        # once more with them.
        self._silent += 1
        try:
            for _ in range(_ROUNDS):
                outs = self.run(loop.body, [*consts, *carry, *scanned], scope)
                new = [
                    counters[i] or widened(carry[i], outs[i], dtype_name(variable))
                    for i, variable in enumerate(loop.carries)
                ]
                if new == carry:
                    break
                carry = new
        finally:
            self._silent -= 1
        return carry, scanned


def _lazily(eqn: Any, outer: Callable[[], Place]) -> Callable[[], Place]:
    return functools.cache(lambda: place_of(eqn, outer()))
