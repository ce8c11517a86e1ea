"""What the tests of `precision_report` share: markers, and the comparison with them."""

import inspect
import re

from jmp_scale.diagnostics import precision_report

ERRORS = {"half-constant", "half-integers", "half-parameters"}


def line_of(function):
    return function.__code__.co_firstlineno


def planted(*functions):
    """(file, line, rule, severity) of every `# !rule` in the source of functions."""
    found = set()
    for function in functions:
        lines, first = inspect.getsourcelines(function)
        for line, text in enumerate(lines, first):
            for rule, severity in re.findall(r"!(\w+-[\w-]+)(?::(\w+))?", text):
                usual = "error" if rule in ERRORS else "warning"
                file = inspect.getsourcefile(function)
                found.add((file, line, rule, severity or usual))
    return found


def reported(report):
    """The same of the errors and warnings of a report."""
    return {
        (f.file, f.line, f.rule, f.severity)
        for f in report.findings
        if f.severity != "note"
    }


def assert_finds(functions, fun, *args, **kwargs):
    """Everything planted in the functions is reported of `fun`, and nothing else."""
    report = precision_report(fun, *args, **kwargs)
    assert reported(report) == planted(*functions)
    places = {(f.file, f.line, f.rule) for f in report.findings}
    assert len(report.findings) == len(places)
    assert report.not_looked_into == ()
    return report
