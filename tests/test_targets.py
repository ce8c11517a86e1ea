"""The step as the TPU and NVIDIA compilers make it, on machines that are not there."""

import functools
import os

import _compiled
import _hlo
import _problems
import _targets
import _traffic
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jmp_scale
from jmp_scale import _finite, _mesh, _reductions, _scaling, _skip, _squares


def compiles_for(*names):
    """Parametrizes with targets, skipped where their compiler is not installed."""
    return pytest.mark.parametrize(
        "name",
        [
            pytest.param(
                name,
                marks=pytest.mark.skipif(
                    _targets.missing(name) is not None,
                    reason=f"{name}: {_targets.missing(name)}",
                ),
            )
            for name in names
        ],
    )


def leaf(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


# Large leaves and small ones of three shapes, a transformer's proportions.
PARAMS = {
    **{f"kernel{i}": leaf(2048, 1024) for i in range(8)},
    **{f"bias{i}": leaf(1024) for i in range(8)},
    **{f"gain{i}": leaf(256) for i in range(8)},
    **{f"small{i}": leaf(64, 64) for i in range(8)},
}


def compiled(name, peer, dtype="f32", optimizer="adamw", chips=1):
    grads = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, _problems.DTYPES[dtype]), PARAMS
    )
    loss_fn = _problems.given_gradients(_problems.DTYPES[dtype])
    carry, step = _problems.build(peer, loss_fn, PARAMS, optimizer, types_only=True)
    target = _targets.Target(name, chips)
    return _compiled.compile_step(step, carry, grads, target)[1]


figures = functools.cache(compiled)


def ratio(what, name, of=figures, **kwargs):
    """A figure of the wrapped step over that of the unscaled one."""
    scaled = getattr(of(name, "with_loss_scale", **kwargs), what)
    return scaled / getattr(figures(name, "unscaled", **kwargs), what)


# AdamW reads gradients, parameters and two moments, and writes the last three: 8/7 of
# the bytes with each gradient read once more, or 28/26 where gradients are float16.
BYTES = {
    ("h100", "f32"): 8 / 7 + 1e-3,
    ("h100", "f16"): 28 / 26 + 1e-3,
    # On-chip memory keeps most gradients between the check and the update.
    ("tpu-v5e", "f32"): 1.04,
    ("tpu-v5e", "f16"): 1.04,
}


@compiles_for("h100", "tpu-v5e")
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_adamw_reads_each_gradient_at_most_once_more(name, dtype):
    assert ratio("bytes_accessed", name, dtype=dtype) <= BYTES[name, dtype]


@compiles_for("h100", "tpu-v5e")
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_clipping_reads_the_gradients_once(name, dtype):
    """The flag falls out of the pass that the norm takes."""
    bytes_ratio = ratio("bytes_accessed", name, dtype=dtype, optimizer="clip+adamw")
    assert bytes_ratio <= {"h100": 1.001, "tpu-v5e": 1.01}[name]


@compiles_for("h100")
@pytest.mark.parametrize(
    ("optimizer", "limit"), [("adamw", 1.6), ("clip+adamw", 1.0), ("lion", 1.6)]
)
def test_a_gpu_launches_few_more_kernels(name, optimizer, limit):
    assert ratio("kernels", name, optimizer=optimizer) <= limit


@compiles_for("tpu-v5e")
@pytest.mark.parametrize(("dtype", "limit"), [("f32", 1.18), ("f16", 1.15)])
def test_a_tpu_takes_few_more_cycles(name, dtype, limit):
    assert 1 < ratio("cycles", name, dtype=dtype) <= limit


@compiles_for("h100")
def test_a_gpu_needs_several_leaves_in_one_reduction(name, switched):
    switched(_reductions, "GPU_GROUP", 1)
    assert ratio("kernels", name, of=compiled) > 1.6


@compiles_for("h100")
def test_a_gpu_needs_no_more_than_four_leaves_in_one_reduction(name, switched):
    switched(_reductions, "GPU_GROUP", 8)
    bytes_ratio = ratio("bytes_accessed", name, of=compiled, optimizer="clip+adamw")
    assert bytes_ratio > 1.001


@compiles_for("h100")
def test_clipping_needs_gradients_that_are_not_zeroed(name, switched):
    switched(_skip, "_is_plain_only", lambda closed: True)
    bytes_ratio = ratio("bytes_accessed", name, of=compiled, optimizer="clip+adamw")
    assert bytes_ratio > 1.1


