"""Sums over devices against float64, and what each device holds of them."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    EXPLICIT,
    EXPLICIT_TWO,
    ONE_AXIS,
    TWO_AXES,
    assert_bitwise_equal,
    by_name,
    on_each_device,
    sharded,
    slow,
    varying,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_scale

# Errors of the norm of normal gradients: two roundings, or that of each device alone.
WHOLE = {"bfloat16": 2.6e-3, "float16": 3.3e-4, "float32": 2e-7}
SHARE = {"bfloat16": 1.9e-3, "float16": 2.4e-4, "float32": 2e-7}
HALF = ["bfloat16", "float16"]
WHOLE_SPEC = P()


def normal(*shape):
    """Gradients of each of eight devices, f32[8, *shape]."""
    return np.random.RandomState(0).normal(size=(8, *shape)).astype(np.float32)


def error(got, own):
    """Of the norm, in units in which no square overflows."""
    unit = max(np.abs(own).max(initial=0), 1e-38)
    exact = own.astype(np.float64).sum(0) / unit
    got = np.asarray(got).astype(np.float64) / unit
    return np.linalg.norm(got - exact) / np.linalg.norm(exact)


def in_shard_map(use, own, mesh=ONE_AXIS, out_specs=WHOLE_SPEC, check_vma=True):
    """`use` of each device's gradients, of which there are eight."""
    local = lambda tree: use(jax.tree.map(lambda x: x[0], tree))  # noqa: E731
    specs = {"in_specs": P(mesh.axis_names), "out_specs": out_specs}
    mapped = jax.shard_map(local, mesh=mesh, **specs, check_vma=check_vma)
    return jax.jit(mapped)(own)


def on_explicit_axes(use, own, mesh=EXPLICIT):
    """Of gradients that are unreduced over all axes."""
    parts = jax.shard_map(
        lambda tree: jax.tree.map(lambda x: x[0], tree),
        in_specs=P(mesh.axis_names),
        out_specs=P(unreduced=set(mesh.axis_names)),
        check_vma=False,
    )
    with jax.set_mesh(mesh):
        placed = sharded(own, mesh, P(mesh.axis_names))
        return jax.jit(lambda own: use(parts(own)))(placed)


UNCHECKED = functools.partial(in_shard_map, check_vma=False)
WAYS = {
    "shard_map": in_shard_map,
    "shard_map unchecked": UNCHECKED,
    "two axes": functools.partial(in_shard_map, mesh=TWO_AXES),
    "Explicit": on_explicit_axes,
    "two axes unchecked": functools.partial(UNCHECKED, mesh=TWO_AXES),
    "pmap": lambda use, own: jax.pmap(use)(own),
    "two Explicit axes": functools.partial(on_explicit_axes, mesh=EXPLICIT_TWO),
}
each_way = pytest.mark.parametrize("way", by_name(["two Explicit axes"], WAYS))
KINDS = {
    "even": (normal(16, 1024), WHOLE),
    "odd": (normal(1003, 17), WHOLE),
    "scalar": (normal(), 3e-7),
    "small": (normal(5), 3e-7),
    "empty": (normal(0, 4), 0),
    "integers": (np.full((8, 64, 256), 2**24 + 1, np.int32), 0),
    "bfloat16": (normal(64, 256).astype(jnp.bfloat16), 5e-3),
    "small bfloat16": (normal(3).astype(jnp.bfloat16), 4e-3),
    "float16": (normal(64, 256).astype(np.float16), 4e-3),
    "float8": (np.full((8, 3), 0.25, jnp.float8_e5m2), 0),
    "complex": (normal(64, 256) * np.complex64(1 + 2j), 3e-7),
    "ones": (np.ones((8, 16, 1024), np.float32), 0),
}
# Row, column: device and value of an entry of another array.
BAD = {(0, 1): (5, np.nan), (7, 7): (0, np.inf), (15, 9): (2, np.inf)}


