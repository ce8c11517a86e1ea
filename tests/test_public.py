"""Public names are those of jmp_scale, wherever they are defined."""

import inspect
import pickle

import jax
import jax.numpy as jnp
import optax
import pytest

import jmp_scale
from jmp_scale import DynamicLossScale, SpikeGuard, diagnostics


def definitions(module):
    """Public classes and functions of a module, by name."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and (inspect.isclass(value) or callable(value))
    }


PUBLIC = {
    f"{module.__name__}.{name}": value
    for module in (jmp_scale, diagnostics)
    for name, value in definitions(module).items()
}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_pickled_by_where_users_import_it(name):
    value = PUBLIC[name]
    assert f"{value.__module__}.{value.__qualname__}" == name
    assert pickle.loads(pickle.dumps(value)) is value


def test_a_pickled_state_names_no_private_module():
    tx = jmp_scale.with_loss_scale(
        optax.adam(0.1), DynamicLossScale(), guard=SpikeGuard()
    )
    state = tx.init(jnp.ones(2))
    data = pickle.dumps(state._replace(inner_state=()))
    assert b"jmp_scale" in data
    assert b"jmp_scale._" not in data
    restored, leaves = pickle.loads(data), jax.tree.leaves(state.guard)
    assert restored.loss_scale.period == DynamicLossScale().period
    assert [*map(float, jax.tree.leaves(restored.guard))] == [*map(float, leaves)]
