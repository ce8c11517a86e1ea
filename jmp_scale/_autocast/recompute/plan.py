"""Plans what runs together, what is saved for the backward pass, what is recomputed.

With an argument `x`, of

```
h = x + gelu(x @ w1) @ w2
y = normalize(h) @ w3
```

`x` is saved and, in half precision, as products return them, `x @ w1` and
`gelu(...) @ w2`. The backward pass recomputes the results of gelu, the sum `h`, and its
norm.
"""

import dataclasses
from collections.abc import Collection, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

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
# The level of equations that no tangent reaches, such as masks: they run first.
_BEFORE_ALL = -1
_BYTES_OF_HALF = 2  # an entry


class Output(NamedTuple):
    """What a result of an island is for."""

    is_data: bool  # the gradients of all products that read it are added in half
    # Its half-precision copy is a residual, which products read.
    is_saved_in_half: bool
    is_softmax: bool  # the island's derivative reads this copy, too
    # The result itself is saved: a small sum, or the stream. What is computed from it
    # is recomputed from the residual.
    is_saved: bool


class UnitProduct(NamedTuple):
    """A product of a unit."""

    product: Product
    # Of what it reads: first among the outputs of the island, then among `Unit.passed`.
    places: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Unit:
    """An island and products that read it. Equal ones, of equal layers, share traces.

    It may have no product. A product that no island is joined with has an empty one.
    """

    key: Hashable  # equal for equal islands
    jaxpr: Jaxpr = dataclasses.field(compare=False)  # the island
    # The scopes in which all its equations were, which they no longer name.
    scope: NameStack = dataclasses.field(compare=False)
    outputs: tuple[Output, ...]  # one for each of the island's
    products: tuple[UnitProduct, ...]
    passed: tuple[Var, ...] = dataclasses.field(compare=False)

    def places(self, fact: str) -> list[int]:
        """Returns the positions of outputs with a property, such as "is_saved"."""
        return [i for i, each in enumerate(self.outputs) if getattr(each, fact)]

    @property
    def passed_inputs(self) -> tuple[tuple[int, int], ...]:
        """Positions in `passed`, and of equal residuals among the island's inputs."""
        inputs = {v: i for i, v in enumerate(self.jaxpr.invars)}
        pairs = enumerate(self.passed)
        return tuple((j, inputs[v]) for j, v in pairs if v in inputs)

    @property
    def not_compared(self) -> Hashable:
        """What equal units may differ in, and a function of a unit reads."""
        scopes = (each.product.scope for each in self.products)
        return self.scope, *scopes, self.passed_inputs

    @property
    def settings(self) -> AbstractContextManager[Any]:
        """A context of the settings and the mesh with which it was traced."""
        eqns = self.jaxpr.eqns or [each.product.equation for each in self.products]
        return eqns[-1].ctx.manager

    @property
    def results(self) -> list[Var]:
        """The variables of the island's results, by position."""
        return variables(self.jaxpr.outvars)

    @property
    def operands(self) -> set[int]:
        """The positions of operands of products."""
        return {i for each in self.products for i in each.places[:2]}

    @property
    def copied(self) -> set[int]:
        """The positions of results of which there is a half-precision copy."""
        operands = self.operands.intersection(range(len(self.outputs)))
        return operands.union(self.places("is_saved_in_half"))


def make_plan(reading: Reading, *, joins: bool = True) -> list[Step | Unit]:
    """Returns the parts of a program, in the order in which they run.

    `joins`: whether there are islands. Without them, each product is a unit.
    """
    parts = _Levels(reading).parts() if joins else reading.steps
    return _Units(reading, parts).units()


# A step, or an island.
Part = Step | Jaxpr


