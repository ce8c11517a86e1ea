"""Reads a float32 program: what each equation is, and where each value comes from."""

import collections
import dataclasses
import enum
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from .. import _jaxpr, _jaxpr_rewrite
from .._jaxpr import Atom, Jaxpr, JaxprEqn, Var, dtype_name, is_float32, variables
from .._policy import is_half
from .._types import PyTree
from .biases import BETWEEN, sizes_of_expensive, with_rounding
from .casting import Casting
from .picks import as_pick, has_picks, may_pick
from .products import Fate, Product, fate, has_products, is_cheap, looks_up_rows

_INTEGERS = "bool", "int", "uint"
# Calls that are evaluated anew if they pick entries.
_CALLS = "scan", "scan3", "while", "cond", "remat2", "shard_map"

# Operations on an array that is stored in half precision which move the stored array
# itself: rows and what devices send, and outside of loops what both passes then read.
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
    """Where a value comes from. The defaults are those of a value that may be any."""

    origin: Origin = Origin.DATA
    is_constant: bool = False  # computed from integers and constants alone
    is_fixed: bool = False  # no argument changes it
    # Whether it is computed from a float32 argument, so that a matrix product returns
    # its gradient in float32.
    has_float32_grad: bool = False


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
    def settings(self) -> AbstractContextManager[Any]:
        """A context of the settings and the mesh with which it was traced."""
        return self.eqn.ctx.manager

    @property
    def half_product(self) -> Product | None:
        """The product, if the step is one that becomes half precision."""
        return self.product if self.kind == "product" else None


