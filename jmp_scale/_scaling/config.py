"""`get_loss_scale`: reads loss scales from configuration files and flags."""

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from .._policy import half_dtype, name_to_dtype
from .._state import LossScale
from .loss_scale import DynamicLossScale, NoOpLossScale, StaticLossScale


def get_loss_scale(spec: LossScale | ArrayLike | DTypeLike) -> LossScale:
    """Reads a loss scale from a configuration value, as `get_policy` reads a policy.

    | `spec` | loss scale |
    |---|---|
    | `"none"` | `NoOpLossScale()` |
    | `"dynamic"` | `DynamicLossScale()` |
    | `"dynamic:2**16"` | `DynamicLossScale(2.0**16)`, with the other defaults |
    | `1024`, `"2**10"`, `"static:1024"` | `StaticLossScale` of that number |
    | `"fp16"`, `"f16"`, `"half"` | `DynamicLossScale()`: float16 needs one |
    | `"bf16"`, `"fp32"`, `"f64"` | `NoOpLossScale()`: at least the range of float32 |
    | a loss scale | itself |

    A dtype means the same as its name. Names are those of `get_policy`; case and blanks
    do not matter.

    Raises:
      TypeError: neither a string, a number, a dtype nor a loss scale.
      ValueError: an unknown string (the message lists the known ones), or a number out
        of the range of the loss scale.
    """
    if isinstance(spec, LossScale):
        return spec
    if isinstance(spec, (type, np.dtype)):
        spec = str(jnp.dtype(spec))
    if not isinstance(spec, str):
        return StaticLossScale(spec)  # pyright: ignore[reportArgumentType]
    text = spec.lower().strip()
    # Only "half" looks at the devices, which starts JAX.
    dtype = half_dtype() if text == "half" else name_to_dtype.get(text)
    if text == "dynamic" or (dtype is not None and dtype == jnp.float16):
        return DynamicLossScale()
    if text == "none" or dtype is not None:
        return NoOpLossScale()
    kind, _, argument = text.rpartition(":")
    try:
        number = _number(argument)
    except (ValueError, ArithmeticError):
        number = None
    if number is None or kind.strip() not in ("", "static", "dynamic"):
        raise ValueError(
            f'get_loss_scale: unknown loss scale {spec!r}; known are "none"; "dynamic" '
            'or "dynamic:2**16"; a number, "1024" or "static:2**10"; the name of a '
            'dtype ("half", "fp16", "bf16", "fp32", ...). A framework\'s own '
            "configuration is for its function in jmp_scale.presets"
        )
    is_dynamic = kind.strip() == "dynamic"
    return DynamicLossScale(number) if is_dynamic else StaticLossScale(number)


def _number(text: str) -> float:
    base, power, exponent = text.partition("**")
    return float(base) ** float(exponent) if power else float(text)
