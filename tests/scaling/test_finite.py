import contextlib
import itertools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import on_devices, slow

import jmp_scale
from jmp_scale._scaling import finite as _finite

pytestmark = pytest.mark.strict_promotion


@pytest.fixture(params=["one device", "eight devices"])
def devices(request):
    """Both ways in which `all_finite` reduces a leaf."""
    with on_devices(request.param):
        yield


@pytest.mark.usefixtures("devices")
def test_all_finite_and_the_norm_see_one_bad_entry_in_any_dtype():
    dtypes = ["float16", "float32", "float8_e4m3fn", "float8_e5m2", "complex64"]
    clean = [np.ones((3, 5), jnp.dtype(dtype)) for dtype in dtypes]
    judge = jax.jit(
        lambda tree: (jmp_scale.all_finite(tree), *_finite.finite_and_norm(tree))
    )
    assert judge(clean)[:2] == (True, True)
    for i, array in enumerate(clean):
        has_infinity = array.dtype != jnp.float8_e4m3fn
        entries = (np.nan, np.inf, -np.inf) if has_infinity else (np.nan,)
        if array.dtype == jnp.complex64:
            entries += (complex(0, np.inf),)
        for bad in entries:
            dirty = array.copy()
            dirty[2, 4] = bad
            judged = judge([*clean[:i], dirty, *clean[i + 1 :]])
            assert judged == (False, False, np.inf)


@pytest.mark.usefixtures("devices")
def test_all_finite_is_right_under_fast_math():
    # Which makes x - x zero whatever x is; from jax 0.10 on without further flags.
    fast = {"xla_cpu_enable_fast_math": True}
    finite = jax.jit(lambda x: jmp_scale.all_finite(x), compiler_options=fast)
    for bad in (np.nan, np.inf, -np.inf):
        assert not finite(jnp.ones(4099, jnp.float32).at[4098].set(bad))


@pytest.mark.usefixtures("devices")
def test_all_finite_has_no_false_alarm_at_the_ends_of_the_range():
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    large = [jnp.full(1000, x, jnp.float32) for x in (3.4e38, 1.9e19, 2.0**-149)]
    assert jmp_scale.all_finite([jnp.asarray(halves[np.isfinite(halves)]), *large])


@pytest.mark.usefixtures("devices")
def test_all_finite_of_an_empty_tree_is_true():
    for tree in (None, {}, [], {"a": None}, optax.MaskedNode(), jnp.zeros((0,))):
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
def test_all_finite_looks_at_each_row_under_vmap_and_has_no_derivative():
    rows = jax.jit(jax.vmap(lambda tree: jmp_scale.all_finite(tree)))
    slope = jax.grad(lambda x: jnp.where(jmp_scale.all_finite([x, x]), x.sum(), 0))
    clean = [np.ones((3, *shape), np.float32) for shape in ((), (0, 3), (40, 33, 2))]
    assert rows(clean).tolist() == [True, True, True]
    for dirty in (clean[0], clean[2]):
        dirty.reshape(3, -1)[1, -1] = -np.nan
        assert rows(clean).tolist() == [True, False, True]
        dirty[:] = 1
    assert (jax.jit(slope)(clean[2]) == 1).all()


@pytest.fixture(params=["cpu", slow("gpu"), slow("eight devices")])
def machine(request):
    """Programs are as lowered for this machine, or as sharded over several of them."""

    def of_machine(*args, default, **variants):
        return variants.get(request.param, default)(*args)

    if request.param == "gpu":
        switch = request.getfixturevalue("switched")
        switch(jax.lax, "platform_dependent", of_machine)
    is_sharded = request.param == "eight devices"
    with on_devices(request.param) if is_sharded else contextlib.nullcontext():
        yield


# More of one shape than a group holds, and others.
SHAPES = [(8, 3)] * 9 + [(512, 256), (2, 256, 384), (4099,), (5,), ()]


def normal_arrays():
    rng = np.random.RandomState(0)
    return [np.asarray(rng.normal(size=shape), np.float32) for shape in SHAPES]


def flag_and_norm(tree):
    # A new function for each call: `jax.jit` would find another machine's program.
    return jax.jit(lambda tree: _finite.finite_and_norm(tree))(tree)


def reference_norm(*arrays):
    """The norm in float64."""
    squares = [np.sum(np.abs(np.asarray(x, np.complex128)) ** 2) for x in arrays]
    return np.sqrt(np.sum(squares))