@compiles_for("tpu-v5e")
@pytest.mark.parametrize(
    ("module", "constant", "value", "optimizer"),
    [
        (_reductions, "TPU_GROUP", 1, "adamw"),
        (_reductions, "TPU_PRODUCT_SIZE", 2**40, "adamw"),
        (_skip, "_is_plain_only", lambda closed: True, "clip+adamw"),
    ],
    ids=["groups", "products", "gradients that are not zeroed"],
)
def test_a_tpu_needs(name, module, constant, value, optimizer, switched):
    as_is = ratio("cycles", name, optimizer=optimizer)
    switched(module, constant, value)
    assert ratio("cycles", name, of=compiled, optimizer=optimizer) > as_is + 0.02


@compiles_for("h100", "tpu-v5e")
def test_the_barrier_for_cpus_would_cost_the_scalar_all_reduce(name, switched):
    for variant in ("_finite_on_gpu", "_finite_on_tpu"):
        switched(_reductions, variant, _reductions._finite_on_cpu)
    ((_, types),) = compiled(name, "with_loss_scale", chips=4).collectives
    assert types not in (("pred[]",), ("u32[]",))


def train_step(name, peer, dtype="f32"):
    """The one of `overhead.py`: 3 layers of width 256, 8 x 128 tokens."""
    loss_fn, params, batch = _problems.problems(dtype)["train"][1]
    carry, step = _problems.build(peer, loss_fn, params, types_only=True)
    return _compiled.compile_step(step, carry, batch, _targets.Target(name))[1]


train_figures = functools.cache(train_step)


@compiles_for("h100", "tpu-v5e")
@pytest.mark.parametrize("dtype", ["f32", pytest.param("f16", marks=pytest.mark.slow)])
def test_a_train_step_moves_and_launches_little_more(name, dtype):
    unscaled, scaled = (
        train_figures(name, peer, dtype) for peer in ("unscaled", "with_loss_scale")
    )
    # The gradients are 1.43 % of the bytes. With float16 on a TPU they stay in on-chip
    # memory until the flag is known, and XLA moves eight activations out of it (f16 of
    # 8 x 128 x 256), in every library. With half the examples it moves none.
    limit = {("tpu-v5e", "f32"): 1.001, ("tpu-v5e", "f16"): 1.075}.get(
        (name, dtype), 1.01
    )
    assert scaled.bytes_accessed / unscaled.bytes_accessed <= limit
    if name == "h100":
        assert scaled.kernels / unscaled.kernels <= 1.15
    assert scaled.cycles <= 1.18 * unscaled.cycles
    assert (scaled.conditionals, scaled.transfers) == (0, 0)


@compiles_for("h100")
def test_a_gpu_needs_quotients_to_read_partial_products_once(name, switched):
    unscaled = train_figures(name, "unscaled")
    switched(_scaling, "_over", _scaling._times_reciprocal)
    scaled = train_step(name, "with_loss_scale")
    assert scaled.bytes_accessed / unscaled.bytes_accessed > 1.015


@compiles_for("h100", "tpu-v5e", "tpu-v6e")
def test_nothing_is_copied_branched_or_sent_to_the_host(name):
    scaled = figures(name, "with_loss_scale")
    assert scaled.copied_arrays == 0
    assert scaled.conditionals == 0
    assert scaled.transfers == 0
    assert scaled.collectives == []


@compiles_for("tpu-v5e")
def test_apply_if_finite_copies_and_branches_on_a_tpu(name):
    """What this library avoids there is real."""
    peer = figures(name, "optax.apply_if_finite")
    assert peer.conditionals == 1
    assert ratio("bytes_accessed", name) < 1.3
    unscaled = figures(name, "unscaled").bytes_accessed
    assert peer.bytes_accessed / unscaled > 1.3


@compiles_for("h100", "tpu-v5e")
@pytest.mark.parametrize("chips", [4, 64, 256])  # 256 do not divide 64: whole arrays
def test_auto_mesh_axes_need_one_scalar_all_reduce_more(name, chips):
    scaled = figures(name, "with_loss_scale", chips=chips)
    flag = {"h100": "pred[]", "tpu-v5e": "u32[]"}[name]
    assert figures(name, "unscaled", chips=chips).collectives == []
    assert scaled.collectives == [("all-reduce", (flag,))]


def finite_hlo(name, place, **jit_arguments):
    leaves = [place(leaf(512, 256)) for _ in range(4)]
    compiled = jax.jit(jmp_scale.all_finite, **jit_arguments).lower(leaves).compile()
    return _hlo.parse(compiled.as_text())


