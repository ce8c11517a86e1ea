"""What half-precision parameters and states cost over float32 ones, as compiled.

The programs are compiled for a TPU or GPU that is not there: AdamW alone, and a whole
train step of a transformer with `autocast` and `with_loss_scale`, each with float32
parameters, with bfloat16 ones and their remainders, and with stochastic rounding; each
of these also with moving averages in bfloat16. `--layers 1` has 20 arrays, `--layers 6`
100. See the README of this folder for what to install.
"""

import _harness
import _models
import _targets
import jax
import jax.numpy as jnp
import optax
from _compiled import AS_WRITTEN, figures

import jmp_scale

INNER = optax.adamw(1e-3)


AVERAGES = {"averages": ("mu", "nu"), "key": jax.random.key(0)}
STOCHASTIC = {"remainders": False, "key": jax.random.key(0)}


def stored(**kinds):
    return lambda: jmp_scale.with_half_storage(INNER, **kinds)


FORMS = {
    "float32": (jnp.float32, lambda: INNER),
    "float32, mu_dtype": (
        jnp.float32,
        lambda: optax.adamw(1e-3, mu_dtype=jnp.bfloat16),
    ),
    "float32, half states": (jnp.float32, stored(**AVERAGES)),
    "remainder": (jnp.bfloat16, stored()),
    "remainder, half states": (jnp.bfloat16, stored(**AVERAGES)),
    "stochastic": (jnp.bfloat16, stored(**STOCHASTIC)),
    "stochastic, half states": (jnp.bfloat16, stored(**AVERAGES, remainders=False)),
}
PARTS = ("optimizer", "step")


def main(argv=None):
    args = _parser().parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    tables = []
    for name in args.targets:
        if (reason := _targets.missing(name)) is not None:
            raise SystemExit(f"half_parameters_cost.py: --targets {name} {reason}")
        for part in args.parts:
            table = _harness.Table(f"{part}, {name}, over float32 parameters", [])
            table.columns = ["parameters", "bytes", "bytes a parameter"]
            table.columns += ["cycles", "temporaries", "kernels"]
            add_rows(table, _targets.Target(name), part, args.layers)
            tables.append(table)
    _harness.report(tables, args.json, "compiled, not run")


def add_rows(table, target, part, layers):
    sizes = _models.Transformer(layers=layers, vocabulary=8192)
    model, base = _models.transformer(sizes), None
    arrays = jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))[0])
    count = sum(array.size for array in arrays)
    for form, (dtype, make) in FORMS.items():
        found = figures(compiled(model, target, part, dtype, make()), target)
        base = base or found
        table.rows.append([
            form,
            f"{found.bytes_accessed / base.bytes_accessed:.3f}",
            f"{found.bytes_accessed / count:.2f}",
            f"{found.cycles / base.cycles:.3f}" if base.cycles else "",
            f"{found.temporaries / max(base.temporaries, 1):.3f}",
            found.kernels,
        ])  # fmt: skip


def compiled(model, target, part, dtype, tx):
    """The program of one form, for a target; parameters and state are donated."""
    params, batch = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), params)
    if part == "step":
        tx = jmp_scale.with_loss_scale(tx)
    state = jax.eval_shape(tx.init, params)
    half = jmp_scale.autocast(lambda p, b: model.loss(p, b, None), "bfloat16")

    def step(params, state, batch):
        loss, grads = None, batch
        if part == "step":
            grad_fn = jmp_scale.value_and_grad(half, state.loss_scale)
            loss, grads = grad_fn(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    batch = batch if part == "step" else params  # the gradients
    arguments = map(target.replicated, (params, state, batch))
    jitted = jax.jit(step, donate_argnums=(0, 1))
    return jitted.lower(*arguments).compile(compiler_options=AS_WRITTEN)


def _parser():
    parser = _harness.parser(__doc__)
    _harness.add_several(parser, "--parts", PARTS, PARTS, "programs to compile")
    targets = ("h100", "tpu-v5e")
    _harness.add_several(parser, "--targets", _targets.TARGETS, targets, "machines")
    parser.add_argument("--layers", type=int, default=4, help="of the transformer")
    return parser


if __name__ == "__main__":
    main()