@dataclasses.dataclass(eq=False)
class Reading:
    """A program as `autocast` reads it, without the calls that it opens."""

    cast: Casting
    jaxpr: Jaxpr
    constants: dict[Var, PyTree]  # values, by variable
    stored: dict[Var, np.dtype]  # of what is stored in half precision, perhaps moved
    given: Mapping[Var, Provenance]  # of inputs and constants that are not data

    def __post_init__(self) -> None:
        # Nothing is known of a variable without an entry.
        self.provenance = collections.defaultdict(Provenance, self.given)
        # The equations of `jaxpr` whose results or effects are wanted.
        self.steps: list[Step] = []
        # `checkpoint_name`s of results of products. The array that is saved gets the
        # name, because policies of `jax.checkpoint` save what has a name.
        self.names: dict[Var, str] = {}
        self._maker: dict[Var, Step] = {}
        self._tables = _tables_of(self.jaxpr)
        self._expensive = sizes_of_expensive(self.jaxpr)
        for eqn in self.jaxpr.eqns:  # by what is known of those before it
            self._add(self._step(eqn))
        self._drop_unread_steps()
        # Float32 variables whose half-precision copies are exact.
        products = [step.half_product for step in self.steps if step.half_product]
        self.halves = {p.result for p in products if not p.has_float32_result}

    def _add(self, step: Step) -> None:
        self.steps.append(step)
        self._maker.update(dict.fromkeys(step.outvars, step))
        self.provenance.update(dict.fromkeys(step.outvars, self._provenance(step)))

    def origin(self, atom: Atom) -> Origin:
        """The origin of a value."""
        known = isinstance(atom, Var)
        return self.provenance[atom].origin if known else Origin.ARGUMENTS

    def is_data(self, v: Atom) -> bool:
        """Whether a value is not computed from arguments and constants alone."""
        return self.origin(v) is Origin.DATA

    def is_sent(self, eqn: JaxprEqn) -> bool:
        """Whether devices add up the gradient of what it moves in half precision.

        Proven is that it moves arrays between devices as they are, and nothing else.
        """
        if _jaxpr.name_of(eqn) == "reshard":  # rows are added up in float32
            return is_cheap(eqn) and self._tables.isdisjoint(eqn.outvars)
        return _jaxpr.name_of(eqn) == "all_gather"

    def _step(self, eqn: JaxprEqn) -> Step:
        """Returns what an equation is, by the first rule that knows its primitive.

        Only a gather may be of two kinds: a pick is not a move of a stored array.
        """
        return (
            self._name(eqn)
            or self._sum(eqn)
            or self._multiply(eqn)
            or self._pick(eqn)
            or self._move(eqn)
            or self._call(eqn)
            or Step("other", eqn)
        )

    def _name(self, eqn: JaxprEqn) -> Step | None:
        """A name of a product's result becomes a copy: what is saved has the name."""
        for v in variables(eqn.invars) if _jaxpr.name_of(eqn) == "name" else ():
            if self._is_product(v):
                self.names[v] = _jaxpr.params_of(eqn)["name"]
                return Step("other", eqn.replace(primitive=jax.lax.copy_p, params={}))
        return None

    def _sum(self, eqn: JaxprEqn) -> Step | None:
        """The gradient of a sum of a product and a bias, which is repeated, is rounded.

        A bias is repeated before, or has axes of length 1 for larger ones of the sum.
        Proven is that the gradient of the one is rounded anyway, and that of the other
        a sum of several entries. The gradient of a stream has the sum's, unrounded.
        """
        if _jaxpr.name_of(eqn) != "add" or not is_float32(eqn.outvars[0]):
            return None
        pair, size = variables(eqn.invars), _jaxpr.size(eqn.outvars[0])
        if size not in self._expensive or len(pair) != 2:
            return None
        sources = [self._before(v, BETWEEN)[0] for v in pair]

        def is_product(i: int) -> bool:
            return _jaxpr.size(pair[i]) == size and self._is_product(sources[i])

        def is_bias(i: int) -> bool:
            source, maker = sources[i], self._equation_of(sources[i])
            if maker and _jaxpr.name_of(maker) == "broadcast_in_dim":
                (source,) = maker.invars
            return _jaxpr.size(source) < size

        if any(is_product(i) and is_bias(1 - i) for i in range(2)):
            return Step("other", with_rounding(eqn, self.cast.backward))
        return None

    def _multiply(self, eqn: JaxprEqn) -> Step | None:
        """A product becomes half precision, unless its fate is another one."""
        if _jaxpr.name_of(eqn) not in _jaxpr.PRODUCTS:
            return None
        decision = fate(
            eqn,
            is_parameter=lambda v: self.origin(v) is Origin.PARAMETER,
            is_constant=lambda v: self.provenance[v].is_constant,
            is_exempt=self.cast.is_exempt,
        )
        if decision is not Fate.BECOMES_HALF:
            return Step("other", eqn)
        product = self._product(eqn)
        return Step("own" if product.dtype else "product", eqn, product)

    def _pick(self, eqn: JaxprEqn) -> Step | None:
        """A pick of data becomes a comparison."""
        table = variables(eqn.invars[:1])
        if not may_pick(eqn) or self._have(table, "origin"):
            return None
        return Step("other", as_pick(eqn, self._equation_of, self.constants))

    def _move(self, eqn: JaxprEqn) -> Step | None:
        """A stored array is moved as it is stored, or gets axes of length 1.

        So is a half-precision one of which rows are looked up: a row may be read often.
        """
        for v in variables(eqn.invars[:1]):
            is_table = _jaxpr.name_of(eqn) == "gather" and is_half(dtype_name(v))
            is_table = is_table and not self.provenance[v].is_constant
            dtype = self.stored.get(v) or (_jaxpr.dtype_of(v) if is_table else None)
            if dtype and self._moves(eqn, dtype):
                self.stored[eqn.outvars[0]] = dtype
                return Step("move", eqn)
        return None

    def _moves(self, eqn: JaxprEqn, dtype: np.dtype) -> bool:
        """Proven is that all entries of the result are entries of the first operand.

        So a stored array may be moved before or after it is cast. What a gather of
        float32 rows fills in is a number of the stored dtype, too.
        """
        if _jaxpr.name_of(eqn) == "broadcast_in_dim":
            return _jaxpr.size(eqn.invars[0]) == _jaxpr.size(eqn.outvars[0])
        fill = eqn.params.get("fill_value")
        if fill and fill == fill and is_float32(eqn.outvars[0]):
            with np.errstate(over="ignore"):
                return float(np.float64(fill).astype(dtype)) == fill
        return _jaxpr.name_of(eqn) in (_SENDS if self.cast.in_loop else _MOVES)

    def _call(self, eqn: JaxprEqn) -> Step | None:
        """A call is evaluated anew if it holds products, or picks in a loop.

        So is one that reads half precision, perhaps in each iteration.
        """
        if has_products(eqn):
            return None if self.cast.is_exempt(eqn) else Step("call", eqn)
        reads_half = _jaxpr.any_half(variables(eqn.invars))
        if _jaxpr.name_of(eqn) in _CALLS and (reads_half or has_picks(eqn)):
            return Step("call", eqn)
        return None

    def _is_product(self, v: Var) -> bool:
        """Whether a value is the result of a product that becomes half precision."""
        maker = self._maker.get(v)
        return maker is not None and maker.half_product is not None

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
        is_dot = _jaxpr.name_of(eqn) == "dot_general"
        half = {*filter(is_half, map(self._stored_in, operands))}
        is_own = len(half) == 1 and self.cast.forward.name not in half
        return Product(
            key=_jaxpr_rewrite.structural_key(jaxpr),
            jaxpr=jaxpr,
            moves=len(left),
            float32_grads=tuple(
                is_dot and is_float32(v) and self.provenance[v].has_float32_grad
                for v in (lhs, rhs)
            ),
            dtype=half.pop() if is_own else None,
            scope=scope,
            has_float32_result=self.cast.has_float32_result(eqn),
        )

    def _stored_in(self, v: Var) -> str:
        """Returns the dtype in which the elements of an operand are stored."""
        source, _ = self._before(v, _jaxpr.SAME_ENTRIES)
        return self.stored[source].name if source in self.stored else dtype_name(v)

    def _before(self, v: Var, names: Collection[str]) -> tuple[Var, list[JaxprEqn]]:
        """Returns an array before operations of these names, and their equations."""
        eqns: list[JaxprEqn] = []
        while (maker := self._maker.get(v)) and maker.kind != "move":
            sources = variables(maker.eqn.invars)
            if len(sources) != 1 or _jaxpr.name_of(maker.eqn) not in names:
                break
            eqns.insert(0, maker.eqn)
            (v,) = sources
        return v, eqns

    def _provenance(self, step: Step) -> Provenance:
        """Returns the provenance of an equation's results."""
        eqn, inputs = step.eqn, variables(step.eqn.invars)
        if any(map(_jaxpr.is_reference, [*inputs, *eqn.outvars])):
            return Provenance()  # what a reference holds changes
        numbers = itertools.filterfalse(_is_integer, inputs)
        data = Provenance(
            is_constant=step.kind != "call" and self._have(numbers, "is_constant"),
            is_fixed=self._have(inputs, "is_fixed"),
        )
        # A layer of a stack of weights is one at any index, as of a loop's counter.
        is_lookup = _jaxpr.name_of(eqn) in _jaxpr.LOOKUPS
        sources = variables(eqn.invars[:1]) if is_lookup else inputs
        if self._returns_data(step) or not self._have(sources, "origin"):
            return data
        known = [self.provenance[v] for v in sources]
        scales = _jaxpr.name_of(eqn) in _jaxpr.SCALINGS
        highest = max((each.origin for each in known), default=Origin.ARGUMENTS)
        return data._replace(
            origin=highest if scales else Origin.ARGUMENTS,
            has_float32_grad=any(each.has_float32_grad for each in known),
        )

    def _have(self, inputs: Iterable[Var], fact: str) -> bool:
        """Whether a fact, such as "is_fixed", holds for all values."""
        return all(getattr(self.provenance[v], fact) for v in inputs)

    def _returns_data(self, step: Step) -> bool:
        """Whether results are data even if the operands are arguments.

        Results of products are, and so are rows of a table that an argument chooses.
        """
        if step.kind not in ("move", "other"):
            return True
        eqns = step.eqn, *_jaxpr.equations_within(step.eqn)
        products = (e for e in eqns if _jaxpr.name_of(e) in _jaxpr.PRODUCTS)
        if any(fate(product) is Fate.IS_HALF for product in products):
            return True
        indices = variables(step.eqn.invars[1:2])
        return looks_up_rows(step.eqn) and not self._have(indices, "is_fixed")

    def _drop_unread_steps(self) -> None:
        wanted, steps = {*variables(self.jaxpr.outvars)}, list[Step]()
        for step in reversed(self.steps):
            if _jaxpr.has_effects(step.eqn) or not wanted.isdisjoint(step.outvars):
                steps.append(step)
                wanted.update(step.invars)
        self.steps = steps[::-1]


