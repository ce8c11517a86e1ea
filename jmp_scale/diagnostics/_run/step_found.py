"""Holds the findings of `check_step`, and the first calls that all passes read."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeGuard

from ..._types import PyTree
from .step_arguments import Path
from .step_calls import Calls, Change, Run
from .step_rules import Level

COUNTS = "counts skipped steps"

Changes = dict[Path, Change]


class Found(NamedTuple):
    """A finding: its rule, the leaf or result, and the values in its text."""

    rule: str
    where: str = ""
    level: Level | None = None  # if it is not the rule's
    values: Mapping[str, Any] = {}


@dataclasses.dataclass
class Check:
    """The calls, the first results and the findings so far, for all passes."""

    calls: Calls
    base: Run = None  # pyright: ignore  (set by `applied_step`)
    changes: Changes = dataclasses.field(default_factory=dict)
    window: int = 1  # calls until an accumulated step ends
    found: list[Found] = dataclasses.field(default_factory=list)
    not_checked: list[str] = dataclasses.field(default_factory=list)
    is_over: bool = False  # later passes cannot run
    has_other_optimizers: bool = False  # without a loss scale

    def has(self, *rules: str) -> bool:
        return any(found.rule in rules for found in self.found)

    @property
    def seen_on_a_skip(self) -> set[str]:
        """Returns leaves that a skipped step changes as any other does."""
        return {found.where for found in self.found if found.rule == COUNTS}

    def matters(self, path: Path) -> bool:
        """Whether NaN in a leaf harms the training, or an average of it."""
        # A scalar is a sum or a mean for a log. Other optimizers skip nothing.
        return self.changes[path].ndim > 0 and not self.has_other_optimizers

    def name(self, path: Path) -> str:
        return self.calls.arguments.names[path]

    def node_name(self, path: Path, field: str) -> str:
        """Returns the name of a state or loss scale, by one of its fields."""
        return self.name((*path, field)).rpartition(field)[0].rstrip(".['")

    def is_alike(self, run: Run | None) -> TypeGuard[Run]:
        """Whether a call was applied, and counted as the first was."""
        if run is None or not self.calls.is_applied(run):
            return False
        return self.calls.verdicts(run) == self.calls.verdicts(self.base)

    def run(self, what: str, *args: PyTree, **kwargs: PyTree) -> Run | None:
        """Calls the step; returns None if it raises, as its own checks may do."""
        try:
            return self.calls(*args, **kwargs)
        except Exception as error:
            self.not_checked.append(f"{what}: the step raised {type(error).__name__}")
            return None
