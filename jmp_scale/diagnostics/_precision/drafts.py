"""What a rule finds, before it has a line: the vocabulary of the rules and the walk."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from ..._jaxpr import dtype_name, shape
from .facts import Fact
from .source import Place

Severity = Literal["error", "warning", "note"]


class Draft(NamedTuple):
    """A finding without its place.

    Attributes:
      rule: name of the rule.
      severity: "error", "warning" or "note".
      message: what happens, and the cure.
      dtype: the dtype in question.
      shape: shape of the array in question.
      narrowing: whether only the cast of a float32 result is at fault.
    """

    rule: str
    severity: Severity
    message: str
    dtype: str
    shape: tuple[int, ...]
    narrowing: bool = False


class Found(NamedTuple):
    """A draft with its place.

    Attributes:
      draft: what was found.
      place: where.
      primitive: JAX's name of the operation.
      backward: whether it was found in the backward pass.
      order: position in the program.
      cause: of `half-division`, the equation that the lost epsilon comes from.
    """

    draft: Draft
    place: Place
    primitive: str
    backward: bool
    order: int
    cause: int = -1


class Step(NamedTuple):
    """An equation, and what is known about its operands there.

    Attributes:
      eqn: the equation.
      ins: what is known about its inputs.
      out: what is known about its first output.
      place: gives its place, which takes time.
      mechanical: whether JAX made it by transposing another: it has no line of its own,
        and only what accumulates can go wrong.
      same: whether its first two inputs are the same value.
    """

    eqn: Any
    ins: Sequence[Fact]
    out: Fact
    place: Callable[[], Place]
    mechanical: bool
    same: bool

    @property
    def name(self) -> str:
        """JAX's name of the operation."""
        return self.eqn.primitive.name

    @property
    def source(self) -> str:
        """Dtype of the first input, "" without inputs."""
        return dtype_name(self.eqn.invars[0]) if self.eqn.invars else ""

    @property
    def result(self) -> str:
        """Dtype of the first output, "" without outputs."""
        return dtype_name(self.eqn.outvars[0]) if self.eqn.outvars else ""

    def draft(
        self, rule: str, severity: Severity, message: str, narrowing: bool = False
    ) -> Draft:
        """A draft about the first input of the equation, or its output without one."""
        atom = (*self.eqn.invars, *self.eqn.outvars)[0]
        dtype = self.result
        return Draft(rule, severity, message, dtype, shape(atom), narrowing)


class Scope(NamedTuple):
    """Where in the program a jaxpr is.

    Attributes:
      outer: gives the place of the equation that holds it.
      backward: whether it is part of a backward pass.
      mechanical: whether JAX made it by transposing another.
      times: how often it runs.
    """

    outer: Callable[[], Place]
    backward: bool = False
    mechanical: bool = False
    times: int = 1


class Visit(NamedTuple):
    """An equation without nested jaxprs that the walk has passed.

    Attributes:
      eqn: the equation.
      place: gives its place.
      backward: whether it is part of a backward pass.
      times: how often it runs.
      order: position in the program.
    """

    eqn: Any
    place: Callable[[], Place]
    backward: bool
    times: int
    order: int
