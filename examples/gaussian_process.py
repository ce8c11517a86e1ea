"""A Gaussian process on features of a network: which part may be half precision.

The network's products may. The kernel's distances, x^2 + y^2 - 2xy, may not: what they
round makes the kernel's matrix indefinite, its Cholesky factor is NaN, and nearly every
step is skipped. One name in `keep_float32` cures that. Prints the error of the first
gradient beside float32's (inf: not finite), the loss at the end, in float32, the
skipped steps, and the share of half precision in the matrix work.
"""

import functools

import _digits
import _show
import jax
import jax.numpy as jnp
import optax

import jmp_scale
from jmp_scale import diagnostics

POINTS, NOISE = 128, 0.05


def loss_fn(params, x, y):
    """Negative log marginal likelihood for each point."""
    h = 4 + 3 * _digits.network(params, x, "float32", activation=jnp.tanh)
    kernel = jnp.exp(-distances(h) / 2) + NOISE * jnp.eye(POINTS)
    factor = jnp.linalg.cholesky(kernel)
    explained = jax.scipy.linalg.cho_solve((factor, True), y)
    return (y @ explained / 2 + jnp.sum(jnp.log(jnp.diag(factor)))) / POINTS


def train_step(loss_fn, tx, carry, batch):
    params, opt_state = carry
    scaled = jmp_scale.value_and_grad(loss_fn, opt_state.loss_scale)
    loss, grads = scaled(params, *batch)
    updates, opt_state = tx.update(grads, opt_state, params, value=loss)
    return (optax.apply_updates(params, updates), opt_state), loss


def distances(h):
    squares = jnp.sum(h**2, 1)
    return squares[:, None] + squares - 2 * h @ h.T


def data(key, steps):
    """For each step, points in a cube and a noisy function of them."""
    x = jax.random.uniform(key, (steps, POINTS, 4), minval=-1)
    noise = jax.random.normal(key, (steps, POINTS))
    return x, jnp.sin(3 * x.sum(-1)) + NOISE**0.5 * noise


def main(argv=None):
    args = _show.parser(__doc__, 300).parse_args(argv)
    batches = data(jax.random.key(0), args.steps)
    first = [x[0] for x in batches]
    plans = {"float32": loss_fn}
    for dtype in ("bfloat16", "float16"):
        cast = functools.partial(jmp_scale.autocast, loss_fn, dtype)
        plans[dtype] = cast()
        plans[f"{dtype}, distances kept"] = cast(keep_float32="distances")
    rows = []
    for name, half_loss in plans.items():
        start = _digits.init_layers([4, 64, 64, 8], jax.random.key(1))
        error = diagnostics.compare_gradients(half_loss, loss_fn, start, *first).error
        loss_scale = jmp_scale.DynamicLossScale() if "float16" in name else None
        tx = jmp_scale.with_loss_scale(optax.adam(3e-3), loss_scale)
        step = functools.partial(train_step, half_loss, tx)
        (params, state), _ = _show.scan(step, (start, tx.init(start)), batches, name)
        loss = jax.jit(loss_fn)(params, *first)
        share = diagnostics.precision_report(half_loss, start, *first).half_share
        cells = f"{100 * error:.2g} %", f"{loss:.3f}", state.skipped, f"{share:.0%}"
        rows.append([name, *cells])
    _show.table(["", "gradient", "loss", "skipped", "half"], rows)


if __name__ == "__main__":
    main()
