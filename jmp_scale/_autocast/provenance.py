"""Reads a float32 program: what each equation is, and where each value comes from."""

import dataclasses
import enum
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from .. import _jaxpr, _jaxpr_rewrite
from .._jaxpr import Atom, Jaxpr, JaxprEqn, Var, dtype_name, is_float32, variables
from .._policy import is_half
from .._types import Leaf
from .biases import MOVES, is_bias_sum, read_by_expensive, rounding_of
from .picks import as_pick, has_picks, may_pick
from .products import (
    Fate,
    Product,
    fate,
    has_products,
    is_cheap,
    looks_up_rows,
    matrix_sizes,
    never,
)

_INTEGERS = "bool", "int", "uint"
# They run as calls if they pick entries.
_CALLS = "scan", "scan3", "while", "cond", "remat2", "shard_map"

# Of arrays that are stored in half precision these move entries as stored: rows and
# what devices send, and outside of loops what both passes then read.
_SENDS = _jaxpr.words("all_gather gather ppermute reshard")
_MOVES = _SENDS | _jaxpr.REARRANGES - {"sharding_constraint"}
# "product": it becomes half precision. "own": a product in the dtype of an operand,
# which is not `autocast`'s. "call": its nested jaxprs hold products. "move": it moves
# an array that is stored in half precision. "other": it runs as it was traced.
Kind = Literal["product", "own", "call", "move", "other"]


class Origin(enum.IntEnum):
    """All that a value is computed from."""

    DATA = 0  # results of products too, rows of a table, or what a loop hands on
    ARGUMENTS = 1  # arguments and constants alone
    PARAMETER = 2  # it is an argument or constant, perhaps moved or scaled


class Provenance(NamedTuple):
    """Where a value comes from. A variable without an entry has these defaults."""

    origin: Origin = Origin.DATA
    is_constant: bool = False  # computed from integers and constants alone
    is_fixed: bool = False  # no argument changes it
    # Whether it is computed from a float32 argument, so that a matrix product returns
    # its gradient in float32.
    has_float32_grad: bool = False


_DATA = Provenance()


class Step(NamedTuple):
    """An equation of a program, and what it is to `autocast`."""

    kind: Kind
    eqn: JaxprEqn
    product: Product | None = None

    @property
    def invars(self) -> list[Var]:
        """The variables that it reads: of a product those before they are moved."""
        return variables(self.product.jaxpr.invars if self.product else self.eqn.invars)

    @property
    def outvars(self) -> list[Var]:
        """The variables of its results."""
        return self.eqn.outvars

    @property
    def half_product(self) -> Product | None:
        """The product, if the step is one that becomes half precision."""
        return self.product if self.kind == "product" else None


