"""What of a float32 program runs in half precision: a plan, read off its jaxpr.

Matrix products and convolutions become half precision, everything else stays as traced.
The cheap operations between products form islands, which the backward pass computes
again. Nothing is run here, and nothing depends on values.
"""

import dataclasses
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import jax
from jax import lax

from . import _jaxpr
from ._jaxpr import PRODUCTS, is_literal, words

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
# So many operations on arguments alone are repeated in each island that reads them.
_MOST_REPEATED = 32
KEPT = "keep_float32:"  # how the name of a call that stays as it is begins


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
    """

    kind: Literal["product", "island", "call", "other"]
    jaxpr: Any = dataclasses.field(compare=False)
    scope: Any = dataclasses.field(compare=False)
    likeness: Any
    moves: int = 0
    weights: tuple[bool, ...] = ()


class Plan(NamedTuple):
    """A program as a sequence of steps.

    Attributes:
      jaxpr: the program, with calls inlined that hold products or cheap equations.
      constants: values of its constants, by variable.
      steps: in the order in which they run.
      kept: what the backward pass may keep as it is: arguments, scalars, what is small
        beside the arrays of its island, ends of loops, results of the kind "other".
    """

    jaxpr: Any
    constants: dict[Any, Any]
    steps: list[Step]
    kept: set[Any]


def _is_product(eqn: Any) -> bool:
    """Whether an equation is a float32 product that becomes half precision."""
    precisions = jax.tree.leaves(eqn.params.get("precision"))
    if eqn.primitive.name not in PRODUCTS or {*precisions} - {lax.Precision.DEFAULT}:
        return False
    if eqn.primitive.name == "dot_general" and _is_sum(eqn):
        return False
    return all(map(is_float32, (*eqn.invars[:2], eqn.outvars[0])))


def _has_product(jaxpr: Any) -> bool:
    return any(map(_is_product, _jaxpr.equations(jaxpr)))


def is_float32(atom: Any) -> bool:
    return _jaxpr.dtype_name(atom) == "float32"


def _is_kept(eqn: Any, names: Collection[str]) -> bool:
    """Whether a call is one that the user wants in float32."""
    name = str(eqn.params.get("name", ""))
    return name.startswith(KEPT) or name in names


def make_plan(jaxpr: Any, held: Sequence[bool], keep: Collection[str] = ()) -> Plan:
    """The plan of a program, without the calls of the names in `keep`.

    `held`: whether each input is alive in the backward pass anyway, as arguments are.
    """
    flat, constants = _inlined(jaxpr, keep)
    given = {v for v, is_held in zip(flat.invars, held, strict=True) if is_held}
    return _Planner(flat, given | {*constants}, keep).plan(constants)


def _is_sum(eqn: Any) -> bool:
    """Whether one operand of a product is a vector, for each index of the batch."""
    sides = zip(eqn.invars, *eqn.params["dimension_numbers"], strict=True)
    own = ({*range(v.aval.ndim)}.difference(*dims) for v, *dims in sides)
    sizes = zip(eqn.invars, own, strict=True)  # which may be symbolic: not 1
    return any(math.prod(v.aval.shape[d] for d in dims) == 1 for v, dims in sizes)


def _inlined(jaxpr: Any, keep_float32: Collection[str]) -> tuple[Any, dict[Any, Any]]:
    """A jaxpr with calls opened, and its constants. What costs more stays a call."""
    constants: dict[Any, Any] = {}
    equations: list[Any] = []

    def add(body: Any, inputs: Sequence[Any]) -> list[Any]:
        inner, values = _jaxpr.open_jaxpr(body)
        fresh = [_jaxpr.variable(v.aval) for v in inner.constvars]
        constants.update(zip(fresh, values, strict=True))
        names = dict(zip(inner.constvars, fresh, strict=True))
        names |= zip(inner.invars, inputs, strict=True)

        def named(atoms: Iterable[Any]) -> list[Any]:
            return [v if is_literal(v) else names[v] for v in atoms]

        for eqn in inner.eqns:
            inputs = named(eqn.invars)
            if _is_open(eqn, keep_float32):
                outputs = add(_jaxpr.subjaxprs(eqn)[0], inputs)
            else:
                outputs = [_jaxpr.variable(v.aval) for v in eqn.outvars]
                equations.append(eqn.replace(invars=inputs, outvars=outputs))
            names.update(zip(eqn.outvars, outputs, strict=True))
        return named(inner.outvars)

    outer, _ = _jaxpr.open_jaxpr(jaxpr)
    outputs = add(jaxpr, outer.invars)
    return _jaxpr.part(outer, equations, outer.invars, outputs), constants


def _is_open(eqn: Any, keep_float32: Collection[str]) -> bool:
    if eqn.primitive.name not in _CALLS or _is_kept(eqn, keep_float32):
        return False
    bodies = _jaxpr.subjaxprs(eqn)
    return len(bodies) == 1 and (_is_cheap(eqn) or _has_product(bodies[0]))


class _Planner:
    """Facts about the equations of a program without calls that hold products.

    The level of a value is the largest number of equations that are not cheap on a path
    to it. The cheap equations of one level are an island: whatever lies between two of
    them is of their level too, so the islands have an order.
    """

    def __init__(self, jaxpr: Any, given: set[Any], keep: Collection[str]) -> None:
        self.jaxpr, self.given, self.equations = jaxpr, given, jaxpr.eqns
        self.maker = {v: i for i, e in enumerate(jaxpr.eqns) for v in e.outvars}
        self.level = dict.fromkeys([*jaxpr.invars, *given], 0)
        self.repeats = dict.fromkeys(given, 0)  # equations that make a value anew
        self.kinds: list[Any] = []
        self.starts: list[int] = []  # level of an equation's inputs
        differentiable = {v for v in self.level if is_float32(v)}
        last_effect = 0
        for eqn in self.equations:
            inputs, kind = variables(eqn.invars), _kind(eqn, keep)
            start = max([self.level[v] for v in inputs], default=0)
            if kind == "island" and all(v in self.repeats for v in inputs):
                count = 1 + sum(self.repeats[v] for v in inputs)
                # What a table gives is an activation, as of embeddings.
                if count <= _MOST_REPEATED and eqn.primitive.name != "gather":
                    self.repeats.update(dict.fromkeys(eqn.outvars, count))
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

    def plan(self, constants: dict[Any, Any]) -> Plan:
        """Makes the steps, the last one first: what nobody reads is left out."""
        steps: list[Step] = []
        wanted, kept = {*variables(self.jaxpr.outvars)}, {*self.given}
        for members in reversed(self._groups()):
            kind, eqn = self.kinds[members[0]], self.equations[members[0]]
            facts: Any = ()
            if kind == "island":
                part = self._part(members, wanted)
                sizes = [_jaxpr.size(v) for e in part.eqns for v in e.outvars]
                small = max([8, *sizes]) / 8
                kept.update(v for v in part.invars if _jaxpr.size(v) <= small)
            elif kind == "product":
                part, *facts = self._product(eqn)
            else:
                inputs = dict.fromkeys(variables(eqn.invars))
                part = _jaxpr.part(self.jaxpr, [eqn], inputs, eqn.outvars)
                ends = getattr(_jaxpr.loop_of(eqn), "carry", 0)
                kept.update(eqn.outvars[: ends if kind == "call" else None])
            if eqn.effects or wanted.intersection(part.outvars):
                scope, part = _jaxpr.without_common_scope(part)
                steps.append(Step(kind, part, scope, _jaxpr.likeness(part), *facts))
                wanted.update(part.invars)
        return Plan(self.jaxpr, constants, steps[::-1], kept)

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
        weights = tuple(is_dot and v in self.repeats for v in eqn.invars[:2])
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


def _kind(eqn: Any, keep: Collection[str]) -> str:
    if _is_product(eqn):
        return "product"
    if _is_cheap(eqn, keep):
        return "island"
    holds_product = any(map(_has_product, _jaxpr.subjaxprs(eqn)))
    return "call" if holds_product and not _is_kept(eqn, keep) else "other"


def _is_cheap(eqn: Any, keep_float32: Collection[str] = ()) -> bool:
    """Whether an equation costs less to compute again than to keep."""
    bodies, name = _jaxpr.subjaxprs(eqn), eqn.primitive.name
    if eqn.effects or _is_kept(eqn, keep_float32):
        return False
    if name == "reshard":  # to another mesh it is a border between steps
        return eqn.invars[0].aval.sharding.mesh == eqn.outvars[0].aval.sharding.mesh
    if not bodies:
        return name in _CHEAP
    return (name in _CALLS or name == "custom_jvp_call") and all(
        _is_cheap(inner) for body in bodies for inner in _jaxpr.open_jaxpr(body)[0].eqns
    )


def variables(atoms: Iterable[Any]) -> list[Any]:
    return [v for v in atoms if not is_literal(v)]
