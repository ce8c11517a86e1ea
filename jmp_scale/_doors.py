"""Errors for submodules that `import jmp_scale` does not load, and foreign names."""

import sys
from typing import NoReturn

# What others call their tool, and what it is here.
_ELSEWHERE = {
    "GradScaler": "with_loss_scale(tx, jmp_scale.DynamicLossScale())",
    "LossScaleOptimizer": "with_loss_scale(tx, jmp_scale.DynamicLossScale())",
    "DynamicScale": "DynamicLossScale()",
    "DynamicLossScaling": "DynamicLossScale()",
}


def __getattr__(name: str) -> NoReturn:
    """What `jmp_scale` does with a name that it does not have."""
    is_door = name in ("checkpoints", "linen", "nnx", "plotting")
    hint = f"; write import jmp_scale.{name}" if is_door else ""
    error = AttributeError
    if name in _ELSEWHERE:
        hint = f"; write jmp_scale.{_ELSEWHERE[name]}"
        # `from jmp_scale import name` has words of its own for an AttributeError.
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller == "importlib._bootstrap":
            error = ImportError
    raise error(f"module 'jmp_scale' has no attribute {name!r}{hint}")
