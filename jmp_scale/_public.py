"""Public names: where users import them from, and the error for those of others."""

import itertools
import types
from typing import NoReturn

from ._validation import callers


def name_module(namespace: dict[str, object]) -> None:
    """Lets pickles, reprs and help pages name a module in place of private ones."""
    module = namespace["__name__"]
    for name, value in namespace.items():
        is_definition = isinstance(value, (type, types.FunctionType))
        if is_definition and not name.startswith("_"):
            value.__module__ = str(module)


def __getattr__(name: str) -> NoReturn:
    """Raises the error for a name that `jmp_scale` does not have."""
    text = f"module 'jmp_scale' has no attribute {name!r}"
    if name != "GradScaler":
        raise AttributeError(text)
    # `from jmp_scale import GradScaler` has words of its own for an AttributeError.
    (_, importer), *_ = itertools.islice(callers(), 1, None)
    error = ImportError if importer == "importlib._bootstrap" else AttributeError
    cure = "with_loss_scale(tx, jmp_scale.DynamicLossScale())"
    raise error(f"{text}; write jmp_scale.{cure}")