@compiles_for("h100", "tpu-v5e")
def test_a_chip_alone_reduces_leaves_of_one_shape_together(name):
    mesh = _targets.Target(name).mesh
    on_mesh = NamedSharding(mesh, P())
    alone = SingleDeviceSharding(mesh.devices.flat[0])
    for sharding in (on_mesh, alone):
        module = finite_hlo(
            name,
            lambda x, s=sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        )
        # Four leaves of one megabyte on their own take 8 kernels on the GPU, 4 and the
        # joining on the TPU; together 2 and the joining.
        assert _traffic.kernels(module) <= {"h100": 4, "tpu-v5e": 12}[name]
        assert _traffic.conditionals(module) == 0


@compiles_for("h100", "tpu-v5e")
def test_shardings_that_only_jit_knows_give_the_scalar_all_reduce_too(name):
    sharding = NamedSharding(_targets.Target(name, 4).mesh, P("chips"))
    module = finite_hlo(name, lambda x: x, in_shardings=(sharding,))
    assert [kind for kind, _ in _traffic.collectives(module)] == ["all-reduce"]
    assert all(types in (("pred[]",), ("u32[]",)) for _, types in
               _traffic.collectives(module))  # fmt: skip


@compiles_for("h100", "tpu-v5e")
def test_a_step_exported_for_three_machines_is_the_one_compiled_for_each(name):
    params = {f"w{i}": leaf(512, 512) for i in range(4)}
    tx = jmp_scale.with_loss_scale(optax.adamw(1e-3), jmp_scale.DynamicLossScale())
    state = jax.eval_shape(tx.init, params)
    leaves, structure = jax.tree.flatten((params, state, params))

    def step(*leaves):
        return jax.tree.leaves(tx.update(*jax.tree.unflatten(structure, leaves)))

    platforms = ["cpu", "tpu", "cuda"]
    exported = jax.export.export(jax.jit(step), platforms=platforms)(*leaves)
    restored = jax.export.deserialize(exported.serialize())
    target = _targets.Target(name)
    direct, through = (
        _compiled.figures(jax.jit(f).lower(*target.placed(leaves)).compile(), target)
        for f in (step, restored.call)
    )
    assert direct == through


@pytest.mark.parametrize("platforms", [["cpu"], ["tpu"], ["cuda"], ["cpu", "tpu"]])
def test_an_exported_program_holds_the_reduction_of_each_machine(platforms):
    exported = jax.export.export(jax.jit(jmp_scale.all_finite), platforms=platforms)
    text = exported([leaf(512, 512)] * 4).mlir_module()
    # The CPU takes each leaf twice in one reduction, the TPU a matrix product.
    assert ("stablehlo.dot_general" in text) == ("tpu" in platforms)
    assert ("stablehlo.optimization_barrier" in text) == ("cpu" in platforms)


def test_a_program_exported_for_several_machines_runs_on_this_one():
    leaves = [np.ones((8, 8), np.float32), np.ones(3, np.float16)]
    exported = jax.export.export(
        jax.jit(jmp_scale.all_finite), platforms=["cpu", "tpu", "cuda"]
    )(leaves)
    restored = jax.export.deserialize(exported.serialize())
    assert restored.call(leaves)
    leaves[0][3, 4] = np.nan
    assert not restored.call(leaves)


@pytest.mark.parametrize(
    "shape", [(512, 512), (3, 40, 1100), (16, 48, 256), (300_000,)]
)
@pytest.mark.parametrize("variant", ["_finite_on_tpu", "_finite_on_gpu"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.complex64])
def test_the_other_machines_reductions_are_right(variant, shape, dtype):
    """Run here: the operations are the same, whatever the machine."""
    finite = jax.jit(getattr(_reductions, variant))
    good = np.ones(shape, dtype)
    assert finite(good, np.ones(7, np.float32), good)
    for bad in (np.nan, np.inf, -np.inf):
        for place in (0, good.size // 2 + 17, good.size - 1):
            array = good.copy()
            array.reshape(-1)[place] = bad
            assert not finite(good, np.ones(7, np.float32), array)


def test_targets_say_which_group_is_missing(monkeypatch):
    monkeypatch.setattr(_targets.importlib.util, "find_spec", lambda name: None)
    assert "--group cuda-compile" in _targets.missing("h100")
    assert "--group tpu-compile" in _targets.missing("tpu-v6e")


@compiles_for("tpu-v5e")
def test_nothing_waits_for_a_cloud_machine(name):
    assert _targets.Target(name, 4).mesh.size == 4
    assert os.environ["TPU_SKIP_MDS_QUERY"] == "1"


def guarded(name, inner, chips=1):
    """Figures of a step with a guard."""
    tx = jmp_scale.with_loss_scale(inner, guard=jmp_scale.SpikeGuard())

    def step(carry, grads):
        params, state = carry
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), jnp.float32(0)

    carry = PARAMS, jax.eval_shape(tx.init, PARAMS)
    return _compiled.compile_step(step, carry, PARAMS, _targets.Target(name, chips))[1]


