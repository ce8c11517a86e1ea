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
from jmp_scale import linen

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PYTHON_BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_quick_start_is_two_command_lines():
    blocks = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    assert [block.strip().count("\n") for block in blocks] == [0, 0]
    assert "examples/train_digits.py" in blocks[0]
    assert blocks[1].strip().endswith("pytest")


def test_the_train_step_stands_within_forty_lines():
    assert "apply_updates" in "\n".join(README.splitlines()[:40])


def test_the_python_of_the_readme_trains_a_float16_model():
    def model(params, x):
        return x @ params["w"]

    namespace = {"model": model}
    for block in PYTHON_BLOCKS[:2]:
        exec(block, namespace)
    x = jax.random.normal(jax.random.key(0), (64, 4))
    batch = {"x": x, "y": x @ jnp.full((4, 1), 0.1)}
    params = {"w": jnp.zeros((4, 1))}
    opt_state = namespace["tx"].init(params)
    losses = []
    for scale in (1.0, 1e6, 1.0, 1.0):  # inputs of 1e6 overflow in float16
        params, opt_state, loss = namespace["train_step"](params, opt_state, batch | {"x": x * scale})
        losses.append(float(loss))
    assert namespace["train_step"]._cache_size() == 1
    assert losses[-1] < losses[0]
    assert opt_state.skipped == 1
    assert isinstance(opt_state.loss_scale, jmp_scale.DynamicLossScale)


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"(?:examples|benchmarks|docs)/[\w./]+\.\w+", README)))
)
def test_every_file_that_the_readme_names_exists(path):
    assert (ROOT / path).is_file()


def test_every_example_is_in_the_table():
    scripts = {p.name for p in (ROOT / "examples").glob("*.py") if "def main" in p.read_text()}
    assert scripts == set(re.findall(r"^\| `examples/(\w+\.py)`", README, re.MULTILINE))
