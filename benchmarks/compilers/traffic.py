"""Counts in a parsed program: memory traffic, kernels, copies, collectives, cycles.

XLA's own `cost_analysis` is None for a GPU that is not there, and on a TPU it mixes
device memory with on-chip memory. The text of a scheduled module has all that is
needed.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from compilers.hlo import Array, Instruction, Module, attribute, called_computations

Computation = dict[str, Instruction]

HOST_MEMORY = 5
# Instructions that move no data.
FREE = {"add-dependency", "after-all", "bitcast", "constant", "get-tuple-element"}
FREE |= {"opt-barrier", "parameter", "partition-id", "replica-id", "tuple"}
FREE_CUSTOM_CALLS = {"AllocateBuffer", "ConcatBitcast", "Sharding"}
# Custom calls whose last result is a workspace.
LIBRARIES = ("__cublas", "__cudnn")
# Instructions that run the computations that they name.
CALLS = {"call", "conditional", "while"}
SLICES = {"dynamic-slice", "gather", "slice"}
# Instructions whose result is their first operand, changed in places, and the position
# of the operand that holds the changes.
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-broadcast")
COLLECTIVES += ("collective-permute", "ragged-all-to-all", "reduce-scatter")


class Executed(NamedTuple):
    """An instruction that runs, how often, and the computation that it is in."""

    times: int
    instruction: Instruction
    computation: Computation

    @property
    def operands(self) -> list[Array]:
        names = dict.fromkeys(self.instruction.operands)
        return [array for name in names for array in self.computation[name].results]


def executed(module: Module, name: str | None = None) -> Iterator[Executed]:
    """What runs.

    A loop's body counts as often as it is known to run, else once. Of a conditional the
    branch that moves most counts.
    """
    computation = module.computations[module.entry if name is None else name]
    for instruction in computation.values():
        called = called_computations(instruction.attributes)
        if instruction.opcode == "conditional":
            called = [max(called, key=lambda name: traffic(module, name))]
        if instruction.opcode in CALLS:
            trips = _trip_count(instruction)
            for callee in called:
                for inner in executed(module, callee):
                    yield inner._replace(times=inner.times * trips)
        yield Executed(1, instruction, computation)


def traffic(module: Module, name: str | None = None) -> int:
    """Bytes that the program reads from and writes to the device's memory."""
    return _total(traffic_of, module, name)


def kernels(module: Module) -> int:
    """Instructions that run and that compute or copy, which a GPU launches.

    Collectives and asynchronous copies do not count.
    """
    return _total(lambda _, ran: _is_kernel(ran.instruction), module)


def copies(module: Module) -> list[Array]:
    """Results of the copies from the device's memory to the device's memory."""
    found = []
    for ran in executed(module):
        if ran.instruction.opcode in ("copy", "copy-start"):
            result = ran.instruction.results[0]
            if all(array.space == 0 for array in [result, *ran.operands]):
                found.append(result)
    return found


def collectives(module: Module) -> list[tuple[str, tuple[str, ...]]]:
    """Kind and operand types of each collective, in the order of the program."""
    return [
        (kind, tuple(map(str, ran.operands)))
        for ran in executed(module)
        if (kind := collective(ran.instruction))
    ]


def conditionals(module: Module) -> int:
    """Branches of the program."""
    return sum(i.opcode == "conditional" for i in _all_instructions(module))


def host_operations(module: Module) -> int:
    """Transfers from and to the host, and callbacks."""
    return sum(map(_is_host_operation, _all_instructions(module)))


def estimated_cycles(module: Module) -> int:
    """Cycles as the TPU compiler's cost model estimates them; 0 elsewhere."""
    return _total(lambda _, ran: _estimated_cycles(ran.instruction), module)


def traffic_of(module: Module, ran: Executed) -> int:
    """Bytes that one instruction reads from and writes to the device's memory.

    Each operand is read once and each result written once. Of what is only sliced the
    slices are read, and an update in place writes what it updates. What a start and a
    done do together is counted at the done.
    """
    instruction, opcode = ran.instruction, ran.instruction.opcode
    if _is_free(instruction) or opcode in CALLS or opcode.endswith("-start"):
        return 0
    if opcode.endswith("-update"):
        return 0
    if opcode.endswith("-done"):
        return _traffic_of_done(ran)
    if opcode == "fusion" or opcode in SLICES or opcode in UPDATES:
        return _traffic_of_fusion(module, ran)
    return _bytes(_results(instruction)) + _bytes(ran.operands)


def _results(instruction: Instruction) -> tuple[Array, ...]:
    """Arrays that an instruction writes, without the workspace of cuBLAS and cuDNN.

    How much of that they use is not known.
    """
    target = attribute(instruction.attributes, "custom_call_target") or ""
    *results, last = instruction.results or (None,)
    if results and last.dtype in ("s8", "u8") and target.startswith(LIBRARIES):
        return tuple(results)
    return instruction.results