def on_wires(grads, wires=tuple(WHOLE), **kwargs):
    """The sums by wire; one program of all compiles faster than one of each."""
    return {w: jmp_scale.sum_gradients(grads, wire=w, **kwargs) for w in wires}


def held_by_each(total):
    """Of each device the entries that it holds."""
    return np.reshape(on_each_device(total), (8, -1))


def bad():
    own = normal(16, 1024)
    for (row, column), (device, value) in BAD.items():
        own[device, row, column] = value
    own[3, 7, 7] = -np.inf
    return own


@functools.cache
def summed(way):
    """Sums of all kinds by wire, means, and whether the sums of `bad` are finite."""
    own = {kind: grads for kind, (grads, _) in KINDS.items()} | {"bad": bad()}
    if way == "Explicit" and jax.__version_info__ < (0, 9):
        del own["scalar"]  # jax 0.8 does not know that a scalar is unreduced

    def use(own):
        few = {kind: own[kind] for kind in ("even", "odd", "ones", "bad")}
        sums = on_wires(few, ["float16", "float32"])
        sums["bfloat16"], _ = jmp_scale.sum_gradients((own, "text"))
        some = {kind: own[kind] for kind in ("even", "small", "integers")}
        mean = jmp_scale.sum_gradients(some, mean=True)
        return sums, mean, [jmp_scale.all_finite(s["bad"]) for s in sums.values()]

    return WAYS[way](use, own)


@each_way
def test_a_sum_is_off_by_two_roundings_and_equal_on_all_devices(way):
    for wire, sums in summed(way)[0].items():
        for kind in sums.keys() - {"bad"}:
            own, limit = KINDS[kind]
            limit = limit[wire] if limit is WHOLE else limit
            assert sums[kind].dtype == own.dtype
            held = held_by_each(sums[kind])
            exact = own.astype(np.complex128).sum(0).reshape(-1)
            assert np.linalg.norm(held[0] - exact) <= limit * np.linalg.norm(exact)
            assert len({row.tobytes() for row in held}) == 1


@each_way
def test_a_mean_is_the_sum_over_the_number_of_devices(way):
    sums, means, _ = summed(way)
    for kind, mean in means.items():
        count = 1 if kind == "integers" else 8
        assert_bitwise_equal(mean * count, sums["bfloat16"][kind])


@each_way
def test_what_is_not_finite_stays_so_on_every_device(way):
    sums, _, finite = summed(way)
    for wire, flag in zip(sums, finite, strict=True):
        total = held_by_each(sums[wire]["bad"])[0].reshape(16, 1024)
        assert on_each_device(flag) == [False] * 8
        assert np.argwhere(~np.isfinite(total)).tolist() == sorted(map(list, BAD))
        assert total[15, 9] == np.inf
        others = np.isfinite(total)
        own = np.where(others, bad(), 0)
        assert error(np.where(others, total, 0), own) < WHOLE[wire]


def test_what_is_not_an_array_passes_and_so_does_the_gradient_of_an_integer():
    others, passed = [None, np.zeros(2, jax.dtypes.float0), jnp.tanh], []

    def use(g):
        total, *rest = jmp_scale.sum_gradients([g, *others])
        passed.extend(rest)
        return total

    in_shard_map(use, normal(2))
    assert all(a is b for a, b in zip(passed, others, strict=True))


@each_way
@pytest.mark.parametrize("mean", [False, True])
def test_the_largest_of_float8s_next_values_is_taken(way, mean):
    history = np.abs(normal(16))
    history[3, -1] = np.nan
    own = {"_overwrite_with_gradient": {"history": history}, "params": history}
    add = functools.partial(jmp_scale.sum_gradients, mean=mean, wire="float32")
    sums = WAYS[way](add, own)
    held = held_by_each(sums["_overwrite_with_gradient"]["history"])
    assert held.tolist() == [[*history[:, :-1].max(0), np.inf]] * 8
    total = history.sum(0) / (8 if mean else 1)
    np.testing.assert_allclose(held_by_each(sums["params"])[0], total, 1e-6)