class _Levels:
    """Forms islands of the equations of a program.

    The level of a value is the largest number of equations that are not cheap on a path
    to it. The cheap equations of one level are an island: whatever lies between two of
    them is of their level too, so the islands have an order.
    """

    def __init__(self, reading: Reading) -> None:
        self._program, self._steps = reading.jaxpr, reading.steps
        self._maker = {v: i for i, s in enumerate(self._steps) for v in s.outvars}
        cheap = [step.kind == "other" and is_cheap(step.eqn) for step in self._steps]
        self._repeats = self._repeated(cheap, reading.given)
        inputs = [*reading.jaxpr.invars, *reading.given]
        self._is_first = self._steps_without_tangents(inputs)
        pairs = zip(cheap, self._is_first, strict=True)
        self._in_island = [each and not is_first for each, is_first in pairs]
        self._starts = self._levels(inputs)  # of the inputs of each equation
        self._delay()

    def _repeated(self, cheap: Sequence[bool], given: Collection[Var]) -> set[Var]:
        """Returns what few cheap equations compute from arguments alone."""
        counts = dict.fromkeys(given, 0)  # of these equations
        for step, is_repeatable in zip(self._steps, cheap, strict=True):
            if is_repeatable and all(v in counts for v in step.invars):
                count = 1 + sum(counts[v] for v in step.invars)
                if count <= _MOST_REPEATED:
                    counts.update(dict.fromkeys(step.outvars, count))
        return counts.keys() - given

    def _steps_without_tangents(self, inputs: Iterable[Var]) -> list[bool]:
        """Says which steps no tangent of a floating-point input reaches."""
        reached = {*filter(_jaxpr.is_floating, inputs)}
        found = []
        for step in self._steps:
            is_plain = step.kind == "other" and not _jaxpr.has_effects(step.eqn)
            found.append(is_plain and reached.isdisjoint(step.invars))
            if not found[-1]:
                reached.update(step.outvars)
        return found

    def _levels(self, inputs: Iterable[Var]) -> list[int]:
        """Returns the level of each step: the highest one of a value that it reads."""
        level, starts, last_effect = dict.fromkeys(inputs, 0), list[int](), 0
        for i, step in enumerate(self._steps):
            start = max([level[v] for v in step.invars], default=0)
            if self._is_first[i]:
                start = _BEFORE_ALL
            elif _jaxpr.has_effects(step.eqn):  # these equations keep their order
                start = max(start, last_effect)
                last_effect = start + 1
            starts.append(start)
            end = start if self._in_island[i] else start + 1
            level |= dict.fromkeys(step.outvars, end)
        return starts

    def _delay(self) -> None:
        """Moves equations of one array to the first island that reads their results.

        That island then reads the array. If the equations ran in the island that
        computes the array, a result of each of them would be saved in its place.
        """
        # For each value, the lowest level of an island that reads it.
        first_reader: dict[Var, int] = {}
        # Results of the program, and what equations outside of islands read.
        read_elsewhere = {*variables(self._program.outvars)}
        for index, step in reversed([*enumerate(self._steps)]):
            if not self._in_island[index]:
                read_elsewhere.update(step.invars)
                continue
            only_islands_read = read_elsewhere.isdisjoint(step.outvars)
            all_are_read = all(v in first_reader for v in step.outvars)
            if _is_of_one_array(step) and only_islands_read and all_are_read:
                self._starts[index] = min(first_reader[v] for v in step.outvars)
            level = self._starts[index]
            for v in step.invars:
                first_reader[v] = min(level, first_reader.get(v, level))

    def parts(self) -> list[Part]:
        """Returns steps and islands in their order, without those that nobody reads."""
        parts: list[Part] = []
        wanted = {*variables(self._program.outvars)}
        for members in reversed(self._members()):
            part = self._steps[members[0]]
            has_effects = _jaxpr.has_effects(part.eqn)
            if self._in_island[members[0]]:
                part = self._island(members, wanted)
            if has_effects or not wanted.isdisjoint(part.outvars):
                parts.append(part)
                wanted.update(part.invars)
        return parts[::-1]

    def _members(self) -> list[list[int]]:
        """Returns the equations of each part, in the order in which parts run."""
        members: dict[tuple[int, int, str], list[int]] = {}
        for index, is_island in enumerate(self._in_island):
            key = self._starts[index], index, ""
            if is_island:  # runs before what else reads values of its level
                mesh = mesh_of(self._steps[index].outvars[0])
                key = self._starts[index], -1, str(mesh.axis_types)
            members.setdefault(key, []).append(index)
        return [members[key] for key in sorted(members)]

    def _island(self, members: list[int], wanted: set[Var]) -> Jaxpr:
        """Returns an island of its wanted equations and those of arguments alone."""
        outputs = [v for i in members for v in self._steps[i].outvars if v in wanted]
        allowed = {*members}
        needed = set[int]()
        todo = [*outputs]
        inputs: dict[Var, None] = {}
        while todo:
            v = todo.pop()
            maker = self._maker.get(v, -1)
            if maker not in allowed and v not in self._repeats:
                inputs[v] = None
            elif maker not in needed:
                needed.add(maker)
                todo += variables(self._steps[maker].eqn.invars)
        equations = [self._steps[i].eqn for i in sorted(needed)]
        return _jaxpr_rewrite.excerpt(self._program, equations, inputs, outputs)


