import functools

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from helpers import assert_bitwise_equal, count_traces, on_devices

import jmp_scale
from jmp_scale import _mesh, _tree

pytestmark = pytest.mark.strict_promotion

FLOATS = [
    jnp.float16,
    jnp.bfloat16,
    jnp.float32,
    jnp.float8_e4m3fn,
    jnp.float8_e5m2,
    jnp.complex64,
]


@pytest.fixture(params=["one device", "eight devices"])
def devices(request):
    """Both ways in which `all_finite` reduces a leaf."""
    with on_devices(request.param):
        assert _mesh.has_whole_arrays() == (request.param == "one device")
        yield


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", FLOATS)
def test_all_finite_sees_one_bad_entry_in_any_dtype(bad, dtype):
    if dtype == jnp.float8_e4m3fn and np.isinf(bad):
        bad = np.nan  # the type has no infinity
    clean = jnp.ones((3, 5), dtype)
    dirty = clean.at[2, 4].set(jnp.array(bad, dtype))
    assert jmp_scale.all_finite({"a": clean, "b": clean})
    assert not jmp_scale.all_finite({"a": clean, "b": dirty})
    assert not jax.jit(jmp_scale.all_finite)({"a": dirty, "b": clean})


@pytest.mark.usefixtures("devices")
def test_all_finite_sees_an_imaginary_part():
    assert not jmp_scale.all_finite(jnp.array(1.0) + jnp.array(1j) * jnp.inf)


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("size", [1, 4098, 4099, 4100, 100_003])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_all_finite_sees_a_bad_entry_at_every_size(size, bad):
    x = np.ones(size, np.float32)
    assert jax.jit(jmp_scale.all_finite)(x)
    for place in {0, size // 2, size - 1}:
        x = np.ones(size, np.float32)
        x[place] = bad
        assert not jax.jit(jmp_scale.all_finite)(x)


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_all_finite_is_right_under_fast_math(bad):
    # Which makes x - x zero whatever x is; from jax 0.10 on without further flags.
    finite = jax.jit(
        jmp_scale.all_finite, compiler_options={"xla_cpu_enable_fast_math": True}
    )
    assert not finite(jnp.ones(4099, jnp.float32).at[4098].set(bad))


@pytest.mark.usefixtures("devices")
def test_all_finite_accepts_every_finite_float16():
    bits = np.arange(2**16, dtype=np.uint16).view(np.float16)
    assert jmp_scale.all_finite(jnp.asarray(bits[np.isfinite(bits)]))


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("largest", [3.4e38, 1.9e19, 2.0**-149])
def test_all_finite_has_no_false_alarm_at_the_ends_of_the_range(largest):
    assert jmp_scale.all_finite(jnp.full(1000, largest, jnp.float32))


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize(
    "tree", [None, {}, [], {"a": None}, optax.MaskedNode(), jnp.zeros((0,))]
)
def test_all_finite_of_an_empty_tree_is_true(tree):
    finite = jmp_scale.all_finite(tree)
    assert finite
    assert (finite.shape, finite.dtype) == ((), jnp.bool_)


def test_all_finite_looks_at_inexact_leaves_only():
    tree = {
        "int": jnp.iinfo(jnp.int32).max,
        "bool": True,
        "key": jax.random.key(0),
        "float0": np.zeros(3, jax.dtypes.float0),
        "function": jnp.tanh,
        "text": "nan",
    }
    assert jmp_scale.all_finite(tree)
    assert not jmp_scale.all_finite(tree | {"python": float("nan")})
    assert not jmp_scale.all_finite(tree | {"numpy": np.float64("inf")})


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (3, 1, 5), (40, 33, 2)])
def test_all_finite_sees_a_bad_entry_anywhere_in_any_shape_under_vmap_and_grad(shape):
    clean = np.ones((3, *shape), np.float32)
    rows = jax.jit(jax.vmap(jmp_scale.all_finite))
    for place in np.random.RandomState(0).permutation(clean[0].size)[:3]:
        dirty = clean.copy()
        dirty.reshape(3, -1)[1, place] = -np.nan
        assert rows(dirty).tolist() == [True, False, True]
    assert rows(clean).tolist() == [True, True, True]
    value, slope = jax.value_and_grad(
        lambda x: jnp.where(jmp_scale.all_finite(x), x.sum(), 0.0)
    )(clean)
    assert (value, slope.min(initial=1.0)) == (clean.sum(), 1.0)


def test_all_finite_refuses_a_mesh_without_specs():
    with pytest.raises(ValueError, match="mesh is given without specs"):
        jmp_scale.all_finite(jnp.ones(2), mesh=jax.make_mesh((8,), ("i",)))


def test_all_finite_can_be_mapped_over_examples():
    grads = {"w": jnp.array([[1.0, 2.0], [jnp.inf, 0.0], [3.0, 4.0]])}
    assert jax.vmap(jmp_scale.all_finite)(grads).tolist() == [True, False, True]


def leaves_of_many_kinds(offset):
    return {
        "f16": jnp.full((2,), 1 + offset, jnp.float16),
        "f32": jnp.full((2, 3), 1 + offset, jnp.float32),
        "c64": jnp.full((2,), 1 + 1j * offset, jnp.complex64),
        "i32": jnp.int32(offset),
        "bool": jnp.array(offset == 0),
        "key": jax.random.key(offset),
        "numpy": np.full(3, offset, np.float32),
        "masked": optax.MaskedNode(),
        "none": None,
        "function": jnp.tanh,
        "text": "name",
    }


