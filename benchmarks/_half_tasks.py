"""Small models of every kind that are trained on this machine in half precision.

Each is a float32 program, or cast by hand as its framework's users do it.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from _small_tasks import WIDTHS, dense, tasks
from flax import nnx
from models import cast, cross_entropy, wide


class Task(NamedTuple):
    """Something to train.

    Attributes:
      init: parameters of a key.
      examples: a batch of a key.
      loss: of (parameters, batch, dtype), where None is float32.
      tx: the optimizer, of a number of steps.
    """

    init: Callable[[jax.Array], Any]
    examples: Callable[[jax.Array], Any]
    loss: Callable[[Any, Any, Any], jax.Array]
    tx: Callable[[int], optax.GradientTransformation]


def adam(rate: float) -> Callable[[int], Any]:
    return lambda steps: optax.adam(optax.cosine_decay_schedule(rate, steps))


def _pictures(name: str, size: int = 64) -> Callable[[jax.Array], Any]:
    task = tasks()[name]
    return lambda key: task.examples(key, size)


def _reconstruction(params: Any, batch: Any, dtype: Any) -> jax.Array:
    x, _ = batch
    y, params = cast((x, params), dtype)
    for w, b in params:
        y = jax.nn.sigmoid(y @ w + b)
    return jnp.square(wide(y) - x).mean()


AUTOENCODER = Task(dense(WIDTHS), _pictures("autoencoder"), _reconstruction, adam(5e-3))


def _resnet() -> Task:
    class Net(nn.Module):
        dtype: Any

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            conv = functools.partial(nn.Conv, 16, (3, 3), dtype=self.dtype)
            x = conv()(x.reshape(-1, 8, 8, 1))
            for _ in range(3):
                y = x
                for _ in range(2):
                    y = nn.BatchNorm(False, momentum=0.9, dtype=self.dtype)(y)
                    y = conv(use_bias=False)(nn.relu(y))
                x = x + y
            return nn.Dense(10, dtype=self.dtype)(x.mean((1, 2)))

    def loss(params: Any, batch: Any, dtype: Any) -> jax.Array:
        logits, _ = Net(dtype).apply(params, batch[0], mutable=["batch_stats"])
        return cross_entropy(logits, batch[1])

    init = lambda key: Net(None).init(key, jnp.zeros((1, 64)))  # noqa: E731
    return Task(init, _pictures("classifier"), loss, adam(3e-3))


def _transformer() -> Task:
    class Net(nnx.Module):
        def __init__(self, dtype: Any, rngs: nnx.Rngs):
            make = functools.partial(nnx.Linear, dtype=dtype, rngs=rngs)
            self.embed = nnx.Embed(128, 32, dtype=dtype, rngs=rngs)
            self.project, self.mix = make(32, 96), make(32, 32)
            self.norms = nnx.List(
                [nnx.LayerNorm(32, dtype=dtype, rngs=rngs) for _ in range(3)]
            )
            self.up, self.down, self.out = make(32, 128), make(128, 32), make(32, 128)

        def __call__(self, ids: jax.Array) -> jax.Array:
            x = self.embed(ids)
            q, k, v = jnp.split(self.project(self.norms[0](x)), 3, -1)
            scores = wide(q @ k.mT) * 32**-0.5
            mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
            weights = jax.nn.softmax(jnp.where(mask, scores, -1e9)).astype(x.dtype)
            x = x + self.mix(weights @ v)
            x = x + self.down(nnx.gelu(self.up(self.norms[1](x))))
            return self.out(self.norms[2](x))

    def init(key: jax.Array) -> Any:
        return nnx.state(Net(None, nnx.Rngs(key)), nnx.Param)

    def loss(params: Any, batch: Any, dtype: Any) -> jax.Array:
        net = nnx.eval_shape(lambda: Net(dtype, nnx.Rngs(0)))
        graph, _ = nnx.split(net)
        return cross_entropy(nnx.merge(graph, params)(batch[0]), batch[1])

    return Task(init, _pictures("char-LM", 16), loss, adam(3e-3))


def _convolutions() -> Task:
    def init(key: jax.Array) -> Any:
        keys = jax.random.split(key, 3)
        return [
            eqx.nn.Conv2d(1, 16, 3, padding=1, key=keys[0]),
            eqx.nn.Conv2d(16, 16, 3, 2, padding=1, key=keys[1]),
            eqx.nn.MLP(256, 10, 64, 2, key=keys[2]),
        ]

    def arrays(key: jax.Array) -> Any:
        return eqx.filter(init(key), eqx.is_array)

    def loss(params: Any, batch: Any, dtype: Any) -> jax.Array:
        shapes = eqx.filter_eval_shape(init, jax.random.key(0))
        static = eqx.filter(shapes, lambda x: not hasattr(x, "shape"))
        first, second, mlp = eqx.combine(cast(params, dtype), static)

        def logits(x: jax.Array) -> jax.Array:
            x = jax.nn.relu(first(cast(x, dtype).reshape(1, 8, 8)))
            return mlp(jax.nn.relu(second(x)).ravel())

        return cross_entropy(jax.vmap(logits)(batch[0]), batch[1])

    return Task(arrays, _pictures("classifier"), loss, adam(3e-3))


def deep() -> Task:
    """32 sigmoid layers, whose gradients span 2^71."""
    return AUTOENCODER._replace(init=dense((64,) * 33))


TASKS = {
    "autoencoder": lambda: AUTOENCODER,
    "ResNet (Linen)": _resnet,
    "transformer (NNX)": _transformer,
    "convolutions (Equinox)": _convolutions,
}
