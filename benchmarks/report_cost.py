"""What a gradient report costs beside `all_finite`, on one leaf and on many leaves."""

import jax
import jax.numpy as jnp
from _harness import Table, add_pairs, is_quiet, paired_ratio, parser, report

import jmp_scale
from jmp_scale import diagnostics


def main(argv=None):
    arguments = parser(__doc__)
    arguments.add_argument(
        "--entries",
        type=int,
        default=20_000_000,
        help="float32 entries of the gradients",
    )
    arguments.add_argument("--leaves", type=int, nargs="+", default=[1, 100])
    add_pairs(arguments)
    args = arguments.parse_args(argv)
    columns = [
        "leaves",
        "passes of all_finite",
        "passes of grad_report",
        "time ratio",
        "control",
    ]
    table = Table(f"grad_report beside all_finite, {args.entries:,} entries", columns)
    for leaves in args.leaves:
        table.rows.append(measure(args.entries, leaves, args.pairs))
    table.notes.append(
        "passes: bytes accessed over the bytes of the gradients. "
        "control: all_finite against itself."
    )
    report([table], args.json)


def measure(entries, leaves, pairs):
    keys = jax.random.split(jax.random.key(0), leaves)
    grads = [1e-6 * jax.random.normal(key, (entries // leaves,)) for key in keys]
    size, loss_scale = sum(x.nbytes for x in grads), jnp.float32(2**15)
    base = jax.jit(jmp_scale.all_finite).lower(grads).compile()
    full = jax.jit(diagnostics.grad_report).lower(grads, loss_scale).compile()
    passes = [fun.cost_analysis()["bytes accessed"] / size for fun in (base, full)]
    ratio = paired_ratio(
        lambda: full(grads, loss_scale), lambda: base(grads), pairs, f"{leaves} leaves"
    )
    control = paired_ratio(
        lambda: base(grads), lambda: base(grads), pairs, f"{leaves} leaves, control"
    )
    return [
        leaves,
        *passes,
        str(ratio) if is_quiet(control) else "rejected",
        str(control),
    ]


if __name__ == "__main__":
    main()
