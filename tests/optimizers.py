"""Every optimizer of Optax, found by enumeration, and ways to combine them."""

import contextlib
import inspect
import re
import warnings

import jax
import jax.numpy as jnp
import optax
import optax.contrib


@jax.jit  # compiles faster than each operation
def arrays():
    params = {"w": jnp.float32([[1, -2], [0.5, 3]]), "b": jnp.float32([-0.0, 4])}
    good = jax.tree.map(lambda p: p / 4 + 0.75, params)
    steps = [jax.tree.map(lambda g, s=s: g * s, good) for s in (1.0, -0.3, 1e-3, 7.0)]
    bad = {"w": good["w"].at[0, 1].set(jnp.inf), "b": good["b"].at[0].set(jnp.nan)}
    return params, good, steps, bad


PARAMS, GOOD, STEPS, BAD = arrays()


def schedule(count):
    return 0.1 / (1 + count)


def optimizer(start, step=lambda updates, state: (updates, state)):
    """An optimizer whose state starts so, and whose step is a function of both."""
    return optax.GradientTransformation(
        lambda params: start, lambda updates, state, params=None: step(updates, state)
    )


ADAM, SGD, chain = optax.adam(0.1), optax.sgd(0.1), optax.chain
# Optimizers that need more than a learning rate, or none at all, and combinations.
SPECIAL = {
    "multi_steps": optax.MultiSteps(ADAM, 2).gradient_transformation(),
    "adafactor_factored": optax.adafactor(0.1, min_dim_size_to_factor=2),
    "adam_bf16_momentum": optax.adam(0.1, mu_dtype=jnp.bfloat16),
    "add_noise": chain(optax.add_noise(0.1, 0.55, jax.random.key(0)), SGD),
    "backtracking": chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(10)),
    "clip_adamw": chain(optax.clip_by_global_norm(0.5), optax.adamw(0.1)),
    "freeze": chain(ADAM, optax.transforms.freeze({"w": False, "b": True})),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(learning_rate=schedule),
    "lbfgs_without_search": optax.lbfgs(0.1, linesearch=None),
    "masked": chain(
        optax.masked(
            optax.masked(optax.trace(0.9), {"w": True, "b": False}),
            lambda tree: jax.tree.map(lambda x: x.ndim > 0, tree),
        ),
        optax.scale(-0.1),
    ),
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "partition": optax.partition(
        {"a": ADAM, "s": optax.sgd(0.1, momentum=0.9)}, {"w": "a", "b": "s"}
    ),
    "polyak_sgd": optax.polyak_sgd(),
    "reduce_on_plateau": chain(ADAM, optax.contrib.reduce_on_plateau(patience=1)),
    "rmsprop_centered": optax.rmsprop(0.1, centered=True, momentum=0.9),
    "sam": optax.contrib.sam(SGD, optax.sgd(0.05)),
    "schedule_free": optax.contrib.schedule_free(ADAM, 0.1),
}


def every_optimizer():
    """Every optimizer that a learning rate suffices for, and the special ones."""
    found = {}
    for name, make in sorted({**vars(optax), **vars(optax.contrib)}.items()):
        is_public = inspect.isfunction(make) and not name.startswith("_")
        if is_public and "learning_rate" in inspect.signature(make).parameters:
            # Those that need more are special, or not for whole batches.
            with warnings.catch_warnings(), contextlib.suppress(TypeError):
                warnings.simplefilter("ignore")
                found[name] = make(learning_rate=0.1)
    return found | SPECIAL


OPTIMIZERS = every_optimizer()


def half(tree, dtype=jnp.bfloat16):
    return jax.tree.map(lambda x: jnp.array(x, dtype), tree)


def value_fn(params):
    return sum(jnp.sum((p - 0.1) ** 2) for p in jax.tree.leaves(params))


def stepper(tx, seen=lambda params, state: params):
    """`(params, state, grads) -> (params, state)`, with what any optimizer asks for.

    The loss is that of the parameters that are `seen`.
    """
    tx = optax.with_extra_args_support(tx)

    def step(params, state, grads):
        value = value_fn(seen(params, state))
        extra = {"value": value, "grad": grads, "value_fn": value_fn}
        # Sophia asks for a function, which others refuse; some refuse all of them.
        for given in (extra, extra | {"obj_fn": value_fn}, {}):
            try:
                updates, state = tx.update(grads, state, params, **given)
            except (TypeError, ValueError) as error:
                if not re.search("obj_fn must be|unexpected keyword", str(error)):
                    raise
            else:
                return optax.apply_updates(params, updates), state
        raise AssertionError("no extra arguments suit the optimizer")

    return step
