"""Finds the line of user code that an operation of a traced program comes from."""

import contextlib
import functools
import importlib.util
import linecache
import math
import os
import pathlib
import re
import sys
import sysconfig
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..._jaxpr import loop_of, open_jaxpr, subjaxprs

_OWN = pathlib.Path(__file__).parents[2]
_LIBRARIES = "jax jaxlib flax haiku equinox optax chex jmp numpy ml_dtypes"
_NUMBER = r"(?<![\w.])(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_UNNAMED = re.compile(r"(\.<locals>\.<\w+>)+$")
_USER, _THIRD_PARTY, _CALLER = 2, 1, 0


class Place(NamedTuple):
    """A line of source, and what led from it to an operation.

    Attributes:
      file: path of the source file, or None if it is unknown.
      line: line number, from 1, or None.
      calls: names of the library functions between that line and the operation, from
        the inside out.
      packages: the libraries that these functions belong to.
      rank: how much the line is the user's: 2 in the program, 1 in a package that is
        not known here, 0 for the line that called `precision_report`.
      function: name of the function that the line is in; of a lambda or a generator,
        of the function around it.
    """

    file: str | None
    line: int | None
    calls: tuple[str, ...] = ()
    packages: frozenset[str] = frozenset()
    rank: int = _CALLER
    function: str = ""


def begin_user_code(fun: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls `fun`; frames outside of this one are not part of the traced program."""
    return fun(*args, **kwargs)


def place_of(eqn: Any, outer: Place) -> Place:
    """The innermost line of user code that made an equation.

    A nested jaxpr may come from JAX's cache, traced for another line. So frames beyond
    the one that traces a jaxpr do not count: then `outer`, the place of the equation
    that holds the jaxpr, is the answer.
    """
    calls: list[str] = []
    packages: set[str] = set()
    third_party: Place | None = None
    for file, function, line in _frames(eqn):
        if _begins_program(file, function):
            break
        package = _package(file)
        if not package:
            rank = _USER if package is None else _THIRD_PARTY
            name = _UNNAMED.sub("", function)
            here = Place(file, line, tuple(calls), frozenset(packages), rank, name)
            if package is None:
                return here
            third_party = third_party or here
        calls.append(function)
        packages.add(package)
    if third_party is not None and third_party.rank > outer.rank:
        return third_party
    calls.extend(outer.calls)
    return outer._replace(calls=tuple(calls), packages=outer.packages | packages)


def place_of_caller() -> Place:
    """The line of user code that is running now."""
    frame = sys._getframe(1)
    while frame is not None and _package(frame.f_code.co_filename) == "jmp_scale":
        frame = frame.f_back
    while frame is not None and _package(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return Place(None, None)
    return Place(frame.f_code.co_filename, frame.f_lineno)


def place_of_function(fun: Any, otherwise: Place) -> Place:
    """Where a function is defined; `otherwise` if that is in a library or unknown."""
    code = _code_of(fun)
    if code is None or _package(code.co_filename) is not None:
        return otherwise
    first = code.co_firstlineno
    for line in range(first, first + 20):  # decorators come before the name
        text = linecache.getline(code.co_filename, line).lstrip()
        if text.startswith(f"def {code.co_name}"):
            return Place(code.co_filename, line, rank=_USER)
    return Place(code.co_filename, first, rank=_USER)


def line_in(eqn: Any, fun: Any) -> Place | None:
    """The line of `fun`'s own body that led to an equation."""
    code = _code_of(fun)
    if eqn is None or code is None or _package(code.co_filename) is not None:
        return None
    for file, function, line in _frames(eqn):
        if file == code.co_filename and function == code.co_qualname:
            return Place(file, line, rank=_USER)
    return None


def producer(jaxpr: Any, index: int, outer: Place) -> tuple[Any, Place]:
    """The equation that makes an output of a jaxpr, inside of calls, and its place."""
    inner, _ = open_jaxpr(jaxpr)
    result = inner.outvars[index]
    for eqn in inner.eqns:
        position = next((i for i, v in enumerate(eqn.outvars) if v is result), None)
        if position is None:
            continue
        place = place_of(eqn, outer)
        bodies = subjaxprs(eqn)
        if len(bodies) == 1 and loop_of(eqn) is None:
            body, _ = open_jaxpr(bodies[0])
            if len(body.outvars) == len(eqn.outvars):
                found, inner_place = producer(bodies[0], position, place)
                return (found, inner_place) if found is not None else (eqn, place)
        return eqn, place
    return None, outer


def numbers_at(place: Place) -> list[float]:
    """The numbers that are written at a place, without their signs."""
    numbers = (float(number) for number in re.findall(_NUMBER, _text(place)))
    return [number for number in numbers if math.isfinite(number)]


def names_an_epsilon(place: Place) -> bool:
    """Whether the source at a place speaks of an epsilon, by name."""
    return "eps" in _text(place).lower()


def _text(place: Place) -> str:
    return (
        linecache.getline(place.file, place.line) if place.file and place.line else ""
    )


def _frames(eqn: Any) -> Iterator[tuple[str, str, int]]:
    """(file, function, line) of the Python frames of an equation, innermost first."""
    with contextlib.suppress(Exception):
        for frame in eqn.source_info.traceback.frames:
            yield frame.file_name, frame.function_name, frame.line_num


def _begins_program(file: str, function: str) -> bool:
    # jax 0.8 keeps the frames outside of a nested trace; newer releases cut them off.
    name = function.rpartition(".")[2]
    if name == begin_user_code.__name__ and file == __file__:
        return True
    return name.startswith("trace_to_jaxpr") and _package(file) == "jax"


@functools.cache
def _package(file: str) -> str | None:
    """The library that a source file belongs to, "" if unknown; None for user code."""
    if file.startswith("<"):
        return "python" if file.startswith(("<frozen", "<attrs", "<@")) else None
    for name, root in _library_roots().items():
        if file.startswith(root):
            return name
    if "site-packages" in file or "dist-packages" in file:
        return ""
    return "python" if file.startswith(sysconfig.get_path("stdlib")) else None


@functools.cache
def _library_roots() -> dict[str, str]:
    roots = {"jmp_scale": f"{_OWN}{os.sep}"}
    for name in _LIBRARIES.split():
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.origin:
                roots[name] = f"{pathlib.Path(spec.origin).parent}{os.sep}"
    return roots


def _code_of(fun: Any) -> Any:
    """The code of the Python function inside wrappers, partials and methods."""
    for _ in range(20):
        inner = getattr(fun, "__wrapped__", None) or getattr(fun, "__func__", None)
        if inner is None and isinstance(fun, functools.partial):
            inner = fun.func
        if inner is None:
            break
        fun = inner
    if not hasattr(fun, "__code__"):
        fun = type(fun).__call__
    return getattr(fun, "__code__", None)
