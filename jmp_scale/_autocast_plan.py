"""What of a float32 program runs in half precision: a plan, read off its jaxpr.

Matrix products and convolutions become half precision, the rest stays as traced. The
cheap operations between products form islands. An island and the products that
read its results are a unit: the backward pass computes the island once more, and takes
from that run its own derivative and the operands of the products' gradients. For

```
h = x + gelu(x @ w1) @ w2
y = normalize(h) @ w3
```

it keeps `x`, an argument, and in half precision, as products gave them, `x @ w1` and
`gelu(...) @ w2`. It makes again what gelu gives, the sum `h`, and its norm. Nothing is
rounded for the backward pass alone: it reads an array that the forward pass read, or
what is computed from such arrays once more.

Nothing is run here, and nothing depends on values.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import jax
from jax import lax
from jax.core import Tracer

from . import _autocast_kept, _jaxpr
from ._jaxpr import PRODUCTS, is_literal, words
from ._marks import Names

# Linear operations on one array that only move its entries.
_MOVES = words("copy copy_p reshape rev sharding_constraint squeeze transpose")
# What costs less to compute again than to keep.
_CHEAP = _MOVES | words("""
    abs acos acosh add add_any and argmax argmin asin asinh atan atan2 atanh
    bitcast_convert_type broadcast_in_dim cbrt ceil clamp concatenate conj
    convert_element_type cos cosh digamma div dynamic_slice eq erf erf_inv erfc exp exp2
    expm1 floor gather ge gt imag integer_pow iota is_finite le lgamma log log1p
    logistic lt max min mul name ne neg nextafter not optimization_barrier or pad
    pbroadcast pcast population_count pow pvary real reduce_and reduce_max reduce_min
    reduce_or reduce_precision reduce_prod reduce_sum rem round rsqrt select_n
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh slice split sqrt
    square stop_gradient sub tan tanh xor
""")
_CALLS = words("closed_call core_call jit pjit")
_INTEGERS = "bool", "int", "uint"
_HALF = "half precision"  # no reason to stay float32
# So many operations on arguments alone are repeated in each island that reads them.
_MOST_REPEATED = 32


@dataclasses.dataclass(frozen=True)
class Step:
    """Equations that run together. Equal ones, as of equal layers, are traced once.

    Attributes:
      kind: "product"; "island", of cheap equations that the backward pass repeats;
        "call", one equation whose nested jaxprs hold products; "other", as traced.
      jaxpr: the equations, a product's last. Its inputs and outputs are variables of
        the program.
      scope: the scopes in which all equations were, which they no longer name.
      likeness: what equal steps share.
      moves: how many move the entries of the first operand; then those of the second.
      weights: for each operand of a matrix product, whether it is computed from
        arguments alone. The transposes of other products take operands of one dtype.
      shared: positions of the results of which all operations read one cast.
    """

    kind: Literal["product", "island", "call", "other"]
    jaxpr: Any = dataclasses.field(compare=False)
    scope: Any = dataclasses.field(compare=False)
    likeness: Any
    moves: int = 0
    weights: tuple[bool, ...] = ()
    shared: tuple[int, ...] = ()

    @property
    def context(self) -> Any:
        """Of JAX's settings and mesh, as its equations were traced."""
        return self.jaxpr.eqns[-1].ctx.manager

    @property
    def operands(self) -> list[Any]:
        """The two variables that a product multiplies."""
        return self.jaxpr.invars[:2] if self.kind == "product" else []


class Unit(NamedTuple):
    """A step, and if it is an island the products that read what it makes again.

    Attributes:
      step: what runs first.
      products: run next. The backward pass computes operands of each from the island.
      kept: positions of the results that the backward pass keeps in half precision, as
        operands of products, since it would have to keep more to make them again.
      softmaxes: positions of those from which a softmax takes its derivative.
      streams: positions of the results that it keeps as they are, in place of what
        they were computed from.
    """

    step: Step
    products: tuple[Step, ...] = ()
    kept: tuple[int, ...] = ()
    softmaxes: tuple[int, ...] = ()
    streams: tuple[int, ...] = ()

    @property
    def island(self) -> Any:
        """The jaxpr of the island, or None."""
        return self.step.jaxpr if self.step.kind == "island" else None

    @property
    def results(self) -> list[Any]:
        """Variables that the island makes."""
        return self.island.outvars if self.island else []

    @property
    def made(self) -> list[Any]:
        """Variables that the products make."""
        return [v for p in self.products for v in p.jaxpr.outvars]

    def apart(self) -> "list[Unit]":
        """The island and each product alone."""
        own = Unit(self.step, self.products if not self.island else ())
        return [own, *(Unit(p, (p,)) for p in self.products if self.island)]


