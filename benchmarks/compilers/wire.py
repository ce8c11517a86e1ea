"""What a compiled program sends between its devices."""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from compilers import hlo, traffic
from compilers.hlo import Array, Instruction, Module
from compilers.traffic import Executed


class Sent(NamedTuple):
    """A collective, as one device runs it.

    Attributes:
      kind: such as `all-reduce`.
      arrays: the operands; of an all-gather the results.
      times: that it runs.
      asynchronous: whether the device may compute meanwhile.
    """

    kind: str
    arrays: list[Array]
    times: int
    asynchronous: bool

    def bytes_of(self, array: Array) -> int:
        """An all-reduce counts twice: a reduce-scatter and an all-gather."""
        return self.times * array.bytes * (2 if self.kind == "all-reduce" else 1)

    @property
    def bytes(self) -> int:
        return sum(map(self.bytes_of, self.arrays))


def parse(text: str) -> Module:
    """As `hlo.parse`, with the turns of each loop that counts up from 0."""
    module = hlo.parse(text)
    for computation in module.computations.values():
        for name, instruction in computation.items():
            if instruction.opcode == "while":
                computation[name] = _counted(module, instruction)
    return module


def sent(module: Module) -> list[Sent]:
    """All collectives that run, those in loops and fusions included."""
    found, chains = [], set()
    for where, ran in _with_wrapped(module, traffic.executed(module)):
        attributes, opcode = ran.instruction.attributes, ran.instruction.opcode
        kind = traffic.collective(ran.instruction)
        if kind is None or opcode == "async-start":  # what it wraps is counted
            continue
        # A TPU deals one asynchronous collective out to several fusions.
        chain = re.search(r'chain_id="\d+"', attributes)
        if chain and chain[0] in chains:
            continue
        chains |= {chain[0]} if chain else set()
        # A TPU's reduce-scatter is the fusion of an all-reduce and a slice.
        kind = "reduce-scatter" if "all-reduce-scatter" in where else kind
        started = opcode.endswith("-start") and '"is_sync":true' not in attributes
        asynchronous = started or chain is not None
        found.append(Sent(kind, _arrays(kind, ran), ran.times, asynchronous))
    return found


def totals(module: Module, smallest: int = 1024) -> dict[str, tuple[int, int]]:
    """Number of arrays and their bytes by kind and dtype, such as `all-reduce f32`.

    Arrays of fewer bytes than `smallest` do not count.
    """
    result: dict[str, tuple[int, int]] = {}
    for one in sent(module):
        for array in one.arrays:
            if array.bytes >= smallest:
                name = f"{one.kind} {array.dtype}"
                number, size = result.get(name, (0, 0))
                result[name] = number + one.times, size + one.bytes_of(array)
    return dict(sorted(result.items()))


def _counted(module: Module, loop: Instruction) -> Instruction:
    """Says how often a loop runs that counts from 0, which XLA does for GPUs alone."""
    if "known_trip_count" in loop.attributes:
        return loop
    called = hlo.called_computations(loop.attributes)
    condition, body = (module.computations[name] for name in called)
    (test,) = (i for i in condition.values() if i.is_root)
    (turn,) = (i for i in body.values() if i.is_root)
    limit = _constant(test, condition)
    indices = [
        re.search(r"index=(\d+)", condition[n].attributes) for n in test.operands
    ]
    counters = [int(index[1]) for index in indices if index]
    if limit is None or not counters or "direction=LT" not in test.attributes:
        return loop
    step = _constant(body[turn.operands[counters[0]]], body)
    known = f'known_trip_count={{"n":"{math.ceil(limit / (step or 1))}"}}'
    return dataclasses.replace(loop, attributes=f"{loop.attributes}, {known}")


def _constant(instruction: Instruction, computation: traffic.Computation) -> int | None:
    """The positive whole number among the operands."""
    given = [computation[name] for name in instruction.operands]
    found = [operand for operand in given if operand.opcode == "constant"]
    values = [int(x.attributes) for x in found if x.attributes.isdigit()]
    return values[0] if values else None


def _with_wrapped(
    module: Module, runs: Iterable[Executed], where: str = ""
) -> Iterator[tuple[str, Executed]]:
    """What runs and what it wraps, each with the name of its computation."""
    for ran in runs:
        yield where, ran
        if ran.instruction.opcode in ("fusion", "async-start"):
            for name in hlo.called_computations(ran.instruction.attributes):
                body = module.computations[name]
                inner = [Executed(ran.times, i, body) for i in body.values()]
                yield from _with_wrapped(module, inner, name)


def _arrays(kind: str, ran: Executed) -> list[Array]:
    instruction = ran.instruction
    given = [x for name in instruction.operands for x in ran.computation[name].results]
    if kind == "all-gather":  # a start has operands, then results
        skipped = len(given) if instruction.opcode.endswith("-start") else 0
        return list(instruction.results[skipped : skipped + len(given)])
    in_place = kind == "collective-permute" and "slice_sizes" in instruction.attributes
    return given[:1] if in_place else given
