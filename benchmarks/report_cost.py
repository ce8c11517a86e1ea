"""What a gradient report costs beside `all_finite`, on one leaf and on many of 20 million entries in all.

First what does not depend on the machine: bytes accessed by the compiled programs, in passes over the
gradients. Then times, in rounds of all_finite, report, all_finite: the ratio is that of the report to the
mean of the two around it, and the ratio of these two is the control, which has to be close to 1.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

import jmp_scale
from jmp_scale import diagnostics


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--entries", type=int, default=20_000_000, help="of the gradients (20000000)")
    parser.add_argument("--pairs", type=int, default=15, help="timed pairs (15)")
    args = parser.parse_args(argv)
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {args.entries:,} float32 entries")
    print(f"{'leaves':>8}{'passes':>16}{'ms':>22}{'report / all_finite':>24}{'control':>12}")
    print(f"{'':8}{'all_finite':>10}{'report':>8}{'all_finite':>12}{'report':>10}{'median':>12}{'IQR':>12}")
    for leaves in (1, 100):
        measure(args.entries, leaves, args.pairs)


def measure(entries, leaves, pairs):
    keys = jax.random.split(jax.random.key(0), leaves)
    grads = [1e-6 * jax.random.normal(key, (entries // leaves,)) for key in keys]
    size = sum(x.nbytes for x in grads)
    base = jax.jit(jmp_scale.all_finite).lower(grads).compile()
    report = jax.jit(diagnostics.grad_report).lower(grads, jnp.float32(2**15)).compile()
    passes = [fun.cost_analysis()["bytes accessed"] / size for fun in (base, report)]

    run_base, run_report = (lambda: base(grads)), (lambda: report(grads, jnp.float32(2**15)))
    for fun in (run_base, run_report):
        seconds(fun)
    rounds = np.array([[seconds(run_base), seconds(run_report), seconds(run_base)] for _ in range(pairs)])
    ratios = rounds[:, 1] / rounds[:, ::2].mean(1)
    control = np.median(rounds[:, 2] / rounds[:, 0])
    low, middle, high = np.percentile(ratios, (25, 50, 75))
    first, second = 1e3 * np.median(rounds[:, ::2]), 1e3 * np.median(rounds[:, 1])
    print(
        f"{leaves:8}{passes[0]:10.2f}{passes[1]:8.2f}{first:12.1f}{second:10.1f}{middle:12.2f}"
        f"{f'{low:.2f}-{high:.2f}':>12}{control:12.2f}" + ("" if 0.9 < control < 1.1 else "  (noisy: reject)")
    )


def seconds(fun):
    begin = time.perf_counter()
    jax.block_until_ready(fun())
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