def _total(
    measure: Callable[[Module, Executed], int], module: Module, name: str | None = None
) -> int:
    return sum(ran.times * measure(module, ran) for ran in executed(module, name))


def _traffic_of_done(ran: Executed) -> int:
    start = ran.computation[ran.instruction.operands[0]]
    while start.opcode.endswith("-update"):
        start = ran.computation[start.operands[0]]
    read = _bytes(ran._replace(instruction=start).operands)
    if start.opcode.removesuffix("-start") in SLICES:
        read = min(read, _bytes(ran.instruction.results, anywhere=True))
    return _bytes(ran.instruction.results) + read


def _traffic_of_fusion(module: Module, ran: Executed) -> int:
    """Traffic of a fusion, or of one instruction that could be fused."""
    instruction, computation = ran.instruction, ran.computation
    if instruction.opcode == "fusion":
        (callee,) = called_computations(instruction.attributes)
        body = module.computations[callee]
    else:
        body = _as_fusion(ran)
    parameters = [i for i in body.values() if i.opcode == "parameter"]
    parameters.sort(key=lambda parameter: int(parameter.attributes))
    read = 0
    for name, parameter in zip(instruction.operands, parameters, strict=True):
        if any(array.space == 0 for array in computation[name].results):
            whole = _bytes(parameter.results, anywhere=True)
            read += min(whole, _read_of(parameter, body))
    (root,) = (i for i in body.values() if i.is_root)
    roots = [body[name] for name in root.operands] if root.opcode == "tuple" else [root]
    written = sum(
        _written_by(origin, body) if len(origin.results) == 1 else result.bytes
        for result, origin in zip(instruction.results, roots, strict=False)
        if result.space == 0
    )
    if len(roots) == 1 and len(instruction.results) > 1:  # a reduction of several
        written = _bytes(instruction.results)
    return read + written


def _as_fusion(ran: Executed) -> Computation:
    """The body of a fusion of one instruction."""
    names = dict.fromkeys(ran.instruction.operands)
    as_parameter = {"opcode": "parameter", "operands": (), "is_root": False}
    body = {
        name: dataclasses.replace(
            ran.computation[name], attributes=str(i), **as_parameter
        )
        for i, name in enumerate(names)
    }
    root = dataclasses.replace(ran.instruction, is_root=True)
    return body | {root.name: root}


def _read_of(parameter: Instruction, body: Computation) -> int:
    """Bytes of a fusion's parameter that are read, each use taken by itself."""
    read = 0
    for user in body.values():
        for position, name in enumerate(user.operands):
            if name != parameter.name:
                continue
            if user.opcode in SLICES and position == 0:
                read += _bytes(user.results, anywhere=True)
            elif user.opcode == "bitcast":
                read += _read_of(user, body)
            elif not (user.opcode in UPDATES and position == 0):
                return _bytes(parameter.results, anywhere=True)
    return read


def _written_by(origin: Instruction, body: Computation) -> int:
    """Bytes that a fusion's root writes: of an update in place, what it changes."""
    while origin.opcode == "bitcast":
        origin = body[origin.operands[0]]
    if origin.opcode in UPDATES:
        origin = body[origin.operands[UPDATES[origin.opcode]]]
    return _bytes(origin.results, anywhere=True)


def _bytes(arrays: Iterable[Array], *, anywhere: bool = False) -> int:
    return sum(array.bytes for array in arrays if anywhere or array.space == 0)


def _is_free(instruction: Instruction) -> bool:
    target = attribute(instruction.attributes, "custom_call_target")
    return instruction.opcode in FREE or target in FREE_CUSTOM_CALLS


def _is_kernel(instruction: Instruction) -> bool:
    opcode = instruction.opcode
    asynchronous = opcode.endswith(("-start", "-update", "-done"))
    called = opcode in CALLS or asynchronous or collective(instruction)
    return not (called or _is_free(instruction))


def collective(instruction: Instruction) -> str | None:
    if instruction.opcode == "async-start":  # named after what it wraps
        names = [kind for kind in COLLECTIVES if instruction.name.startswith(kind)]
        return names[0] if names else None
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in COLLECTIVES else None


def _is_host_operation(instruction: Instruction) -> bool:
    target = attribute(instruction.attributes, "custom_call_target") or ""
    return (
        instruction.opcode in {"infeed", "outfeed", "send", "recv"}
        or "callback" in target
        or any(array.space == HOST_MEMORY for array in instruction.results)
    )


def _trip_count(instruction: Instruction) -> int:
    found = re.search(r'known_trip_count"?[:=]\{"n":"(\d+)"', instruction.attributes)
    return int(found[1]) if found else 1


def _estimated_cycles(instruction: Instruction) -> int:
    found = re.search(r'"estimated_cycles":"(\d+)"', instruction.attributes)
    return int(found[1]) % (2**63 - 1) if found else 0  # 2^63 - 1 is unknown


def _all_instructions(module: Module) -> Iterator[Instruction]:
    for computation in module.computations.values():
        yield from computation.values()
