"""Whether `autocast` trains as float32 does: four models, and 32 sigmoid layers.

Each is trained from several seeds, on the same batches in every program. The loss is
the mean over the last tenth of the steps. "as float32" is said where the spread over
the seeds overlaps that of float32.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import _half_tasks
import _harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _harness import Table
from tqdm import tqdm

import jmp_scale
from jmp_scale.diagnostics._timing import relative_error

DEEP = "32 sigmoid layers"
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
    tasks = [*_half_tasks.TASKS, DEEP]
    for flag, choices in (("--tasks", tasks), ("--programs", PROGRAMS)):
        _harness.add_several(parser, flag, choices, choices, "to run")
    parser.add_argument("--seeds", type=int, default=5, help="of each program")
    parser.add_argument("--steps", type=int, default=1000, help="of each training")
    args = parser.parse_args(argv)
    trained = [name for name in args.tasks if name != DEEP]
    cases = [(t, p) for t in trained for p in args.programs]
    columns = ["program", "loss", "least", "largest"]
    columns += ["skipped steps", "last S", "verdict"]
    tables = {name: Table(name, columns) for name in trained}
    reference: Any = {}
    for name, row in tqdm(cases):
        task = _half_tasks.TASKS[name]()
        losses, state = train(task, PROGRAMS[row], args.seeds, args.steps)
        reference.setdefault(name, losses)
        cells = [f"{f(losses):.3g}" for f in (np.median, np.min, np.max)]
        cells += [f"{np.mean(state.skipped):.1f}", _power(state.loss_scale.loss_scale)]
        as_reference = _overlap(losses, reference[name])
        verdict = "as float32" if as_reference else "not as float32"
        tables[name].rows.append([row, *cells, verdict])
    found = list(tables.values())
    if DEEP in args.tasks:
        found.append(gradients(args.seeds))
    _harness.report(found)


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


def gradients(seeds: int) -> Table:
    """The error of the worst layer's gradient, of 32 sigmoid layers."""
    task = _half_tasks.deep()
    table = Table(f"{DEEP}: error of the gradient", ["program", "error"])
    for name, program in PROGRAMS.items():
        worst = []
        for seed in range(seeds):
            key = jax.random.key(seed)
            params, batch = task.init(key), task.examples(key)
            exact = jax.grad(PROGRAMS["float32"].loss(task))(params, batch)
            got = _gradient(program, task, params, batch)
            pairs = zip(jax.tree.leaves(got), jax.tree.leaves(exact), strict=True)
            worst.append(max(relative_error(a, b) for a, b in pairs))
        table.rows.append([name, f"{np.median(worst):.2g}"])
    table.notes.append(
        "Median over the seeds of the largest of all layers' errors, relative to the "
        "norm of float32's gradient. S is 2^15."
    )
    return table


def _gradient(program: Any, task: Any, params: Any, batch: Any) -> Any:
    loss = program.loss(task)

    def gradient(s: Any, params: Any, batch: Any) -> Any:
        return jmp_scale.grad(loss, s)(params, batch)

    s = program.loss_scale or jmp_scale.NoOpLossScale()
    return jax.jit(gradient)(s, params, batch)


def _overlap(losses: np.ndarray, reference: np.ndarray) -> bool:
    return losses.min() <= reference.max() and losses.max() >= reference.min()


def _power(scale: Any) -> str:
    return "-" if np.ndim(scale) == 0 else f"2^{np.median(np.log2(scale)):.0f}"


if __name__ == "__main__":
    main()
