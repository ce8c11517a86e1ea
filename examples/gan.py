"""Two losses, two loss scales: a GAN of handwritten digits in float16.

Generator and discriminator have an optimizer and a loss scale each, so that an overflow
in one skips and backs off only that one. `--overflow-at STEP` causes one: that step's
discriminator loss is multiplied by 2^60, which is finite in float32, but whose gradient
is infinite in float16. Prints a table, and draws samples and both loss scales.
"""

import _digits
import _show
import jax
import numpy as np
import optax

import jmp_scale

DYNAMIC = jmp_scale.DynamicLossScale(period=200)
TX = jmp_scale.with_loss_scale(optax.adam(5e-4, b1=0.5), DYNAMIC)


def update(player, loss_fn, *args):
    """One step of one player, which never looks at the other's loss scale."""
    params, opt_state = player
    value_and_grad = jmp_scale.value_and_grad(loss_fn, opt_state.loss_scale)
    loss, grads = value_and_grad(params, *args)
    updates, opt_state = TX.update(grads, opt_state, params, value=loss)
    s, skipped = opt_state.loss_scale.loss_scale, ~opt_state.applied
    record = {"loss": loss, "S": s, "skipped": skipped}
    return (optax.apply_updates(params, updates), opt_state), record


def train_step(players, batch):
    images, key, spike = batch
    generator, discriminator = players
    noise = jax.random.normal(key, (2, len(images), 16))
    fakes = generate(generator[0], noise[1])
    generator, g = update(generator, generator_loss, discriminator[0], noise[0])
    discriminator, d = update(discriminator, discriminator_loss, images, fakes, spike)
    return (generator, discriminator), {"generator": g, "discriminator": d}


def generator_loss(params, discriminator, noise):
    return _digits.verdict_loss(discriminator, generate(params, noise), 1)


def discriminator_loss(params, images, fakes, spike):
    real = _digits.verdict_loss(params, images, 0.9)
    return spike * (real + _digits.verdict_loss(params, fakes, 0))


def generate(params, noise):
    return jax.nn.sigmoid(_digits.network(params, noise))


def main(argv=None):
    parser = _show.parser(__doc__, 6000, seed=True, out=True)
    _show.add_number(parser, "--overflow-at", "step that overflows")
    args = parser.parse_args(argv)
    keys = jax.random.split(jax.random.key(args.seed), 3)
    generator = _digits.init_layers((16, 128, 128, 64), keys[0], "he_normal")
    discriminator = _digits.init_layers((64, 128, 64, 1), keys[1], "he_normal")
    players = tuple((p, TX.init(p)) for p in (generator, discriminator))
    images = _digits.image_batches(args.steps, 64, args.seed)
    spikes = np.where(np.arange(args.steps) + 1 == args.overflow_at, 2.0**60, 1)
    batches = images, jax.random.split(keys[2], args.steps), np.float32(spikes)
    (generator, _), records = _show.scan(train_step, players, batches)
    _show.players(records)
    noise = jax.random.normal(jax.random.key(1), (5, 8, 16))
    samples = {f"row {i + 1}": generate(generator[0], x) for i, x in enumerate(noise)}
    scales = {name: x["S"] for name, x in records.items()}
    panels = [
        _show.images("Samples of the generator", samples),
        _show.scales("Each player has its own S", scales),
    ]
    _show.figure(args.out / "gan.png", panels)


if __name__ == "__main__":
    main()