def _is_integer(v: Var) -> bool:
    return dtype_name(v).startswith(_INTEGERS)


def _tables_of(jaxpr: Jaxpr) -> set[Var]:
    """Returns arrays of which rows are looked up, also after they are resharded.

    A table that is not found is sent in half precision, like a weight.
    """
    tables: set[Var] = set()
    for eqn in reversed(jaxpr.eqns):
        is_table = not tables.isdisjoint(eqn.outvars)
        if looks_up_rows(eqn) or (_jaxpr.name_of(eqn) == "reshard" and is_table):
            tables.update(variables(eqn.invars[:1]))
    return tables


def read(
    program: _jaxpr.Program,
    origins: Sequence[Origin],
    cast: Casting,
    stored: Mapping[Var, np.dtype] | None = None,
) -> Reading:
    """Reads a program whose inputs have these origins.

    `stored` are the dtypes of inputs that are stored in half precision.
    """
    is_opened = functools.partial(_is_opened, is_exempt=cast.is_exempt)
    jaxpr, constants = _jaxpr_rewrite.inlined(program, is_opened)
    traced = {v for v, x in constants.items() if isinstance(x, Tracer)}
    arrays = itertools.filterfalse(_jaxpr.is_reference, traced)
    half = {v: _jaxpr.dtype_of(v) for v in arrays if is_half(dtype_name(v))}
    stored = {**(stored or {}), **half}

    def given(v: Var, origin: Origin) -> Provenance:
        is_known = v in constants and v not in traced
        has_float32_grad = is_float32(v) and v not in stored and not is_known
        return Provenance(origin, is_known, is_known, has_float32_grad)

    origin_of = dict(zip(jaxpr.invars, origins, strict=True))
    origin_of |= dict.fromkeys(constants, Origin.PARAMETER)
    of_given = {v: given(v, origin) for v, origin in origin_of.items() if origin}
    return Reading(cast, jaxpr, constants, stored, of_given)


def _is_opened(call: JaxprEqn, is_exempt: Callable[[JaxprEqn], bool]) -> bool:
    """Whether a call is read as if its equations stood in its place."""
    if _jaxpr.name_of(call) not in _jaxpr.CALLS:
        return False
    if has_products(call):
        return not is_exempt(call)
    (body,) = map(_jaxpr.bare, _jaxpr.subjaxprs(call))
    lookups = (_jaxpr.name_of(e) in _jaxpr.LOOKUPS or is_cheap(e) for e in body.eqns)
    # A call such as `jnp.take` only moves entries or looks up rows.
    reads_half = _jaxpr.any_half(variables(call.invars))
    return has_picks(call) or reads_half or all(lookups)