@pytest.mark.parametrize("pred", [True, False])
def test_select_tree_takes_every_leaf_from_one_side(pred):
    new, old = leaves_of_many_kinds(1), leaves_of_many_kinds(0)
    selected = jmp_scale.select_tree(jnp.array(pred), new, old)
    expected = new if pred else old
    assert selected.pop("function") is jnp.tanh
    assert selected.pop("text") == "name"
    del expected["function"], expected["text"]
    assert_bitwise_equal(selected, expected)


def test_select_tree_returns_nan_and_negative_zero_untouched():
    old = jnp.array([-0.0, jnp.nan, 1e-45])
    assert_bitwise_equal(jmp_scale.select_tree(jnp.array(False), jnp.ones(3), old), old)


def test_select_tree_never_keeps_the_new_python_number_of_a_skipped_step():
    assert (
        jmp_scale.select_tree(jnp.array(False), {"step": 2}, {"step": 1})["step"] == 1
    )


@pytest.mark.parametrize(
    ("new", "old", "message"),
    [
        (
            {"w": jnp.ones(3)},
            {"w": jnp.ones((1, 3))},
            r"\['w'\].*shape \(3,\).*\(1, 3\)",
        ),
        ({"w": jnp.ones(3)}, {"w": jnp.ones(())}, "shape"),
        ({"w": jnp.ones(3, jnp.float16)}, {"w": jnp.ones(3)}, "dtype float16.*float32"),
        ({"w": jnp.ones(3)}, {"v": jnp.ones(3)}, "same structure"),
        ({"w": jnp.ones(3)}, {"w": {"x": jnp.ones(3)}}, "same structure"),
        ({"f": jnp.tanh}, {"f": jnp.sin}, "no array and differs"),
        ({"f": "a"}, {"f": "b"}, "no array and differs"),
        ({"f": jnp.ones(3)}, {"f": "b"}, "no array and differs"),
    ],
)
def test_select_tree_refuses_trees_that_do_not_match(new, old, message):
    with pytest.raises(ValueError, match=message):
        jax.jit(lambda p: jmp_scale.select_tree(p, new, old))(True)


@pytest.mark.parametrize(
    "pred", [jnp.ones([1], bool), jnp.array(1), jnp.array(1.0), np.ones(2, bool), 1]
)
def test_select_tree_refuses_a_predicate_that_is_no_boolean_scalar(pred):
    with pytest.raises(ValueError, match="expected boolean scalar"):
        jmp_scale.select_tree(pred, None, None)


@pytest.mark.parametrize("pred", [True, np.True_, np.array(True), jnp.array(True)])
def test_select_tree_takes_any_boolean_scalar(pred):
    assert jmp_scale.select_tree(pred, jnp.ones(()), jnp.zeros(())) == 1


def test_select_tree_is_traced_once_for_both_answers():
    select, traces = count_traces(jmp_scale.select_tree)
    jitted = jax.jit(select)
    for pred in (True, False, True):
        jitted(jnp.array(pred), jnp.ones(3), jnp.zeros(3))
    assert len(traces) == 1


@pytest.mark.parametrize("dtype", [*FLOATS, jnp.int32, jnp.bool_])
def test_widen_casts_exactly_what_is_narrower_than_32_bits(dtype):
    x = jnp.ones(3, dtype)
    narrow = jnp.issubdtype(dtype, jnp.inexact) and x.dtype.itemsize < 4
    assert _tree.widen(x).dtype == (jnp.float32 if narrow else dtype)


def test_widen_keeps_float64():
    with jax.enable_x64(True):
        assert _tree.widen(jnp.ones(2, jnp.float64)).dtype == jnp.float64


@pytest.mark.parametrize(
    ("leaf", "inexact"),
    [
        (1.0, True),
        (1j, True),
        (np.float16(1), True),
        (np.zeros(2, ml_dtypes.float8_e5m2), True),
        (jnp.zeros(2, jnp.bfloat16), True),
        (True, False),
        (3, False),
        (np.zeros(2, jax.dtypes.float0), False),
        (np.array(["a"]), False),
        (None, False),
        ("1.0", False),
        (functools.partial(jnp.tanh), False),
    ],
)
def test_a_leaf_is_inexact_if_it_holds_floating_point_numbers(leaf, inexact):
    assert _tree.is_inexact(leaf) is inexact
    assert not _tree.is_inexact(jax.random.key(0))


class TreeVariants(chex.TestCase):
    @chex.variants(
        with_jit=True, without_jit=True, with_device=True, without_device=True
    )
    def test_all_finite_and_select_tree_in_every_mode(self):
        @self.variant
        def keep_finite(new, old):
            return jmp_scale.select_tree(jmp_scale.all_finite(new), new, old)

        old = {"a": jnp.zeros(2), "b": jnp.zeros((), jnp.float16)}
        new = {"a": jnp.ones(2), "b": jnp.array(jnp.inf, jnp.float16)}
        chex.assert_trees_all_equal(keep_finite(new, old), old)
        chex.assert_trees_all_equal(
            keep_finite(jax.tree.map(jnp.ones_like, old), old)["a"], new["a"]
        )
