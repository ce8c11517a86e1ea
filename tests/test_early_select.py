import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest
from helpers import assert_bitwise_equal

from jmp_scale import all_finite, select_tree
from jmp_scale._early_select import update_or_keep

PARAMS = {"w": jnp.linspace(-1.0, 1.0, 32).reshape(8, 4), "b": jnp.arange(8.0) / 8}
GOOD = jax.tree.map(lambda p: jnp.cos(p) / 3, PARAMS)
BAD = {"w": GOOD["w"].at[3, 1].set(jnp.nan), "b": GOOD["b"]}
OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optax.adam(0.1),
    "adamw": optax.adamw(0.1),
    "adam_bf16_momentum": optax.adam(0.1, mu_dtype=jnp.bfloat16),
    "amsgrad": optax.amsgrad(0.1),
    "clip_adam": optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(learning_rate=lambda n: 0.1 / (1 + n)),
    "multi_steps": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "add_noise": optax.chain(optax.add_noise(0.1, 0.55, jax.random.key(0)), optax.sgd(0.1)),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=2),
    "lamb": optax.lamb(0.1),
    "lion": optax.lion(0.1),
    "rmsprop": optax.rmsprop(0.1, momentum=0.9),
    "muon": optax.contrib.muon(0.1),
    "schedule_free": optax.contrib.schedule_free_adamw(0.1),
    "lbfgs": optax.lbfgs(),
}


def late(finite, update, old):
    updates, new = update()
    return updates, select_tree(finite, new, old)


def stepper(tx, select):
    """One step with the state selected by `select`; the gradients of a skipped one are zeroed."""

    def value_fn(params):
        return sum(jnp.sum((p - 0.1) ** 2) for p in jax.tree.leaves(params))

    def step(params, state, grads):
        finite = all_finite(grads)
        safe = jax.tree.map(lambda g: jnp.where(finite, g, 0), grads)
        extra = {"value": value_fn(params), "grad": safe, "value_fn": value_fn}
        tx_update = optax.with_extra_args_support(tx).update
        updates, state = select(finite, lambda: tx_update(safe, state, params, **extra), state)
        updates = jax.tree.map(lambda u: jnp.where(finite, u, 0), updates)
        return optax.apply_updates(params, updates), state

    return step


@pytest.fixture
def no_fusion():
    """Every operation rounds as it stands, so that two programs of the same operations agree."""
    with jax.disable_jit(False), jax.default_matmul_precision("highest"):
        yield {"xla_disable_hlo_passes": "fusion", "xla_cpu_use_fusion_emitters": False}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_early_and_late_selects_agree_bit_for_bit(name):
    tx = OPTIMIZERS[name]
    early_step, late_step = (jax.jit(stepper(tx, s)) for s in (update_or_keep, late))
    actual = expected = (PARAMS, tx.init(PARAMS))
    for grads in (BAD, GOOD, GOOD, BAD, GOOD):
        actual, expected = early_step(*actual, grads), late_step(*expected, grads)
        assert_bitwise_equal(actual, expected)