class Plan(NamedTuple):
    """A program as a sequence of units.

    Attributes:
      jaxpr: the program, with calls inlined that hold products or cheap equations.
      constants: values of its constants, by variable.
      units: in the order in which they run.
      given: arguments and constants, which the backward pass may keep as they are.
      weights: what is computed from them alone.
      halves: float32 variables whose half-precision copies are exact.
      shared: those of which all operations read one cast.
    """

    jaxpr: Any
    constants: dict[Any, Any]
    units: list[Unit]
    given: set[Any]
    weights: set[Any]
    halves: set[Any]
    shared: set[Any]


def make_plan(
    jaxpr: Any,
    weights: Sequence[bool],
    names: Names = Names(),  # noqa: B008
    share_casts: bool = False,
) -> Plan:
    """The plan of a program.

    Args:
      jaxpr: the program.
      weights: whether each input is computed from arguments alone. The backward pass
        keeps these anyway.
      names: what stays float32.
      share_casts: whether all operations read the cast of what a product reads.
    """
    flat, constants = _inlined(jaxpr, names)
    pairs = zip(flat.invars, weights, strict=True)
    given = {v for v, is_weight in pairs if is_weight} | {*constants}
    numbers = {v for v, x in constants.items() if not isinstance(x, Tracer)}
    planner = _Planner(flat, given, numbers, names)
    return planner.plan(constants, share_casts)


def has_product(jaxpr: Any) -> bool:
    """Whether a program holds a product that becomes half precision."""
    return any(map(_is_product, _jaxpr.equations(jaxpr)))


def is_float32(atom: Any) -> bool:
    return _jaxpr.dtype_name(atom) == "float32"


def variables(atoms: Iterable[Any]) -> list[Any]:
    return [v for v in atoms if not is_literal(v)]


def why_float32(jaxpr: Any) -> str:
    """Why no product of a program becomes half precision; "" if some are already."""
    products = [e for e in _jaxpr.equations(jaxpr) if e.primitive.name in PRODUCTS]
    reasons = dict.fromkeys(_reason(e) or "kept, or unreadable" for e in products)
    if _HALF in reasons:
        return ""
    return "they have " + ", ".join(reasons) if reasons else "there is none"


def _reason(eqn: Any) -> str | None:
    """Why a product stays float32; None if it becomes half precision."""
    dtypes = {_jaxpr.dtype_name(v) for v in (*eqn.invars[:2], eqn.outvars[0])}
    if not dtypes.isdisjoint(("float16", "bfloat16")):
        return _HALF
    if dtypes != {"float32"}:
        return "dtype " + " and ".join(sorted(dtypes))
    if {*jax.tree.leaves(eqn.params.get("precision"))} - {lax.Precision.DEFAULT}:
        return "a precision of their own"
    if eqn.primitive.name == "dot_general" and _is_sum(eqn):
        return "nothing to do for a matrix unit (sums, outer products)"
    return None


def _is_product(eqn: Any) -> bool:
    return eqn.primitive.name in PRODUCTS and _reason(eqn) is None


def _is_sum(eqn: Any) -> bool:
    """Whether a matrix unit has nothing to do, for each index of the batch.

    One operand is a vector, or nothing is contracted: positions times frequencies.
    """
    sizes = []
    for v, contracting, batch in zip(
        eqn.invars, *eqn.params["dimension_numbers"], strict=True
    ):
        own = {*range(v.aval.ndim)}.difference(contracting, batch)
        sizes += [
            math.prod(v.aval.shape[d] for d in dims) for dims in (own, contracting)
        ]
    return 1 in sizes  # which may be symbolic: not 1