def test_each_device_gets_its_share_of_next_values_that_are_split():
    own = {"_overwrite_with_gradient": normal(16, 3)}
    like = {"_overwrite_with_gradient": P("i")}
    add = functools.partial(jmp_scale.sum_gradients, like=like)
    for run in (in_shard_map, UNCHECKED):
        total = run(add, own, out_specs=P("i"))["_overwrite_with_gradient"]
        assert_bitwise_equal(np.asarray(total), own["_overwrite_with_gradient"].max(0))


SPLIT = {
    ONE_AXIS: [P("i"), P(None, "i")],
    TWO_AXES: [P("i"), P(None, "i"), P("j"), P(("i", "j")), P(None, ("j", "i"))],
}


@pytest.mark.parametrize("check_vma", [True, slow(False)])
@pytest.mark.parametrize("mesh", SPLIT, ids=str)
def test_what_is_split_comes_back_so_split(mesh, check_vma):
    own = {"w": normal(16, 1024), "b": normal(16, 8)}
    specs = SPLIT[mesh]

    def add(own):
        return [on_wires(own, HALF, like={"w": spec, "b": spec}) for spec in specs]

    sums = in_shard_map(add, own, mesh, specs, check_vma)
    for spec, wires in zip(specs, sums, strict=True):
        # Over two axes of which one splits it is gathered over the other.
        is_gathered = mesh is TWO_AXES and spec[-1] in ("i", "j")
        for wire, total in wires.items():
            limits = WHOLE if is_gathered else SHARE
            assert error(total["w"], own["w"]) < limits[wire]
            assert error(total["b"], own["b"]) < 2e-7
            assert total["w"].sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)


def test_parameters_in_a_map_say_by_their_shape_how_they_are_split():
    own, params = normal(16, 1024), np.zeros((16, 1024), np.float32)
    specs = [P("i"), P("j"), P(("i", "j")), P()]

    def add(g, likes):
        return [jmp_scale.sum_gradients(g[0], ("i", "j"), like=x) for x in likes]

    both = {"in_specs": (P(("i", "j")), specs), "out_specs": specs}
    mapped = jax.shard_map(add, mesh=TWO_AXES, **both, check_vma=False)
    sums = jax.jit(mapped)(own, [params] * len(specs))
    for total, spec in zip(sums, specs, strict=True):
        assert error(total, own) < WHOLE["bfloat16"]
        assert total.sharding.is_equivalent_to(NamedSharding(TWO_AXES, spec), 2)


def test_on_explicit_axes_sums_have_the_type_of_the_parameters():
    own, bias = normal(16, 1024), jnp.ones(3)
    both = [P(("i", "j")), P(None, ("j", "i")), P("i", "j"), P("j", "i")]
    specs = [P("i"), P(None, "j"), P(), *both]
    params = [sharded(jnp.zeros((16, 1024)), EXPLICIT_TWO, spec) for spec in specs]

    def use(grads):
        sums = []
        for spec, w in zip(specs, params, strict=True):
            for like in (w, spec, w.sharding):
                total = jmp_scale.sum_gradients(grads, like=like)
                assert jax.typeof(total) == jax.typeof(w)
            sums.append(total)
        # What is not unreduced is a sum already.
        assert jmp_scale.sum_gradients({"w": grads, "b": bias})["b"] is bias
        return sums

    for total in on_explicit_axes(use, own, EXPLICIT_TWO):
        assert error(total, own) < WHOLE["bfloat16"]


