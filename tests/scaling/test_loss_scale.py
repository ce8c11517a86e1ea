import copy
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bitwise_equal, reference_rule
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

import jmp_scale
from jmp_scale import DynamicLossScale, NoOpLossScale, StaticLossScale, get_loss_scale

pytestmark = pytest.mark.strict_promotion

EVERY_KIND = [NoOpLossScale(), StaticLossScale(8.0), DynamicLossScale(8.0)]


def trajectory(loss_scale, finite, loss_finite=None):
    """[(S, counter)] after each step, all steps in one compiled scan."""

    def step(loss_scale, flags):
        loss_scale = loss_scale.adjust(flags[0], loss_finite=flags[1])
        return loss_scale, (loss_scale.loss_scale, loss_scale.counter)

    loss_finite = [True] * len(finite) if loss_finite is None else loss_finite
    flags = jnp.array([finite, loss_finite]).T
    _, (s, counter) = jax.lax.scan(step, loss_scale, flags)
    return list(zip(s.tolist(), counter.tolist(), strict=True))


@pytest.mark.parametrize(
    ("loss_scale", "expected"),
    [
        (DynamicLossScale(8.0, 10, period=3), [16, 16, 16, 32]),
        (DynamicLossScale(4.0, period=1, max_loss_scale=10.0), [8, 8, 8]),
        (
            DynamicLossScale(4.0, period=1, max_loss_scale=10.0, at_max="clamp"),
            [8, 10, 10],
        ),
    ],
)
def test_s_after_each_finite_step(loss_scale, expected):
    history = trajectory(loss_scale, [True] * len(expected))
    assert [s for s, _ in history] == expected


@pytest.mark.parametrize("end", [2.0**-126, 1.0, 2.0**126])
def test_many_overflows_end_at_the_floor_and_many_growths_at_the_cap(end):
    ends = {"min_loss_scale": min(end, 1.0), "max_loss_scale": max(end, 2.0**15)}
    loss_scale = DynamicLossScale(period=1, **ends)
    assert trajectory(loss_scale, [end > 1] * 300)[-1] == (end, 0)


def test_a_nan_that_was_restored_ends_at_the_floor():
    leaves, treedef = jax.tree.flatten(DynamicLossScale(8.0, min_loss_scale=0.5))
    restored = jax.tree.unflatten(treedef, [jnp.float32(jnp.nan), leaves[1]])
    for adjust in (jmp_scale.adjust, jax.jit(jmp_scale.adjust)):
        assert adjust(restored, False).loss_scale == 0.5


configurations = st.fixed_dictionaries(
    {
        "loss_scale": st.sampled_from([1.0, 8.0, 2.0**15, 100.0]),
        "period": st.integers(1, 6),
        "factor": st.sampled_from([2, 4.0, 1.5]),
        "min_loss_scale": st.sampled_from([0.0, 2.0**-14, 1.0]),
        "max_loss_scale": st.sampled_from([2.0**15, 2.0**24, 40000.0]),
        "backoff_factor": st.sampled_from([None, 0.5, 0.25, 0.75]),
        "growth_delay": st.integers(0, 2),
        "hysteresis": st.integers(1, 3),
        "hysteresis_reset": st.sampled_from(["growth", "finite", "finite_or_backoff"]),
        "at_max": st.sampled_from(["hold", "clamp"]),
    }
)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    configurations,
    st.lists(st.tuples(st.booleans(), st.booleans()), min_size=40, max_size=40),
)
def test_every_configuration_follows_the_rule_in_plain_python(configuration, flags):
    finite, loss_finite = [a or b for a, b in flags], [a or not b for a, b in flags]
    expected = reference_rule(finite, loss_finite=loss_finite, **configuration)
    actual = trajectory(DynamicLossScale(**configuration), finite, loss_finite)
    assert [c for _, c in actual] == [c for _, c, _ in expected]
    # Not powers of two: Python computes in f64, the loss scale in f32.
    np.testing.assert_allclose(
        [s for s, _ in actual], [s for s, _, _ in expected], rtol=1e-5
    )


def test_adjust_takes_any_boolean_scalar_and_no_other_flag():
    for flag in (True, False, np.True_, np.array(False), jnp.array(True)):
        adjusted = DynamicLossScale(8.0, period=1).adjust(flag)
        assert adjusted.loss_scale == (16 if flag else 4)
    for flag in (jnp.ones(2, bool), jnp.ones((1,), bool), 1, 1.0, jnp.float32(0)):
        for name in ("grads_finite", "loss_finite"):
            flags = {"grads_finite": True} | {name: flag}
            message = f"expected {name} to be a boolean of the"
            with pytest.raises(ValueError, match=message):
                DynamicLossScale().adjust(**flags)