def _inlined(jaxpr: Any, names: Names) -> tuple[Any, dict[Any, Any]]:
    """A jaxpr with calls opened, and its constants. What costs more stays a call."""
    constants: dict[Any, Any] = {}
    equations: list[Any] = []

    def add(body: Any, inputs: Sequence[Any], scopes: Any) -> list[Any]:
        inner, values = _jaxpr.open_jaxpr(body)
        fresh = [_jaxpr.variable(v.aval) for v in inner.constvars]
        constants.update(zip(fresh, values, strict=True))
        renamed = dict(zip(inner.constvars, fresh, strict=True))
        renamed |= zip(inner.invars, inputs, strict=True)

        def named(atoms: Iterable[Any]) -> list[Any]:
            return [v if is_literal(v) else renamed[v] for v in atoms]

        for eqn in inner.eqns:
            inputs = named(eqn.invars)
            if _is_open(eqn, names):
                within = _jaxpr.scopes_within(scopes, eqn)
                outputs = add(_jaxpr.subjaxprs(eqn)[0], inputs, within)
            else:
                outputs = [_jaxpr.variable(v.aval) for v in eqn.outvars]
                eqn = _jaxpr.in_scopes(eqn, scopes)
                equations.append(eqn.replace(invars=inputs, outvars=outputs))
            renamed.update(zip(eqn.outvars, outputs, strict=True))
        return named(inner.outvars)

    outer, _ = _jaxpr.open_jaxpr(jaxpr)
    outputs = add(jaxpr, outer.invars, None)
    return _jaxpr.part(outer, equations, outer.invars, outputs), constants


def _is_open(eqn: Any, names: Names) -> bool:
    bodies = _jaxpr.subjaxprs(eqn)
    if eqn.primitive.name not in _CALLS or len(bodies) != 1:
        return False
    if has_product(bodies[0]):
        return not names.keep(eqn)
    return _is_cheap(eqn)


