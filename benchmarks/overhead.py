"""What loss scaling and skipping cost, measured beside every peer.

The optimizer-only step takes given gradients, so that nothing hides the cost; the full
train step is a small transformer's. Carries are donated, gradients are those of a loss
scaled by 2^15. Ratios are to the step without scaling.

With `--target` the programs are compiled for a TPU or GPU that is not there, and the
figures are those compilers' own; see the README of this folder for what to install.
"""


import _comparisons
import _harness
import _problems
import _steps
import _targets
import jax
import jax.numpy as jnp
from _compiled import compile_step

PARTS = ("optimizer", "mixed", "train")


def main(argv=None):
    args = _parser().parse_args(argv)
    _harness.round_as_written()
    if args.target is not None:
        jax.config.update("jax_platforms", "cpu")
        if (reason := _targets.missing(args.target)) is not None:
            raise SystemExit(f"overhead.py: --target {args.target} {reason}")
    wanted = ["unscaled", *(peer for peer in args.peers if peer != "unscaled")]
    peers, missing = _steps.installed(wanted)
    # The first compilation of a process takes longer.
    loss_fn, params, batch = _problems.optimizer_only(jnp.float32, {"w": jnp.ones(1)})
    carry, step = _problems.build("unscaled", loss_fn, params)
    targets = [_targets.Target(args.target, n) for n in args.chips if args.target]
    for target in targets[:1] or [None]:
        compile_step(step, carry, batch, target)

    tables = []
    for part, optimizer in _parts(args):
        for name in args.dtypes:
            if args.target is None:
                tables.append(_table_here(part, optimizer, name, args, peers))
            for target in targets:
                made = _table_of_target(part, optimizer, name, args, peers, target)
                tables.append(made)
    for table in tables:
        table.notes += [f"{peer}: not installed." for peer in missing]
        table.keep(args.columns)
        if table.title == tables[-1].title:  # which are printed as the last one
            table.notes.append(_comparisons.legend(args.target))
    device = f"compiled for {args.target}, not run" if args.target else None
    _harness.report(tables, args.json, device)


def _table_here(part, optimizer, name, args, peers):
    title, (loss_fn, params, batch) = _of(part, name, args)
    title = title.format(_problems.TITLES[optimizer], "{}")
    table = _harness.Table(title, [], case=name)
    params, batch = jax.tree.map(_filled, (params, batch))
    problem = loss_fn, params, jax.device_put(batch)
    pairs = 0 if args.no_times else args.pairs
    _comparisons.compare(table, problem, peers, optimizer, pairs)
    return table


def _filled(leaf):
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jnp.full(leaf.shape, 1e-2, leaf.dtype)
    return leaf


def _table_of_target(part, optimizer, name, args, peers, target):
    title, problem = _of(part, name, args)
    # Several numbers of chips stand side by side, else both dtypes.
    chips, dtype, case = target.chips, "{}", name
    if len(args.chips) > 1:
        chips, dtype, case = "{}", name, str(target.chips)
    title = title.format(_problems.TITLES[optimizer], dtype)
    table = _harness.Table(f"{chips} x {target.name}: {title}", [], case=case)
    _comparisons.compare_on(target, table, problem, peers, optimizer)
    return table


def _parts(args):
    """The parts, each with its optimizers."""
    return [
        (part, optimizer)
        for part in args.parts
        for optimizer in (["adamw"] if part == "train" else args.optimizers)
    ]


def _of(part, name, args):
    sizes = {"layers": args.layers, "width": args.width}
    return _problems.problems(name, **sizes, examples=max(8, *args.chips))[part]


def _parser():
    parser = _harness.parser(__doc__)

    def several(flag, choices, default, text):
        choices = {"choices": list(choices), "default": list(default)}
        parser.add_argument(flag, nargs="+", **choices, help=text)

    several("--parts", PARTS, ("optimizer", "train"), "tables to make")
    several("--dtypes", _problems.DTYPES, _problems.DTYPES, "of the gradients")
    several("--peers", _steps.PEERS, _steps.PEERS, "steps to compare")
    several("--optimizers", _problems.OPTIMIZERS, ["adamw"], "of the steps alone")
    parser.add_argument("--columns", nargs="+", help="those to print, default all")
    target = {"choices": _targets.TARGETS, "help": "compile for this machine"}
    parser.add_argument("--target", **target)
    text = "of the target, parameters sharded over all of them"
    parser.add_argument("--chips", nargs="+", type=int, default=[1], help=text)
    text = "of the optimizer-only step's transformer"
    parser.add_argument("--layers", type=int, default=12, help=text)
    text = "of both transformers"
    parser.add_argument("--width", type=int, default=256, help=text)
    parser.add_argument("--no-times", action="store_true", help="no time ratios")
    _harness.add_pairs(parser)
    return parser


if __name__ == "__main__":
    main()
