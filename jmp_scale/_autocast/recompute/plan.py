"""Plans what runs together, what is saved for the backward pass, what is recomputed.

The cheap operations between products form islands. An island and the products that
read its results are a unit: the backward pass recomputes the island, and takes from
that both the island's derivative and operands of the products' gradients. For

```
h = x + gelu(x @ w1) @ w2
y = normalize(h) @ w3
```

it saves `x`, an argument, and in half precision, as products return them, `x @ w1` and
`gelu(...) @ w2`. It recomputes the results of gelu, the sum `h`, and its norm.
"""

import dataclasses
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import NamedTuple

from ... import _jaxpr, _jaxpr_rewrite
from ..._jaxpr import Jaxpr, NameStack, Var, is_float32, variables
from ..products import Product, is_cheap, mesh_of
from ..provenance import Reading, Step
from .islands import needed_for, read_by_derivative, small_sums, softmaxes_of

# At most this many operations on arguments alone are repeated in each island that reads
# them.
_MOST_REPEATED = 32
# An equation of one array and smaller ones reads at most this many times its result.
_ONE_ARRAY = 9 / 8


class Output(NamedTuple):
    """What a result of an island is for."""

    is_data: bool  # the gradients of all products that read it are added in half
    is_shared: bool  # all operations read one cast of it
    # Its half-precision copy is a residual, which products read.
    is_saved_in_half: bool
    is_softmax: bool  # the island's derivative reads this copy, too
    # It is a residual itself, a small sum or a stream. What is computed from it is
    # recomputed from the residual.
    is_saved: bool


@dataclasses.dataclass(frozen=True)
class Unit:
    """An island and products that read it. Equal ones, of equal layers, share traces.

    A unit may have no product. A product that is in no unit is a step by itself.
    """

    key: Hashable  # equal for equal islands
    jaxpr: Jaxpr = dataclasses.field(compare=False)  # the island
    # The scopes in which all its equations were, which they no longer name.
    scope: NameStack = dataclasses.field(compare=False)
    outputs: tuple[Output, ...]  # one for each of the island's
    # Each with the positions of what it reads: the outputs, and after these `passed`.
    products: tuple[tuple[Product, tuple[int, ...]], ...]
    passed: tuple[Var, ...] = dataclasses.field(compare=False)

    def places(self, fact: str) -> list[int]:
        """Returns the positions of outputs with a property, such as "is_saved"."""
        return [i for i, each in enumerate(self.outputs) if getattr(each, fact)]

    @property
    def passed_inputs(self) -> tuple[tuple[int, int], ...]:
        """Positions in `passed`, and of the same residuals among the island's inputs.

        Equal units may differ in these.
        """
        inputs = {v: i for i, v in enumerate(self.jaxpr.invars)}
        pairs = enumerate(self.passed)
        return tuple((j, inputs[v]) for j, v in pairs if v in inputs)

    @property
    def operands(self) -> set[int]:
        """The positions of operands of products."""
        return {i for _, places in self.products for i in places[:2]}


def make_plan(reading: Reading) -> list[Step | Unit]:
    """Returns the parts of a program, in the order in which they run."""
    return _Units(reading, _Levels(reading).parts()).units()


class _Island(NamedTuple):
    jaxpr: Jaxpr
    half_product: None = None  # a step may have one

    @property
    def inputs(self) -> list[Var]:
        return self.jaxpr.invars

    @property
    def outputs(self) -> list[Var]:
        return variables(self.jaxpr.outvars)


