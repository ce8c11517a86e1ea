"""A `Finding` about a line, an `Equation` of the program, a `Fact` about a value."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from jax.extend.core import JaxprEqn, Var

from ..._jaxpr import Atom, dtype_name, shape
from ..._policy import is_half
from .._source import Place
from .._tables import printed

INF = math.inf
Severity = Literal["error", "warning", "note"]
SEVERITIES = ("note", "warning", "error")
SourceLine = tuple[str | None, int | None]


@printed
class Finding(NamedTuple):
    """A line of a program that half precision harms.

    Attributes:
      rule: name of the rule, such as "half-sum".
      severity: "error" (wrong or not finite for ordinary values), "warning" (loses
        precision, or depends on the data) or "note" (cost).
      message: the problem and a remedy; within a library, its file and line too.
      file: path of the user's source file, or None if it is unknown.
      line: line in that file, from 1, or None.
      primitive: JAX's name of the operation; "" for a whole program.
      dtype: the dtype in question.
      shape: shape of the array in question.
      backward: whether the problem occurs in the backward pass only.
    """

    rule: str
    severity: Severity
    message: str
    file: str | None
    line: int | None
    primitive: str
    dtype: str
    shape: tuple[int, ...]
    backward: bool

    def summary(self) -> str:
        """Returns the finding in a compiler's format, in one line."""
        where = location((self.file, self.line))
        end = " (backward pass)" if self.backward else ""
        return f"{where}: {self.severity}: {self.message} [{self.rule}]{end}"


def location(line: SourceLine) -> str:
    return f"{line[0]}:{line[1]}" if line[0] else "<unknown line>"


@dataclasses.dataclass(frozen=True, slots=True)
class Fact:
    """Knowledge about the elements of an array."""

    low: float = -INF  # no element is smaller
    high: float = INF  # no element is larger
    extreme: float = 0.0  # a constant that some are equal to, which float16 loses
    # Result if the other operand is 0: eps for x + eps; None without a constant.
    epsilon: float | None = None
    summed: float = 0.0  # number of float32 elements summed
    maker: str = ""  # name of the operation that computed them
    varying: frozenset[Var] = frozenset()  # in the loops around, that it depends on
    # The carries in half precision of which it is `a * carry + b`, with a number `a`
    # and a `b` that does not depend on the carry; and the last addition of a `b`.
    sums: "Mapping[Var, Equation | None]" = dataclasses.field(default_factory=dict)

    @property
    def magnitude(self) -> float:
        return max(abs(self.low), abs(self.high))

    @property
    def may_be_zero(self) -> bool:
        return self.low <= 0 <= self.high

    @property
    def single(self) -> float | None:
        """The value of all elements, if they are known to be equal."""
        return self.low if self.low == self.high else None


class Equation(NamedTuple):
    """An equation of the traced program in its place."""

    eqn: JaxprEqn
    place: Callable[[], Place]  # a function, because to find its source line takes time
    backward: bool = False  # whether JAX transposed an equation of the same line
    times: int = 1  # how often it runs
    ins: Sequence[Fact] = ()  # facts of its inputs

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    @property
    def source(self) -> str:  # dtype
        return dtype_name(self.eqn.invars[0]) if self.eqn.invars else ""

    @property
    def result(self) -> str:  # dtype
        return dtype_name(self.eqn.outvars[0]) if self.eqn.outvars else ""

    @property
    def line(self) -> SourceLine:
        return self.place()[:2]

    @property
    def narrows(self) -> bool:
        """Whether it casts float32 or wider to half precision."""
        casts = self.name == "convert_element_type"
        return casts and is_wide(self.source) and is_half(self.result)

    def finding(
        self, rule: str, severity: Severity, message: str, atom: Atom | None = None
    ) -> Finding:
        """Returns a rule's finding on an input of the equation, default the first."""
        dtype = self.result if atom is None else dtype_name(atom)
        atom = (*self.eqn.invars, *self.eqn.outvars)[0] if atom is None else atom
        found = finding_at(self.place(), rule, severity, message, dtype, self.name)
        return found._replace(shape=shape(atom), backward=self.backward)


def finding_at(
    place: Place, rule: str, severity: Severity, text: str, dtype: str, name: str = ""
) -> Finding:
    """Returns the finding of a rule at a line; its message names a library's line."""
    library = f" (in {place.library})" if place.library else ""
    message = f"{text[0].upper()}{text[1:]}{library}."
    return Finding(rule, severity, message, *place[:2], name, dtype, (), False)


def is_wide(dtype: str) -> bool:
    """Whether a dtype is float32 or float64."""
    return dtype in ("float32", "float64")


def is_integer(dtype: str) -> bool:
    return dtype.startswith(("int", "uint"))
