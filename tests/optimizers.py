"""Every optimizer of Optax, found by enumeration."""

import inspect
import warnings

import jax
import jax.numpy as jnp
import optax
import optax.contrib

# Optimizers that need more than a learning rate, or none at all.
SPECIAL = {
    "adafactor_factored": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
    "adam_bf16_momentum": lambda: optax.adam(0.1, mu_dtype=jnp.bfloat16),
    "add_noise": lambda: optax.chain(
        optax.add_noise(0.1, 0.55, jax.random.key(0)), optax.sgd(0.1)
    ),
    "backtracking": lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(10)
    ),
    "clip_adamw": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.1)),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(
        learning_rate=lambda n: 0.1 / (1 + n)
    ),
    "lbfgs_without_search": lambda: optax.lbfgs(0.1, linesearch=None),
    "masked": lambda: optax.chain(
        optax.masked(optax.trace(0.9), {"w": True, "b": False}), optax.scale(-0.1)
    ),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "multi_steps": lambda: optax.MultiSteps(
        optax.adam(0.1), 2
    ).gradient_transformation(),
    "partition": lambda: optax.partition(
        {"a": optax.adam(0.1), "s": optax.sgd(0.1, momentum=0.9)}, {"w": "a", "b": "s"}
    ),
    "polyak_sgd": lambda: optax.polyak_sgd(),
    "reduce_on_plateau": lambda: optax.chain(
        optax.adam(0.1), optax.contrib.reduce_on_plateau(patience=1)
    ),
    "rmsprop_centered": lambda: optax.rmsprop(0.1, centered=True, momentum=0.9),
    "sam": lambda: optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05)),
    "schedule_free": lambda: optax.contrib.schedule_free(optax.adam(0.1), 0.1),
    "zero_nans": lambda: optax.chain(optax.zero_nans(), optax.sgd(0.1)),
}


def enumerated():
    """Functions of Optax that make an optimizer of a learning rate, by name."""
    found = {}
    for module in (optax, optax.contrib):
        for name, make in vars(module).items():
            if not inspect.isfunction(make) or name.startswith("_"):
                continue
            if "learning_rate" in inspect.signature(make).parameters:
                found[name] = make
    return found


def every_optimizer():
    """Every optimizer that a learning rate suffices for, and the special ones."""
    optimizers = {}
    for name, make in sorted(enumerated().items()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                tx = make(learning_rate=0.1)
            except TypeError:  # it needs more: in SPECIAL, or not for whole batches
                continue
        optimizers[name] = tx
    return optimizers | {name: make() for name, make in SPECIAL.items()}


def value_fn(params):
    return sum(jnp.sum((p - 0.1) ** 2) for p in jax.tree.leaves(params))


def stepper(tx):
    """`(params, state, grads) -> (params, state)`, with what any optimizer asks for."""
    tx = optax.with_extra_args_support(tx)

    def step(params, state, grads):
        value = value_fn(params)
        extra = {"value": value, "grad": grads, "value_fn": value_fn}
        for more in ({}, {"obj_fn": value_fn}):
            try:
                updates, state = tx.update(grads, state, params, **extra, **more)
                break
            except ValueError as error:  # Sophia asks for a function, others refuse it
                if "obj_fn must be provided" not in str(error):
                    raise
            except TypeError as error:
                if "unexpected keyword" not in str(error):
                    raise
                updates, state = tx.update(grads, state, params)
                break
        return optax.apply_updates(params, updates), state

    return step
