"""What a compiled program sends between its devices."""

import dataclasses
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import _hlo
import _traffic
from _hlo import Array, Instruction, Module
from _traffic import Executed


class Sent(NamedTuple):
    """One array of a collective, as one device has it.

    Attributes:
      kind: such as `all-reduce`.
      array: that is reduced or sent on, or that was gathered.
      times: that it runs.
      asynchronous: whether the device may compute meanwhile.
      first: whether it is the first array of its collective.
    """

    kind: str
    array: Array
    times: int
    asynchronous: bool
    first: bool

    @property
    def bytes(self) -> int:
        """Bytes on the wire; an all-reduce is a reduce-scatter and an all-gather."""
        return self.times * self.array.bytes * (2 if self.kind == "all-reduce" else 1)


class Total(NamedTuple):
    """Arrays of one kind of collective and one dtype, and their bytes on the wire."""

    number: int
    bytes: int


def module_of(compiled: Any) -> Module:
    """A program whose loops are known to run as often as their conditions say."""
    module = _hlo.parse(compiled.as_text())
    counted = {
        name: {i.name: _with_trip_count(i, module) for i in computation.values()}
        for name, computation in module.computations.items()
    }
    return Module(counted, module.entry)


def sent(module: Module) -> list[Sent]:
    """Arrays of all collectives that run, those in loops and fusions included."""
    found, chains = [], set()
    for name, ran in _with_called(module, _traffic.executed(module)):
        kind = _traffic.collective(ran.instruction)
        if kind is None or ran.instruction.opcode == "async-start":
            continue  # what an async-start wraps comes by itself
        # A TPU deals one collective out to several fusions.
        chain = re.search(r'chain_id="\d+"', ran.instruction.attributes)
        if chain is not None and chain[0] in chains:
            continue
        chains |= {chain[0]} if chain else set()
        # A TPU's reduce-scatter is the fusion of an all-reduce and a slice.
        kind = "reduce-scatter" if "all-reduce-scatter" in name else kind
        asynchronous = chain is not None or _is_asynchronous(ran.instruction)
        for at, array in enumerate(_arrays(kind, ran)):
            found.append(Sent(kind, array, ran.times, asynchronous, at == 0))
    return found


def totals(found: Iterable[Sent], smallest: int = 0) -> dict[str, Total]:
    """By kind and dtype, such as `all-reduce f32`.

    Arrays of fewer bytes than `smallest` do not count.
    """
    result: dict[str, Total] = {}
    for one in found:
        if one.array.bytes >= smallest:
            name = f"{one.kind} {one.array.dtype}"
            number, size = result.get(name, Total(0, 0))
            result[name] = Total(number + one.times, size + one.bytes)
    return dict(sorted(result.items()))


def _with_trip_count(instruction: Instruction, module: Module) -> Instruction:
    """A loop from 0 in steps of 1, which a TPU's text does not say to be known."""
    found = re.search(r"\bcondition=%?([\w.\-~]+)", instruction.attributes)
    if found is None or "known_trip_count" in instruction.attributes:
        return instruction
    condition = module.computations[found[1]]
    (root,) = (i for i in condition.values() if i.is_root)
    limits = [condition[n] for n in root.operands if condition[n].opcode == "constant"]
    if "direction=LT" not in root.attributes or len(limits) != 1:
        return instruction
    known = f', known_trip_count={{"n":"{limits[0].attributes}"}}'
    return dataclasses.replace(instruction, attributes=instruction.attributes + known)


def _with_called(
    module: Module, runs: Iterable[Executed], where: str = ""
) -> Iterator[tuple[str, Executed]]:
    """What runs and what it wraps, each with the name of the computation it is in."""
    for ran in runs:
        yield where, ran
        if ran.instruction.opcode in ("fusion", "async-start"):
            for name in _hlo.called_computations(ran.instruction.attributes):
                body = module.computations[name]
                inner = [Executed(ran.times, i, body) for i in body.values()]
                yield from _with_called(module, inner, name)


def _is_asynchronous(instruction: Instruction) -> bool:
    started = instruction.opcode.endswith("-start")
    return started and '"is_sync":true' not in instruction.attributes


def _arrays(kind: str, ran: Executed) -> list[Array]:
    instruction = ran.instruction
    given = [x for name in instruction.operands for x in ran.computation[name].results]
    if kind == "all-gather":
        skipped = len(given) if instruction.opcode.endswith("-start") else 0
        return list(instruction.results[skipped : skipped + len(given)])
    in_place = kind == "collective-permute" and "slice_sizes" in instruction.attributes
    return given[:1] if in_place else given
