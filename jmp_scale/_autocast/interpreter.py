"""Runs a float32 program unit by unit, as its plan says.

How a product runs is for a subclass to say, in one method: `autocast` makes it half
precision, and the probe of `sensitive_products` where a flag is set.
"""

import abc
import dataclasses
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from .. import _jaxpr
from .._jaxpr import Atom, JaxprEqn, Program, Var
from .._validation import warn
from . import operations as ops
from .higher_order import RUNS, Part
from .identities import with_cotangent_of_its_dtype, with_value
from .marks import Names
from .plan import Origin, Plan, Unit, make_plan
from .stored import (
    Stored,
    Value,
    array_of,
    looked_up,
    loops_that_add_up,
    places_of,
    stored,
)

T = TypeVar("T")
# Files that the user did not write.
_INSTALLED = re.compile(r"/lib/python3|-packages\b")
ByVariable = dict[Var, Any]  # arrays, or stored ones


class Values(ByVariable):
    """The values so far. Each reading of a stored one has a cotangent of its own."""

    def __getitem__(self, v: Var) -> jax.Array:
        return array_of(super().__getitem__(v))

    def as_stored(self, atom: Atom) -> Value:
        """The value itself."""
        return super().__getitem__(atom) if isinstance(atom, Var) else atom.val


