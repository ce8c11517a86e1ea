"""Parses optimized HLO text, as `compiled.as_text()` returns it."""

import dataclasses
import math
import re

ITEM_BITS = {"pred": 8, "token": 0, "opaque": 0}  # others end in their number of bits


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of an instruction's result."""

    dtype: str  # as XLA spells it, such as `f32`
    shape: tuple[int, ...]
    space: int  # of memory: 0 is the device's, 5 the host's, others are on the chip

    @property
    def bytes(self) -> int:
        digits = re.search(r"\d+", self.dtype)
        bits = ITEM_BITS.get(self.dtype, int(digits[0]) if digits else 0)
        return math.ceil(math.prod(self.shape) * bits / 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str  # of a parameter its position, of a constant its value
    is_root: bool


@dataclasses.dataclass(frozen=True)
class Module:
    """A program: its computations by name, and the name of the one that runs."""

    computations: dict[str, dict[str, Instruction]]
    entry: str


def parse(text: str) -> Module:
    """Reads what `compiled.as_text()` returns."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = None, None
    for line in text.splitlines():
        if current is None:
            header = re.match(r"(ENTRY )?(%?[\w.\-~]+) \(.*\{$", line)
            if header:
                current = computations.setdefault(bare_name(header[2]), {})
                entry = bare_name(header[2]) if header[1] else entry
        elif line.startswith("}"):
            current = None
        elif " = " in line:
            instruction = _instruction(line)
            current[instruction.name] = instruction
    if entry is None:
        raise ValueError("parse: expected HLO text with an ENTRY computation, got none")
    return Module(computations, entry)


def _instruction(line: str) -> Instruction:
    name, definition = line.strip().split(" = ", 1)
    shape, rest = _split_shape(definition)
    opcode, rest = rest.split("(", 1)
    end = _closing(rest)
    if opcode in ("parameter", "constant"):
        operands, attributes = (), rest[:end]
    else:
        operands = tuple(map(bare_name, re.findall(r"%[\w.\-~]+", rest[:end])))
        attributes = rest[end + 1 :]
    is_root = name.startswith("ROOT ")
    name = bare_name(name.removeprefix("ROOT "))
    return Instruction(name, opcode, _arrays(shape), operands, attributes, is_root)


def _split_shape(definition: str) -> tuple[str, str]:
    """The result type of an instruction, and what follows it."""
    if not definition.startswith("("):
        shape, rest = definition.split(" ", 1)
        return shape, rest
    end = _closing(definition[1:]) + 2
    return definition[:end], definition[end:].lstrip()


def _closing(text: str) -> int:
    """The position of the parenthesis that closes one opened before `text`."""
    depth = 1
    for match in re.finditer(r"[()]", text):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    raise ValueError(f"parse: expected balanced parentheses, got {text!r}")


def _arrays(shape: str) -> tuple[Array, ...]:
    found = re.findall(r"\b(\w+)\[([\d,<=]*)\](?:\{([^}]*)\})?", shape)
    return tuple(
        Array(
            dtype,
            tuple(int(d.removeprefix("<=")) for d in dims.split(",") if d),
            int(space[1]) if (space := re.search(r"S\((\d+)\)", layout)) else 0,
        )
        for dtype, dims, layout in found
    )


def bare_name(text: str) -> str:
    return text.removeprefix("%")


def attribute(attributes: str, name: str) -> str | None:
    found = re.search(rf'\b{name}="([^"]*)"', attributes)
    return found[1] if found else None


def called_computations(attributes: str) -> list[str]:
    """The computations that an instruction names, in the order of its attributes."""
    keys = "calls|to_apply|condition|body|(?:branch|true|false)_computations?"
    found = re.findall(rf"\b(?:{keys})=(?:\{{([^}}]*)\}}|(%?[\w.\-~]+))", attributes)
    names = [name for pair in found for name in (pair[0] or pair[1]).split(",")]
    return [bare_name(name.strip()) for name in names]
