"""What AdamW costs with half storage over float32 parameters and averages, as compiled.

An update is compiled for a TPU or GPU that is not there, on the parameters of a
transformer of one layer. See the README of this folder for what to install.
"""

import _harness
import _models
import _targets
import jax
import jax.numpy as jnp
import optax
from _compiled import AS_WRITTEN, figures

from jmp_scale import with_half_storage

INNER = optax.adamw(1e-3)
AVERAGES = {"averages": ("mu", "nu"), "key": jax.random.key(0)}
STOCHASTIC = {"remainders": False, "key": jax.random.key(0)}
FORMS = {
    "float32": (jnp.float32, INNER),
    "float32, mu_dtype": (jnp.float32, optax.adamw(1e-3, mu_dtype=jnp.bfloat16)),
    "float32, half states": (jnp.float32, with_half_storage(INNER, **AVERAGES)),
    "remainder": (jnp.bfloat16, with_half_storage(INNER)),
    "remainder, half states": (jnp.bfloat16, with_half_storage(INNER, **AVERAGES)),
    "stochastic": (jnp.bfloat16, with_half_storage(INNER, **STOCHASTIC)),
    "stochastic, half states": (
        jnp.bfloat16,
        with_half_storage(INNER, **AVERAGES | STOCHASTIC),
    ),
}


def main(argv=None):
    parser = _harness.parser(__doc__)
    targets = ("h100", "tpu-v5e")
    _harness.add_several(parser, "--targets", _targets.TARGETS, targets, "machines")
    args = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    tables = []
    for name in args.targets:
        if (reason := _targets.missing(name)) is not None:
            raise SystemExit(f"half_storage_cost.py: --targets {name} {reason}")
        columns = ["parameters", "bytes a parameter", "temporaries", "M cycles"]
        table = _harness.Table(f"AdamW, {name}", [*columns, "kernels"])
        table.rows = list(rows(_targets.Target(name)))
        tables.append(table)
    _harness.report(tables, "compiled, not run")


def rows(target):
    """Read and written bytes and temporaries of each form, in bytes a parameter."""
    sizes = _models.Transformer(layers=1, vocabulary=8192)
    init = _models.transformer(sizes).init
    shapes, _ = jax.eval_shape(init, jax.random.key(0))
    count = sum(array.size for array in jax.tree.leaves(shapes))
    for form, (dtype, tx) in FORMS.items():
        params = jax.tree.map(
            lambda x, dtype=dtype: jax.ShapeDtypeStruct(x.shape, dtype), shapes
        )
        found = figures(compiled(target, params, tx), target)
        cycles = f"{found.cycles / 1e6:.2f}" if found.cycles else "-"
        temporaries = f"{found.temporaries / count:.3f}"
        size = f"{found.bytes_accessed / count:.2f}"
        yield [form, size, temporaries, cycles, found.kernels]


def compiled(target, params, tx):
    """An update, for a target; parameters and state are donated."""

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.eval_shape(tx.init, params)
    arguments = map(target.replicated, (params, state, params))
    jitted = jax.jit(step, donate_argnums=(0, 1))
    return jitted.lower(*arguments).compile(compiler_options=AS_WRITTEN)


if __name__ == "__main__":
    main()
