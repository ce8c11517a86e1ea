"""What skipping may cost, as the compiler counts it: the same on every run and machine."""

import jax
import jax.numpy as jnp
import overhead
import pytest

PARAMS = {f"layer{i}": {"kernel": jnp.ones((64, 64)), "bias": jnp.ones(64)} for i in range(4)}
PARAM_BYTES = sum(leaf.nbytes for leaf in jax.tree.leaves(PARAMS))


@pytest.fixture(scope="module", params=["f32", "f16"])
def steps(request):
    """Figures of AdamW alone, unscaled and wrapped, with their (carry, step, batch)."""
    problem = overhead.optimizer_only(overhead.DTYPES[request.param], PARAMS)

    def compiled(peer):
        carry, step = overhead.build(peer, *problem[:2])
        return overhead.figures(overhead.compile_step(step, carry, problem[2])[0]), (step, carry, problem[2])

    return request.param, compiled("unscaled")[0], *compiled("with_loss_scale")


def test_the_step_reads_and_writes_little_more_than_the_unscaled_one(steps):
    name, unscaled, scaled, _ = steps
    assert scaled.bytes_accessed / unscaled.bytes_accessed <= {"f32": 1.16, "f16": 1.12}[name]


def test_temporaries_are_a_byte_per_parameter(steps):
    _, _, scaled, _ = steps
    assert scaled.temporaries / PARAM_BYTES <= 0.26


def test_only_scalars_of_the_state_are_copied(steps):
    _, _, scaled, _ = steps
    assert scaled.copied_leaves == 0


def test_five_steps_compile_once_and_move_nothing_to_or_from_the_host(steps):
    _, _, scaled, problem = steps
    assert scaled.transfers == 0
    assert overhead.compilations(*problem) == 1