class _Planner:
    """Facts about the equations of a program without calls that hold products.

    The level of a value is the largest number of equations that are not cheap on a path
    to it. The cheap equations of one level are an island: whatever lies between two of
    them is of their level too, so the islands have an order.
    """

    def __init__(
        self,
        jaxpr: Any,
        given: set[Any],
        numbers: set[Any],
        names: Names,
    ) -> None:
        self.jaxpr, self.given, self.equations = jaxpr, given, jaxpr.eqns
        self.weights, self.numbers = {*given}, {*numbers}
        self.maker = {v: i for i, e in enumerate(jaxpr.eqns) for v in e.outvars}
        self.level = dict.fromkeys([*jaxpr.invars, *given], 0)
        self.repeats = dict.fromkeys(given, 0)  # equations that make a value anew
        self.kinds: list[Any] = []
        self.starts: list[int] = []  # level of an equation's inputs
        differentiable = {v for v in self.level if is_float32(v)}
        last_effect = 0
        for eqn in self.equations:
            inputs, kind = variables(eqn.invars), self._kind(eqn, names)
            start = max([self.level[v] for v in inputs], default=0)
            self._note_origin(eqn, inputs, kind)
            if eqn.effects:  # which keep their order
                start = max(start, last_effect)
                last_effect = start + 1
            floats = bool(differentiable.intersection(inputs))
            if kind in ("island", "other") and not (floats or eqn.effects):
                kind, start = "other", -1  # as masks, which run first
            else:
                differentiable.update(eqn.outvars)
            self.kinds.append(kind)
            self.starts.append(start)
            self.level |= dict.fromkeys(eqn.outvars, start + (kind != "island"))
        self._sink()

    def _kind(self, eqn: Any, names: Names) -> str:
        if _is_product(eqn):
            exact = self.numbers.issuperset(variables(eqn.invars[:2]))
            return "other" if exact or names.keep(eqn) else "product"
        if _is_cheap(eqn):
            return "island"
        has_products = any(map(has_product, _jaxpr.subjaxprs(eqn)))
        return "call" if has_products and not names.keep(eqn) else "other"

    def _note_origin(self, eqn: Any, inputs: Sequence[Any], kind: str) -> None:
        """Whether results come from arguments alone, or from integers and constants."""
        integers = [v for v in inputs if _jaxpr.dtype_name(v).startswith(_INTEGERS)]
        if kind != "call" and self.numbers.issuperset({*inputs}.difference(integers)):
            self.numbers.update(eqn.outvars)
        if kind in ("island", "other") and self.weights.issuperset(inputs):
            self.weights.update(eqn.outvars)
        if kind == "island" and all(v in self.repeats for v in inputs):
            count = 1 + sum(self.repeats[v] for v in inputs)
            # What a table gives is an activation, as of embeddings.
            if count <= _MOST_REPEATED and eqn.primitive.name != "gather":
                self.repeats.update(dict.fromkeys(eqn.outvars, count))

    def _sink(self) -> None:
        """Moves what only later islands read into the first: one array less is kept."""
        first = dict.fromkeys(variables(self.jaxpr.outvars), -1)
        for index, eqn in reversed([*enumerate(self.equations)]):
            inputs, is_island = variables(eqn.invars), self.kinds[index] == "island"
            entries = sum(map(_jaxpr.size, inputs))  # of one array and small ones
            if is_island and entries * 8 <= _jaxpr.size(eqn.outvars[0]) * 9:
                reader = min(first.get(v, -1) for v in eqn.outvars)
                self.starts[index] = max(self.starts[index], reader)
            start = self.starts[index] if is_island else -1
            first |= {v: min(first.get(v, start), start) for v in inputs}

    def plan(self, constants: dict[Any, Any], share_casts: bool) -> Plan:
        groups = self._groups()
        halves = {
            v
            for i, k in enumerate(self.kinds)
            if k == "product"
            for v in self.equations[i].outvars
        }
        operands = {
            self._side(v)[0]
            for i, k in enumerate(self.kinds)
            if k == "product"
            for v in variables(self.equations[i].invars[:2])
        }
        shared = operands - self.weights - halves if share_casts else set()
        steps = self._steps(groups, shared)
        halves |= shared
        units = _units(steps, halves, self.given)
        return Plan(
            self.jaxpr, constants, units, self.given, self.weights, halves, shared
        )

    def _steps(self, groups: list[list[int]], shared: set[Any]) -> list[Step]:
        """Makes the steps, the last one first: what nobody reads is left out."""
        steps: list[Step] = []
        wanted = {*variables(self.jaxpr.outvars)}
        for members in reversed(groups):
            kind, eqn = self.kinds[members[0]], self.equations[members[0]]
            facts: Any = {}
            if kind == "island":
                part = self._part(members, wanted)
            elif kind == "product":
                part, facts["moves"], facts["weights"] = self._product(eqn)
            else:
                inputs = dict.fromkeys(variables(eqn.invars))
                part = _jaxpr.part(self.jaxpr, [eqn], inputs, eqn.outvars)
            places = enumerate(part.outvars)
            facts["shared"] = tuple(i for i, v in places if v in shared)
            if eqn.effects or wanted.intersection(part.outvars):
                scope, part = _jaxpr.without_common_scope(part)
                likeness = _jaxpr.likeness(part)
                steps.append(Step(kind, part, scope, likeness, **facts))
                wanted.update(part.invars)
        return steps[::-1]

    def _groups(self) -> list[list[int]]:
        """Which equations run together, in the order in which they run."""
        groups: dict[tuple[int, int, str], list[int]] = {}
        for index, kind in enumerate(self.kinds):
            key = self.starts[index], index, ""
            if kind == "island":  # runs before what else reads values of its level
                mesh = self.equations[index].outvars[0].aval.sharding.mesh
                key = self.starts[index], -1, str(mesh.axis_types)
            groups.setdefault(key, []).append(index)
        return [groups[key] for key in sorted(groups)]

    def _part(self, members: list[int], wanted: set[Any]) -> Any:
        """What of an island is wanted, with what it computes from arguments alone."""
        outputs = [v for i in members for v in self.equations[i].outvars if v in wanted]
        allowed, needed, todo = {*members}, set[int](), [*outputs]
        inputs: dict[Any, None] = {}
        while todo:
            v = todo.pop()
            maker = self.maker.get(v)
            if maker is None or not (maker in allowed or v in self.repeats):
                inputs[v] = None
            elif maker not in needed:
                needed.add(maker)
                todo += variables(self.equations[maker].invars)
        equations = [self.equations[i] for i in sorted(needed)]
        return _jaxpr.part(self.jaxpr, equations, inputs, outputs)

    def _product(self, eqn: Any) -> tuple[Any, int, tuple[bool, ...]]:
        (lhs, left), (rhs, right) = map(self._side, eqn.invars[:2])
        inputs = [lhs, rhs, *variables(eqn.invars[2:])]
        part = _jaxpr.part(self.jaxpr, [*left, *right, eqn], inputs, eqn.outvars)
        is_dot = eqn.primitive.name == "dot_general"
        weights = tuple(is_dot and v in self.weights for v in (lhs, rhs))
        return part, len(left), weights

    def _side(self, v: Any) -> tuple[Any, list[Any]]:
        """An operand of a product before its entries are moved, and what moves them."""
        moves: list[Any] = []
        while (i := self.maker.get(v)) is not None:
            eqn = self.equations[i]
            if eqn.primitive.name not in _MOVES or len(variables(eqn.invars)) != 1:
                break
            moves.insert(0, eqn)
            v = eqn.invars[0]
        return v, moves


