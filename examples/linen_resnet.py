"""A small ResNet with BatchNorm in float16 on handwritten digits, with Flax Linen.

The train step is that of Flax's ImageNet example with two lines changed (marked). The
loss scale starts too high on purpose: the first steps overflow and are skipped, and the
BatchNorm statistics stay finite.
"""

from typing import Any

import _digits
import _show
import flax.linen as nn
import jax
import jax.numpy as jnp
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
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, new["batch_stats"]

    images, labels = batch
    grad_fn = state.value_and_grad(loss_fn, has_aux=True)  # changed
    (loss, stats), grads = grad_fn(state.params)
    state = state.apply_gradients(grads=grads, value=loss, batch_stats=stats)  # changed
    opt_state = state.opt_state
    s = opt_state.loss_scale.loss_scale
    return state, {"loss": loss, "S": s, "skipped": opt_state.skipped}


class ResNet(nn.Module):
    channels: int = 16
    blocks: int = 3

    @nn.compact
    def __call__(self, x, train):
        conv = nn.Conv(self.channels, (3, 3), dtype=jnp.float16)
        x = conv(x.reshape(-1, 8, 8, 1))
        for _ in range(self.blocks):
            y = x
            for _ in range(2):
                y = nn.BatchNorm(not train, momentum=0.9, dtype=jnp.float16)(y)
                conv = nn.Conv(self.channels, (3, 3), use_bias=False, dtype=jnp.float16)
                y = conv(nn.relu(y))
            x = x + y
        return nn.Dense(10, dtype=jnp.float16)(x.mean((1, 2))).astype(jnp.float32)


def main(argv=None):
    args = _show.parser(__doc__, 200, out=True).parse_args(argv)
    images, test_images = _digits.load_images()
    labels, test_labels = _digits.load_labels()
    model = ResNet()
    variables = model.init(jax.random.key(0), images[:1], True)
    state = State.create(
        apply_fn=model.apply,
        **variables,
        tx=optax.adam(3e-3),
        loss_scale=jmp_scale.DynamicLossScale(2.0**24, period=50),
    )
    batches = [_digits.Batches(x, args.steps, 128) for x in (images, labels)]
    state, record = _show.scan(train_step, state, tuple(batches))

    _show.history(record)
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    guesses = state.apply_fn(variables, test_images, False).argmax(-1)
    print(f"test accuracy {np.mean(guesses == test_labels):.3f}")
    finite = jmp_scale.all_finite(state.batch_stats)
    print(f"BatchNorm statistics finite: {bool(finite)}")
    panels = [
        _show.curves("The loss falls", "training loss", {"loss": record["loss"]}),
        _show.scales("S backs off from 2^24, then grows", {"S": record["S"]}),
    ]
    _show.figure(args.out / "linen_resnet.png", panels)


if __name__ == "__main__":
    main()
