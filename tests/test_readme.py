"""What the README says runs, and stands where a newcomer looks for it."""

import pathlib
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint.experimental.v1 as ocp
import pytest
from flax import nnx

import jmp_scale

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
NAMED_BLOCK = r"<!-- block: ([\w-]+) -->\n```\w+\n(.*?)```"
BLOCKS = dict(re.findall(NAMED_BLOCK, README, re.DOTALL))


def test_the_quick_start_is_two_command_lines():
    blocks = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)[:2]
    assert blocks == [BLOCKS["main"], BLOCKS["tests"]]
    assert [block.strip().count("\n") for block in blocks] == [0, 0]
    assert blocks[0].strip().endswith("python examples/train_digits.py")
    assert blocks[1].strip().endswith("pytest")


def test_the_readme_installs_from_a_clone_since_no_index_has_the_package():
    assert not re.search(r"pip install \S*jmp.scale", README)


def test_the_train_step_stands_within_forty_lines():
    assert "apply_updates" in "\n".join(README.splitlines()[:40])


def test_the_python_of_the_readme_trains_a_float16_model():
    def model(params, x):
        return x @ params["w"]

    namespace = {"model": model}
    for name in ("train-step", "loss"):
        exec(BLOCKS[name], namespace)
    x = jax.random.normal(jax.random.key(0), (64, 4))
    batch = {"x": x, "y": x @ jnp.full((4, 1), 0.1)}
    params = {"w": jnp.zeros((4, 1))}
    opt_state = namespace["tx"].init(params)
    losses = []
    for scale in (1.0, 1e6, 1.0, 1.0):  # inputs of 1e6 overflow in float16
        params, opt_state, loss = namespace["train_step"](
            params, opt_state, batch | {"x": x * scale}
        )
        losses.append(float(loss))
    assert namespace["train_step"]._cache_size() == 1
    assert losses[-1] < losses[0]
    assert opt_state.skipped == 1
    assert isinstance(opt_state.loss_scale, jmp_scale.DynamicLossScale)


def test_the_linen_lines_of_the_readme_train_a_model():
    model = nn.BatchNorm(use_running_average=False)
    x = jax.random.normal(jax.random.key(0), (8, 2))
    variables = model.init(jax.random.key(1), x)

    def loss_fn(params):
        y, updates = model.apply(
            variables | {"params": params}, x, mutable="batch_stats"
        )
        return jnp.mean((y - 1) ** 2), updates

    namespace = {
        "jmp_scale": jmp_scale,
        "optax": optax,
        "model": model,
        "loss_fn": loss_fn,
        **variables,
    }
    exec(BLOCKS["linen"], namespace)
    state = namespace["state"]
    assert state.step == 1
    assert (state.batch_stats["mean"] != variables["batch_stats"]["mean"]).all()


def test_the_nnx_lines_of_the_readme_train_a_model():
    def loss_fn(model, batch):
        return jnp.mean((model(batch) - 1) ** 2)

    namespace = {
        "jmp_scale": jmp_scale,
        "optax": optax,
        "loss_fn": loss_fn,
        "batch": jnp.ones((4, 2)),
    }
    exec(
        BLOCKS["nnx"],
        namespace | {"model": nnx.Linear(2, 1, rngs=nnx.Rngs(0))},
        run := {},
    )
    assert run["optimizer"].step[...] == 1


def test_the_checkpoint_lines_of_the_readme_restore_a_state_from_before_loss_scaling(
    tmp_path,
):
    params = {"w": jnp.arange(3.0)}
    path = tmp_path / "before"
    ocp.save(path, {"params": params, "opt_state": optax.adam(0.1).init(params)})
    tx = jmp_scale.with_loss_scale(optax.adam(0.1), jmp_scale.DynamicLossScale(8.0))
    new = jax.tree.map(jnp.zeros_like, params)
    run = {"path": path, "state": {"params": new, "opt_state": tx.init(new)}}
    exec(BLOCKS["checkpoint"], run)
    assert run["state"]["params"]["w"].tolist() == [0, 1, 2]
    assert run["state"]["opt_state"].loss_scale.loss_scale == 8


@pytest.mark.parametrize(
    "path",
    sorted(set(re.findall(r"(?:examples|benchmarks|docs)/[\w./]+\.\w+", README))),
)
def test_every_file_that_the_readme_names_exists(path):
    assert (ROOT / path).is_file()
