"""A plan of a float32 program: what runs in half precision, read off its jaxpr.

Matrix products and convolutions become half precision, the rest stays as traced. The
cheap operations between products form islands. An island and the products that
read its results are a unit: the backward pass computes the island once more, and takes
from that run its own derivative and the operands of the products' gradients. For

```
h = x + gelu(x @ w1) @ w2
y = normalize(h) @ w3
```

it saves `x`, an argument, and in half precision, as products gave them, `x @ w1` and
`gelu(...) @ w2`. It recomputes what gelu gives, the sum `h`, and its norm. Parts and
units are one module, because they are read together.

What islands buy, beside products that are cast alone (`recompute=False`) with the
policy `dots_saveable`: 8 to 21 % of an H100's traffic. Beside them without a policy:
the memory is .28 to .76 of it. They buy no accuracy.
"""

import dataclasses
import enum
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike

from ... import _jaxpr
from ..._jaxpr import Atom, Jaxpr, JaxprEqn, NameStack, Var, is_float32, variables
from ..._policy import is_half
from .. import products as ops
from ..marks import Names
from .islands import read_by_derivative, small_sums, softmaxes_of

_INTEGERS = "bool", "int", "uint"
# At most this many operations on arguments alone are repeated in each island that reads
# them.
_MOST_REPEATED = 32
# An equation of one array and smaller ones reads at most this many times its result.
_ONE_ARRAY = 9 / 8

# They run as calls if they read weights in half precision, whose gradients are sums.
_SUMMING = "scan", "scan3", "while", "cond", "remat2", "shard_map"

UnitKind = Literal["half", "call", "own", "other"]


class Origin(enum.IntEnum):
    """The origin of a value: all that it is computed from."""

    DATA = 0  # from results of products too, or in a loop
    ARGUMENTS = 1  # from arguments and constants alone, and so kept anyway
    PARAMETER = 2  # it is one of these, perhaps moved or scaled


@dataclasses.dataclass(frozen=True)
class Unit:
    """Equations that run together. Equal ones, as of equal layers, are traced once."""

    # "half": an island, which may be empty, and products. "call": one equation whose
    # nested jaxprs hold products. "own": a product in the dtype of an operand, which is
    # not `autocast`'s. "other": what runs as it was traced.
    kind: UnitKind
    key: Hashable  # equal for equal units
    # The island, or the equation. An island has these outputs: its results, then small
    # sums, then what products read that it does not make.
    jaxpr: Jaxpr = dataclasses.field(compare=False)
    # The scopes in which all equations were, which they no longer name.
    scope: NameStack = dataclasses.field(compare=False)
    # Each with what it reads. These and all below are positions of outputs.
    products: tuple[tuple[ops.Product, tuple[int, ...]], ...] = ()
    reads: int = 0  # inputs that the island reads itself; it passes on the others
    kept: tuple[int, ...] = ()  # `Kept`'s
    softmaxes: tuple[int, ...] = ()
    known: tuple[int, ...] = ()  # small sums, and `Kept`'s streams
    shared: tuple[int, ...] = ()  # all operations read one cast of these


class Plan(NamedTuple):
    """A program as a sequence of units."""

    jaxpr: Jaxpr  # with calls inlined that hold products or cheap equations
    constants: dict[Var, Any]  # values, by variable
    units: list[Unit]  # in the order in which they run
    given: set[Var]  # arguments and constants, which may be kept as they are
    origins: dict[Var, Origin]  # by variable; `DATA` where it has none
    halves: set[Var]  # float32 variables whose half-precision copies are exact
    shared: set[Var]  # all operations read one cast of these
    # Names that the program gives to results of products, which have them in half
    # precision: policies of `jax.checkpoint` save what has a name.
    named: dict[Var, str]
    copied: list[int]  # inputs of which the last ones are copies, one for each reader


