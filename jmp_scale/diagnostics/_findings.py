"""What every tool tells: findings, made from its table of rules."""

import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

LEVELS = ("error", "warning", "note")  # the most severe first


class Rule(NamedTuple):
    """A row of a tool's table: what a finding says, with the names of values in {}."""

    level: str
    text: str
    cure: str


error_rule, warning_rule = (functools.partial(Rule, level) for level in LEVELS[:2])


class Finding(NamedTuple):
    """What a tool tells. `str` of it is one line, and the cure on the next.

    Attributes:
      rule: name of the rule, such as "half-sum" or "unscaled twice".
      level: "error" (wrong, or not finite), "warning" (loses precision, or may be
        wrong) or "note" (may be right).
      where: a leaf, as `args[1].inner_state[0].mu['w']`; a result; a line, as
        `model.py:41`, with " (backward)" if it is wrong in the backward pass alone;
        steps of a run, as "steps 120 to 160"; or "".
      text: what happens.
      cure: what to write, or "".
    """

    rule: str
    level: str
    where: str
    text: str
    cure: str

    def __str__(self) -> str:
        where = f"{self.where}: " if self.where else ""
        line = f"{self.level} [{self.rule}] {where}{self.text}"
        return f"{line}\n  {self.cure}" if self.cure else line


def finding(
    rules: Mapping[str, Rule], name: str, where: str = "", /, **values: object
) -> Finding:
    """Returns what a row of a table says of a place, with these values."""
    level, text, cure = (part.format_map(values) for part in rules[name])
    return Finding(name, level, where, text, cure)


def are_notes(findings: Iterable[Finding]) -> bool:
    """Whether no finding is above a note."""
    return all(finding.level == "note" for finding in findings)


def summary_of(fine: str, findings: Sequence[Finding], *details: str) -> str:
    """Returns findings and details in lines; `fine` says that there are only notes."""
    lines = [fine] if are_notes(findings) else []
    lines += map(str, findings)
    if len(findings) > 1:
        counts = Counter(finding.level for finding in findings)
        numbers = [(counts[level], level) for level in LEVELS if counts[level]]
        lines.append(", ".join(f"{n} {level}{'s' * (n > 1)}" for n, level in numbers))
    return "\n".join([*lines, *details])