class _Levels:
    """Forms islands of the equations of a program.

    The level of a value is the largest number of equations that are not cheap on a path
    to it. The cheap equations of one level are an island: whatever lies between two of
    them is of their level too, so the islands have an order.
    """

    def __init__(self, reading: Reading) -> None:
        self._program, self._steps = reading.jaxpr, reading.steps
        self._maker = {v: i for i, s in enumerate(self._steps) for v in s.outputs}
        # Values of arguments alone, and how many equations compute them.
        self._repeats = dict.fromkeys(reading.given, 0)
        self._in_island: list[bool] = []
        self._starts: list[int] = []  # level of an equation's inputs
        level = dict.fromkeys([*reading.jaxpr.invars, *reading.given], 0)
        differentiable = {v for v in level if _jaxpr.is_floating(v)}
        last_effect = 0
        for step in self._steps:
            inputs = step.inputs
            has_effects = _jaxpr.has_effects(step.eqn)
            is_island = step.kind == "other" and is_cheap(step.eqn)
            if is_island:
                self._note_repeats(step, inputs)
            start = max([level[v] for v in inputs], default=0)
            if has_effects:  # these equations keep their order
                start = max(start, last_effect)
                last_effect = start + 1
            has_tangent = not differentiable.isdisjoint(inputs)
            if step.kind == "other" and not (has_tangent or has_effects):
                is_island, start = False, -1  # masks, for example, run first
            else:
                differentiable.update(step.outputs)
            self._in_island.append(is_island)
            self._starts.append(start)
            level |= dict.fromkeys(step.outputs, start + (not is_island))
        self._delay()

    def _note_repeats(self, step: Step, inputs: Sequence[Var]) -> None:
        if all(v in self._repeats for v in inputs):
            count = 1 + sum(self._repeats[v] for v in inputs)
            if count <= _MOST_REPEATED:
                self._repeats.update(dict.fromkeys(step.outputs, count))

    def _delay(self) -> None:
        """Moves equations of one array to the first island that reads their results.

        That array is then read there, and not a result of each of them saved.
        """
        first: dict[Var, int] = {}  # level of the first island that reads a value
        elsewhere = {*variables(self._program.outvars)}  # read by other equations
        for index, step in reversed([*enumerate(self._steps)]):
            inputs = step.inputs
            if not self._in_island[index]:
                elsewhere.update(inputs)
                continue
            entries = sum(map(_jaxpr.size, inputs))
            is_one_array = entries <= _ONE_ARRAY * _jaxpr.size(step.outputs[0])
            readers = [first[v] for v in step.outputs if v in first]
            is_read_by_all = len(readers) == len(step.outputs)
            if is_one_array and is_read_by_all and elsewhere.isdisjoint(step.outputs):
                self._starts[index] = min(readers)
            start = self._starts[index]
            first |= {v: min(first.get(v, start), start) for v in inputs}

    def parts(self) -> list[Step | _Island]:
        """Steps and islands in their order, without those that nobody reads."""
        parts: list[Step | _Island] = []
        wanted = {*variables(self._program.outvars)}
        for members in reversed(self._members()):
            part, effects = self._steps[members[0]], False
            if self._in_island[members[0]]:
                part = self._island(members, wanted)
            else:
                effects = _jaxpr.has_effects(part.eqn)
            if effects or not wanted.isdisjoint(part.outputs):
                parts.append(part)
                wanted.update(part.inputs)
        return parts[::-1]

    def _members(self) -> list[list[int]]:
        """Returns the equations of each part, in the order in which parts run."""
        members: dict[tuple[int, int, str], list[int]] = {}
        for index, is_island in enumerate(self._in_island):
            key = self._starts[index], index, ""
            if is_island:  # runs before what else reads values of its level
                mesh = mesh_of(self._steps[index].outputs[0])
                key = self._starts[index], -1, str(mesh.axis_types)
            members.setdefault(key, []).append(index)
        return [members[key] for key in sorted(members)]

    def _island(self, members: list[int], wanted: set[Var]) -> _Island:
        """Returns an island of its wanted equations and those of arguments alone."""
        outputs = [v for i in members for v in self._steps[i].outputs if v in wanted]
        allowed = {*members}
        needed = set[int]()
        todo = [*outputs]
        inputs: dict[Var, None] = {}
        while todo:
            v = todo.pop()
            maker = self._maker.get(v)
            if maker is None or not (maker in allowed or v in self._repeats):
                inputs[v] = None
            elif maker not in needed:
                needed.add(maker)
                todo += variables(self._steps[maker].eqn.invars)
        equations = [self._steps[i].eqn for i in sorted(needed)]
        excerpt = _jaxpr_rewrite.excerpt
        return _Island(excerpt(self._program, equations, inputs, outputs))


class Choice(NamedTuple):
    """What is saved and what is recomputed of an island's results."""

    recomputed: Collection[Var]  # operands of products
    saved: Collection[Var]  # the other operands
    softmaxes: Collection[Var]  # those of the saved ones that the derivative reads
    streams: Collection[Var]  # results, in place of what they are computed from
    inputs: Collection[Var]  # residuals besides these


