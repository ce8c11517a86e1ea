"""Why reinforcement learning goes back to float16: two passes, one policy.

A language model writes token by token, with a cache, and learns from whole sequences.
Both passes are the same function in another order, and half precision rounds them
differently: the policy that acts is not quite the policy that learns. bfloat16 rounds
eight times as coarsely as float16 (Qi et al., 2025, arXiv 2510.26788).

Prints how far the log-probabilities of both passes are apart before training, and the
reward that policy gradients earn in the last 50 steps: median, least and largest of all
seeds. In a task as small as this one the mismatch does no harm: bfloat16 earns no less
than seeds differ, and float16 does without a loss scale. In long runs of large models
the mismatch is said to be what ends them.
"""

import functools

import _show
import _transformer
import jax
import jax.numpy as jnp
import optax

import jmp_scale

BATCH = 32


def loss_fn(params, tokens, sampled, advantage, dtype):
    log_probs = jax.vmap(_transformer.read, (None, 0, None))(params, tokens, dtype)
    mismatch = jnp.mean(jnp.abs(log_probs - sampled))
    return -jnp.mean(advantage * log_probs), mismatch


def train_step(tx, dtype, carry, key):
    params, opt_state = carry
    write = jax.vmap(_transformer.sample, (None, 0, None))
    tokens, sampled = write(params, jax.random.split(key, BATCH), dtype)
    reward = earned(tokens)
    scaled = jmp_scale.value_and_grad(loss_fn, opt_state.loss_scale, has_aux=True)
    batch = (tokens, sampled, reward - reward.mean(), dtype)
    (loss, mismatch), grads = scaled(params, *batch)
    updates, opt_state = tx.update(grads, opt_state, params, value=loss)
    record = {"reward": reward.mean(), "mismatch": mismatch}
    return (optax.apply_updates(params, updates), opt_state), record


def earned(tokens):
    """1 for each token that is right, 0 for the others: right is 5 t + 3 after t."""
    right = (5 * tokens[:, :-1] + 3) % _transformer.TOKENS
    return (tokens[:, 1:] == right).astype(jnp.float32)


def main(argv=None):
    args = _show.parser(__doc__, 200, seeds=5).parse_args(argv)
    keys = jax.random.split(jax.random.key(0), (args.steps, args.seeds))
    plans = {
        "float32": ("float32", None),
        "bfloat16": ("bfloat16", None),
        "float16": ("float16", None),
        "float16, dynamic": ("float16", jmp_scale.DynamicLossScale(period=50)),
    }
    rows = []
    for name, (dtype, loss_scale) in plans.items():
        tx = jmp_scale.with_loss_scale(optax.adam(3e-3), loss_scale)
        params = jax.vmap(_transformer.init_params)(jnp.arange(args.seeds))
        carry = params, jax.jit(jax.vmap(tx.init))(params)
        step = jax.vmap(functools.partial(train_step, tx, dtype))
        (_, state), record = _show.scan(step, carry, keys, name)
        mismatch = f"{record['mismatch'][0].mean():.1e}"
        rewards = _show.spread(record["reward"][-50:].mean(0))
        rows.append([name, mismatch, *rewards, state.skipped.sum()])
    _show.table(["", "mismatch", "reward", "least", "largest", "skipped"], rows)


if __name__ == "__main__":
    main()