def test_a_constant_loss_scale_adjusts_to_itself():
    for loss_scale in EVERY_KIND[:2]:
        assert loss_scale.adjust(False, loss_finite=False) is loss_scale


@pytest.mark.parametrize("kind", [StaticLossScale, DynamicLossScale])
def test_both_verbs_widen_to_float32_first_and_keep_complex(kind):
    s = kind(2.0**20)  # not of float16
    narrow = ["float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "float32"]
    for dtype in (*narrow, "complex64"):
        x = jnp.array([1.0, -3.0], dtype)
        expected = "complex64" if dtype == "complex64" else "float32"
        for verb, factor in ((s.scale, 2.0**20), (s.unscale, 2.0**-20)):
            assert verb(x).dtype == verb(np.asarray(x)).dtype == expected
            assert verb(x).tolist() == [factor, -3 * factor]


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_both_verbs_keep_double_precision(dtype):
    with jax.enable_x64(True):
        x = jnp.asarray(np.asarray([1 / 3, 1e-300]), dtype)
        for loss_scale in (StaticLossScale(2.0**15), DynamicLossScale(2.0**15)):
            assert_bitwise_equal(loss_scale.unscale(loss_scale.scale(x)), x)
        third = DynamicLossScale(3.0).unscale(x)
        np.testing.assert_allclose(third, np.asarray(x) / 3, rtol=1e-15)


def test_a_complex_leaf_keeps_its_imaginary_part_and_an_infinity_makes_no_nan():
    x = jax.lax.complex(jnp.array([1.0, jnp.inf]), jnp.array([-2.0, 0.0]))
    scaled = DynamicLossScale(8.0).scale(x)
    assert scaled.real.tolist() == [8, np.inf]
    assert scaled.imag.tolist() == [-16, 0]


@pytest.mark.parametrize("loss_scale", EVERY_KIND)
def test_leaves_that_are_not_inexact_pass_unchanged(loss_scale):
    leaves = [jnp.int32(3), 3, True, "name", jnp.tanh, jax.random.key(1)]
    leaves.append(np.zeros(2, jax.dtypes.float0))
    for verb in (loss_scale.scale, loss_scale.unscale):
        assert all(a is b for a, b in zip(verb(leaves), leaves, strict=True))
    assert loss_scale.scale(None) is loss_scale.unscale(None) is None


@pytest.mark.parametrize("s", [2.0**-126, 2.0**126])
def test_a_power_of_two_changes_no_bit(s):
    # All digits, and one exponent: nothing under- or overflows at the ends of S.
    x = jnp.asarray(np.random.default_rng(0).uniform(1, 2, 100_000), jnp.float32)
    loss_scale = DynamicLossScale(s, min_loss_scale=0, max_loss_scale=2.0**126)
    assert_bitwise_equal(jax.jit(loss_scale.unscale)(loss_scale.scale(x)), x)


def test_an_array_of_loss_scales_is_refused_outside_vmap():
    several = DynamicLossScale(jnp.array([8.0, 16.0]))
    message = r"^scale: .* scalar loss_scale, got one of shape \(2,\).*adjust one loss"
    with pytest.raises(ValueError, match=message):
        several.scale(jnp.float32(1.0))
    scaled = jax.vmap(jmp_scale.scale, in_axes=(0, None))(several, jnp.float32(1.0))
    assert scaled.tolist() == [8, 16]
    assert several.adjust(jnp.array([True, False])).loss_scale.tolist() == [8, 8]


FULL = DynamicLossScale(
    *(4.0, 3, 7, 4, 0.25),
    max_loss_scale=2.0**20,
    backoff_factor=0.125,
    growth_delay=1,
    hysteresis=3,
    hysteresis_reset="finite",
    at_max="clamp",
)


@pytest.mark.parametrize("made", [FULL, jmp_scale.SpikeGuard(5.0, 0.9, 20, 3)])
def test_every_field_survives(made):
    default = vars(type(made)())
    for name, value in vars(made).items():
        assert value != default[name] or name in jmp_scale.SpikeGuard._leaf_names
    mapped = jax.vmap(lambda x: x)(jax.tree.map(lambda x: x[None], made))
    for copied in (
        jax.tree.map(lambda x: x, made),
        jax.jit(lambda made: made)(made),
        pickle.loads(pickle.dumps(made)),
        copy.deepcopy(made),
        dataclasses.replace(made),
        jax.tree.map(lambda x: x[0], mapped),
    ):
        assert vars(copied) == vars(made)


@pytest.mark.parametrize(
    ("made", "names"),
    [
        (StaticLossScale(8.0), ""),
        (DynamicLossScale(), "loss_scale counter"),
        (FULL, "loss_scale counter hysteresis_left"),
        (
            jmp_scale.SpikeGuard(),
            "loss_mean loss_deviation loss_steps norm_mean norm_deviation norm_steps "
            "accepted in_a_row",
        ),
    ],
)
def test_leaves_are_named(made, names):
    leaves, _ = jax.tree_util.tree_flatten_with_path(made)
    assert [path[0].name for path, _ in leaves] == names.split()


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (DynamicLossScale(), "DynamicLossScale()"),
        (
            DynamicLossScale(2).adjust(True),
            "DynamicLossScale(loss_scale=2.0, counter=1)",
        ),
        (DynamicLossScale(hysteresis=2), "DynamicLossScale(hysteresis=2)"),
        (StaticLossScale(3 * 2.0**40), "StaticLossScale(loss_scale=3298534883328.0)"),
        (
            jmp_scale.presets.pytorch(init_scale=2.0**20),
            "DynamicLossScale(loss_scale=2.0**20, min_loss_scale=2.0**-126, "
            "max_loss_scale=2.0**126, backoff_factor=0.5)",
        ),
        (NoOpLossScale(), "NoOpLossScale()"),
        (jmp_scale.SpikeGuard(warmup=9), "SpikeGuard(warmup=9)"),
    ],
)
def test_the_text_has_what_differs_from_the_defaults_and_makes_an_equal_one(made, text):
    assert repr(made) == text
    assert eval(text, {**vars(jmp_scale), **globals()}) == made


