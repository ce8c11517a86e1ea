"""A differential equation solved by a network in float16, which needs loss scaling.

A wire of one metre bends by a fraction of a millimetre under a load that changes sign:
u'' = load, and u = 0 at both ends. A network learns the equation at random points. In
metres the squared error is below 1e-6: float16 loses three of four gradients at the
end. With a loss scale it is as good as float32; a cap of S above the default of 2^24
gains nothing. Prints the relative error of u (median, least, largest) and the last S.
"""

import functools

import _digits
import _show
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmp_scale

MILLIMETRE, WAVES, POINTS = 1e-3, 3 * jnp.pi, 32


def load(x):
    return -10 * jnp.sin(WAVES * x)


def loss_fn(params, x, dtype):
    curvature = jax.grad(jax.grad(height, 1), 1)  # plain second derivatives, unscaled
    bent = jax.vmap(curvature, (None, 0, None))(params, x, dtype)
    return jnp.mean((MILLIMETRE * (bent - load(x))) ** 2)


def train_step(tx, dtype, carry, key):
    params, opt_state = carry
    x = jax.random.uniform(key, (POINTS,))
    scaled = jmp_scale.value_and_grad(loss_fn, opt_state.loss_scale)
    loss, grads = scaled(params, x, dtype)
    updates, opt_state = tx.update(grads, opt_state, params, value=loss)
    return (optax.apply_updates(params, updates), opt_state), None


def height(params, x, dtype):
    """Height of the wire at x in millimetres, f32[], by a network run in `dtype`."""
    y = _digits.network(params, x[None], dtype, activation=jnp.tanh)[0]
    return x * (1 - x) * y  # 0 at both ends


def error(params):
    """Relative root mean square error of the heights, in float32."""
    x = jnp.linspace(0, 1, 101)
    exact = 10 * jnp.sin(WAVES * x) / WAVES**2
    heights = jax.vmap(height, (None, 0, None))(params, x, "float32")
    return jnp.sqrt(jnp.mean((heights - exact) ** 2) / jnp.mean(exact**2))


def main(argv=None):
    args = _show.parser(__doc__, 2000, seeds=3).parse_args(argv)
    keys = jax.random.split(jax.random.key(0), (args.steps, args.seeds))
    dynamic = functools.partial(jmp_scale.DynamicLossScale, period=args.steps // 40 + 1)
    plans = {dtype: (dtype, None) for dtype in ("float32", "bfloat16", "float16")}
    plans["float16, dynamic"] = "float16", dynamic()
    plans["float16, cap of 2^40"] = "float16", dynamic(max_loss_scale=2.0**40)
    rows = []
    for name, (dtype, loss_scale) in plans.items():
        schedule = optax.cosine_decay_schedule(1e-2, args.steps)
        tx = jmp_scale.with_loss_scale(optax.adam(schedule), loss_scale)
        init = functools.partial(_digits.init_layers, [1, 24, 24, 1])
        params = jax.vmap(init)(jax.random.split(jax.random.key(0), args.seeds))
        carry = params, jax.jit(jax.vmap(tx.init))(params)
        step = jax.vmap(functools.partial(train_step, tx, dtype))
        (params, state), _ = _show.scan(step, carry, keys, name)
        last = _show.power(np.max(state.loss_scale.loss_scale))
        errors = _show.spread(jax.vmap(error)(params))
        rows.append([name, *errors, last, state.skipped.sum()])
    _show.table(["", "error", "least", "largest", "last S", "skipped"], rows)


if __name__ == "__main__":
    main()
