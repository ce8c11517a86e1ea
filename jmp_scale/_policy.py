"""`Policy` (of jmp): the dtypes of parameters, computation and outputs."""

import contextlib
import dataclasses
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ._tree import cast_floating

T = TypeVar("T")

dtype_to_names: dict[DTypeLike, tuple[str, ...]] = {
    jnp.bfloat16: ("bf16", "bfloat16"),
    jnp.float16: ("f16", "float16", "fp16"),
    jnp.float32: ("full", "f32", "float32", "fp32"),
    jnp.float64: ("f64", "float64"),
}
name_to_dtype = {name: d for d, names in dtype_to_names.items() for name in names}


@dataclasses.dataclass(frozen=True)
class Policy:
    """The dtypes of a mixed-precision model.

    Use it if you cast manually, as with jmp; `autocast` needs no policy. Its methods
    cast the floating-point arrays of a tree. Keep parameters in float32 and cast them
    inside the loss, so that gradients and optimizer work on float32 master values.

    Source: jmp 0.0.4 (DeepMind); Micikevicius et al., "Mixed Precision Training", 2018,
    section 3.1.

    Attributes:
      param_dtype: dtype of the stored (master) parameters.
      compute_dtype: dtype in which the model runs.
      output_dtype: dtype of the model's outputs.
    """

    param_dtype: DTypeLike
    compute_dtype: DTypeLike
    output_dtype: DTypeLike

    def cast_to_param(self, tree: T) -> T:
        """Casts floating-point arrays to `param_dtype`; returns others unchanged."""
        return cast_floating(tree, self.param_dtype)

    def cast_to_compute(self, tree: T) -> T:
        """Casts floating-point arrays to `compute_dtype`; returns others unchanged."""
        return cast_floating(tree, self.compute_dtype)

    def cast_to_output(self, tree: T) -> T:
        """Casts floating-point arrays to `output_dtype`; returns others unchanged."""
        return cast_floating(tree, self.output_dtype)

    def with_output_dtype(self, output_dtype: DTypeLike) -> "Policy":
        """Returns the same policy with another output dtype."""
        return dataclasses.replace(self, output_dtype=output_dtype)

    def __str__(self) -> str:
        given = (self.param_dtype, self.compute_dtype, self.output_dtype)
        dtypes = [jnp.dtype(name_to_dtype.get(str(dtype), dtype)) for dtype in given]
        short = {jnp.dtype(known): names[0] for known, names in dtype_to_names.items()}
        return "p={},c={},o={}".format(*(short.get(x, x.name) for x in dtypes))


def get_policy(policy_name: str) -> Policy:
    """Reads a policy from a configuration string.

    `"float16"` means that dtype for all three; `"p=f32,c=f16,o=f32"` names each (also
    `params`, `compute`, `output`). Defaults: `params` is f32, `compute` is that of
    `params`, `output` is that of `compute`.

    Args:
      policy_name: dtypes are `full`/`f32`/`float32`/`fp32`, `half` (see `half_dtype`),
        `f16`/`float16`/`fp16`, `bf16`/`bfloat16`, `f64`/`float64`.

    Raises:
      TypeError: `policy_name` is not a string.
      ValueError: an unknown key or dtype.
    """
    if not isinstance(policy_name, str):
        raise TypeError(
            f"get_policy: expected a string, got {policy_name!r}; write "
            'get_policy("params=float32,compute=float16")'
        )
    if "=" not in policy_name:
        dtype = _parse_dtype(policy_name)
        return Policy(dtype, dtype, dtype)
    dtypes = {}
    for part in policy_name.split(","):
        key, _, value = (word.strip() for word in part.partition("="))
        if key not in ("p", "params", "c", "compute", "o", "output"):
            raise ValueError(
                f"Unknown key '{key}' in '{policy_name}' should be 'params', 'compute' "
                "or 'output' (or 'p', 'c', 'o')"
            )
        dtypes[key[0]] = _parse_dtype(value)
    param = dtypes.get("p", jnp.float32)
    compute = dtypes.get("c", param)
    return Policy(param, compute, dtypes.get("o", compute))


def cast_to_full(tree: T) -> T:
    """Casts floating-point arrays to float32; returns other leaves unchanged."""
    return cast_floating(tree, jnp.float32)


def cast_to_half(tree: T) -> T:
    """Casts floating-point arrays to `half_dtype()`; returns other leaves unchanged."""
    return cast_floating(tree, half_dtype())


def half_dtype() -> DTypeLike:
    """Returns bfloat16 if the backend is a TPU, otherwise float16, as in jmp."""
    return jnp.bfloat16 if jax.local_devices()[0].platform == "tpu" else jnp.float16


def is_half(dtype: object) -> bool:
    """Whether a NumPy dtype, or the name of one, is float16 or bfloat16."""
    return str(dtype) in ("bfloat16", "float16")


def holds_half(x: object) -> bool:
    """Whether a leaf is an array of float16 or bfloat16, and not a reference to one."""
    is_reference = hasattr(getattr(x, "aval", None), "inner_aval")
    return is_half(getattr(x, "dtype", None)) and not is_reference


def checked_half(argument: str, dtype: DTypeLike | None) -> np.dtype:
    """Returns float16 or bfloat16, from a dtype, or a name that all machines share."""
    known = name_to_dtype.get(dtype) if isinstance(dtype, str) else dtype
    with contextlib.suppress(TypeError):
        if known is not None and is_half(jnp.dtype(known)):
            return jnp.dtype(known)
    raise ValueError(
        f"autocast: expected {argument} float16 or bfloat16, got {dtype!r}; short "
        'names are "f16" and "bf16"'
    )


def _parse_dtype(name: str) -> DTypeLike:
    if name == "half":
        return half_dtype()
    if name not in name_to_dtype:
        known = ", ".join(name_to_dtype)
        raise ValueError(f"Unknown dtype '{name}' must be one of half, {known}")
    return name_to_dtype[name]