@dataclasses.dataclass(eq=False)
class Reading:
    """A program as `autocast` reads it, without calls that it opens.

    `dtype`, `backward` and the two functions are those of `read`.
    """

    dtype: np.dtype
    backward: np.dtype
    is_exempt: Callable[[JaxprEqn], bool]
    has_float32_result: Callable[[JaxprEqn], bool]
    jaxpr: Jaxpr
    constants: dict[Var, Leaf]  # values, by variable
    stored: dict[Var, np.dtype]  # of what is stored in half precision, perhaps moved
    in_loop: bool
    given: Mapping[Var, Provenance]  # of inputs and constants that are not data
    provenance: dict[Var, Provenance] = dataclasses.field(init=False)
    # The equations of `jaxpr` whose results or effects are wanted.
    steps: list[Step] = dataclasses.field(default_factory=list)
    # Names that the program gives to results of products, which have them in the dtype
    # in which they are saved: policies of `jax.checkpoint` save what has a name.
    names: dict[Var, str] = dataclasses.field(default_factory=dict)
    # Float32 variables whose half-precision copies are exact, and of these the ones of
    # which all operations read one cast.
    halves: set[Var] = dataclasses.field(default_factory=set)
    shared: set[Var] = dataclasses.field(default_factory=set)

    def __post_init__(self) -> None:
        self.provenance = {**self.given}
        self._maker: dict[Var, Step] = {}
        self._tables: set[Var] = set()  # of which rows are looked up
        for eqn in reversed(self.jaxpr.eqns if self.stored else ()):
            is_sent_on = eqn.primitive.name == "reshard" and self._is_table(eqn)
            if looks_up_rows(eqn) or is_sent_on:
                self._tables.update(variables(eqn.invars[:1]))
        self._near_expensive = read_by_expensive(self.jaxpr)
        for eqn in self.jaxpr.eqns:
            for each in self._with_rounding(eqn):
                self._add(self._step(self._without_name(each)))

    def _add(self, step: Step) -> None:
        self.steps.append(step)
        self._maker.update(dict.fromkeys(step.eqn.outvars, step))
        if found := self._provenance(step):
            self.provenance.update(dict.fromkeys(step.eqn.outvars, found))

    def _with_rounding(self, eqn: JaxprEqn) -> list[JaxprEqn]:
        """Returns the equation, and one that rounds the gradient of a bias's sum."""

        def maker_of(v: Var) -> Step | None:
            return self._maker.get(self._before(v, MOVES)[0])

        def is_product(v: Var) -> bool:
            maker = maker_of(v)
            return maker is not None and maker.half_product is not None

        def is_repeated(v: Var) -> bool:
            maker = maker_of(v)
            return maker is not None and maker.eqn.primitive.name == "broadcast_in_dim"

        is_near = not self._near_expensive.isdisjoint(eqn.outvars)
        if is_near and is_bias_sum(eqn, is_product, is_repeated):
            before = Var(eqn.outvars[0].aval)
            rounding = rounding_of(eqn, before, self.backward)
            return [eqn.replace(outvars=[before]), rounding]
        return [eqn]

    def origin(self, v: Var) -> Origin:
        """The origin of a value."""
        return self._of(v).origin

    def is_data(self, v: Var) -> bool:
        """Whether a value is not computed from arguments and constants alone."""
        return self.origin(v) is Origin.DATA

    def is_sent(self, eqn: JaxprEqn) -> bool:
        """Whether devices add up the gradient of what it moves in half precision."""
        if eqn.primitive.name == "reshard":  # rows are added up in float32
            return is_cheap(eqn) and not self._is_table(eqn)
        return eqn.primitive.name == "all_gather"

    def _is_table(self, eqn: JaxprEqn) -> bool:
        return not self._tables.isdisjoint(eqn.outvars)

    def _of(self, v: Var) -> Provenance:
        return self.provenance.get(v, _DATA)

    def _is_parameter(self, v: Var) -> bool:
        return self.origin(v) is Origin.PARAMETER

    def _without_name(self, eqn: JaxprEqn) -> JaxprEqn:
        """Returns the equation, or a copy if it names the result of a product."""
        for v in variables(eqn.invars) if _jaxpr.name_of(eqn) == "name" else ():
            product = self._maker[v].half_product if v in self._maker else None
            if product:
                self.names[v] = _jaxpr.params_of(eqn)["name"]
                return eqn.replace(primitive=jax.lax.copy_p, params={})
        return eqn

    def _step(self, eqn: JaxprEqn) -> Step:
        if eqn.primitive.name in _jaxpr.PRODUCTS:
            found = fate(
                eqn,
                is_parameter=self._is_parameter,
                is_constant=lambda v: self._of(v).is_constant,
                is_exempt=self.is_exempt,
            )
            if found is not Fate.BECOMES_HALF:
                return Step("other", eqn)
            product = self._product(eqn)
            return Step("own" if product.dtype else "product", eqn, product)
        if may_pick(eqn) and not self._all(variables(eqn.invars[:1]), "origin"):
            return Step("other", as_pick(eqn, self._equation_of, self.constants))
        for v in self._moved(eqn):
            self.stored[eqn.outvars[0]] = self.stored[v]
            return Step("move", eqn)
        if has_products(eqn):
            return Step("other" if self.is_exempt(eqn) else "call", eqn)
        is_call = _jaxpr.name_of(eqn) in _CALLS and has_picks(eqn)
        return Step("call" if is_call else "other", eqn)

    def _moved(self, eqn: JaxprEqn) -> list[Var]:
        """Returns the stored array whose elements an equation moves, if it does."""
        is_move = eqn.primitive.name in (_SENDS if self.in_loop else _MOVES)
        return [v for v in variables(eqn.invars[:1]) if is_move and v in self.stored]

    def _equation_of(self, atom: Atom) -> JaxprEqn | None:
        maker = self._maker.get(atom) if isinstance(atom, Var) else None
        return maker.eqn if maker else None

    def _product(self, eqn: JaxprEqn) -> Product:
        operands = variables(eqn.invars[:2])
        (lhs, left), (rhs, right) = (
            self._before(v, _jaxpr.REARRANGES) for v in operands
        )
        inputs = [lhs, rhs, *variables(eqn.invars[2:])]
        eqns = [*left, *right, eqn]
        whole = _jaxpr_rewrite.excerpt(self.jaxpr, eqns, inputs, eqn.outvars)
        scope, jaxpr = _jaxpr_rewrite.without_common_scope(whole)
        is_dot = matrix_sizes(eqn) is not None
        half = {*filter(is_half, map(self._stored_in, operands))}
        is_own = len(half) == 1 and self.dtype.name not in half
        return Product(
            key=_jaxpr_rewrite.structural_key(jaxpr),
            jaxpr=jaxpr,
            moves=len(left),
            float32_grads=tuple(
                is_dot and is_float32(v) and self._of(v).has_float32_grad
                for v in (lhs, rhs)
            ),
            dtype=half.pop() if is_own else None,
            scope=scope,
            has_float32_result=self.has_float32_result(eqn),
        )

    def _stored_in(self, v: Var) -> str:
        """Returns the dtype in which the elements of an operand are stored."""
        source, _ = self._before(v, _jaxpr.SAME_ENTRIES)
        return self.stored[source].name if source in self.stored else dtype_name(v)

    def _before(self, v: Var, moves: Collection[str]) -> tuple[Var, list[JaxprEqn]]:
        """Returns an array before its elements were moved, and the moving equations."""
        eqns: list[JaxprEqn] = []
        while (maker := self._maker.get(v)) and maker.kind != "move":
            sources = variables(maker.eqn.invars)
            if len(sources) != 1 or maker.eqn.primitive.name not in moves:
                break
            eqns.insert(0, maker.eqn)
            (v,) = sources
        return v, eqns

    def _provenance(self, step: Step) -> Provenance | None:
        """Returns the provenance of an equation's results; None if nothing is known."""
        eqn, inputs = step.eqn, variables(step.eqn.invars)
        if any(map(_jaxpr.is_reference, [*inputs, *eqn.outvars])):
            return None  # what a reference holds changes
        numbers = [v for v in inputs if not dtype_name(v).startswith(_INTEGERS)]
        is_constant = step.kind != "call" and self._all(numbers, "is_constant")
        is_fixed = self._all(inputs, "is_fixed")
        data = Provenance(Origin.DATA, is_constant, is_fixed)
        products = (eqn, *_jaxpr.equations_within(eqn))
        products = (e for e in products if e.primitive.name in _jaxpr.PRODUCTS)
        moves = step.kind in ("move", "other")
        if not moves or any(fate(e) is Fate.IS_HALF for e in products):
            return data
        indices = variables(eqn.invars[1:2])
        if looks_up_rows(eqn) and not self._all(indices, "is_fixed"):
            return data
        # A layer of a stack of weights is one at any index, as of a loop's counter.
        is_lookup = eqn.primitive.name in _jaxpr.LOOKUPS
        sources = variables(eqn.invars[:1]) if is_lookup else inputs
        if not self._all(sources, "origin"):
            return data
        scales = eqn.primitive.name in _jaxpr.SCALINGS
        is_parameter = scales and any(map(self._is_parameter, sources))
        return Provenance(
            origin=Origin.PARAMETER if is_parameter else Origin.ARGUMENTS,
            is_constant=is_constant,
            is_fixed=is_fixed,
            has_float32_grad=any(self._of(v).has_float32_grad for v in sources),
        )

    def _all(self, inputs: Iterable[Var], field: str) -> bool:
        return all(getattr(self._of(v), field) for v in inputs)


