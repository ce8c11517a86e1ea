"""Loss scaling in one page: a float16 gradient of 0, and the right one.

Fits w so that w x = 0.3 x, by gradient descent. The numbers on the gradient's way are
too small for float16, so it comes out as exactly 0, and w would never move.
"""

import _show
import jax
import jax.numpy as jnp
import optax

import jmp_scale

x = jnp.linspace(-0.01, 0.01, 4000)


def loss_fn(w):  # computed in float16; its gradient is about -2e-5
    w, x16 = w.astype(jnp.float16), x.astype(jnp.float16)
    return jnp.mean((w * x16 - 0.3 * x16).astype(jnp.float32) ** 2)


tx = jmp_scale.with_loss_scale(optax.sgd(2e3), jmp_scale.DynamicLossScale())


@jax.jit
def train_step(w, opt_state):
    loss, grads = jmp_scale.value_and_grad(loss_fn, opt_state.loss_scale)(w)
    updates, opt_state = tx.update(grads, opt_state, w, value=loss)
    return optax.apply_updates(w, updates), opt_state, grads


def main(argv=None):
    steps = _show.parser(__doc__, 400).parse_args(argv).steps
    w = jnp.float32(0.0)
    opt_state = tx.init(w)
    print(f"gradient without a loss scale: {jax.grad(loss_fn)(w)}")
    print(f"gradient with a loss scale:    {train_step(w, opt_state)[2]:.3g}")
    for _ in range(steps):
        w, opt_state, _ = train_step(w, opt_state)
    print(f"w after {steps} steps: {w:.3f}, with S = {opt_state.loss_scale.loss_scale}")


if __name__ == "__main__":
    main()
