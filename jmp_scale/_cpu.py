"""CPUs: what a processor is, and the form in which its matrix units take products."""

import functools
import pathlib
import platform
from typing import Any

import jax
import jax.extend.core.primitives
import jax.numpy as jnp
from jax import lax

Dimensions = lax.DotDimensionNumbers

_DESCRIPTION = pathlib.Path("/proc/cpuinfo")  # of Linux; other systems have none
_USES_UNITS = (0, 10, 2)  # jax 0.8 gains nothing, and some of the forms raise in it


@functools.cache
def has_bfloat16_units() -> bool:
    """Returns whether the operating system says that the CPU has AMX for bfloat16."""
    return any("amx_bf16" in flags.split() for flags in _values("flags"))


def takes_bfloat16() -> bool:
    """Returns whether products run on matrix units: this alone chooses their form.

    From `_USES_UNITS` on all forms run, with and without such units.
    """
    return has_bfloat16_units() and jax.__version_info__ >= _USES_UNITS


def processor_name() -> str:
    """Returns the number of processors and their name."""
    if names := _values("model name"):
        return f"{len(names)} x {names[0]}"
    return platform.processor() or platform.machine()


@functools.cache
def _values(field: str) -> tuple[str, ...]:
    """Returns what each processor's description says of a field."""
    if not _DESCRIPTION.exists():
        return ()
    pairs = (line.split(":", 1) for line in _DESCRIPTION.read_text().splitlines())
    return tuple(pair[-1].strip() for pair in pairs if pair[0].strip() == field)


def multiply(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """Multiplies on the matrix units of a CPU for bfloat16, elsewhere in float32.

    Where no unit is used and the result is half precision, the product is JAX's own.
    """
    dot_general = jax.extend.core.primitives.dot_general_p.bind
    dtype = params["preferred_element_type"]
    is_bfloat16 = lhs.dtype == rhs.dtype == jnp.bfloat16
    is_on_units = takes_bfloat16() and is_bfloat16 and dtype is not None
    if is_on_units and (split := in_halves(lhs, rhs, params["dimension_numbers"])):
        *pair, params["dimension_numbers"] = split
        params["preferred_element_type"] = jnp.dtype("float32")
        # Else a transpose of the program is folded into the product, which then has a
        # form that the compiler's runtime does not take.
        return lax.optimization_barrier(dot_general(*pair, **params)).astype(dtype)
    if dtype == jnp.float32:
        lhs, rhs = lhs.astype(dtype), rhs.astype(dtype)
    return dot_general(lhs, rhs, **params)


def in_halves(
    lhs: jax.Array, rhs: jax.Array, dimensions: Dimensions
) -> tuple[jax.Array, jax.Array, Dimensions] | None:
    """Returns a product that contracts two dimensions or more; None if there is none.

    XLA:CPU makes canonical, for its matrix units, only products that contract several
    dimensions. One that contracts a single dimension contracts its two halves instead,
    unless the size is odd, or the dimension is split over Explicit axes of a mesh.
    """
    contracted, batch = dimensions
    places = [i for i, d in enumerate(contracted[0]) if lhs.shape[d] != 1]
    if len(places) > 1:
        return lhs, rhs, dimensions
    size = lhs.shape[contracted[0][places[0]]] if places else 1
    if not isinstance(size, int) or size < 4 or size % 2:
        return None
    (place,) = places
    pair, numbers = [], []
    for x, own, of_batch in zip((lhs, rhs), contracted, batch, strict=True):
        d = own[place]
        if jax.typeof(x).sharding.spec[d] is not None:
            return None
        shape = *x.shape[:d], 2, x.shape[d] // 2, *x.shape[d + 1 :]
        pair.append(x.reshape(shape))
        own = [e + (e > d) for e in own]
        own.insert(place + 1, d + 1)
        numbers.append(((*own,), tuple(e + (e > d) for e in of_batch)))
    left, right = lax.optimization_barrier((pair[0], pair[1]))
    return left, right, (*zip(*numbers, strict=True),)  # pyright: ignore
