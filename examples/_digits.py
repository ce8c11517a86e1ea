"""The data and the model of most examples: an autoencoder of handwritten digits.

Eight sigmoid layers, each of which passes on at most a quarter of a gradient, and a
mean over batch and pixels make the first layers' gradients too small for float16.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jmp_scale

WIDTHS = (64, 128, 64, 32, 16, 32, 64, 128, 64)


def load_images(seed=0, train_size=1437):
    """(train, test) images in [0, 1], f32[1437, 64] and f32[360, 64], shuffled."""
    images = (load_digits().data / 16).astype(np.float32)
    images = images[np.random.RandomState(seed).permutation(len(images))]
    return images[:train_size], images[train_size:]


def load_labels(seed=0, train_size=1437):
    """(train, test) labels of the images of `load_images`, i32[1437] and i32[360]."""
    labels = np.random.RandomState(seed).permutation(load_digits().target)
    return np.split(labels.astype(np.int32), [train_size])


class Batches:
    """Random batches of `data`, one for each step, drawn when steps are sliced."""

    def __init__(self, data, steps, size, seed=0):
        self.data = data
        self.picks = np.random.RandomState(seed).randint(len(data), size=(steps, size))

    def __len__(self):
        return len(self.picks)

    def __getitem__(self, steps):
        return self.data[self.picks[steps]]


def image_batches(steps, size, seed=0):
    """Random training images, f32[size, 64] for each step."""
    return Batches(load_images(seed)[0], steps, size, seed)


def labelled_batches(steps, size, seed=0):
    """The same images, and their labels, i32[size] for each step."""
    labels = Batches(load_labels(seed)[0], steps, size, seed)
    return image_batches(steps, size, seed), labels


def weights(size, heavy):
    """Of the images of a batch, f32[size, 1]; a heavy one overflows in float16."""
    return np.float32([1] * (size - 1) + [2**40 if heavy else 1])[:, None]


def init_autoencoder(seed=0):
    """Float32 parameters, Glorot normal and zero biases: [{"w": [i, o], "b": [o]}]."""
    return init_layers(WIDTHS, jax.random.key(seed))


def init_classifier(seed=0):
    """Parameters of a network of one hidden layer that names the digits."""
    return init_layers((64, 128, 10), jax.random.key(seed))


def init_layers(widths, key, initializer="glorot_normal"):
    """Float32 parameters of dense layers: [{"w": [i, o], "b": [o]}]."""
    keys = jax.random.split(key, len(widths) - 1)
    initializer = getattr(jax.nn.initializers, initializer)()
    shapes = zip(keys, widths[:-1], widths[1:], strict=True)
    return [{"w": initializer(k, (i, o)), "b": jnp.zeros(o)} for k, i, o in shapes]


def autoencoder(params, images):
    """Reconstructions of `images` [batch, 64], in the dtype of the parameters."""
    x = images.astype(params[0]["w"].dtype)
    for layer in params:
        x = jax.nn.sigmoid(x @ layer["w"] + layer["b"])
    return x


def reconstruction_loss(params, images, weights=1.0):
    """Mean squared error over batch and pixels, f32[].

    `weights` [batch, 1] multiply the errors of each image.
    """
    return jnp.mean(weights * (autoencoder(params, images) - images) ** 2)


half_loss = jmp_scale.autocast(reconstruction_loss, "float16")


def leaky_relu(x):
    return jax.nn.leaky_relu(x, 0.2)


def network(params, x, dtype="float16", activation=leaky_relu):
    """Outputs in float32 of dense layers that compute in `dtype`."""
    *hidden, last = jax.tree.map(lambda w: w.astype(dtype), params)
    x = x.astype(dtype)
    for layer in hidden:
        x = activation(x @ layer["w"] + layer["b"])
    return (x @ last["w"] + last["b"]).astype(jnp.float32)


def init_two_heads(seed=0):
    """Float32 parameters of an encoder, and of a head for each of two losses."""
    glorot = jax.nn.initializers.glorot_normal()
    encoder, *heads = jax.random.split(jax.random.key(seed), 3)
    widths = {"reconstruction": 64, "label": 10}
    heads = {
        name: glorot(key, (32, width))
        for key, (name, width) in zip(heads, widths.items(), strict=True)
    }
    return {"encoder": glorot(encoder, (64, 32)), "heads": heads}


def two_losses(params, images, labels):
    """The mean squared error and the cross entropy, f32[], of a float16 network."""
    params = jax.tree.map(lambda w: w.astype(jnp.float16), params)
    hidden = jnp.tanh(images.astype(jnp.float16) @ params["encoder"])
    output = {
        name: (hidden @ head).astype(jnp.float32)
        for name, head in params["heads"].items()
    }
    return {
        "reconstruction": jnp.mean((output["reconstruction"] - images) ** 2),
        "label": classification_loss(output["label"], labels),
    }


def classification_loss(logits, labels):
    """Mean cross entropy of logits [batch, classes], f32[]."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def accuracy(params, batches):
    """The share of all images of `labelled_batches` that a network names, f32[]."""
    images, labels = batches
    return jnp.mean(network(params, images.data).argmax(1) == labels.data)


def verdict_loss(discriminator, images, label):
    """Mean cross entropy, f32[], of a network that tells real images, 1, from fakes."""
    logits = network(discriminator, images)
    labels = jnp.full_like(logits, label)
    return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, labels))


def zero_share(grads):
    """The share of all gradient entries that are 0, f32[]."""
    leaves = jax.tree.leaves(grads)
    return sum(jnp.sum(g == 0) for g in leaves) / sum(g.size for g in leaves)
