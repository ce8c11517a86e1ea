"""The textbook case: a gradient that float16 cannot hold, and the loss scales that save it.

Fits y = 0.3 x to 4,096 points with x in (-0.01, 0.01) by gradient descent from w = 0. The gradient is
about -2e-5, but the numbers on its way are below the smallest float16: in float16 it comes out as
exactly 0, and w never moves.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits import positive_int

import jmp_scale


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=positive_int, default=400, help="of gradient descent (400)"
    )
    steps = parser.parse_args(argv).steps
    x = np.random.RandomState(0).uniform(-1, 1, 4096).astype(np.float32) * np.float32(
        1e-2
    )
    rows = {"float32": (jnp.float32, 1.0), "float16": (jnp.float16, 1.0)}
    rows |= {f"float16, S = 2^{n}": (jnp.float16, 2.0**n) for n in (7, 10, 15)}
    print(
        f"{'':20}{'gradient at w = 0':>20}{f'w after {steps} steps':>20}   (true w: 0.3)"
    )
    results = {}
    for name, (dtype, s) in rows.items():
        gradient, w = fit(x, dtype, jmp_scale.StaticLossScale(s), steps)
        results[name] = (float(gradient), float(w))
        print(f"{name:20}{gradient:20.4g}{w:20.4f}")
    return results


def fit(x, dtype, loss_scale, steps):
    """The first gradient, and w after `steps` of gradient descent."""
    tx = optax.sgd(2e3)
    loss_and_grad = jmp_scale.value_and_grad(
        lambda w: squared_error(w, x, dtype), loss_scale
    )

    def step(carry, _):
        w, opt_state = carry
        _, grads = loss_and_grad(w)
        updates, opt_state = tx.update(grads, opt_state)
        return (optax.apply_updates(w, updates), opt_state), grads

    start = jnp.float32(0.0), tx.init(jnp.float32(0.0))
    (w, _), gradients = jax.jit(lambda start: jax.lax.scan(step, start, length=steps))(
        start
    )
    return gradients[0], w


def squared_error(w, x, dtype):
    residual = w.astype(dtype) * x.astype(dtype) - (0.3 * x).astype(dtype)
    return jnp.mean(residual**2).astype(jnp.float32)


if __name__ == "__main__":
    main()
