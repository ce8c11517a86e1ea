"""What the tests of `precision_report` share: markers, and the comparison with them."""

import inspect
import re

import jax
from jax.sharding import PartitionSpec as P

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


def on_four_devices(function, check_vma=False):
    """A function of what all devices share and of rows, with one result for all."""
    mesh = jax.make_mesh((4,), ("i",), (jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (P(), P("i")), "out_specs": P(), "check_vma": check_vma}
    return jax.shard_map(function, mesh=mesh, **specs)