@pytest.mark.usefixtures("machine")
def test_the_norm_is_right_on_every_machine_and_a_bad_entry_of_any_array_is_seen():
    @jax.jit
    def judged(given):
        return jmp_scale.all_finite(given), *_finite.finite_and_norm(given)

    good = normal_arrays()
    sizes = (1e-15, 1e-10, 1.0, 1e15)
    mixed = (1e-20, 1e-9), (1e-20, 1), (1e-30, 1e15)
    for given in [
        *([np.float32(size) * array for array in good] for size in sizes),
        *([np.full(4097, size, np.float32) for size in pair] for pair in mixed),
    ]:
        *flags, norm = judged(given)
        assert all(flags)
        assert (norm.shape, norm.dtype) == ((), jnp.float32)
        # What a GPU sums in a tree this machine adds one by one.
        np.testing.assert_allclose(norm, reference_norm(*given), rtol=1e-4)
    # Squares beyond float32, and an absolute value.
    squares = [np.full(4097, size, np.float32) for size in (1e30, 1)]
    for large in (squares, [*good[:-1], np.float32(1e20)], np.full(9, 3e38 + 3e38j)):
        *flags, norm = judged(large)
        assert all(flags)
        assert norm == np.finfo(np.float32).max
    for position, bad in enumerate([np.nan, -np.inf] * 7):
        given = [array.copy() for array in good]
        given[position][(-1,) * given[position].ndim] = bad
        *flags, norm = judged(given)
        assert not any(flags)
        assert norm == np.inf


@pytest.mark.usefixtures("machine")
def test_the_norm_is_right_in_every_dtype():
    dtypes = itertools.cycle([jnp.bfloat16, jnp.float16, jnp.complex64])
    given = [jnp.asarray(x, d) for x, d in zip(normal_arrays(), dtypes, strict=False)]
    given = [x * x.dtype.type(3 + 4j) if x.dtype.kind == "c" else x for x in given]
    norm = flag_and_norm([*given, jnp.int32(3)])[1]
    np.testing.assert_allclose(norm, reference_norm(*given), rtol=1e-4)


@pytest.mark.usefixtures("machine")
def test_float64_gradients_have_a_norm_too():
    given = [np.full((4, 5), 3e4, np.float16), np.full((4, 5), 1e4, np.float64)]
    with jax.enable_x64(True):
        finite, norm = flag_and_norm(given)
        assert finite
        np.testing.assert_allclose(norm, reference_norm(*given), rtol=1e-6)
        finite, norm = flag_and_norm(np.full((2, 9), 1e300))
        assert finite
        assert (norm, norm.dtype) == (np.finfo(np.float32).max, jnp.float32)


def test_the_norm_of_many_entries_is_right():
    count = 2**24 + 2**20 + 11  # a prime

    # One float32 to which ones are added does not grow beyond 2**24.
    @jax.jit
    def norm(x):
        return _finite.finite_and_norm(jnp.broadcast_to(x, (count,)))[1]

    np.testing.assert_allclose(norm(jnp.float32(1)), np.sqrt(count), rtol=1e-5)


def update_of_sgd(tree):
    """Whether the gradients of a step are finite, which promotes no dtype itself."""
    guard = jmp_scale.SpikeGuard(warmup=2)
    tx = jmp_scale.with_loss_scale(
        optax.sgd(0.5), jmp_scale.DynamicLossScale(), guard=guard
    )
    state = tx.init({"a": 0.0, "b": 0.0})
    return tx.update(tree, state, value=jnp.bfloat16(1.0))[1].grads_finite


@pytest.mark.parametrize("fun", [jmp_scale.all_finite, update_of_sgd])
def test_arrays_of_a_symbolic_size_can_be_exported(fun):
    n, m = jax.export.symbolic_shape("n, m")
    types = {
        "a": jax.ShapeDtypeStruct((n, 4), jnp.float32),
        "b": jax.ShapeDtypeStruct((m,), jnp.float16),
    }
    exported = jax.export.export(jax.jit(fun))(types)
    tree = {"a": np.ones((5000, 4), np.float32), "b": np.ones(3, np.float16)}
    assert exported.call(tree)
    tree["a"][4999, 3] = np.nan
    assert not exported.call(tree)


OF_HOST = {"a": 2.0, "b": np.array([-4.0, 4.0]), "c": np.array([0.0, -8.0j])}


@pytest.mark.parametrize(
    ("tree", "expected"),
    [(OF_HOST, 10), (None, 0), ({"step": 3}, 0), (jnp.zeros((0, 2)), 0)],
)
def test_the_norm_of_numbers_of_the_host_is_theirs_and_of_none_is_zero(tree, expected):
    finite, norm = _finite.finite_and_norm(tree)
    assert (bool(finite), float(norm)) == (True, expected)
