"""Errors for submodules that `import jmp_scale` does not load."""

from typing import NoReturn

# What others call their tool, and what it is here.
_ELSEWHERE = {
    "GradScaler": "with_loss_scale(tx, jmp_scale.DynamicLossScale())",
    "DynamicScale": "DynamicLossScale()",
}


def __getattr__(name: str) -> NoReturn:
    """What `jmp_scale` does with a name that it does not have."""
    is_door = name in ("checkpoints", "linen", "nnx", "plotting")
    hint = f"; write import jmp_scale.{name}" if is_door else ""
    if name in _ELSEWHERE:
        hint = f"; write jmp_scale.{_ELSEWHERE[name]}"
    raise AttributeError(f"module 'jmp_scale' has no attribute {name!r}{hint}")
