import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import on_devices

import jmp_scale
from jmp_scale import _finite

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
    with pytest.raises(ValueError, match=r"expected specs.* with mesh; got mesh alone"):
        jmp_scale.all_finite(jnp.ones(2), mesh=jax.make_mesh((8,), ("i",)))


def test_all_finite_can_be_mapped_over_examples():
    grads = {"w": jnp.array([[1.0, 2.0], [jnp.inf, 0.0], [3.0, 4.0]])}
    assert jax.vmap(jmp_scale.all_finite)(grads).tolist() == [True, False, True]


def reference_norm(*arrays):
    """The norm in float64."""
    squares = [np.sum(np.abs(np.asarray(x, np.complex128)) ** 2) for x in arrays]
    return np.sqrt(np.sum(squares))


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("size", [1e-12, 1.0, 1e15, 1e19, 2e19, 1e30, 3.4e38 / 40])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.complex64])
def test_the_norm_is_right_for_every_size_of_gradients(size, dtype):
    rng = np.random.RandomState(0)
    tree = {
        name: jnp.asarray(size * rng.normal(size=shape), dtype)
        for name, shape in {"w": (40, 30), "b": (7,), "s": ()}.items()
    }
    if dtype == jnp.complex64:
        tree["w"] = tree["w"] * jnp.complex64(0.6 + 0.8j)
    finite, norm = jax.jit(_finite.finite_and_norm)(tree | {"step": jnp.int32(3)})
    assert finite
    assert (norm.shape, norm.dtype) == ((), jnp.float32)
    # Sums of 1,208 float32 squares, in any order.
    np.testing.assert_allclose(norm, reference_norm(*tree.values()), rtol=1e-5)


@pytest.mark.usefixtures("devices")
def test_a_norm_beyond_float32_is_its_largest_number():
    finite, norm = _finite.finite_and_norm(jnp.full(9, 3.0e38, jnp.float32))
    assert finite
    assert norm == np.finfo(np.float32).max
    with jax.enable_x64(True):
        finite, norm = _finite.finite_and_norm(jnp.full(9, 1e300, jnp.float64))
        assert finite
        assert (norm, norm.dtype) == (np.finfo(np.float32).max, jnp.float32)


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_flag_beside_the_norm_is_that_of_all_finite(bad, dtype):
    if dtype == jnp.float8_e4m3fn and np.isinf(bad):
        bad = np.nan  # the type has no infinity
    tree = {"a": jnp.ones((3, 5), dtype), "b": jnp.ones((), dtype)}
    assert _finite.finite_and_norm(tree)[0]
    tree["a"] = tree["a"].at[2, 4].set(jnp.array(bad, dtype))
    finite, norm = jax.jit(_finite.finite_and_norm)(tree)
    assert not finite
    assert norm == np.inf


@pytest.mark.parametrize("sign", [1, -1, 1j, -1j])
def test_numbers_of_the_host_are_judged_as_they_are(sign):
    assert jmp_scale.all_finite({"a": sign * 1e300, "b": np.array([sign * 1e300])})
    for bad in (np.inf, np.nan):
        assert not jmp_scale.all_finite({"a": sign * bad})
        assert not jmp_scale.all_finite({"b": np.array([1.0, sign * bad])})


def test_the_norm_of_numbers_of_the_host_is_theirs():
    tree = {"a": 2.0, "b": np.array([-4.0, 4.0]), "c": np.array([0.0, -8.0j])}
    finite, norm = _finite.finite_and_norm(tree)
    assert (bool(finite), float(norm)) == (True, 10.0)


@pytest.mark.parametrize("tree", [None, {}, {"step": 3}, jnp.zeros((0, 2))])
def test_the_norm_of_no_gradients_is_zero(tree):
    finite, norm = _finite.finite_and_norm(tree)
    assert (bool(finite), float(norm)) == (True, 0.0)