def test_what_is_not_one_known_number_is_shown_by_its_type():
    several, texts = DynamicLossScale(np.array([8.0, 4.0]), counter=1), []
    assert repr(several) == "DynamicLossScale(loss_scale=float32[2], counter=int32[2])"
    jax.vmap(lambda traced: texts.append(repr(traced)))(several)
    texts.append(repr(jax.eval_shape(DynamicLossScale)))
    assert texts == ["DynamicLossScale(loss_scale=float32[], counter=int32[])"] * 2


def test_any_placeholder_may_stand_for_a_leaf():
    treedef = jax.tree.structure(DynamicLossScale(8.0, period=3))
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    for placeholder in (None, object(), PartitionSpec("i"), shape, 0, "text", ()):
        loss_scale = jax.tree.unflatten(treedef, [placeholder, placeholder])
        assert loss_scale.loss_scale is loss_scale.counter is placeholder
        assert loss_scale.period == 3
    specs = DynamicLossScale(PartitionSpec(), PartitionSpec())
    assert (specs.loss_scale, specs.counter) == (PartitionSpec(), PartitionSpec())
    assert jax.tree.leaves(DynamicLossScale(None)) == []


FLOAT16 = (jnp.float16, np.float16, np.dtype("float16"))
WIDE = (jnp.bfloat16, jnp.dtype(jnp.bfloat16), np.float64, float)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("none", NoOpLossScale()),
        (DynamicLossScale(8.0), DynamicLossScale(8.0)),
        (" Dynamic ", DynamicLossScale()),
        ("dynamic: 2.**16", DynamicLossScale(2.0**16)),
        ("static:2 ** 10", StaticLossScale(1024.0)),
        ("2**-3", StaticLossScale(0.125)),
        (128, StaticLossScale(128.0)),
        (np.float16(8), StaticLossScale(8.0)),
        (jnp.float32(8), StaticLossScale(8.0)),
        *((name, DynamicLossScale()) for name in ("f16", "FP16", "half", *FLOAT16)),
        *((name, NoOpLossScale()) for name in ("bf16", "float32", "f64", *WIDE)),
    ],
)
def test_a_spec_gives_the_loss_scale_it_names(spec, expected):
    assert_bitwise_equal(get_loss_scale(spec), expected)


def test_only_half_looks_at_the_devices_and_that_of_a_tpu_needs_none(monkeypatch):
    half_dtype = "jmp_scale._scaling.loss_scale.half_dtype"
    monkeypatch.setattr(half_dtype, pytest.fail)
    assert get_loss_scale("dynamic") == DynamicLossScale()
    assert get_loss_scale("bf16") == NoOpLossScale()
    monkeypatch.setattr(half_dtype, lambda: jnp.bfloat16)
    assert get_loss_scale("half") == NoOpLossScale()


@pytest.mark.parametrize("spec", ["9**999999999", "10**999", "0**-1", "2**2**3"])
def test_a_power_that_is_no_number_is_an_unknown_loss_scale(spec):
    with pytest.raises(ValueError, match="unknown loss scale"):
        get_loss_scale(spec)