def _is_cheap(eqn: Any) -> bool:
    """Whether an equation costs less to compute again than to keep."""
    bodies, name = _jaxpr.subjaxprs(eqn), eqn.primitive.name
    if eqn.effects:
        return False
    if name == "reshard":  # to another mesh it is a border between steps
        return eqn.invars[0].aval.sharding.mesh == eqn.outvars[0].aval.sharding.mesh
    if not bodies:
        return name in _CHEAP
    return (name in _CALLS or name == "custom_jvp_call") and all(
        _is_cheap(inner) for body in bodies for inner in _jaxpr.open_jaxpr(body)[0].eqns
    )


def _units(steps: list[Step], halves: set[Any], given: set[Any]) -> list[Unit]:
    """Joins each island with the products whose operands it makes again."""
    made = {v: i for i, s in enumerate(steps) for v in s.jaxpr.outvars}
    readers: dict[Any, list[int]] = {}
    for i, step in enumerate(steps):
        for v in dict.fromkeys(step.operands):
            readers.setdefault(v, []).append(i)
    later = {v for s in steps if s.kind == "island" for v in s.jaxpr.invars}
    kept = {*given}  # what the backward pass keeps anyway
    units: list[Unit] = []
    done: set[int] = set()

    def runs_with(i: int, product: int) -> bool:
        """Whether a product can run right behind the island `i`."""
        there = all(made.get(v, -1) <= i for v in steps[product].jaxpr.invars)
        contexts = {s.jaxpr.eqns[-1].ctx for s in (steps[i], steps[product])}
        return there and len(contexts) == 1

    def cost(v: Any) -> int:
        """Bytes that the backward pass keeps of a variable, if it does."""
        width = 2 if v in halves else getattr(v.aval.dtype, "itemsize", 8)
        return 0 if v in kept else width * _jaxpr.size(v)

    for i, step in enumerate(steps):
        if i in done:
            continue
        if step.kind != "island":
            kept.update(halves.intersection(step.operands))
            units.append(Unit(step, (step,) if step.kind == "product" else ()))
            continue
        operands = [v for v in step.jaxpr.outvars if v in readers and is_float32(v)]
        must = [v for v in operands if not all(runs_with(i, n) for n in readers[v])]
        streams = [v for v in step.jaxpr.outvars if v in later and is_float32(v)]
        choice = _autocast_kept.choose(step.jaxpr, operands, must, streams, cost)
        held = {*operands} - choice.again
        products = sorted({n for v in choice.again for n in readers[v]})
        done.update(products)
        kept.update(choice.inputs, choice.streams, halves & held)
        outs = [*enumerate(step.jaxpr.outvars)]
        positions = tuple(j for j, v in outs if v in held)
        softmaxes = tuple(j for j, v in outs if v in choice.softmaxes)
        known = tuple(j for j, v in outs if v in choice.streams)
        pairs = tuple(steps[n] for n in products)
        units.append(Unit(step, pairs, positions, softmaxes, known))
    return units
