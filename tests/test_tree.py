import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict
from helpers import assert_bitwise_equal

import jmp_scale

pytestmark = pytest.mark.strict_promotion


def leaves_of_many_kinds(offset):
    return {
        "f16": jnp.full((2,), 1 + offset, jnp.float16),
        "f32": jnp.full((2, 3), 1 + offset, jnp.float32),
        "odd": jnp.float32([-0.0, jnp.nan, 1e-45, offset]),
        "c64": jnp.full((2,), 1 + 1j * offset, jnp.complex64),
        "i32": jnp.int32(offset),
        "bool": jnp.array(offset == 0),
        "key": jax.random.key(offset),
        "numpy": np.full(3, offset, np.float32),
        "masked": optax.MaskedNode(),
        "none": None,
        "function": jnp.tanh,
        "text": "".join(["na", "me"]),
        "number": offset,
    }


@pytest.mark.parametrize("pred", [np.True_, jnp.array(False)])
def test_select_tree_takes_every_leaf_from_one_side(pred):
    new, old = leaves_of_many_kinds(1), leaves_of_many_kinds(0)
    assert new["text"] is not old["text"]
    selected, expected = jmp_scale.select_tree(pred, new, old), new if pred else old
    for name in ("function", "text", "number"):
        assert selected.pop(name) == expected.pop(name)
    assert_bitwise_equal(selected, expected)


@pytest.mark.parametrize(
    ("new", "old", "message"),
    [
        ({"w": jnp.ones(3)}, {"w": jnp.ones((1, 3))}, r"\['w'\].*\(3,\).*\(1, 3\)"),
        ({"w": jnp.ones(3, jnp.float16)}, {"w": jnp.ones(3)}, "dtype float16.*float32"),
        ({"w": jnp.ones(3)}, {"v": jnp.ones(3)}, "structure|mismatch"),
        ({"f": jnp.tanh}, {"f": jnp.sin}, "not an array and differs"),
        ({"f": jnp.ones(3)}, {"f": "b"}, "not an array and differs"),
    ],
)
def test_select_tree_refuses_trees_that_do_not_match(new, old, message):
    with pytest.raises(ValueError, match=message):
        jax.jit(lambda p: jmp_scale.select_tree(p, new, old))(True)


@pytest.mark.parametrize("pred", [jnp.ones([1], bool), jnp.array(1.0), 1])
def test_select_tree_refuses_a_predicate_that_is_not_a_boolean_scalar(pred):
    with pytest.raises(ValueError, match="expected a boolean scalar"):
        jmp_scale.select_tree(pred, None, None)


FLOAT8 = "_overwrite_with_gradient"  # Flax's name
ONE = jnp.float32([1.0, 0.5])
OfNNX = type(FLOAT8, (nnx.Variable,), {})  # what NNX makes of the name
Attribute = collections.namedtuple("Attribute", FLOAT8[1:])


@pytest.mark.parametrize(
    ("tree", "is_next"),
    [
        ({FLOAT8: {"scale": ONE}}, True),
        (FrozenDict({FLOAT8: {"dense": {"scale": ONE}}}), True),
        ([{"generator": {FLOAT8: [ONE]}}], True),
        (nnx.State({"dense": {"scale": OfNNX(ONE)}}), True),
        ({FLOAT8 + "s": ONE, FLOAT8[1:]: ONE}, False),
        ({"params": {"input_scale": ONE, "input_amax_history": ONE}}, False),
        (Attribute(ONE), False),
        (nnx.State({FLOAT8[1:]: nnx.Param(ONE)}), False),
        (ONE, False),
    ],
)
def test_only_next_values_of_float8_are_neither_scaled_nor_cast(tree, is_next):
    for leaf in jax.tree.leaves(jmp_scale.StaticLossScale(8.0).scale(tree)):
        assert leaf.tolist() == ([1, 0.5] if is_next else [8, 4])
    policy = jmp_scale.get_policy("float16")
    for cast in (jmp_scale.cast_to_half, policy.cast_to_compute, policy.cast_to_param):
        for leaf in jax.tree.leaves(cast(tree)):
            assert leaf.dtype == (jnp.float32 if is_next else jnp.float16)
