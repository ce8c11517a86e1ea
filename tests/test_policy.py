import types

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest

import jmp_scale

pytestmark = pytest.mark.strict_promotion

F32, F16, BF16 = jnp.float32, jnp.float16, jnp.bfloat16


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("f16", (F16, F16, F16)),
        ("c=f16", (F32, F16, F16)),
        ("p=f16,c=bf16", (F16, BF16, BF16)),
        ("params=f32,compute=float16,output=f32", (F32, F16, F32)),
        ("p=full, c=f16, o=full", (F32, F16, F32)),
        ("o=bf16", (F32, F32, BF16)),
        ("p=bf16", (BF16, BF16, BF16)),
        ("p=fp32,c=fp16,o=fp32", (F32, F16, F32)),
    ],
)
def test_get_policy_reads_it_and_what_the_policy_prints(spec, expected):
    policy = jmp_scale.get_policy(spec)
    assert (policy.param_dtype, policy.compute_dtype, policy.output_dtype) == expected
    assert jmp_scale.get_policy(str(policy)) == policy


@pytest.mark.parametrize("half", ["bfloat16", "bf16", BF16, jnp.dtype(BF16)])
def test_a_policy_of_dtypes_in_any_form_has_a_text(half):
    policy = jmp_scale.Policy("float32", half, np.dtype("float32"))
    assert str(policy) == "p=full,c=bf16,o=full"
    assert str(jmp_scale.Policy("f32", "f16", half)) == "p=full,c=f16,o=bf16"
    assert str(jmp_scale.Policy(F32, np.int8, float)) == "p=full,c=int8,o=f64"


@pytest.mark.parametrize(
    "spec", ["compute_float16", "", "c=", "c=f17", "f16,c=f16", "x=f16"]
)
def test_get_policy_refuses_an_unknown_dtype_or_key(spec):
    message = "key 'x' in 'x=f16'" if spec == "x=f16" else "(dtype|key)"
    with pytest.raises(ValueError, match=f"Unknown {message}"):
        jmp_scale.get_policy(spec)


def test_the_cast_verbs_cast_real_floating_point_arrays_only():
    real = [jnp.ones(2), np.ones(2, np.float32)]
    others = [jnp.arange(2), jnp.ones(2, jnp.complex64), jax.random.key(0)]
    others += [object(), None, 1.5, "f32"]
    policy = jmp_scale.get_policy("p=f32,c=f16,o=bf16")
    assert [x.dtype for x in policy.cast_to_compute(real)] == [F16, F16]
    for x in others:
        assert policy.cast_to_compute(x) is x


@pytest.mark.parametrize(
    ("platform", "half"), [("tpu", BF16), ("gpu", F16), ("cpu", F16), ("METAL", F16)]
)
def test_half_dtype_is_jmps_rule(monkeypatch, platform, half):
    device = types.SimpleNamespace(platform=platform)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert jmp_scale.half_dtype() == half == jmp.half_dtype()
    assert jmp_scale.cast_to_half(jnp.ones(2)).dtype == half
    assert jmp_scale.get_policy("half").compute_dtype == half
