"""The modules that are imported by name, because they need more than JAX and Optax."""

import sys


def _attribute(name: str) -> None:
    is_door = name in ("checkpoints", "linen", "nnx", "plotting")
    hint = f"; write import jmp_scale.{name}" if is_door else ""
    raise AttributeError(f"module 'jmp_scale' has no attribute {name!r}{hint}")


# Set here, because type checkers take any name for one of a module with `__getattr__`.
vars(sys.modules["jmp_scale"])["__getattr__"] = _attribute