def test_of_a_weight_that_is_split_already_parts_are_added_up():
    own = normal(16, 1024)
    likes = [P(None, "j"), P(None, ("j", "i")), P("i", "j")]

    @jax.jit
    def use(own):
        parts = jax.shard_map(
            lambda x: x.sum(0),
            in_specs=P("i", None, "j"),
            out_specs=P(None, "j", unreduced={"i"}),
            check_vma=False,
        )(own)
        return [jmp_scale.sum_gradients(parts, like=like) for like in likes]

    with jax.set_mesh(EXPLICIT_TWO):
        sums = use(sharded(own, EXPLICIT_TWO, P("i", None, "j")))
    for total, like in zip(sums, likes, strict=True):
        assert error(total, own) < WHOLE["bfloat16"]
        assert total.sharding.is_equivalent_to(NamedSharding(EXPLICIT_TWO, like), 2)


@pytest.mark.parametrize("like", [P("i"), slow((P(),))], ids=str)
def test_float16_is_as_exact_whatever_the_magnitude(like):
    normals = normal(16, 1024)
    normals[:, 0] *= np.float32(2**-10)  # are still normal numbers on the wire
    sizes = np.float32([1e-30, 1e-12, 1.0, 6e4, 1e30, 1e36])
    given = [normals * size for size in sizes]
    kwargs = {"wire": "float16", "like": [like] * len(given)}
    add = functools.partial(jmp_scale.sum_gradients, **kwargs)
    for own, total in zip(given, in_shard_map(add, given, out_specs=like), strict=True):
        assert error(total, own) < WHOLE["float16"]
        assert error(total[0], own[:, 0]) < WHOLE["float16"]


def test_the_error_does_not_grow_with_the_devices():
    own = np.random.RandomState(0).normal(size=(64, 64, 1024)).astype(np.float32)
    mapped = jax.vmap(lambda g: on_wires(g, HALF, axis_name="i"), axis_name="i")
    # A bfloat16 all-reduce over 64 devices is off by 1e-2.
    for wire, total in jax.jit(mapped)(own).items():
        assert error(total[0], own) < WHOLE[wire]


def text_of(wire, like=None, shape=(16, 1024)):
    add = functools.partial(jmp_scale.sum_gradients, wire=wire, like=like)
    program = jax.jit(functools.partial(UNCHECKED, add, out_specs=like or P()))
    return program.lower(np.ones((8, *shape), np.float32)).as_text()


def test_small_leaves_and_those_of_float32_wires_are_one_all_reduce():
    for text in (text_of("bfloat16", shape=(16, 511)), text_of("float32")):
        assert "all_to_all" not in text
        assert text.count("stablehlo.all_reduce") == 1
    text = text_of("bfloat16", P("i"))
    assert "all_gather" not in text
    assert "all_reduce" not in text


PARAMS = {"layer": [np.zeros((16, 1024), np.float32)]}
TREE = {"layer": [normal(16, 1024)]}
LEAF = r"\['layer'\]\[0\]"


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"wire": "int8"}, ValueError, "expected wire to be 'bfloat16', .*'int8'"),
        ({"wire": jnp.float8_e5m2}, ValueError, "expected wire to be"),
        ({"axis_name": {"i"}}, TypeError, "expected axis_name to be the name"),
        ({"axis_name": "data"}, ValueError, f"of \\('i',\\), got {LEAF} .*'data'"),
        ({"like": [P()]}, ValueError, "expected like to have the structure of grads"),
        ({"like": {"layer": ["i"]}}, TypeError, f"for {LEAF}, got 'i'"),
        *(
            ({"like": {"layer": [like]}}, ValueError, f"like to be split.*{LEAF}")
            for like in (*map(jnp.ones, [(4, 1024), (2, 128), 2]), P("i", "i"))
        ),
    ],
)
def test_wrong_arguments_are_errors_that_name_the_leaf(kwargs, error, message):
    with pytest.raises(error, match=f"^sum_gradients: .*{message}"):
        in_shard_map(lambda g: jmp_scale.sum_gradients(g, **kwargs), TREE)


