"""docs/do-i-need-it.md: the programs run, and print what the page says."""

import contextlib
import io
import pathlib
import re

import jax
import pytest

pytestmark = pytest.mark.slow

PAGE = (pathlib.Path(__file__).parents[1] / "docs/do-i-need-it.md").read_text()
BLOCK = r'### "([^"]+)"(.*?)(?=\n### |\Z)'
SECTIONS = dict(re.findall(BLOCK, PAGE, re.DOTALL))


@pytest.fixture(scope="module")
def outputs():
    """What each section's program prints, one after another, and what the page says."""
    namespace, outputs = {}, {}
    with jax.numpy_rank_promotion("allow"):
        for claim, text in SECTIONS.items():
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
                    exec(code, namespace)
            on_page = re.findall(r"```text\n(.*?)```", text, re.DOTALL) or [""]
            outputs[claim] = out.getvalue(), *on_page
    return outputs


def of(outputs, words):
    """Both outputs of the section whose claim has these words."""
    (found,) = (both for claim, both in outputs.items() if words in claim)
    return found


@pytest.mark.parametrize("words", ["underflow below", "dynamic loss scale"])
def test_the_output_is_that_of_the_page(outputs, words):
    printed, text = of(outputs, words)
    assert printed == text


def test_only_the_deep_float16_model_needs_loss_scaling(outputs):
    for output in of(outputs, "needs loss scaling"):
        needed = ["not needed" not in line for line in output.splitlines()]
        assert needed == [True, False, False]


def test_the_real_backward_pass_loses_more_than_a_cast_shows(outputs):
    for output in of(outputs, "Cast the gradients"):
        shares = [
            [int(n) for n in re.findall(r"(\d+)%", x)] for x in output.splitlines()
        ]
        assert len(shares) == 4
        assert all(real >= cast for cast, real in shares)
        assert shares[1][0] < 50 < 95 < shares[1][1]


def test_powers_of_two_change_no_bit(outputs):
    for output in of(outputs, "changes the gradients"):
        differ = [int(n) for n in re.findall(r": (\d+) of 4096", output)]
        assert differ[:2] == [0, 0]
        assert differ[2] > 2048


def test_only_what_is_saved_for_the_backward_pass_is_halved(outputs):
    for output in of(outputs, "half the memory"):
        figures = [float(n) for n in re.findall(r"[\d.]+(?= MB| saved)", output)]
        masters, saved = figures[::2], figures[1::2]
        assert set(masters) == {1.6}
        large, small = saved[1] / saved[0], saved[3] / saved[2]
        assert 0.4 < large < 0.6  # XLA's and JAX's choice of what to keep may change
        assert 0.3 < small < 0.7
        assert saved[2] < masters[0] < saved[1]