class TraceCache:
    """Makes one function of equal parts of a program, so that JAX traces it once."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}

    def made(self, make: Callable[..., T], *facts: Hashable) -> T:
        """`make(*facts)`, or what it made of equal facts before."""
        key = make, facts
        try:
            hash(key)
        except TypeError:  # objects of hijax have parameters of any kind
            return make(*facts)
        if key not in self._made:
            self._made[key] = make(*facts)
        return self._made[key]


@dataclasses.dataclass(eq=False)
class Notes:
    """Notes on one call of a program, with all that is nested in it."""

    warned: set[str]  # of these there is no further warning
    is_unscaled: bool = False  # whether no loss scale reaches its gradients
    any_half: bool = False  # whether a product became half precision


@dataclasses.dataclass(frozen=True)
class Interpreter(abc.ABC):
    """Runs programs by their plans. Equal ones share traces of equal programs."""

    forward: np.dtype  # that of the products of the forward pass
    backward: np.dtype
    names: Names
    traces: TraceCache = dataclasses.field(compare=False)
    notes: Notes = dataclasses.field(compare=False)
    recompute: bool = True
    share_casts: bool = False
    # Precision of products that stay float32 and have none of their own.
    setting: str | None = None
    in_loop: bool = False
    in_rule: bool = False  # of a `custom_jvp`

    @abc.abstractmethod
    def run_products(
        self, unit: Unit, plan: Plan, env: Values, halves: ByVariable
    ) -> ByVariable:
        """The float32 values that an island makes, and the products that read it.

        `env` has the values so far, `halves` half-precision copies, to which it adds.
        """

    def within(self, unit: Unit, part_of: Part) -> "Interpreter":
        """The interpreter of what is nested in the equation of a unit."""
        return dataclasses.replace(
            self,
            # A rule is transposed: what is computed again has no derivative there.
            recompute=self.recompute and part_of not in ("rule", "policy"),
            in_loop=self.in_loop or part_of == "loop",
            in_rule=self.in_rule or part_of == "rule",
        )

    def run(
        self, jaxpr: Program, origins: Sequence[Origin], *values: Value
    ) -> list[jax.Array]:
        """The results of a program whose inputs have these origins."""
        are_stored = places_of(values)
        plan = make_plan(
            jaxpr,
            origins,
            self.forward,
            self.names,
            share_casts=self.share_casts,
            join=self.recompute,
            stored=are_stored,
        )
        inputs = [*values, *(values[i] for i in plan.copied)]
        env = Values(zip(plan.jaxpr.invars, inputs, strict=True))
        env.update(plan.constants)
        for v in plan.jaxpr.invars:
            if v in plan.shared:
                env[v] = self.rounded(env[v])
        halves: ByVariable = {}
        for unit in plan.units:
            equations = unit.jaxpr.eqns or unit.products[0][0].jaxpr.eqns
            with equations[-1].ctx.manager:  # settings and mesh, as they were traced
                if unit.kind == "half":
                    made = self.run_products(unit, plan, env, halves)
                else:
                    made = self._run_traced(unit, plan, env)
            if are_stored:  # what is made of weights alone is a weight, as `w.T` is
                for v in plan.origins.keys() & made.keys():
                    made[v] = stored(array_of(made[v]))
            self.name(plan, made, halves)
            env.update(made)
        return _jaxpr.results_of(plan.jaxpr, env)

    def name(self, plan: Plan, made: ByVariable, halves: ByVariable) -> None:
        """Gives results of products their names; a policy saves what has one."""
        for v in plan.named.keys() & made.keys():
            half = checkpoint_name(made[v].astype(self.forward), plan.named[v])
            made[v], halves[v] = half.astype(made[v].dtype), half

    def rounded(self, x: jax.Array) -> jax.Array:
        """`x` and its cotangent in half precision: one array serves all readers."""
        dtypes = self.backward, self.forward
        return with_value(*(x.astype(d).astype(x.dtype) for d in dtypes))

    def _run_traced(self, unit: Unit, plan: Plan, env: Values) -> ByVariable:
        """Runs equations as they are, or one whose nested jaxprs hold products."""
        outputs = _jaxpr.variables(unit.jaxpr.outvars)

        def change(v: Var, x: jax.Array) -> jax.Array:
            return self.rounded(x) if v in plan.shared else x

        eqn = unit.jaxpr.eqns[0]
        if unit.kind == "other" and eqn.primitive.name == "gather":
            values = [*map(env.as_stored, eqn.invars)]
            if isinstance(values[0], Stored):
                with _jaxpr.scope(unit.scope):
                    return {eqn.outvars[0]: looked_up(eqn, values)}
        inputs = [env[v] for v in unit.jaxpr.invars]
        with _jaxpr.scope(unit.scope):
            results = self._call(unit, plan, env) if unit.kind == "call" else None
            if unit.kind == "own":
                ((product, _),) = unit.products
                results = [product.run(product.dtype or self.forward, *inputs)]
                self.notes.any_half = True
            if results is None or _jaxpr.name_of(eqn) == "custom_jvp_call":
                self._warn_of_half_sums(eqn, env)
            if results is None:
                if _jaxpr.subjaxprs(eqn):
                    inputs = [*map(with_cotangent_of_its_dtype, inputs)]
                jaxpr = _jaxpr.with_precision(unit.jaxpr, self.setting)
                results = _jaxpr.evaluate_all(_jaxpr.bare(jaxpr), inputs, change=change)
            else:
                results = map(change, outputs, results)
        return dict(zip(outputs, results, strict=True))

    def _warn_of_half_sums(self, eqn: JaxprEqn, env: Values) -> None:
        if not places_of([*map(env.as_stored, eqn.invars)]):
            return
        for loop in loops_that_add_up(eqn):
            place = _place_of([loop], eqn)
            if place not in self.notes.warned:
                self.notes.warned.add(place)
                warn(
                    f"autocast: a loop{place} adds up the gradient of a weight in half "
                    "precision, as the weight is stored, because autocast does not "
                    "change the function around it; cast the weight to float32 before "
                    "the loop: w.astype(jnp.float32)"
                )

    def _call(self, unit: Unit, plan: Plan, env: Values) -> list[jax.Array] | None:
        """Runs an equation whose nested jaxprs hold products, if that can be done."""
        (eqn,) = unit.jaxpr.eqns
        origins = [
            plan.origins.get(v, Origin.DATA) if isinstance(v, Var) else Origin.ARGUMENTS
            for v in eqn.invars
        ]

        def body(
            jaxpr: Program,
            *,
            places: Sequence[int | None],
            part_of: Part,
            stored: Sequence[int] = (),
        ) -> Callable[..., list[jax.Array]]:
            inner = tuple(Origin.DATA if i is None else origins[i] for i in places)
            nested = self.within(unit, part_of)
            facts = nested, jaxpr, inner, tuple(stored)
            return self.traces.made(_nested_function, *facts)

        values = [*map(env.as_stored, eqn.invars)]
        run = RUNS.get(_jaxpr.name_of(eqn))
        results = run(eqn, values, body) if run else None
        name, warned = _jaxpr.name_of_call(eqn), self.notes.warned
        if results is None and name not in warned and ops.has_products(eqn):
            warned.add(name)
            products = filter(ops.becomes_half, _jaxpr.equations_within(eqn))
            warn(
                f"autocast: {name} ({_jaxpr.name_of(eqn)}) holds matrix products"
                f"{_place_of(products, eqn)} and cannot be read: they stay float32; "
                "mark it by jmp_scale.in_half to give it half precision, or by "
                "jmp_scale.keep_float32; of a solver, cast the function that it calls"
            )
        return results


def _place_of(made: Iterable[JaxprEqn], call: JaxprEqn) -> str:
    """The user's line in which a call makes one of these, or else that of the call."""
    for eqn in (*made, call):
        for frame in getattr(eqn.source_info.traceback, "frames", ()):
            if not _INSTALLED.search(frame.file_name):
                return f" ({frame.file_name}:{frame.line_num}, {frame.function_name})"
    return ""


def _nested_function(
    interpreter: Interpreter,
    jaxpr: Program,
    origins: tuple[Origin, ...],
    places: tuple[int, ...],
) -> Callable[..., list[jax.Array]]:
    """A function of a jaxpr's inputs, of which those at `places` are stored ones."""

    def run(*values: Value) -> list[jax.Array]:
        arrays = [*values]
        for i in places:
            arrays[i] = stored(array_of(arrays[i]))
        return interpreter.run(jaxpr, origins, *arrays)

    return run