def test_a_spec_that_does_not_divide_a_leaf_is_an_error_that_names_it():
    uneven = {"layer": [normal(12, 1024)]}
    like = {"layer": [P("i")]}
    message = rf"split dimension 0 into 8 equal parts, got {LEAF} of shape \(12, 1024\)"
    for run in (in_shard_map, on_explicit_axes):
        with pytest.raises(ValueError, match=message):
            run(lambda g: jmp_scale.sum_gradients(g, like=like), uneven)


def test_what_two_axes_split_is_added_up_over_one_after_the_other():
    own = normal(16, 1024)

    def add(x):
        with pytest.raises(ValueError, match="add up over one axis after the other"):
            jmp_scale.sum_gradients(x, like=P("i", "j"))
        x = jmp_scale.sum_gradients(x, "i", like=P("i"))
        return jmp_scale.sum_gradients(x, "j", like=P(None, "j"))

    total = in_shard_map(add, own, TWO_AXES, P("i", "j"), check_vma=False)
    assert error(total, own) < WHOLE["bfloat16"]


@pytest.mark.skipif(not hasattr(jax.sharding, "UnreducedKind"), reason="since jax 0.12")
@pytest.mark.parametrize("kind", ["max", "min"])
def test_parts_of_a_maximum_are_no_parts_of_a_sum(kind):
    kind = getattr(jax.sharding.UnreducedKind, kind)
    spec = P(unreduced={"i"}, unreduced_kind=kind)
    parts = jax.ShapeDtypeStruct(
        (8, 8), jnp.float32, sharding=NamedSharding(EXPLICIT, spec)
    )
    with jax.set_mesh(EXPLICIT), pytest.raises(ValueError, match=f"by {kind.name}"):
        jax.eval_shape(jmp_scale.sum_gradients, parts)


@pytest.mark.parametrize("axis_name", [None, "i"])
def test_gradients_that_jax_has_added_up_are_refused_with_the_cure(axis_name):
    def loss(params, x):
        return jnp.sum(params["layer"][0] * x)

    def local(x, vary):
        params = varying(PARAMS, ("i",)) if vary else PARAMS
        return jmp_scale.sum_gradients(jax.grad(loss)(params, x), axis_name)

    x = TREE["layer"][0]
    total = in_shard_map(lambda x: local(x, vary=True), x)
    assert error(total["layer"][0], x) < WHOLE["bfloat16"]
    message = f"each device's own gradients over \\('i',\\), got {LEAF} which JAX has"
    with pytest.raises(ValueError, match=f"{message} added up already; .*pcast"):
        in_shard_map(lambda x: local(x, vary=False), x)


@pytest.mark.parametrize("kwargs", [{}, {"axis_name": "i"}, {"mean": True}])
def test_gradients_of_auto_axes_are_refused(kwargs):
    message = f"own gradients .*{LEAF}.*take gradients in a"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda g: jmp_scale.sum_gradients(g, **kwargs), PARAMS)


def test_a_map_over_some_axes_is_refused_where_others_may_split():
    own = normal(16, 1024).reshape(4, 2, 16, 1024)[:, 0]
    for mesh, spec, wire, refused in (
        (TWO_AXES, P("i"), "bfloat16", True),
        (TWO_AXES, P("i"), "float32", False),
        (EXPLICIT_TWO, P("i"), "bfloat16", False),
        (EXPLICIT_TWO, P("i", None, "j"), "bfloat16", True),
    ):
        mapped = jax.shard_map(
            lambda x: jmp_scale.sum_gradients(x[0], "i", wire=wire),  # noqa: B023
            mesh=mesh,
            in_specs=P("i"),
            out_specs=P(),
            axis_names={"i"},
            check_vma=False,
        )
        raises = pytest.raises(ValueError, match=r"a map over all .*'j'.*g\[None\]")
        with jax.set_mesh(mesh), raises if refused else contextlib.nullcontext():
            total = jax.jit(mapped)(sharded(own, mesh, spec))
            assert error(total, own) < WHOLE["bfloat16"]
