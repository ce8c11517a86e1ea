"""What of a float32 program runs in half precision: a plan, read off its jaxpr.

Matrix products and convolutions become half precision, everything else stays as traced.
The cheap operations between products form islands, which the backward pass computes
again. Nothing is run here, and nothing depends on values.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal, NamedTuple

from . import _jaxpr
from ._jaxpr import PRODUCTS, is_literal, words

# Linear operations on one array that only move its entries.
_MOVES = words(
    "copy copy_p expand_dims reshape rev sharding_constraint squeeze transpose"
)
_PARTS = words("slice split")
# What costs less to compute again than to keep.
_CHEAP = (
    _MOVES
    | _PARTS
    | words("""
    abs acos acosh add add_any and argmax argmin asin asinh atan atan2 atanh
    bitcast_convert_type broadcast_in_dim cbrt ceil clamp concatenate conj
    convert_element_type cos cosh digamma div dynamic_slice eq erf erf_inv erfc exp exp2
    expm1 floor gather ge gt imag integer_pow iota is_finite le lgamma log log1p
    logistic lt max min mul name ne neg nextafter not optimization_barrier or pad
    pbroadcast pcast population_count pow pvary real reduce_and reduce_max reduce_min
    reduce_or reduce_precision reduce_prod reduce_sum rem reshard round rsqrt select_n
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
    stop_gradient sub tan tanh xor
    """)
)
_CALLS = words("closed_call core_call jit pjit")
_RANDOM = ("random_", "rng_", "threefry")
# What is computed from arguments alone is computed again in each island that reads it,
# if it takes no more operations than these.
_MOST_REPEATED = 32
_KEPT = "keep_float32:"


class Product(NamedTuple):
    """A matrix product or convolution, with the moves around it.

    Attributes:
      sides: for each operand a jaxpr that moves the entries of one array.
      equation: the product itself.
      after: a jaxpr that moves the entries of its result.
      weights: for each operand, whether it is computed from arguments alone.
    """

    sides: tuple[Any, Any]
    equation: Any
    after: Any
    weights: tuple[bool, bool]


class Step(NamedTuple):
    """Equations that run together.

    Attributes:
      kind: "product"; "island", of cheap equations that the backward pass repeats;
        "call", one equation whose nested jaxprs hold products; "other", as traced.
      jaxpr: the equations. Its inputs and outputs are variables of the program.
      product: details of a product.
    """

    kind: Literal["product", "island", "call", "other"]
    jaxpr: Any
    product: Product | None = None


class Plan(NamedTuple):
    """A program as a sequence of steps.

    Attributes:
      jaxpr: the program, with calls inlined that hold products or cheap equations.
      constants: values of its constants, by variable.
      steps: in the order in which they run.
      kept: variables that the backward pass may keep as they are: arguments, and what
        is small beside the arrays of its island.
      exact: float32 variables whose cast to half precision is not clipped: results of
        products, and operands of products.
    """

    jaxpr: Any
    constants: dict[Any, Any]
    steps: list[Step]
    kept: Collection[Any]
    exact: Collection[Any]


def is_product(eqn: Any) -> bool:
    """Whether an equation is a float32 product that becomes half precision."""
    if eqn.primitive.name not in PRODUCTS or _precision(eqn) - {"None", "DEFAULT"}:
        return False
    if eqn.primitive.name == "dot_general" and min(_free_sizes(eqn)) == 1:
        return False  # a sum of products, which stays float32
    return all(map(is_float32, (*eqn.invars[:2], eqn.outvars[0])))


def has_product(jaxpr: Any) -> bool:
    """Whether there is a product in a jaxpr, or in one nested in it."""
    return any(map(is_product, _jaxpr.equations(jaxpr)))


def is_float32(atom: Any) -> bool:
    return _jaxpr.dtype_name(atom) == "float32"


def is_kept(eqn: Any, names: Collection[str]) -> bool:
    """Whether a call is one that the user wants in float32."""
    name = str(eqn.params.get("name", ""))
    return name.startswith(_KEPT) or name in names


def kept_name(name: str) -> str:
    """The name of a call that `is_kept`."""
    return _KEPT + name


def make_plan(
    jaxpr: Any, held: Sequence[bool], keep_float32: Collection[str] = ()
) -> Plan:
    """The plan of a program.

    Args:
      jaxpr: the program, with the values of its constants.
      held: for each input, whether it is alive during the backward pass in any case, as
        arguments of a loss are.
      keep_float32: names of calls that stay as they are.

    Returns:
      Its plan.
    """
    flat, constants = _inlined(jaxpr, keep_float32)
    given = {v for v, is_held in zip(flat.invars, held, strict=True) if is_held}
    return _Planner(flat, given | {*constants}, keep_float32).plan(constants)


def _precision(eqn: Any) -> set[str]:
    precision = eqn.params.get("precision")
    both = precision if isinstance(precision, tuple) else (precision,)
    return {str(getattr(p, "name", p)) for p in both}


def _free_sizes(eqn: Any) -> list[int]:
    """Entries of each operand's dimensions that are neither summed nor shared."""
    contracting, batch = eqn.params["dimension_numbers"]
    return [
        math.prod(n for d, n in enumerate(_jaxpr.shape(v)) if d not in (*c, *b))
        for v, c, b in zip(eqn.invars, contracting, batch, strict=True)
    ]