class _Units:
    """Joins each island with the products whose operands are recomputed with it."""

    def __init__(self, reading: Reading, parts: Sequence[Step | _Island]) -> None:
        self._reading, self._parts = reading, parts
        self._held = {*reading.given}  # residuals already, so they cost nothing
        self._maker = {v: i for i, part in enumerate(parts) for v in part.outputs}
        islands = [part for part in parts if isinstance(part, _Island)]
        self._later = {v for island in islands for v in island.inputs}
        self._readers: dict[Var, list[int]] = {}  # products that read an operand
        for i, part in enumerate(parts):
            product = part.half_product
            for v in dict.fromkeys(product.operands if product else ()):
                self._readers.setdefault(v, []).append(i)

    def units(self) -> list[Step | Unit]:
        units: list[Step | Unit] = []
        joined: set[int] = set()
        for i, part in enumerate(self._parts):
            if i in joined:
                continue
            if isinstance(part, _Island):
                choice = self._choice(i, part.jaxpr)
                behind = {n for v in choice.recomputed for n in self._readers[v]}
                joined |= behind
                self._hold(choice.saved)
                self._held.update(choice.inputs, choice.streams)
                products = (self._parts[n].half_product for n in sorted(behind))
                units.append(self._unit(part.jaxpr, [p for p in products if p], choice))
            else:
                product = part.half_product
                self._hold(product.operands if product else ())
                units.append(part)
        return units

    def _hold(self, operands: Collection[Var]) -> None:
        self._held |= self._reading.halves.intersection(operands)

    def _choice(self, i: int, island: Jaxpr) -> Choice:
        """Chooses what is saved of an island.

        An operand of a product is recomputed where that reads little that the island's
        own derivative does not read anyway. Else its half-precision copy is saved.
        """
        results = [v for v in variables(island.outvars) if is_float32(v)]
        operands = [v for v in results if v in self._readers]
        softmaxes = _softmaxes_read(island, operands)
        inputs = _residuals(island, softmaxes, ())
        streams: set[Var] = set()
        for v in (v for v in results if v in self._later):
            fewer = _residuals(island, softmaxes, streams | {v})
            if self._total(fewer) + self._cost(v) < self._total(inputs):
                streams.add(v)
                inputs = fewer
        recomputed: set[Var] = set()
        for v in sorted(operands, key=_jaxpr.size, reverse=True):
            values = needed_for(island, [v], streams)
            more = values.intersection(island.invars) - inputs
            # Computed from a softmax that is saved, it would not be what was read.
            is_exact = softmaxes.isdisjoint(values)
            can_run = is_exact and self._can_run_behind(v, i, island)
            if can_run and self._total(more) < 2 * _jaxpr.size(v):
                recomputed.add(v)
                inputs |= more
        saved = {*operands} - recomputed
        return Choice(recomputed, saved, softmaxes, streams, inputs)

    def _total(self, values: Iterable[Var]) -> int:
        return sum(map(self._cost, values))

    def _cost(self, v: Var) -> int:
        """Bytes of residuals more if the backward pass reads a variable."""
        in_half = v in self._reading.halves
        width = 2 if in_half else _jaxpr.bytes_per_entry(v)
        return 0 if v in self._held else width * _jaxpr.size(v)

    def _can_run_behind(self, v: Var, i: int, island: Jaxpr) -> bool:
        """Whether the products that read a result of an island can run right behind."""
        parts = (self._parts[n] for n in self._readers[v])
        products = [part for part in parts if isinstance(part, Step)]
        are_made = all(
            self._maker.get(read, -1) <= i for p in products for read in p.inputs
        )
        return are_made and all(p.eqn.ctx == island.eqns[-1].ctx for p in products)

    def _unit(self, island: Jaxpr, products: Sequence[Product], choice: Choice) -> Unit:
        sums = small_sums(island)
        made = variables(dict.fromkeys([*island.outvars, *sums]))
        read = dict.fromkeys(v for p in products for v in p.jaxpr.invars)
        passed = tuple(v for v in read if v not in made)
        positions = {v: i for i, v in enumerate([*made, *passed])}
        scope, jaxpr = _jaxpr_rewrite.without_common_scope(
            _jaxpr_rewrite.excerpt(island, island.eqns, island.invars, made)
        )
        outputs = (
            Output(
                is_data=self._reading.is_data(v),
                is_shared=v in self._reading.shared,
                is_saved_in_half=v in choice.saved,
                is_softmax=v in choice.softmaxes,
                is_saved=v in sums or v in choice.streams,
            )
            for v in made
        )
        return Unit(
            key=_jaxpr_rewrite.structural_key(jaxpr),
            jaxpr=jaxpr,
            scope=scope,
            outputs=tuple(outputs),
            products=tuple(
                (p, tuple(positions[v] for v in p.jaxpr.invars)) for p in products
            ),
            passed=passed,
        )


def _residuals(
    island: Jaxpr, softmaxes: Collection[Var], streams: Collection[Var]
) -> set[Var]:
    """Returns the inputs of an island that its derivative reads."""
    read = needed_for(island, read_by_derivative(island, softmaxes), streams)
    return read.intersection(island.invars)


def _softmaxes_read(island: Jaxpr, operands: Collection[Var]) -> set[Var]:
    """Finds the softmaxes whose derivatives read the probabilities of a product.

    To recompute these would cost a transformer 8 % of the bytes that it moves. Nothing
    else reads them, because that would not be what the forward pass read; and the
    scores that they are computed from are not saved.
    """
    found = {v for v in softmaxes_of(island) if v in operands}
    # The last one is first: what reads a result itself may be another one.
    for v in reversed([v for v in operands if v in found]):
        others = found - {v}
        read = needed_for(island, read_by_derivative(island, found), ())
        scores_are_saved = _residuals(island, others, ()) == read & {*island.invars}
        if scores_are_saved or v in read:
            found = others
    return found
