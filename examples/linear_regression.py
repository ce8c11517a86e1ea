"""The textbook case: a gradient that float16 cannot hold, and loss scales that save it.

Fits y = 0.3 x to 4,096 points with x in (-0.01, 0.01) by gradient descent from w = 0.
The gradient is about -2e-5, but the numbers on its way are below the smallest float16:
in float16 it comes out as exactly 0, and w never moves.
"""

import _show
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmp_scale

X = np.random.RandomState(0).uniform(-1e-2, 1e-2, 4096).astype(np.float32)


def squared_error(w, dtype):
    residual = w.astype(dtype) * X.astype(dtype) - (0.3 * X).astype(dtype)
    return jnp.mean(residual**2).astype(jnp.float32)


def fit(dtype, loss_scale, steps):
    """The first gradient, and w after `steps` of gradient descent."""
    tx = optax.sgd(2e3)

    def train_step(carry, _):
        w, opt_state = carry
        grads = jmp_scale.grad(squared_error, loss_scale)(w, dtype)
        updates, opt_state = tx.update(grads, opt_state)
        return (optax.apply_updates(w, updates), opt_state), grads

    start = jnp.float32(0.0), tx.init(jnp.float32(0.0))
    run = jax.jit(lambda start: jax.lax.scan(train_step, start, length=steps))
    (w, _), gradients = run(start)
    return gradients[0], w


def main(argv=None):
    steps = _show.parser(__doc__, 400).parse_args(argv).steps
    runs = {"float32": (jnp.float32, 1.0), "float16": (jnp.float16, 1.0)}
    runs |= {f"float16, S = 2^{n}": (jnp.float16, 2.0**n) for n in (7, 10, 15)}
    rows = []
    for name, (dtype, s) in runs.items():
        gradient, w = fit(dtype, jmp_scale.StaticLossScale(s), steps)
        rows.append([name, f"{gradient:.4g}", f"{w:.4f}"])
    _show.table(["", "gradient at w = 0", f"w after {steps} steps"], rows)
    print("(true w: 0.3)")


if __name__ == "__main__":
    main()