def _inlined(jaxpr: Any, keep_float32: Collection[str]) -> tuple[Any, dict[Any, Any]]:
    """A jaxpr with calls opened, and its constants. What costs more stays a call."""
    outer, values = _jaxpr.open_jaxpr(jaxpr)
    constants = dict(zip(outer.constvars, values, strict=True))
    equations: list[Any] = []

    def add(inner: Any, names: dict[Any, Any]) -> list[Any]:
        def named(atom: Any) -> Any:
            return atom if is_literal(atom) else names.get(atom, atom)

        for eqn in inner.eqns:
            inputs = [named(v) for v in eqn.invars]
            if _is_open(eqn, keep_float32):
                body, values = _jaxpr.open_jaxpr(_jaxpr.subjaxprs(eqn)[0])
                fresh = [_jaxpr.variable(v.aval) for v in body.constvars]
                constants.update(zip(fresh, values, strict=True))
                inputs = [*fresh, *inputs]
                within = dict(zip([*body.constvars, *body.invars], inputs, strict=True))
                outputs = add(body, within)
                names.update(zip(eqn.outvars, outputs, strict=True))
                continue
            if inner is not outer:  # whose body may be inlined once more
                fresh = [_jaxpr.variable(v.aval) for v in eqn.outvars]
                names.update(zip(eqn.outvars, fresh, strict=True))
                eqn = eqn.replace(outvars=fresh)
            equations.append(eqn.replace(invars=inputs))
        return [named(v) for v in inner.outvars]

    outputs = add(outer, {})
    return _jaxpr.part(outer, equations, outer.invars, outputs), constants


def _is_open(eqn: Any, keep_float32: Collection[str]) -> bool:
    if eqn.primitive.name not in _CALLS or is_kept(eqn, keep_float32):
        return False
    bodies = _jaxpr.subjaxprs(eqn)
    return len(bodies) == 1 and (is_cheap(eqn) or has_product(bodies[0]))