def make_plan(
    jaxpr: _jaxpr.Program,
    origins: Sequence[Origin],
    dtype: DTypeLike,
    names: Names,
    *,
    share_casts: bool,
    join: bool,
    stored: Collection[int] = (),
) -> Plan:
    """The plan of a program.

    `origins` are those of its inputs, `dtype` is that of products of the forward pass.
    `join`: whether islands are joined with products, to be computed again. `stored`:
    the positions of inputs whose cotangents are added up in float32.
    """

    def is_open(eqn: JaxprEqn) -> bool:
        if eqn.primitive.name not in _jaxpr.CALLS:
            return False
        if ops.has_products(eqn):
            return not names.exempt(eqn)
        return ops.is_cheap(eqn) or ops.reads_half(eqn)

    flat, constants = _jaxpr.inlined(jaxpr, is_open)
    flat, copied = _jaxpr.read_apart(flat, {flat.invars[i] for i in stored})
    copied = [*map(flat.invars.index, copied)]
    origins = [*origins, *(origins[i] for i in copied)]
    given = {v: o for v, o in zip(flat.invars, origins, strict=True) if o}
    given.update(dict.fromkeys(constants, Origin.PARAMETER))
    numbers = {v for v, x in constants.items() if not isinstance(x, Tracer)}
    planner = _Planner(flat, given, numbers, dtype, names)
    parts = planner.parts()
    products = [part.product for part in parts if part.kind == "product"]
    halves = {product.result for product in products if product}
    read = {
        v for part in parts if part.kind == "product" for v in part.jaxpr.invars[:2]
    }
    shared = read - {*planner.origins} - halves if share_casts else set[Var]()
    halves |= shared
    return Plan(
        jaxpr=flat,
        constants=constants,
        units=_Units(parts, halves, {*given}, shared).units(join),
        given={*given},
        origins=planner.origins,
        halves=halves,
        shared=shared,
        named=planner.named,
        copied=copied,
    )


PartKind = Literal["island", "product", "own", "call", "other"]


class _Part(NamedTuple):
    """Equations that run together, of which units are made."""

    kind: PartKind
    jaxpr: Jaxpr
    product: ops.Product | None = None


