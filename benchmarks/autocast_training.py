"""Whether `autocast` trains as float32 does: three small models.

Each is trained from several seeds, on the same batches in every program. The loss is
the mean over the last tenth of the steps. "as float32" is said where the spread over
the seeds overlaps that of float32.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import _harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _harness import Table
from _small_tasks import WIDTHS, dense, spread_beside, tasks
from models import Model, Transformer, cast, transformer, wide
from models.catalog import resnet
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
    columns = ["program", "loss", "least", "largest", "verdict"]
    columns += ["skipped steps", "last S"]
    tables = {name: Table(name, columns) for name in args.tasks}
    reference: Any = {}
    for name, row in tqdm(cases):
        task = TASKS[name]
        losses, state = train(task, PROGRAMS[row], args.seeds, args.steps)
        reference.setdefault(name, losses)
        cells = spread_beside(losses, reference[name])
        cells += [f"{np.mean(state.skipped):.1f}", _power(state.loss_scale.loss_scale)]
        tables[name].rows.append([row, *cells])
    _harness.report(tables.values())


def train(task: Any, program: Program, seeds: int, steps: int) -> tuple[Any, Any]:
    """(final loss of each seed, last states of the optimizer)."""
    adam = optax.adam(optax.cosine_decay_schedule(task.rate, steps))
    tx = jmp_scale.with_loss_scale(adam, program.loss_scale)
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


def _power(scale: Any) -> str:
    return "-" if np.ndim(scale) == 0 else f"2^{np.median(np.log2(scale)):.0f}"


class Task(NamedTuple):
    """Something to train.

    Attributes:
      init: parameters of a key.
      examples: a batch of a key.
      loss: of (parameters, batch, dtype), where None is float32.
      rate: peak of Adam's learning rate, which ends at 0 (cosine).
    """

    init: Callable[[jax.Array], Any]
    examples: Callable[[jax.Array], Any]
    loss: Callable[[Any, Any, Any], jax.Array]
    rate: float = 3e-3


def _examples(name: str, size: int = 64) -> Callable[[jax.Array], Any]:
    task = tasks()[name]
    return lambda key: task.examples(key, size)


def _reconstruction(params: Any, batch: Any, dtype: Any) -> jax.Array:
    x, _ = batch
    y, params = cast((x, params), dtype)
    for w, b in params:
        y = jax.nn.sigmoid(y @ w + b)
    return jnp.square(wide(y) - x).mean()


def _of_model(model: Model, name: str, batch: Any, size: int = 64) -> Task:
    """A task of a model, whose batch is made of a small task's examples."""

    def loss(params: Any, examples: Any, dtype: Any) -> jax.Array:
        return model.loss(params, batch(*examples), dtype, False)

    init = lambda key: model.init(key)[0]  # noqa: E731
    return Task(init, _examples(name, size), loss)


BLOCKS = [((16, 3, 1), (16, 3, 1))] * 3
TASKS = {
    "autoencoder": Task(dense(WIDTHS), _examples("autoencoder"), _reconstruction, 5e-3),
    "ResNet (Linen)": _of_model(
        resnet((64, 8, 8, 1), 16, BLOCKS, 10),
        "classifier",
        lambda x, y: {"x": x.reshape(-1, 8, 8, 1), "y": y},
    ),
    "transformer": _of_model(
        transformer(Transformer(1, 32, 1, 128, 16, 16)),
        "char-LM",
        lambda x, _: {"tokens": x},
        16,
    ),
}


if __name__ == "__main__":
    main()