def read(
    jaxpr: _jaxpr.Program,
    origins: Sequence[Origin],
    dtype: np.dtype,
    is_exempt: Callable[[JaxprEqn], bool] = never,
    share_casts: bool = False,
    stored: Mapping[Var, np.dtype] = MappingProxyType({}),
    in_loop: bool = False,
    backward: np.dtype | None = None,
    has_float32_result: Callable[[JaxprEqn], bool] = never,
) -> Reading:
    """Reads a program whose inputs have these origins.

    `dtype` is that of products of the forward pass, `backward` that of the others.
    `is_exempt` says whether a name keeps a product float32, or a call with products.
    `share_casts`: all operations read the cast of what a product reads. `stored` are
    the dtypes of inputs that are stored in half precision. `has_float32_result` says
    whether a name keeps the result of a product float32.
    """

    def is_open(eqn: JaxprEqn) -> bool:
        if eqn.primitive.name not in _jaxpr.CALLS:
            return False
        if has_products(eqn):
            return not is_exempt(eqn)
        if has_picks(eqn):
            return True
        # A call such as `jnp.take` only moves entries or looks up rows.
        (body,) = map(_jaxpr.bare, _jaxpr.subjaxprs(eqn))
        lookups = (e.primitive.name in _jaxpr.LOOKUPS or is_cheap(e) for e in body.eqns)
        return all(lookups)

    flat, constants = _jaxpr_rewrite.inlined(jaxpr, is_open)
    stored = {**stored}
    for v, x in constants.items():
        if isinstance(x, Tracer) and is_half(dtype_name(v)):
            stored[v] = _jaxpr.dtype_of(v)

    def has_float32_grad(v: Var) -> bool:
        return is_float32(v) and v not in stored

    given = {
        v: Provenance(origin, has_float32_grad=has_float32_grad(v))
        for v, origin in zip(flat.invars, origins, strict=True)
        if origin
    }
    for v, x in constants.items():
        is_known = not isinstance(x, Tracer)
        wide = has_float32_grad(v) and not is_known
        given[v] = Provenance(Origin.PARAMETER, is_known, is_known, wide)
    reading = Reading(
        dtype=dtype,
        backward=dtype if backward is None else backward,
        is_exempt=is_exempt,
        has_float32_result=has_float32_result,
        jaxpr=flat,
        constants=constants,
        stored=stored,
        in_loop=in_loop,
        given=given,
    )
    wanted, steps = {*variables(flat.outvars)}, list[Step]()
    for step in reversed(reading.steps):
        if _jaxpr.has_effects(step.eqn) or not wanted.isdisjoint(step.outvars):
            steps.append(step)
            wanted.update(step.invars)
    reading.steps = steps[::-1]
    products = [step.half_product for step in reading.steps if step.half_product]
    reading.halves = {p.result for p in products if not p.has_float32_result}
    if share_casts:
        operands = {v for product in products for v in product.operands}
        reading.shared = {*filter(reading.is_data, operands)} - reading.halves
        reading.halves |= reading.shared
    return reading
