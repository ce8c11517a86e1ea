"""The train step in one page: float16 products, and the loss scale that they need.

Ten sigmoid layers learn to reproduce their input. Each passes on at most a quarter of a
gradient, so in float16 the first layer's is 0 unless the loss is scaled.
"""

import _show
import jax
import jax.numpy as jnp
import optax

import jmp_scale


def loss_fn(params, x):  # a float32 program
    h = x
    for w in params:
        h = jax.nn.sigmoid(h @ w)
    return jnp.mean((h - x) ** 2)


half_loss = jmp_scale.autocast(loss_fn, "float16")
tx = jmp_scale.with_loss_scale(optax.adam(1e-3), jmp_scale.DynamicLossScale())


@jax.jit
def train_step(params, opt_state, x):
    loss, grads = jmp_scale.value_and_grad(half_loss, opt_state.loss_scale)(params, x)
    updates, opt_state = tx.update(grads, opt_state, params, value=loss)
    return optax.apply_updates(params, updates), opt_state, loss, grads


def lost(grads):
    return f"{jnp.mean(grads[0] == 0):.0%} of the first layer's gradient is 0"


def main(argv=None):
    steps = _show.parser(__doc__, 200).parse_args(argv).steps
    *keys, key = jax.random.split(jax.random.key(0), 11)
    params = [jax.random.normal(key, (32, 32)) / 6 for key in keys]
    x = jax.random.uniform(key, (256, 32))
    opt_state = tx.init(params)
    print("without a loss scale:", lost(jax.grad(half_loss)(params, x)))
    print("with a loss scale:   ", lost(train_step(params, opt_state, x)[3]))
    print(f"loss {loss_fn(params, x):.4f}")
    for _ in range(steps):
        params, opt_state, loss, _ = train_step(params, opt_state, x)
    s = opt_state.loss_scale.loss_scale
    print(f"loss {loss:.4f} after {steps} steps, with S = {_show.power(s)}")


if __name__ == "__main__":
    main()
