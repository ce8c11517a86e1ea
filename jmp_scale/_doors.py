"""The error for names that `jmp_scale` does not have, such as PyTorch's."""

import itertools
from typing import NoReturn

from ._validation import callers


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