def _is_of_one_array(step: Step) -> bool:
    """Whether an equation reads one array, besides much smaller ones."""
    entries = sum(map(_jaxpr.size, step.invars))
    return entries <= _ONE_ARRAY * _jaxpr.size(step.outvars[0])


class Choice(NamedTuple):
    """What is saved and what is recomputed of an island's results."""

    recomputed: Collection[Var]  # operands of products
    saved_in_half: Collection[Var]  # the other operands
    softmaxes: Collection[Var]  # those of the saved ones that the derivative reads
    streams: Collection[Var]  # results, in place of what they are computed from
    inputs: Collection[Var]  # residuals besides these


class _Units:
    """Joins each island with the products whose operands are recomputed with it."""

    def __init__(self, reading: Reading, parts: Sequence[Part]) -> None:
        self._reading, self._parts = reading, parts
        # Values that are residuals already, so that reading them costs nothing.
        self._already_saved = {*reading.given}
        self._maker = {v: i for i, p in enumerate(parts) for v in variables(p.outvars)}
        self._read_by_islands: set[Var] = set()
        self._products: dict[int, Product] = {}  # by the position of their part
        self._readers: dict[Var, list[int]] = {}  # products that read an operand
        for i, part in enumerate(parts):
            if not isinstance(part, Step):
                self._read_by_islands.update(part.invars)
            elif part.half_product:
                self._products[i] = part.half_product
                for v in dict.fromkeys(part.half_product.operands):
                    self._readers.setdefault(v, []).append(i)

    def units(self) -> list[Step | Unit]:
        units: list[Step | Unit] = []
        joined: set[int] = set()
        for i, part in enumerate(self._parts):
            if i in joined:
                continue
            if not isinstance(part, Step):
                island, choice = part, self._choice(i, part)
                behind = {n for v in choice.recomputed for n in self._readers[v]}
            elif i in self._products:  # no island is joined with it
                island = _jaxpr_rewrite.excerpt(self._reading.jaxpr, [], [], [])
                choice, behind = Choice((), part.invars[:2], (), (), ()), {i}
            else:
                units.append(part)
                continue
            joined |= behind
            products = [self._products[n] for n in sorted(behind)]
            units.append(self._unit(island, products, choice))
            copies = self._reading.halves.intersection(choice.saved_in_half)
            self._already_saved.update(copies, choice.inputs, choice.streams)
        return units

    def _choice(self, i: int, island: Jaxpr) -> Choice:
        """Chooses what is saved of an island, which is the i-th part."""
        results = [v for v in variables(island.outvars) if is_float32(v)]
        operands = [v for v in results if v in self._readers]
        softmaxes = _softmaxes_read(island, operands)
        streams = self._streams(island, results, softmaxes)
        inputs = _residuals(island, softmaxes, streams)
        recomputed: set[Var] = set()
        # The largest first, because later ones share what an earlier one saves.
        for v in sorted(operands, key=_jaxpr.size, reverse=True):
            values = needed_for(island, [v], streams)
            # Computed from a softmax that is saved, it would not be what was read.
            is_exact = softmaxes.isdisjoint(values)
            more = values.intersection(island.invars) - inputs
            is_cheaper = self._bytes(more) < _BYTES_OF_HALF * _jaxpr.size(v)
            if is_exact and is_cheaper and self._can_run_behind(v, i, island):
                recomputed.add(v)
                inputs |= more
        saved = {*operands} - recomputed
        return Choice(recomputed, saved, softmaxes, streams, inputs)

    def _streams(
        self, island: Jaxpr, results: Collection[Var], softmaxes: Collection[Var]
    ) -> set[Var]:
        """Returns the results to save, because their inputs would take more bytes.

        Whichever are saved, the island's values and derivatives are the same numbers.
        """
        streams: set[Var] = set()
        fewest = self._bytes(_residuals(island, softmaxes, ()))
        for v in results:
            if v not in self._read_by_islands:
                continue
            inputs = _residuals(island, softmaxes, {*streams, v})
            if self._bytes([*inputs, v]) < fewest:
                streams.add(v)
                fewest = self._bytes(inputs)
        return streams

    def _bytes(self, values: Iterable[Var]) -> int:
        """Returns the bytes of residuals if the backward pass reads these variables."""
        return sum(
            (_BYTES_OF_HALF if v in self._reading.halves else _jaxpr.bytes_per_entry(v))
            * _jaxpr.size(v)
            for v in values
            if v not in self._already_saved
        )

    def _can_run_behind(self, v: Var, i: int, island: Jaxpr) -> bool:
        """Whether the products that read a result of an island can run right behind."""
        products = [self._products[n] for n in self._readers[v]]
        read = {v for p in products for v in p.jaxpr.invars}
        are_made = all(self._maker.get(v, -1) <= i for v in read)
        context = island.eqns[-1].ctx
        return are_made and all(p.equation.ctx == context for p in products)

    def _unit(self, island: Jaxpr, products: Sequence[Product], choice: Choice) -> Unit:
        sums = small_sums(island)
        made = variables(dict.fromkeys([*island.outvars, *sums]))
        read = dict.fromkeys(v for p in products for v in p.jaxpr.invars)
        passed = tuple(v for v in read if v not in made)
        positions = {v: i for i, v in enumerate([*made, *passed])}
        scope, jaxpr = _jaxpr_rewrite.without_common_scope(
            _jaxpr_rewrite.excerpt(island, island.eqns, island.invars, made)
        )
        return Unit(
            key=_jaxpr_rewrite.structural_key(jaxpr),
            jaxpr=jaxpr,
            scope=scope,
            outputs=tuple(
                Output(
                    is_data=self._reading.is_data(v),
                    is_saved_in_half=v in choice.saved_in_half,
                    is_softmax=v in choice.softmaxes,
                    is_saved=v in sums or v in choice.streams,
                )
                for v in made
            ),
            products=tuple(
                UnitProduct(p, tuple(positions[v] for v in p.jaxpr.invars))
                for p in products
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

    To recompute these would cost a transformer 8 % of the bytes that it moves. Left out
    are a softmax that something else reads too, because that would not be what the
    forward pass read, and one whose scores are saved anyway.
    """
    found = {v for v in softmaxes_of(island) if v in operands}
    # From the last to the first: what reads one of them may be another one.
    for v in reversed([v for v in operands if v in found]):
        others = found - {v}
        read = needed_for(island, read_by_derivative(island, found), ())
        saved = read.intersection(island.invars)
        if v in read or saved == _residuals(island, others, ()):
            found = others
    return found
