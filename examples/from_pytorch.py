"""A PyTorch script with autocast and GradScaler, ported to NNX, and its step checked.

The original is `_from_pytorch.txt`, line by line. Casts, scaler and clipping have
moved: into `autocast` around the loss, and into the optimizer.
"""

import _digits
import _show
import jax.numpy as jnp
import optax
from flax import nnx

import jmp_scale
import jmp_scale.nnx
from jmp_scale import diagnostics


def loss_fn(model, x, y):  # float32, as autocast casts it
    return _digits.classification_loss(model(x), y)


half_loss = jmp_scale.nnx.autocast(loss_fn, "float16")  # torch.autocast


@nnx.jit
def train_step(model, optimizer, x, y):
    loss, grads = optimizer.value_and_grad(half_loss)(model, x, y)  # scale, unscale_
    optimizer.update(model, grads, value=loss)  # clip, step, update
    return loss


def main(argv=None):
    args = _show.parser(__doc__, 300, seed=True).parse_args(argv)
    images, labels = _digits.labelled_batches(args.steps, 256, args.seed)
    rngs = nnx.Rngs(args.seed)
    model = nnx.Sequential(
        nnx.Linear(64, 256, rngs=rngs),
        nnx.gelu,
        nnx.Dropout(0.1, rngs=rngs),
        nnx.Linear(256, 10, rngs=rngs),
    )
    optimizer = jmp_scale.nnx.Optimizer(
        model,
        optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(1e-3, weight_decay=0.01)
        ),
        loss_scale=jmp_scale.presets.pytorch(),  # GradScaler's rule, step by step
    )
    print(diagnostics.check_step(train_step, model, optimizer, images[0], labels[0]))

    for step in range(args.steps):
        loss = train_step(model, optimizer, images[step], labels[step])
    test_images, test_labels = _digits.load_images()[1], _digits.load_labels()[1]
    model.eval()
    right = jnp.mean(model(test_images).argmax(1) == test_labels)
    s = _show.power(optimizer.loss_scale.loss_scale)
    print(f"loss {loss:.4f}, S = {s}, test accuracy {right:.1%}")


if __name__ == "__main__":
    main()
