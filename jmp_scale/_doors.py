"""The modules that are imported by name, because they need more than JAX and Optax."""

import sys
from typing import Any

_DOORS = ("checkpoints", "linen", "nnx", "plotting")


def _attribute(name: str) -> Any:
    message = f"module 'jmp_scale' has no attribute {name!r}"
    if name in _DOORS:
        message += f"; it is imported by name: write import jmp_scale.{name}"
    raise AttributeError(message)


# Set here, because type checkers take any name for one of a module with `__getattr__`.
vars(sys.modules["jmp_scale"])["__getattr__"] = _attribute
