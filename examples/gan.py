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

TX = jmp_scale.with_loss_scale(
    optax.adam(5e-4, b1=0.5), jmp_scale.DynamicLossScale(period=200)
)


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
    return _digits.cross_entropy(
        _digits.leaky_network(discriminator, generate(params, noise)), 1
    )


def discriminator_loss(params, images, fakes, spike):
    loss = _digits.cross_entropy(_digits.leaky_network(params, images), 0.9)
    return spike * (
        loss + _digits.cross_entropy(_digits.leaky_network(params, fakes), 0)
    )


def generate(params, noise):
    return jax.nn.sigmoid(_digits.leaky_network(params, noise))


def main(argv=None):
    parser = _show.parser(__doc__, 6000, seed=True, out=True)
    number = _show.positive_int
    parser.add_argument("--overflow-at", type=number, help="step that overflows (none)")
    args = parser.parse_args(argv)
    *keys, noise_key = jax.random.split(jax.random.key(args.seed), 3)
    widths = (16, 128, 128, 64), (64, 128, 64, 1)
    params = [
        _digits.init_layers(*x, "he_normal") for x in zip(widths, keys, strict=True)
    ]
    players = tuple((p, TX.init(p)) for p in params)
    images = _digits.Batches(
        _digits.load_images(args.seed)[0], args.steps, 64, args.seed
    )
    spikes = np.where(np.arange(args.steps) + 1 == args.overflow_at, 2.0**60, 1)
    batches = images, jax.random.split(noise_key, args.steps), np.float32(spikes)
    (generator, _), records = _show.scan(train_step, players, batches)

    rows = [
        [name, f"{np.median(x['loss'][-100:]):.3f}", _show.power(x["S"][-1]),
         x["skipped"].sum(), _show.steps(x["skipped"])]
        for name, x in records.items()
    ]  # fmt: skip
    _show.table(["", "loss", "last S", "skipped", "first skipped steps"], rows)
    noise = jax.random.normal(jax.random.key(1), (5, 8, 16))
    samples = {str(i): generate(generator[0], x) for i, x in enumerate(noise)}
    scales = {name: x["S"] for name, x in records.items()}
    panels = [
        _show.images("Samples of the generator", samples),
        _show.scales("Each player has its own S", scales),
    ]
    _show.figure(args.out / "gan.png", panels)


if __name__ == "__main__":
    main()