class _Planner:
    """Facts about the equations of a program without calls that hold products.

    The level of a value is the largest number of equations that are not cheap on a path
    to it. The cheap equations of one level are an island: whatever lies between two of
    them is of their level too, so the islands have an order.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        given: dict[Var, Origin],
        numbers: set[Var],
        dtype: DTypeLike,
        names: Names,
    ) -> None:
        self.jaxpr, self.equations = jaxpr, [*jaxpr.eqns]
        self.named: dict[Var, str] = {}
        self.origins, self.numbers = {**given}, {*numbers}
        self.fixed = {*numbers}  # values that do not depend on arguments
        # Values that float32 arguments are in: their gradients are float32 from the
        # product on.
        self.wide = {v for v in given if is_float32(v)} - self.numbers
        self._dtype = np.dtype(dtype).name
        self.maker = {v: i for i, e in enumerate(jaxpr.eqns) for v in e.outvars}
        self.repeats = dict.fromkeys(given, 0)  # equations that make a value anew
        self.kinds: list[PartKind] = []
        self.starts: list[int] = []  # level of an equation's inputs
        level = dict.fromkeys([*jaxpr.invars, *given], 0)
        differentiable = {v for v in level if _jaxpr.is_floating(v)}
        last_effect = 0
        for index, eqn in enumerate(self.equations):
            inputs, kind = variables(eqn.invars), self._kind(eqn, names)
            if _jaxpr.name_of(eqn) == "name" and self._is_product(*inputs):
                self.named[inputs[0]] = _jaxpr.params_of(eqn)["name"]
                self.equations[index] = _jaxpr.as_copy(eqn)
            start = max([level[v] for v in inputs], default=0)
            self._note_origin(eqn, inputs, kind)
            if _jaxpr.has_effects(eqn):  # which keep their order
                start = max(start, last_effect)
                last_effect = start + 1
            floats = bool(differentiable.intersection(inputs))
            if kind in ("island", "other") and not (floats or _jaxpr.has_effects(eqn)):
                kind, start = "other", -1  # as masks, which run first
            else:
                differentiable.update(eqn.outvars)
            self.kinds.append(kind)
            self.starts.append(start)
            level |= dict.fromkeys(eqn.outvars, start + (kind != "island"))
        self._sink()

    def _kind(self, eqn: JaxprEqn, names: Names) -> PartKind:
        if eqn.primitive.name in _jaxpr.PRODUCTS:
            fate = ops.fate(
                eqn,
                is_parameter=self._is_parameter,
                is_number=self.numbers.__contains__,
                is_exempt=names.exempt,
            )
            if fate is not ops.Fate.BECOMES_HALF:
                return "other"
            return "own" if self._own_dtype(eqn) else "product"
        if ops.is_cheap(eqn):
            return "island"
        if ops.has_products(eqn):
            return "other" if names.exempt(eqn) else "call"
        is_summing = _jaxpr.name_of(eqn) in _SUMMING and ops.reads_half(eqn)
        return "call" if is_summing else "other"

    def _is_product(self, v: Var | None = None) -> bool:
        return v in self.maker and self.kinds[self.maker[v]] == "product"

    def _is_parameter(self, v: Var) -> bool:
        return self.origins.get(v) == Origin.PARAMETER

    def _own_dtype(self, eqn: JaxprEqn) -> str | None:
        """The dtype of a half-precision operand, if it is not `autocast`'s."""
        sources = [self._side(v)[0] for v in variables(eqn.invars[:2])]
        dtypes = map(_jaxpr.dtype_name, sources)
        half = {*filter(is_half, dtypes)}
        return half.pop() if len(half) == 1 and self._dtype not in half else None

    def _note_origin(
        self, eqn: JaxprEqn, inputs: Sequence[Var], kind: PartKind
    ) -> None:
        """Notes what comes from arguments alone, or from integers and constants."""
        if any(map(_jaxpr.is_reference, [*inputs, *eqn.outvars])):
            return  # what a reference holds changes
        if self.fixed.issuperset(inputs):
            self.fixed.update(eqn.outvars)
        integers = [v for v in inputs if _jaxpr.dtype_name(v).startswith(_INTEGERS)]
        if kind != "call" and self.numbers.issuperset({*inputs}.difference(integers)):
            self.numbers.update(eqn.outvars)
        is_data = ops.holds_half_products(eqn) or self._is_lookup(eqn)
        is_plain = kind in ("island", "other") and not is_data
        # A layer of a stack of weights is one at any index, as of a loop's counter.
        is_lookup = eqn.primitive.name in _jaxpr.LOOKUPS
        sources = variables(eqn.invars[:1]) if is_lookup else inputs
        if is_plain and self.origins.keys() >= {*sources}:
            scales = eqn.primitive.name in _jaxpr.SCALINGS
            is_parameter = scales and any(map(self._is_parameter, sources))
            origin = Origin.PARAMETER if is_parameter else Origin.ARGUMENTS
            self.origins.update(dict.fromkeys(eqn.outvars, origin))
            if not self.wide.isdisjoint(sources):
                self.wide.update(eqn.outvars)
        if kind == "island" and all(v in self.repeats for v in inputs):
            count = 1 + sum(self.repeats[v] for v in inputs)
            if count <= _MOST_REPEATED:
                self.repeats.update(dict.fromkeys(eqn.outvars, count))

    def _is_lookup(self, eqn: JaxprEqn) -> bool:
        """Whether rows are looked up by what is passed, as tokens: these are data."""
        is_fixed = self.fixed.issuperset(variables(eqn.invars[1:2]))
        return ops.looks_up_rows(eqn) and not is_fixed

    def _sink(self) -> None:
        """Delays an equation to the first island that reads it.

        One array less is kept.
        """
        first = dict.fromkeys(variables(self.jaxpr.outvars), -1)
        for index, eqn in reversed([*enumerate(self.equations)]):
            inputs, is_island = variables(eqn.invars), self.kinds[index] == "island"
            entries = sum(map(_jaxpr.size, inputs))
            if is_island and entries <= _ONE_ARRAY * _jaxpr.size(eqn.outvars[0]):
                reader = min(first.get(v, -1) for v in eqn.outvars)
                self.starts[index] = max(self.starts[index], reader)
            start = self.starts[index] if is_island else -1
            first |= {v: min(first.get(v, start), start) for v in inputs}

    def parts(self) -> list[_Part]:
        """The parts in their order, without those that nobody reads."""
        parts: list[_Part] = []
        wanted = {*variables(self.jaxpr.outvars)}
        for members in reversed(self._members()):
            kind, eqn = self.kinds[members[0]], self.equations[members[0]]
            if kind == "island":
                part = _Part(kind, self._island(members, wanted))
            elif kind in ("product", "own"):
                product = self._product(eqn)
                part = _Part(kind, product.jaxpr, product)
            else:
                inputs = dict.fromkeys(variables(eqn.invars))
                alone = _jaxpr.excerpt(self.jaxpr, [eqn], inputs, eqn.outvars)
                part = _Part(kind, alone)
            if _jaxpr.has_effects(eqn) or wanted.intersection(part.jaxpr.outvars):
                parts.append(part)
                wanted.update(part.jaxpr.invars)
        return parts[::-1]

    def _members(self) -> list[list[int]]:
        """The equations of each part, in the order in which parts run."""
        members: dict[tuple[int, int, str], list[int]] = {}
        for index, kind in enumerate(self.kinds):
            key = self.starts[index], index, ""
            if kind == "island":  # runs before what else reads values of its level
                mesh = ops.mesh_of(self.equations[index].outvars[0])
                key = self.starts[index], -1, str(mesh.axis_types)
            members.setdefault(key, []).append(index)
        return [members[key] for key in sorted(members)]

    def _island(self, members: list[int], wanted: set[Var]) -> Jaxpr:
        """The wanted equations of an island, and what they read of arguments alone."""
        outputs = [v for i in members for v in self.equations[i].outvars if v in wanted]
        allowed = {*members}
        needed = set[int]()
        todo = [*outputs]
        inputs: dict[Var, None] = {}
        while todo:
            v = todo.pop()
            maker = self.maker.get(v)
            if maker is None or not (maker in allowed or v in self.repeats):
                inputs[v] = None
            elif maker not in needed:
                needed.add(maker)
                todo += variables(self.equations[maker].invars)
        equations = [self.equations[i] for i in sorted(needed)]
        return _jaxpr.excerpt(self.jaxpr, equations, inputs, outputs)

    def _product(self, eqn: JaxprEqn) -> ops.Product:
        (lhs, left), (rhs, right) = map(self._side, variables(eqn.invars[:2]))
        inputs = [lhs, rhs, *variables(eqn.invars[2:])]
        whole = _jaxpr.excerpt(self.jaxpr, [*left, *right, eqn], inputs, eqn.outvars)
        scope, jaxpr = _jaxpr.without_common_scope(whole)
        is_dot = eqn.primitive.name == "dot_general"
        wide = [is_dot and is_float32(v) and v in self.wide for v in (lhs, rhs)]
        return ops.Product(
            key=_jaxpr.structural_key(jaxpr),
            jaxpr=jaxpr,
            moves=len(left),
            wide_sides=tuple(wide),
            dtype=self._own_dtype(eqn),
            scope=scope,
        )

    def _side(self, v: Var) -> tuple[Var, list[JaxprEqn]]:
        """An operand of a product before its entries are moved, and what moves them.

        A parameter that is stored in half precision is read as it is stored, so its
        gradient is of its dtype from the product on.
        """
        moves: list[JaxprEqn] = []
        while (i := self.maker.get(v)) is not None:
            eqn = self.equations[i]
            if len(variables(eqn.invars)) != 1:
                break
            (source,) = variables(eqn.invars)
            if eqn.primitive.name in _jaxpr.REARRANGES:
                moves.insert(0, eqn)
            elif not (_is_widening(eqn) and source in self.origins):
                break
            v = source
        return v, moves


