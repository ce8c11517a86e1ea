"""Whether `autocast` trains as float32 does: three small models.

Each is trained from several seeds, on the same batches in every program. The loss is
the mean over the last tenth of the steps. "as float32" is said where the spread over
the seeds overlaps that of float32.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import _harness
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _harness import Table
from _small_tasks import WIDTHS, dense, tasks
from flax import nnx
from models import cast, cross_entropy, wide
from tqdm import tqdm

import jmp_scale

DYNAMIC = jmp_scale.DynamicLossScale(period=100)


class Program(NamedTuple):
    """How a float32 loss becomes a half-precision one, and its loss scale."""

    by_hand: Any = None
    dtype: Any = None
    backward: Any = None
    loss_scale: Any = None

    def loss(self, task: Any) -> Any:
        def loss(params: Any, batch: Any) -> jax.Array:
            return task.loss(params, batch, self.by_hand)

        if self.dtype is None:
            return loss
        return jmp_scale.autocast(loss, self.dtype, backward=self.backward)


PROGRAMS = {
    "float32": Program(),
    "float16 by hand, dynamic S": Program(by_hand=jnp.float16, loss_scale=DYNAMIC),
    "autocast float16, dynamic S": Program(dtype="float16", loss_scale=DYNAMIC),
    "autocast float16, no S": Program(dtype="float16"),
    "autocast bfloat16": Program(dtype="bfloat16"),
    'autocast float16, backward="bfloat16"': Program(
        dtype="float16", backward="bfloat16"
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = _harness.parser(__doc__)
    for flag, choices in (("--tasks", TASKS), ("--programs", PROGRAMS)):
        _harness.add_several(parser, flag, choices, choices, "to run")
    parser.add_argument("--seeds", type=int, default=5, help="of each program")
    parser.add_argument("--steps", type=int, default=1000, help="of each training")
    args = parser.parse_args(argv)
    cases = [(t, p) for t in args.tasks for p in args.programs]
    columns = ["program", "loss", "least", "largest"]
    columns += ["skipped steps", "last S", "verdict"]
    tables = {name: Table(name, columns) for name in args.tasks}
    reference: Any = {}
    for name, row in tqdm(cases):
        task = TASKS[name]()
        losses, state = train(task, PROGRAMS[row], args.seeds, args.steps)
        reference.setdefault(name, losses)
        cells = [f"{f(losses):.3g}" for f in (np.median, np.min, np.max)]
        cells += [f"{np.mean(state.skipped):.1f}", _power(state.loss_scale.loss_scale)]
        as_reference = _overlap(losses, reference[name])
        verdict = "as float32" if as_reference else "not as float32"
        tables[name].rows.append([row, *cells, verdict])
    _harness.report(tables.values())


def train(task: Any, program: Program, seeds: int, steps: int) -> tuple[Any, Any]:
    """(final loss of each seed, last states of the optimizer)."""
    tx = jmp_scale.with_loss_scale(task.tx(steps), program.loss_scale)
    loss_fn = program.loss(task)
    tail = steps - max(1, steps // 10)

    # Not a scan: XLA:CPU computes a convolution in a loop thirty times as slowly.
    @functools.partial(jax.jit, donate_argnums=0)
    def step(carry: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        params, state = carry
        batch = task.examples(key)
        value_and_grad = jmp_scale.value_and_grad(loss_fn, state.loss_scale)
        loss, grads = value_and_grad(params, batch)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    def run(key: jax.Array) -> tuple[np.ndarray, Any]:
        params = task.init(key)
        carry, losses = (params, tx.init(params)), []
        for at in jax.random.split(jax.random.fold_in(key, 1), steps):
            carry, loss = step(carry, at)
            losses.append(loss)
        return np.mean(jax.device_get(losses[tail:])), carry[1]

    runs = [run(key) for key in jax.random.split(jax.random.key(0), seeds)]
    losses, states = zip(*runs, strict=True)
    return np.asarray(losses), jax.tree.map(lambda *x: np.stack(x), *states)


def _overlap(losses: np.ndarray, reference: np.ndarray) -> bool:
    return losses.min() <= reference.max() and losses.max() >= reference.min()


def _power(scale: Any) -> str:
    return "-" if np.ndim(scale) == 0 else f"2^{np.median(np.log2(scale)):.0f}"


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


TASKS = {
    "autoencoder": lambda: AUTOENCODER,
    "ResNet (Linen)": _resnet,
    "transformer (NNX)": _transformer,
}


if __name__ == "__main__":
    main()
