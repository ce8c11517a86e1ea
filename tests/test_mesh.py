"""One answer for all devices, and what it costs in collectives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    EXPLICIT,
    EXPLICIT_TWO,
    ONE_AXIS,
    TWO_AXES,
    by_name,
    collectives,
    on_each_device,
    sharded,
    slow,
)
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jmp_scale
from jmp_scale import _mesh
from jmp_scale._scaling.finite import finite_and_norm

pytestmark = pytest.mark.strict_promotion


def shard_mapped(mesh, spec, **kwargs):
    return lambda fun: jax.jit(
        jax.shard_map(fun, mesh=mesh, in_specs=spec, out_specs=P(), **kwargs)
    )


OVER_I = {"mesh": TWO_AXES, "spec": P("i"), "axis_names": {"i"}}
# From a function of one device's share of f32[8] to one of f32[8].
MANUAL = {
    "pmap without axis name": jax.pmap,
    "pmap with axis name": lambda fun: jax.pmap(fun, axis_name="i"),
    "shard_map": shard_mapped(ONE_AXIS, P("i")),
    "shard_map unchecked": shard_mapped(ONE_AXIS, P("i"), check_vma=False),
    "shard_map 2-D unchecked": shard_mapped(TWO_AXES, P(("i", "j")), check_vma=False),
    "shard_map 2-D": shard_mapped(TWO_AXES, P(("i", "j"))),
    "partial shard_map": shard_mapped(**OVER_I),
    "partial shard_map unchecked": shard_mapped(**OVER_I, check_vma=False),
    "nested shard_map": lambda fun: shard_mapped(**OVER_I)(
        jax.shard_map(fun, in_specs=P("j"), out_specs=P(), axis_names={"j"})
    ),
    "shard_map of Explicit axes": lambda fun: (
        lambda x: shard_mapped(EXPLICIT, P("i"))(fun)(sharded(x, EXPLICIT, P("i")))
    ),
}


each_mode = pytest.mark.parametrize(
    "mode", by_name(("pmap without axis name", "partial shard_map"), MANUAL)
)


def bad_on(device):
    return np.where(np.arange(8) == device, np.inf, 1).astype(np.float32)


@each_mode
def test_one_bad_device_is_known_to_all_and_the_norm_is_the_largest(mode):
    def everything(x):
        mapped = jax.vmap(jmp_scale.all_finite)(jnp.stack([x, jnp.ones_like(x)]))[0]
        return jmp_scale.all_finite(x), mapped, finite_and_norm(x)

    answers = MANUAL[mode](everything)
    flag, mapped, (finite, norm) = answers(np.arange(8, dtype=np.float32))
    for answer in (flag, mapped, finite):
        assert on_each_device(answer) == [True] * 8
    # On partly manual meshes a device of the manual axis holds two numbers.
    expected = np.hypot(6, 7) if "partial" in mode else 7.0
    np.testing.assert_allclose(on_each_device(norm), expected, rtol=1e-6)
    for device in (0, 5, 7):
        flag, mapped, (finite, norm) = answers(bad_on(device))
        for answer in (flag, mapped, finite):
            assert on_each_device(answer) == [False] * 8
        assert np.unique(on_each_device(norm)).size == 1


@each_mode
def test_an_empty_axis_name_leaves_the_answer_local(mode):
    finite = MANUAL[mode](lambda x: jmp_scale.all_finite(x, ()))
    if "shard_map" in mode and "unchecked" not in mode:
        with pytest.raises(ValueError, match="out_specs"):
            finite(bad_on(5))
    else:
        assert set(on_each_device(finite(bad_on(5)))) == {True, False}


@pytest.mark.parametrize("check_vma", [False, slow(True)])
@pytest.mark.parametrize("axis_name", ["i", ["j", "i"]], ids=str)
def test_named_axes_are_the_ones_that_agree(axis_name, check_vma):
    local = lambda x: jmp_scale.all_finite(x, axis_name)[None]  # noqa: E731
    over_all = {"mesh": TWO_AXES, "in_specs": P(("i", "j")), "out_specs": P(("i", "j"))}
    finite = jax.shard_map(local, **over_all, check_vma=check_vma)(bad_on(5))
    bad_devices = {"i": {1, 3, 5, 7}, "j": {4, 5}}.get(str(axis_name), set(range(8)))
    assert {device for device in range(8) if not finite[device]} == bad_devices


def test_vmap_agrees_over_its_axis_only_by_name():
    named = jax.vmap(lambda x: jmp_scale.all_finite(x, "batch"), axis_name="batch")
    unnamed = jax.vmap(jmp_scale.all_finite, axis_name="batch")
    assert named(bad_on(5)).tolist() == [False] * 8
    assert unnamed(bad_on(5)).tolist() == [True] * 5 + [False] + [True] * 2


@pytest.mark.parametrize("mode", ["pmap without axis name", "shard_map unchecked"])
def test_manual_modes_reduce_one_scalar_boolean(mode):
    finite = MANUAL[mode](lambda x: jmp_scale.all_finite([x, x + 1, x + 2]))
    assert collectives(finite, bad_on(5)) == [("all-reduce", "pred[]")]


def test_a_flag_that_is_already_equal_is_not_reduced_again():
    finite = MANUAL["shard_map"](lambda x: jmp_scale.all_finite(lax.psum(x, "i")))
    assert collectives(finite, bad_on(5)) == [("all-reduce", "f32[1]{0}")]


def sharded_tree(mesh, spec, last=1.0):
    """Twelve leaves of f32[8, 16], the fifth of which ends with another entry."""
    tree = {f"leaf{i}": np.ones((8, 16), np.float32) for i in range(12)}
    tree["leaf4"][7, 15] = last
    return sharded(tree, mesh, spec) | {"count": sharded(np.int32(3), mesh, P())}


SHARDED = {
    "1-D": (ONE_AXIS, P("i")),
    "2-D": (TWO_AXES, P("i", "j")),
    "both": (TWO_AXES, P(None, ("j", "i"))),
    "Explicit": (EXPLICIT, P("i")),
    "2-D, Explicit": (EXPLICIT_TWO, P("i", "j")),
}


HOW = {"1-D": "prefix", "2-D": "tree", "both": "context mesh"}


@pytest.mark.parametrize("case", SHARDED)
def test_with_specs_or_explicit_axes_there_is_one_scalar_all_reduce(case):
    (mesh, spec), how = SHARDED[case], HOW.get(case, "by type")
    clean, dirty = sharded_tree(mesh, spec), sharded_tree(mesh, spec, np.nan)
    specs = jax.tree.map(lambda x: x.sharding.spec, clean) if how == "tree" else spec

    @jax.jit
    def finite(tree):
        if how == "by type":
            return jmp_scale.all_finite(tree)
        if how != "tree":
            tree = {k: v for k, v in tree.items() if k != "count"}
        given = None if how == "context mesh" else mesh
        return jmp_scale.all_finite(tree, specs=specs, mesh=given)

    with jax.set_mesh(mesh):
        assert collectives(finite, clean) == [("all-reduce", "pred[]")]
        assert on_each_device(finite(clean)) == [True] * 8
        assert on_each_device(finite(dirty)) == [False] * 8


def test_axes_are_joined_in_the_order_of_the_mesh():
    # A set's order differs between processes, and each host must build one program.
    names = ("i", "model", "k", "data", "expert")
    mesh = jax.make_mesh((2, 2, 2, 1, 1), names, (AxisType.Explicit,) * 5)
    spec = P(("expert", "model"), ("data", "k", "i"))
    seen = []

    def joined(shards, axes):
        seen.append(axes)
        return lax.psum(shards[0].sum(), axes)

    with jax.set_mesh(mesh):
        x = sharded(jnp.ones((8, 8)), mesh, spec)
        _mesh.on_shards(joined, [x], _mesh.sharding_specs([x]))
    assert set(seen) == {names}


def test_explicit_axes_are_found_eagerly_in_vmap_and_beside_manual_axes():
    on_j = EXPLICIT_TWO, P(None, "j")
    clean, dirty = sharded_tree(*on_j), sharded_tree(*on_j, np.inf)
    partial = shard_mapped(EXPLICIT_TWO, P(), axis_names={"i"})(jmp_scale.all_finite)
    for finite in (jmp_scale.all_finite, partial):
        assert finite(clean)
        assert not finite(dirty)
    by_row = jax.vmap(jmp_scale.all_finite)(dirty["leaf4"])
    assert by_row.tolist() == [True] * 7 + [False]


@pytest.mark.parametrize("axis_name", [None, (), "batch"])
def test_specs_are_joined_whatever_the_axis_name(axis_name):
    x = sharded(bad_on(5), ONE_AXIS, P("i"))

    @jax.jit
    def finite(x):
        agreed = jax.vmap(
            lambda x: jmp_scale.all_finite(x, axis_name, specs=P("i"), mesh=ONE_AXIS),
            axis_name="batch",
        )
        return agreed(jnp.stack([x, jnp.ones_like(x)]))

    assert finite(x).tolist() == [False, axis_name != "batch"]


THREE = jax.make_mesh((3,), ("k",), (AxisType.Auto,), devices=jax.devices()[:3])


@pytest.mark.parametrize(
    ("specs", "mesh"),
    [({"a": P("i")}, None), (P("k"), THREE), ({"b": P("i")}, ONE_AXIS)],
)
def test_specs_that_do_not_fit_are_an_error(specs, mesh):
    with pytest.raises(ValueError, match=r"."):
        jmp_scale.all_finite({"a": jnp.ones(8)}, specs=specs, mesh=mesh)


WHOLE_NORM = SHARDED | {
    "Explicit, one of two": (EXPLICIT_TWO, P("j")),
    "Explicit, both": (EXPLICIT_TWO, P(None, ("j", "i"))),
    "Explicit, whole": (EXPLICIT_TWO, P()),
}


@pytest.mark.parametrize("case", by_name(("1-D", "Explicit, both"), WHOLE_NORM))
def test_the_norm_of_sharded_gradients_is_that_of_the_whole_arrays(case):
    mesh, spec = WHOLE_NORM[case]
    tree = sharded_tree(mesh, spec) | {"count": sharded(np.float32(2), mesh, P())}
    finite, norm = jax.jit(finite_and_norm)(tree)
    assert on_each_device(finite) == [True] * 8
    expected = np.sqrt(12 * 8 * 16 + 4)
    np.testing.assert_allclose(on_each_device(norm), expected, rtol=1e-6)


def test_explicit_mode_joins_flag_and_norm_in_one_all_reduce():
    found = collectives(jax.jit(finite_and_norm), sharded_tree(EXPLICIT, P("i")))
    assert found == [("all-reduce", "f32[2]{0}")]