class _Planner:
    """Facts about the equations of a program without calls that hold products.

    The level of a value is the largest number of equations that are not cheap on a path
    to it. Cheap equations of one level that read each other are an island: whatever
    lies between two of them is of their level too, so the islands have an order.
    """

    def __init__(self, jaxpr: Any, given: set[Any], keep: Collection[str]) -> None:
        self.jaxpr, self.given, self.keep = jaxpr, given, keep
        self.equations = jaxpr.eqns
        self.maker = {v: i for i, e in enumerate(jaxpr.eqns) for v in e.outvars}
        self.readers: dict[Any, list[int]] = {}
        for index, eqn in enumerate(jaxpr.eqns):
            for v in _variables(eqn.invars):
                self.readers.setdefault(v, []).append(index)
        self.results = {*_variables(jaxpr.outvars)}
        self.level = dict.fromkeys([*jaxpr.invars, *given], 0)
        self.differentiable = {v for v in self.level if is_float32(v)}
        self.weights = {*given}
        self.repeats = dict.fromkeys(given, 0)  # equations that make a value anew
        self.kinds: list[str] = []
        self.starts: list[int] = []  # level of an equation's inputs
        self.moved: set[int] = set()  # moves that belong to a product
        self._classify()

    def _classify(self) -> None:
        random: set[Any] = set()
        last_effect = 0
        for eqn in self.equations:
            inputs = _variables(eqn.invars)
            level = max([self.level[v] for v in inputs], default=0)
            kind = self._kind(eqn)
            floats = bool(self.differentiable.intersection(inputs))
            if kind in ("cheap", "other") and not (floats or eqn.effects):
                kind, level = f"{kind}, not differentiated", 0
            if eqn.effects:  # which keep their order
                level = max(level, last_effect)
                last_effect = level + 1
            self.kinds.append(kind)
            self.starts.append(level)
            cheap = kind.startswith("cheap")
            made = level if kind.endswith("not differentiated") else level + (not cheap)
            self.level.update(dict.fromkeys(eqn.outvars, made))
            if not kind.endswith("not differentiated"):
                self.differentiable.update(eqn.outvars)
            if eqn.primitive.name.startswith(_RANDOM) or random.intersection(inputs):
                random.update(eqn.outvars)
            elif cheap:
                self._note_repeatable(eqn, inputs)

    def _kind(self, eqn: Any) -> str:
        if is_product(eqn):
            return "product"
        if is_cheap(eqn, self.keep):
            return "cheap"
        holds_product = any(map(has_product, _jaxpr.subjaxprs(eqn)))
        return "call" if holds_product and not is_kept(eqn, self.keep) else "other"

    def _note_repeatable(self, eqn: Any, inputs: Sequence[Any]) -> None:
        if self.weights.issuperset(inputs) and not _looks_up(eqn):
            self.weights.update(eqn.outvars)
        if all(v in self.repeats for v in inputs):
            count = 1 + sum(self.repeats[v] for v in inputs)
            if count <= _MOST_REPEATED:
                self.repeats.update(dict.fromkeys(eqn.outvars, count))

    def plan(self, constants: dict[Any, Any]) -> Plan:
        """Makes the steps, the last one first: what nobody reads is left out."""
        steps: list[Step] = []
        wanted, exact, kept = {*self.results}, set[Any](), {*self.given}
        products = [i for i, kind in enumerate(self.kinds) if kind == "product"]
        after = {i: self._moves_after(self.equations[i].outvars[0]) for i in products}
        self.moved = {i for moves in after.values() for i in moves}
        products = {i: self._product(i, after[i]) for i in products}
        for *_, what in sorted(self._order(), key=lambda x: x[:3], reverse=True):
            if isinstance(what, list):
                step = self._island(what, wanted)
                kept.update(_small(step.jaxpr))
            elif what in products:
                step = products[what]
                exact.update(step.jaxpr.outvars, step.jaxpr.invars[:2])
            else:
                eqn = self.equations[what]
                kind = "call" if self.kinds[what] == "call" else "other"
                inputs = dict.fromkeys(_variables(eqn.invars))
                step = Step(kind, _jaxpr.part(self.jaxpr, [eqn], inputs, eqn.outvars))
            effects = any(eqn.effects for eqn in step.jaxpr.eqns)
            if effects or wanted.intersection(step.jaxpr.outvars):
                steps.append(step)
                wanted.update(step.jaxpr.invars)
        plain = [i for i, k in enumerate(self.kinds) if k.endswith("differentiated")]
        first = self._part(plain, wanted)
        if first.outvars:
            steps.append(Step("other", first))
        return Plan(self.jaxpr, constants, steps[::-1], kept, exact)

    def _order(self) -> Iterable[tuple[int, int, int, Any]]:
        """(level, islands first, position, equation or island), for all steps."""
        parts = _Parts()
        for index, eqn in enumerate(self.equations):
            if self.kinds[index] != "cheap" or index in self.moved:
                continue
            parts.add(index)
            for v in _variables(eqn.invars):
                maker = self.maker.get(v, -1)
                if maker in parts and self.level[v] == self.starts[index]:
                    parts.join(index, maker)
        for group in parts.groups():
            yield self.starts[group[0]], 0, group[0], group
        for index, kind in enumerate(self.kinds):
            if kind in ("product", "call", "other"):
                yield self.starts[index], 1, index, index

    def _island(self, members: list[int], wanted: set[Any]) -> Step:
        return Step("island", self._part(members, wanted, self.repeats))

    def _part(
        self, members: list[int], wanted: set[Any], repeats: Collection[Any] = ()
    ) -> Any:
        """The equations among `members` that what is wanted needs, as a jaxpr."""
        outputs = [v for i in members for v in self.equations[i].outvars if v in wanted]
        allowed, needed, todo = {*members}, set[int](), [*outputs]
        inputs: dict[Any, None] = {}
        while todo:
            v = todo.pop()
            maker = self.maker.get(v)
            if maker is None or not (maker in allowed or v in repeats):
                inputs[v] = None
            elif maker not in needed:
                needed.add(maker)
                todo += _variables(self.equations[maker].invars)
        equations = [self.equations[i] for i in sorted(needed)]
        return _jaxpr.part(self.jaxpr, equations, inputs, outputs)

    def _product(self, index: int, after: list[int]) -> Step:
        eqn = self.equations[index]
        sides = [self._moves_before(v) for v in eqn.invars[:2]]
        moves = [self.equations[i] for i in sorted(after)]
        made = [v for e in moves for v in e.outvars] or [eqn.outvars[0]]
        outputs = [
            v
            for v in made
            if v in self.results or not {*self.readers.get(v, ())} <= {*after}
        ]
        product = Product(
            (sides[0], sides[1]),
            eqn,
            _jaxpr.part(self.jaxpr, moves, [eqn.outvars[0]], outputs),
            (eqn.invars[0] in self.weights, eqn.invars[1] in self.weights),
        )
        inputs = [*(s.invars[0] for s in sides), *_variables(eqn.invars[2:])]
        equations = [*sides[0].eqns, *sides[1].eqns, eqn, *moves]
        part = _jaxpr.part(self.jaxpr, equations, inputs, outputs)
        return Step("product", part, product)

    def _moves_before(self, operand: Any) -> Any:
        """What moves an array's entries before a product, from its first form on."""
        moves, v = [], operand
        while (i := self.maker.get(v)) is not None and i not in self.moved:
            if not _is_move(self.equations[i], _MOVES):
                break
            moves.append(self.equations[i])
            v = moves[-1].invars[0]
        return _jaxpr.part(self.jaxpr, moves[::-1], [v], [operand])

    def _moves_after(self, result: Any) -> list[int]:
        """What moves the entries of a product's result on their way to other products.

        Elsewhere moves are left to the island that reads the result: an array whose
        layout is that of the product is the cheapest to keep.
        """
        found, todo = [], [result]
        while todo:
            v = todo.pop()
            readers = self.readers.get(v, [])
            moves = [_is_move(self.equations[i], _MOVES | _PARTS) for i in readers]
            if v in self.results or not readers:
                return []
            if all(moves):
                found += readers
                todo += [o for i in readers for o in self.equations[i].outvars]
            elif any(self.kinds[i] != "product" for i in readers):
                return []
        return found


