"""What the tests of `precision_report` share: markers, and the comparison with them."""

import inspect
import re

from jmp_scale.diagnostics import precision_report

ERRORS = {"half-constant", "half-integers", "half-parameters"}


def line_of(function):
    return function.__code__.co_firstlineno


def planted(*functions):
    """(line, rule, level) of every `# !rule` in the source of functions."""
    found = set()
    for function in map(inspect.unwrap, functions):
        lines, first = inspect.getsourcelines(function)
        for line, text in enumerate(lines, first):
            for rule, level in re.findall(r"!(\w+-[\w-]+)(?::(\w+))?", text):
                usual = "error" if rule in ERRORS else "warning"
                place = f"{inspect.getsourcefile(function)}:{line}"
                found.add((place, rule, level or usual))
    return found


def reported(report):
    """The same of the errors and warnings of a report."""
    findings = report.findings
    return {(forward(f), f.rule, f.level) for f in findings if f.level != "note"}


def forward(finding):
    """The line of a finding, without the word that it is of the backward pass."""
    return finding.where.removesuffix(" (backward)")


def assert_finds(functions, fun, *args, **kwargs):
    """Everything planted in the functions is reported of `fun`, and nothing else."""
    report = precision_report(fun, *args, **kwargs)
    assert reported(report) == planted(*functions)
    assert report.ok is (not reported(report))
    places = {(forward(f), f.rule) for f in report.findings}
    assert len(report.findings) == len(places)
    assert report.not_looked_into == ()
    return report
