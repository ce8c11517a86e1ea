"""Finds the line of user code that an operation of a traced program comes from."""

import functools
import inspect
import re
import sysconfig
from typing import NamedTuple

from jax.extend.core import JaxprEqn

from .._jaxpr import frames_of
from .._types import Function, PyTree
from .._validation import user_frame

_ROOT = __file__.removesuffix("diagnostics/_source.py")
_INTERNAL = ("jax", "jaxlib", "jmp_scale", "numpy", "python")
_INSTALLED = re.compile(r".*(?:site|dist)-packages/(\w+)")


class Place(NamedTuple):
    """A line of source, and the library functions between it and an operation."""

    file: str | None = None
    line: int | None = None
    # Names of the library functions between that line and the operation, from the
    # inside out, and whether one of them is of a module for linear algebra.
    calls: tuple[str, ...] = ()
    in_linalg: bool = False
    function: str = ""  # the one around the line, with the names of those around it
    library: str = ""  # the line of a library, as "flax/nnx/x.py:12"; "" for JAX

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}" if self.file else ""


def begin_user_code(fun: Function, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
    """Calls `fun`; frames outside of this call are not part of the traced program."""
    return fun(*args, **kwargs)


def place_of(eqn: JaxprEqn, outer: Place) -> Place:
    """Returns the innermost line of user code that an equation comes from.

    JAX may have cached a nested jaxpr that was traced for another line. So frames
    outside of its tracing do not count; without others it is `outer`, of the call.
    """
    calls: list[str] = []
    in_linalg, library = False, ""
    for file, function, line in frames_of(eqn):
        if function.endswith(begin_user_code.__name__) and file == __file__:
            break
        package = _package(file)
        if package is None:
            return Place(file, line, tuple(calls), in_linalg, function, library)
        if not library and package not in _INTERNAL:
            library = f"{file.rpartition('-packages/')[2]}:{line}"
        calls.append(function)
        in_linalg |= "linalg" in file
    return outer._replace(
        calls=(*calls, *outer.calls),
        in_linalg=in_linalg or outer.in_linalg,
        library=library or outer.library,
    )


def place_of_caller() -> Place:
    """Returns the line of user code that is running now."""
    frame, _ = user_frame()
    return Place(frame.f_code.co_filename, frame.f_lineno) if frame else Place()


def place_of_function(fun: Function, otherwise: Place) -> Place:
    """Returns the line of a function's definition, if it is one of the user's."""
    fun = inspect.unwrap(getattr(fun, "func", fun))  # of functools.partial
    code = getattr(fun, "__code__", None)
    if code is None or _package(code.co_filename) is not None:
        return otherwise
    return Place(code.co_filename, code.co_firstlineno)


@functools.cache
def _package(file: str) -> str | None:
    """Returns the library of a source file, or None for user code."""
    if file.startswith("<"):
        return "python" if file.startswith(("<frozen", "<attrs", "<@")) else None
    if file.startswith(_ROOT):
        return "jmp_scale"
    if installed := _INSTALLED.match(file):
        return installed[1]
    return "python" if file.startswith(sysconfig.get_path("stdlib")) else None


def is_own_wrapper(fun: Function) -> bool:
    """Whether a function is one of ours around the user's, as that of `autocast`."""
    code = getattr(fun, "__code__", None)
    is_ours = code is not None and _package(code.co_filename) == "jmp_scale"
    return is_ours and hasattr(fun, "__wrapped__")