def is_cheap(eqn: Any, keep_float32: Collection[str] = ()) -> bool:
    """Whether an equation costs less to compute again than to keep."""
    bodies, name = _jaxpr.subjaxprs(eqn), eqn.primitive.name
    if eqn.effects or is_kept(eqn, keep_float32):
        return False
    if not bodies:
        return name in _CHEAP
    return (name in _CALLS or name == "custom_jvp_call") and all(
        is_cheap(inner) for body in bodies for inner in _jaxpr.open_jaxpr(body)[0].eqns
    )


def _looks_up(eqn: Any) -> bool:
    """Whether it takes entries by index, as embeddings do."""
    inner = (e for body in _jaxpr.subjaxprs(eqn) for e in _jaxpr.equations(body))
    return any(e.primitive.name == "gather" for e in (eqn, *inner))


def _is_move(eqn: Any, names: Collection[str]) -> bool:
    # The sum that is the derivative of a broadcast belongs to float32.
    return eqn.primitive.name in names and len(_variables(eqn.invars)) == 1


def _small(jaxpr: Any) -> list[Any]:
    """Inputs with no more than an eighth of the entries of the largest array."""
    sizes = [_jaxpr.size(v) for eqn in jaxpr.eqns for v in eqn.outvars]
    return [v for v in jaxpr.invars if _jaxpr.size(v) * 8 <= max(sizes)]


def _variables(atoms: Iterable[Any]) -> list[Any]:
    return [v for v in atoms if not is_literal(v)]


class _Parts:
    """Numbers, joined into groups."""

    def __init__(self) -> None:
        self._parent: dict[int, int] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._parent

    def add(self, number: int) -> None:
        self._parent[number] = number

    def join(self, a: int, b: int) -> None:
        self._parent[self._root(a)] = self._root(b)

    def groups(self) -> Iterable[list[int]]:
        found: dict[int, list[int]] = {}
        for number in self._parent:
            found.setdefault(self._root(number), []).append(number)
        return found.values()

    def _root(self, number: int) -> int:
        parent = self._parent
        while parent[number] != number:
            parent[number] = parent[parent[number]]
            number = parent[number]
        return number
