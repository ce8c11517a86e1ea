"""Three float16 runs that go wrong, and what each diagnostic tool says about them.

The digits autoencoder (1) without loss scaling, so that its gradients underflow; (2)
on unnormalized pixels with a hand-written cross entropy that overflows in the forward
pass; (3) with one NaN image among 1,437. Prints what the tools say, and draws figures.
"""

import _digits
import _show
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmp_scale
from jmp_scale import diagnostics


def bad_loss(params, images):
    """Run 2's mistake: exp is infinite in float16 from 11.1 on, and pixels go to 16."""
    *hidden, last = jax.tree.map(lambda x: x.astype(jnp.float16), params)
    logits = _digits.autoencoder(hidden, images) @ last["w"] + last["b"]
    entropy = jnp.log1p(jnp.exp(logits)) - images.astype(jnp.float16) * logits
    return jnp.mean(entropy.astype(jnp.float32))


def train(loss_fn, loss_scale, params, batches, pass_loss=True):
    """Parameters, optimizer state and `LossScaleHistory` after all batches."""
    tx = jmp_scale.with_loss_scale(optax.adam(5e-3), loss_scale)

    def train_step(carry, images):
        params, old, history = carry
        loss, grads = jmp_scale.value_and_grad(loss_fn, old.loss_scale)(params, images)
        value = {"value": loss} if pass_loss else {}
        updates, new = tx.update(grads, old, params, **value)
        history = history.push(old, new)
        return (optax.apply_updates(params, updates), new, history), None

    history = diagnostics.LossScaleHistory.create(len(batches))
    carry = params, tx.init(params), history
    return _show.run_chunk(train_step)(carry, batches)[0]


def main(argv=None):
    args = _show.parser(__doc__, 400, seed=True, out=True).parse_args(argv)
    batches = _digits.image_batches(args.steps, 64, args.seed)[:]
    start = _digits.init_autoencoder(args.seed)
    dynamic = jmp_scale.DynamicLossScale(2.0**15, period=50)

    # 1. Everything is finite, so only the comparison with float32 sees the harm.
    _, state, history = train(_digits.half_loss, None, start, batches)
    images = _digits.load_images(args.seed)[0][:256]
    losses = _digits.half_loss, _digits.reconstruction_loss
    report = diagnostics.compare_gradients(*losses, start, images, loss_scale=1.0)
    verdict = "\n".join(report.summary().splitlines()[:2])
    _show.findings("underflow", state, history, verdict)

    # 2. S falls to its floor, since this loop does not pass its loss to the optimizer.
    pixels = 16 * batches
    params, state, falls = train(bad_loss, dynamic, start, pixels, pass_loss=False)
    s, batch = state.loss_scale, pixels[-1]
    cause = diagnostics.diagnose_nonfinite(bad_loss, s, params, batch)
    _show.findings("overflow in the forward pass", state, falls, cause.summary())

    # 3. S stays, since the loss is passed; the skipped batches are the broken ones.
    drawn = (batches == batches[args.steps // 2, 0]).all(axis=-1, keepdims=True)
    broken = np.where(drawn, np.float32(np.nan), batches)
    _, state, stays = train(_digits.half_loss, dynamic, start, broken)
    batch = broken[np.argmin(stays.to_dict()["grads_finite"])]
    cause = diagnostics.diagnose_nonfinite(_digits.half_loss, 2.0**15, start, batch)
    _show.findings("one NaN image", state, stays, cause.summary())
    _show.diagnosis(args.out / "diagnose.png", report, falls, stays)


if __name__ == "__main__":
    main()