@compiles_for("h100", "tpu-v5e")
@pytest.mark.parametrize("optimizer", ["adamw", "clip+adamw"])
def test_a_guard_reads_what_the_finite_check_reads(name, optimizer):
    with_guard, without = (
        guarded(name, _problems.OPTIMIZERS[optimizer]()),
        figures(name, "with_loss_scale", optimizer=optimizer),
    )
    assert with_guard.bytes_accessed / without.bytes_accessed <= 1.001
    if name == "h100":
        assert with_guard.kernels <= without.kernels + 2
    assert with_guard.conditionals == 0


@compiles_for("tpu-v5e")
def test_a_guard_needs_full_lanes_to_be_added_within_the_product(name, switched):
    switched(_squares, "TPU_LANES", 2**40)
    with_guard = guarded(name, _problems.OPTIMIZERS["clip+adamw"]())
    without = figures(name, "with_loss_scale", optimizer="clip+adamw")
    assert with_guard.bytes_accessed / without.bytes_accessed > 1.01


@compiles_for("h100", "tpu-v5e")
def test_a_guard_needs_one_all_reduce_of_two_numbers(name):
    ((kind, types),) = guarded(name, optax.adamw(1e-3), chips=4).collectives
    assert kind == "all-reduce"
    assert types in (("f32[2]",), ("f32[]", "f32[]"))


def all_reduce(name, fun, chips=4, **shapes):
    """Types of the only collective, for leaves that are sharded and ones that are not.

    Args:
      sharded: shapes of leaves whose first dimension is sharded.
      whole: shapes of leaves of which each chip has a copy.
    """
    mesh = _targets.Target(name, chips).mesh
    specs = {"sharded": P("chips"), "whole": P()}
    leaves = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, specs[k]))
        for k in sorted(shapes, reverse=True)
        for shape in shapes[k]
    ]
    text = jax.jit(fun).lower(leaves).compile().as_text()
    ((kind, types),) = _traffic.collectives(_hlo.parse(text))
    assert kind == "all-reduce"
    return types


@compiles_for("h100", "tpu-v5e")
@pytest.mark.parametrize("chips", [4, 64, 256])
@pytest.mark.parametrize(
    ("sharded", "whole"),
    [
        ([(512, 256)] * 4, [(512,)] * 2),
        # Whole arrays that take more memory than some that are sharded.
        ([(512, 256)] * 4 + [(512,)] * 2, [(257, 31)] * 3),
        ([(512,)] * 2, [(1001, 333)]),
    ],
    ids=["small whole arrays", "larger ones that cannot be sharded", "the largest"],
)
def test_replicated_leaves_leave_the_all_reduce_a_scalar(name, chips, sharded, whole):
    flag, sums = (
        all_reduce(name, fun, chips, sharded=sharded, whole=whole)
        for fun in (jmp_scale.all_finite, _finite.finite_and_norm)
    )
    assert flag in (("pred[]",), ("u32[]",))
    assert sums in (("f32[2]",), ("f32[]", "f32[]"))


@compiles_for("h100", "tpu-v5e")
def test_whole_leaves_between_sharded_ones_cost_a_flag_for_each_shape(name):
    """Four devices could share them, but the user's shardings do not."""
    sharded = [(512, 256)] * 8 + [(512,)] * 8
    types = all_reduce(name, jmp_scale.all_finite, sharded=sharded, whole=[(1024,)] * 8)
    assert types in (("pred[2]",), ("u32[]",) * 2)


@compiles_for("h100", "tpu-v5e")
def test_the_all_reduce_needs_to_know_the_number_of_devices(name, switched):
    switched(_mesh, "no_dimension_divides", lambda shape: False)
    sharded = [(512, 256)] * 4 + [(512,)] * 2
    types = all_reduce(
        name, jmp_scale.all_finite, sharded=sharded, whole=[(257, 31)] * 3
    )
    assert types not in (("pred[]",), ("u32[]",))
