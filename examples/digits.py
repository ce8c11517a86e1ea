"""The model that the examples share: a deep sigmoid autoencoder of scikit-learn's handwritten digits.

Seven sigmoid layers (each passes at most a quarter of a gradient on) and a mean over batch and pixels
make its first layers' gradients too small for float16.
"""

import argparse
import os

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import jmp_scale

# XLA may leave out roundings to float16, and does on a GPU: that would hide what float16 loses.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_allow_excess_precision=false"
)

WIDTHS = (64, 128, 64, 32, 16, 32, 64, 128, 64)


def load_digits_split(seed=0, train_size=1437):
    """(train, test) images in [0, 1], f32[1437, 64] and f32[360, 64], in an order set by `seed`."""
    images = (load_digits().data / 16).astype(np.float32)
    images = images[np.random.RandomState(seed).permutation(len(images))]
    return images[:train_size], images[train_size:]


def init_autoencoder(seed=0):
    """Float32 master parameters, Glorot normal with zero bias: a list of {"w": [i, o], "b": [o]}."""
    keys = jax.random.split(jax.random.key(seed), len(WIDTHS) - 1)
    shapes = zip(keys, WIDTHS[:-1], WIDTHS[1:], strict=True)
    glorot_normal = jax.nn.initializers.glorot_normal()
    return [{"w": glorot_normal(k, (i, o)), "b": jnp.zeros(o)} for k, i, o in shapes]


def autoencoder(params, images):
    """Reconstructions of `images` [batch, 64], in the dtype of the parameters."""
    x = images.astype(params[0]["w"].dtype)
    for layer in params:
        x = jax.nn.sigmoid(x @ layer["w"] + layer["b"])
    return x


def reconstruction_loss(params, images, policy):
    """Mean squared error over batch and pixels, f32[]; the model runs in the policy's compute dtype."""
    reconstructions = autoencoder(policy.cast_to_compute(params), images)
    return jnp.mean((reconstructions.astype(jnp.float32) - images) ** 2)


def policy_for(dtype):
    """Float32 master parameters, computed in `dtype` ("float32", "float16" or "bfloat16")."""
    return jmp_scale.get_policy(f"params=float32,compute={dtype},output=float32")


def zero_share(grads):
    """The share of all gradient entries that are 0, f32[]."""
    leaves = jax.tree.leaves(grads)
    return sum(jnp.sum(g == 0) for g in leaves) / sum(g.size for g in leaves)


def positive_int(text):
    """An argument of a command line, such as a number of steps."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"expected a whole number of at least 1, got {text!r}"
        )
    return int(text)