def _is_widening(eqn: JaxprEqn) -> bool:
    is_cast = eqn.primitive.name == "convert_element_type"
    from_half = is_half(_jaxpr.dtype_name(eqn.invars[0]))
    return is_cast and from_half and is_float32(eqn.outvars[0])


class Kept(NamedTuple):
    """Values of an island that the backward pass keeps, and those it makes again."""

    again: Collection[Var] = ()  # operands of products that it computes again
    kept: Collection[Var] = ()  # the other operands
    softmaxes: Collection[Var] = ()  # those of the kept ones that the derivative reads
    streams: Collection[Var] = ()  # results, in place of what they are computed from
    inputs: Collection[Var] = ()  # read besides these


class _Units:
    """Joins each island with the products whose operands it makes again."""

    def __init__(
        self, parts: list[_Part], halves: set[Var], given: set[Var], shared: set[Var]
    ) -> None:
        self._parts, self._halves, self._shared = parts, halves, shared
        self._held = {*given}  # the backward pass keeps these anyway
        self._maker = {v: i for i, p in enumerate(parts) for v in p.jaxpr.outvars}
        self._later = {v for p in parts if p.kind == "island" for v in p.jaxpr.invars}
        self._readers: dict[Var, list[int]] = {}
        for i, part in enumerate(parts):
            is_product = part.kind == "product"
            for v in dict.fromkeys(part.jaxpr.invars[:2] if is_product else ()):
                self._readers.setdefault(v, []).append(i)

    def units(self, join: bool) -> list[Unit]:
        """The units; islands stay as traced if they are not joined with products.

        Products run together in either case: what they read has one cotangent.
        """
        units: list[Unit] = []
        done: set[int] = set()
        for i, (kind, jaxpr, product) in enumerate(self._parts):
            if i in done:
                continue
            nothing = _jaxpr.excerpt(jaxpr, [], [], [])
            if product and kind == "own":
                units.append(self._unit("own", jaxpr, products=((product, ()),)))
            elif product:
                self._held |= self._halves.intersection(jaxpr.invars[:2])
                units.append(self._half(nothing, [product], Kept()))
            elif kind == "island":
                choice = self._choice(i, jaxpr)
                products = sorted({n for v in choice.again for n in self._readers[v]})
                done.update(products)
                self._held.update(choice.inputs, choice.streams)
                self._held |= self._halves.intersection(choice.kept)
                parts = [self._parts[n] for n in products]
                behind = [part.product for part in parts if part.product]
                if join:
                    units.append(self._half(jaxpr, behind, choice))
                    continue
                units.append(self._unit("other", jaxpr))
                if behind:
                    units.append(self._half(nothing, behind, Kept()))
            else:
                units.append(self._unit("call" if kind == "call" else "other", jaxpr))
        return units

    def _choice(self, i: int, island: Jaxpr) -> Kept:
        """Chooses what the backward pass keeps of an island.

        An operand of a product is made again where that reads little that the island's
        own derivative does not read anyway. Else its half-precision copy is kept.

        The derivative of a softmax reads the probabilities that the next product read.
        To make them again would cost a transformer 8 % of the bytes that it moves.
        Nothing else reads these: it would not be what the forward pass read.
        """

        def needed(softmaxes: Collection[Var], known: Collection[Var]) -> set[Var]:
            return needed_for(island, read_by_derivative(island, softmaxes), known)

        def read(softmaxes: Collection[Var], known: Collection[Var]) -> set[Var]:
            return needed(softmaxes, known).intersection(island.invars)

        def total(values: Collection[Var]) -> int:
            return sum(map(self._cost, values))

        results = [v for v in variables(island.outvars) if is_float32(v)]
        operands = [v for v in results if v in self._readers]
        softmaxes = {v for v in softmaxes_of(island) if v in operands}
        # The last one is first: what reads a result itself may be another one.
        for v in reversed([v for v in operands if v in softmaxes]):
            others = softmaxes - {v}
            scores_are_kept = read(others, ()) == read(softmaxes, ())
            if scores_are_kept or v in needed(softmaxes, ()):
                softmaxes = others
        known: set[Var] = set()
        inputs = read(softmaxes, known)
        for v in (v for v in results if v in self._later):
            fewer = read(softmaxes, known | {v})
            if total(fewer) + self._cost(v) < total(inputs):
                known.add(v)
                inputs = fewer
        again: set[Var] = set()
        for v in sorted(operands, key=_jaxpr.size, reverse=True):
            values = needed_for(island, [v], known)
            more = values.intersection(island.invars) - inputs
            is_exact = softmaxes.isdisjoint(values)
            can_run = is_exact and self._can_run_behind(v, i)
            if can_run and total(more) < 2 * _jaxpr.size(v):
                again.add(v)
                inputs |= more
        return Kept(again, {*operands} - again, softmaxes, known, inputs)

    def _cost(self, v: Var) -> int:
        """Bytes that the backward pass keeps more if it reads a variable."""
        width = 2 if v in self._halves else _jaxpr.bytes_per_entry(v)
        return 0 if v in self._held else width * _jaxpr.size(v)

    def _can_run_behind(self, v: Var, i: int) -> bool:
        """Whether the products that read a result of an island can run right behind."""
        products = [self._parts[n].jaxpr for n in self._readers[v]]
        read = {v for product in products for v in product.invars}
        context = self._parts[i].jaxpr.eqns[-1].ctx
        are_made = all(self._maker.get(v, -1) <= i for v in read)
        return are_made and all(p.eqns[-1].ctx == context for p in products)

    def _half(
        self, island: Jaxpr, products: Sequence[ops.Product], choice: Kept
    ) -> Unit:
        sums = small_sums(island)
        made = dict.fromkeys([*island.outvars, *sums])
        read = [v for p in products for v in p.jaxpr.invars if v not in made]
        inputs = dict.fromkeys([*island.invars, *read])
        outputs = [*dict.fromkeys([*made, *read])]
        wires = [tuple(map(outputs.index, p.jaxpr.invars)) for p in products]
        return self._unit(
            "half",
            _jaxpr.excerpt(island, island.eqns, inputs, outputs),
            products=tuple(zip(products, wires, strict=True)),
            reads=len(island.invars),
            kept=_places(outputs, choice.kept),
            softmaxes=_places(outputs, choice.softmaxes),
            known=_places(outputs, {*sums}.union(choice.streams)),
        )

    def _unit(self, kind: UnitKind, jaxpr: Jaxpr, **facts: Any) -> Unit:
        scope, jaxpr = _jaxpr.without_common_scope(jaxpr)
        return Unit(
            kind=kind,
            key=_jaxpr.structural_key(jaxpr),
            jaxpr=jaxpr,
            scope=scope,
            shared=_places(jaxpr.outvars, self._shared),
            **facts,
        )


def needed_for(
    island: Jaxpr, atoms: Iterable[Atom], given: Collection[Var]
) -> set[Var]:
    """The variables of an island from which values are computed, given some of them."""
    known = {*small_sums(island)}.union(given)
    found = {*variables(atoms)} - known
    for eqn in reversed(island.eqns):
        if not found.isdisjoint(eqn.outvars):
            found.update({*variables(eqn.invars)} - known)
    return found


def _places(outputs: Sequence[Atom], chosen: Collection[Var]) -> tuple[int, ...]:
    return tuple(i for i, v in enumerate(outputs) if v in chosen)
