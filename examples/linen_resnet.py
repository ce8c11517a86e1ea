"""A small ResNet with BatchNorm in float16 on handwritten digits, with Flax Linen.

The model is a float32 one. The train step is that of Flax's ImageNet example with three
lines changed (marked). S starts too high: the first steps are skipped, and BatchNorm's
statistics stay finite.
"""

from typing import Any

import _digits
import _show
import flax.linen as nn
import jax
import numpy as np
import optax

import jmp_scale
from jmp_scale.linen import TrainState


class State(TrainState):
    batch_stats: Any


def train_step(state, batch):
    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, new = state.apply_fn(variables, images, True, mutable="batch_stats")
        return _digits.classification_loss(logits, labels), new["batch_stats"]

    images, labels = batch
    half_loss = jmp_scale.autocast(loss_fn, "float16")  # changed
    grad_fn = state.value_and_grad(half_loss, has_aux=True)  # changed
    (loss, stats), grads = grad_fn(state.params)
    state = state.apply_gradients(grads=grads, value=loss, batch_stats=stats)  # changed
    skipped, s = state.opt_state.skipped, state.loss_scale.loss_scale
    return state, {"loss": loss, "S": s, "skipped": skipped}


class ResNet(nn.Module):
    channels: int = 16
    blocks: int = 3

    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(self.channels, (3, 3))(x.reshape(-1, 8, 8, 1))
        for _ in range(self.blocks):
            y = x
            for _ in range(2):
                y = nn.relu(nn.BatchNorm(not train, momentum=0.9)(y))
                y = nn.Conv(self.channels, (3, 3), use_bias=False)(y)
            x = x + y
        return nn.Dense(10)(x.mean((1, 2)))


def main(argv=None):
    args = _show.parser(__doc__, 200, out=True).parse_args(argv)
    batches = _digits.labelled_batches(args.steps, 128)
    model = ResNet()
    variables = model.init(jax.random.key(0), batches[0][0], True)
    state = State.create(
        apply_fn=model.apply,
        **variables,
        tx=optax.adam(3e-3),
        loss_scale=jmp_scale.DynamicLossScale(2.0**24, period=50),
    )
    state, record = _show.scan(train_step, state, batches)

    _show.history(record)
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    guesses = model.apply(variables, _digits.load_images()[1], False).argmax(-1)
    print(f"test accuracy {np.mean(guesses == _digits.load_labels()[1]):.3f}")
    print(f"BatchNorm statistics finite: {jmp_scale.all_finite(state.batch_stats)}")
    titles = "The loss falls", "S backs off from 2^24, then grows"
    _show.learning(args.out / "linen_resnet.png", titles, record)


if __name__ == "__main__":
    main()
