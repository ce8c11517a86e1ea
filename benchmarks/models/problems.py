"""What the steps are taken on: sizes, optimizers, gradients that are given."""

import _steps
import jax
import jax.numpy as jnp
import optax

import models

DTYPES = {"f32": jnp.float32, "f16": jnp.float16}
CLIP = optax.clip_by_global_norm(1.0)
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(3e-4),
    "clip+adamw": lambda: optax.chain(CLIP, optax.adamw(3e-4)),
    "lion": lambda: optax.lion(1e-4),
}
TITLES = {
    "adamw": "AdamW",
    "clip+adamw": "Clipping by the global norm and AdamW",
    "lion": "Lion",
}


@jax.custom_vjp
def _given(params, grads):
    del params, grads
    return jnp.float32(0)


_given.defvjp(lambda _, grads: (jnp.float32(0), grads), lambda grads, _: (grads, None))


def given_gradients(dtype):
    """A loss whose scaled gradients are the batch, in `dtype`."""

    def loss_fn(params, batch):
        return _given(jax.tree.map(lambda p: p.astype(dtype), params), batch)

    return loss_fn


def optimizer_only(dtype, params):
    """`(loss, params, batch)` of a step that consists of the optimizer alone."""
    grads = jax.tree.map(lambda p: jnp.full_like(p, 1e-2, dtype), params)
    return given_gradients(dtype), params, grads


def build(peer, loss_fn, params, optimizer="adamw", *, types_only=False):
    """`(carry, step)` of a peer, whose carry consists of types if `types_only`."""
    make, tx = _steps.PEERS[peer], OPTIMIZERS[optimizer]()
    if not types_only:
        return make(loss_fn, tx, jax.tree.map(jnp.copy, params))
    made = {}

    def carry_of(params):
        carry, made["step"] = make(loss_fn, tx, params)
        return carry

    carry = jax.eval_shape(carry_of, params)
    return carry, made["step"]


def mixed_params():
    """Types of 33.7M parameters in 36 leaves: 8 large ones, and 28 of three sizes."""
    shapes = {"large": ((4096, 1024), 8), "bias": ((1024,), 12), "wide": ((4096,), 8)}
    shapes["small"] = ((64, 64), 8)
    return {
        f"{name}{i}": jax.ShapeDtypeStruct(shape, jnp.float32)
        for name, (shape, count) in shapes.items()
        for i in range(count)
    }


def problems(name, *, layers=12, width=256, examples=8):
    """Title and `(loss, types of the parameters, batch)` of each part.

    A title has places for the optimizer's and for the dtype's name. `layers` are those
    of the optimizer-only step's transformer, `examples` those of the train step.
    """
    dtype = DTYPES[name]

    def alone(params):
        leaves = jax.tree.leaves(params)
        millions = sum(leaf.size for leaf in leaves) / 1e6
        size = f"{millions:.1f}M parameters in {len(leaves)} leaves"
        grads = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, dtype), params)
        title = f"{{}} alone, {{}} gradients, {size}"
        return title, (given_gradients(dtype), params, grads)

    small = {"vocabulary": 8192, "context": 128, "batch": examples}
    sizes = models.Transformer(3, width, 4, **small)
    model, key = models.transformer(sizes), jax.random.key(0)
    deep = models.transformer(models.Transformer(layers, width, 4, **small))
    params = jax.eval_shape(model.init, key)[0]
    batch = model.init(key)[1]
    return {
        "optimizer": alone(jax.eval_shape(deep.init, key)[0]),
        "mixed": alone(mixed_params()),
        "train": (
            f"Train step ({{}}), {{}} compute, transformer of {sizes.layers} layers, "
            f"{examples} x {sizes.context} tokens",
            (lambda p, b: model.loss(p, b, dtype), params, batch),
        ),
    }
