import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, struct
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
    selected = jmp_scale.select_tree(pred, new, old)
    expected = new if pred else old
    assert new["text"] is not old["text"]
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
ONE = np.float32([1.0, 0.5])
Variable = type(FLOAT8, (nnx.Variable,), {})  # what NNX makes of the name
NEXT_VALUES = {
    "a mapping": {FLOAT8: {"scale": ONE}},
    "a frozen one": FrozenDict({FLOAT8: {"dense": {"scale": ONE}}}),
    "one of several models": [{"generator": {FLOAT8: [ONE]}}],
    "a leaf": {FLOAT8: ONE},
    "NNX's state": nnx.State({"dense": {"scale": Variable(jnp.asarray(ONE))}}),
}


@struct.dataclass
class Attribute:
    _overwrite_with_gradient: jax.Array


OTHERS = {
    "part of a name": {FLOAT8 + "s": ONE, "overwrite_with_gradient": ONE},
    "a value that is beside one": {"params": {"scale": ONE, "amax_history": ONE}},
    "an attribute": Attribute(ONE),
    "a name as a leaf": (FLOAT8, ONE),
    "a variable of another type": nnx.State({FLOAT8[1:]: nnx.Param(jnp.asarray(ONE))}),
    "an array by itself": ONE,
}


@pytest.mark.parametrize("case", NEXT_VALUES | OTHERS)
def test_next_values_of_float8_are_neither_scaled_nor_cast_and_nothing_else_is_one(
    case,
):
    tree = (NEXT_VALUES | OTHERS)[case]
    expected = [1.0, 0.5] if case in NEXT_VALUES else [8.0, 4.0]
    loss_scale = jmp_scale.StaticLossScale(8.0)
    half = np.float32 if case in NEXT_VALUES else np.float16
    policy = jmp_scale.get_policy("float16")
    for leaf in jax.tree.leaves(loss_scale.scale(tree)):
        assert isinstance(leaf, str) or leaf.tolist() == expected
    for cast in (jmp_scale.cast_to_half, policy.cast_to_compute, policy.cast_to_param):
        for leaf in jax.tree.leaves(cast(tree)):
            assert isinstance(leaf, str) or leaf.dtype == half
