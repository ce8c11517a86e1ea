"""How a program is cast: all that its reading and its units ask."""

import dataclasses

import numpy as np

from .._jaxpr import JaxprEqn
from .._validation import warn
from .derivatives import Traces
from .marks import Match, matched


@dataclasses.dataclass(eq=False)
class Notes:
    """What one call of a program has found so far, nested programs included."""

    # Of these there is no further warning.
    warned: set[str] = dataclasses.field(default_factory=set)
    # Whether its gradients are float16 and no loss scale reaches them.
    lacks_scale: bool = False
    any_half: bool = False  # whether a product became half precision
    found: set[str] = dataclasses.field(default_factory=set)  # names that match
    there: set[str] = dataclasses.field(default_factory=set)  # what could be named

    def warn_once(self, about: str, message: str) -> None:
        """Warns, unless it has warned of this before."""
        if about not in self.warned:
            self.warned.add(about)
            warn(message)

    def note_derivative(self) -> None:
        """Warns once of float16 gradients that no loss scale reaches."""
        if self.lacks_scale:
            self.warn_once(
                "no loss scale",
                "autocast: float16 gradients without a loss scale: small ones vanish. "
                "Differentiate by jmp_scale.value_and_grad(fun, loss_scale), give "
                'with_loss_scale a DynamicLossScale(), or autocast backward="bfloat16"',
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Casting:
    """How a program is cast. Equal ones share traces."""

    forward: np.dtype  # that of the products of the forward pass
    backward: np.dtype
    names: frozenset[str] = frozenset()  # of `keep_float32=`
    float32_results: frozenset[str] = frozenset()
    in_exempt: bool = False  # in a call that stays float32
    in_loop: bool = False
    # Whether the backward pass recomputes islands. Not in a rule for derivatives, which
    # is transposed: what would be recomputed has no derivative there. Not in a
    # checkpoint with a policy, which says itself what is saved.
    recompute: bool = True
    traces: Traces = dataclasses.field(default_factory=Traces, compare=False)
    notes: Notes = dataclasses.field(default_factory=Notes, compare=False)

    def is_exempt(self, eqn: JaxprEqn) -> bool:
        """Whether a name keeps a product float32, or a call with products."""
        return self._matched(self.names, eqn).is_exempt or self.in_exempt

    def has_float32_result(self, eqn: JaxprEqn) -> bool:
        """Whether a name keeps the result of a product float32."""
        return bool(self._matched(self.float32_results, eqn).found)

    def _matched(self, names: frozenset[str], eqn: JaxprEqn) -> Match:
        match = matched(names, eqn)
        self.notes.found.update(match.found)
        self.notes.there.update(match.there)
        return match
