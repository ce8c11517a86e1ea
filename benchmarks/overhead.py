"""What loss scaling and skipping cost, measured beside every peer.

The optimizer-only step takes given gradients, so that nothing hides the cost; the full
train step is a small transformer's. Carries are donated, gradients are those of a loss
scaled by 2^15. Ratios are to the step without scaling.

With `--target` the programs are compiled for a TPU or GPU that is not there, and the
figures are those compilers' own; see the README of this folder for what to install.
"""

import collections
import functools

import _harness
import _steps
import jax
import jax.numpy as jnp
from compilers import compile_step, targets
from models import problems
from tqdm import tqdm

PARTS = ("optimizer", "mixed", "train")
QUIET = (0.9, 1.1)  # a program against itself, on an idle machine
LEGEND = (
    "bytes: read from and written to memory, over the unscaled step's. cycles: as the "
    "TPU's compiler estimates them, likewise. kernels: and their ratio. temporaries: "
    "over the bytes of the parameters. waits: branches, callbacks and transfers in the "
    "program. compile s: of all processor cores. time ratio: with its quartiles."
)


def main(argv=None):
    args = _parser().parse_args(argv)
    _harness.round_as_written()
    if args.target is not None:
        jax.config.update("jax_platforms", "cpu")
        if (reason := targets.missing(args.target)) is not None:
            raise SystemExit(f"overhead.py: --target {args.target} {reason}")
    wanted = ["unscaled", *(peer for peer in args.peers if peer != "unscaled")]
    peers, missing = _steps.installed(wanted)
    # The first compilation of a process takes longer.
    loss_fn, params, batch = problems.optimizer_only(jnp.float32, {"w": jnp.ones(1)})
    carry, step = problems.build("unscaled", loss_fn, params)
    machines = [targets.Target(args.target, n) for n in args.chips if args.target]
    machines = machines or [None]
    compile_step(step, carry, batch, machines[0])

    tables = []
    for part in args.parts:
        for optimizer in ["adamw"] if part == "train" else args.optimizers:
            for dtype in args.dtypes:
                sizes = {"layers": args.layers, "width": args.width}
                sizes["examples"] = max(8, *args.chips)
                title, problem = problems.problems(dtype, **sizes)[part]
                for target in machines:
                    table = _table(args, title, optimizer, dtype, target)
                    tables.append(table)
                    compare(table, problem, peers, optimizer, target, args)
    for table in tables:
        table.notes += [f"{peer}: not installed." for peer in missing]
        if table.title == tables[-1].title:  # which are printed as the last one
            table.notes.append(LEGEND)
    device = f"compiled for {args.target}, not run" if args.target else None
    _harness.report(tables, device)


def _table(args, title, optimizer, dtype, target):
    if target is None:
        where, case = "{}", dtype
    elif len(args.chips) == 1:
        where, case = f"{target.chips} x {target.name}: {{}}", dtype
    else:  # several numbers of chips stand side by side, else both dtypes
        where, case = f"{{{{}}}} x {target.name}: {{}}", str(target.chips)
    of = dtype if case != dtype else "{}"
    name = problems.TITLES[optimizer]
    return _harness.Table(where.format(title.format(name, of)), [], case=case)


def compare(table, problem, peers, optimizer, target, args):
    """Adds a row per peer, with its figures, and time ratios if they are wanted."""
    loss_fn, params, batch = problem
    here, programs, carries, base = target is None, {}, {}, None
    chips = 1 if here else target.chips
    is_tpu = not here and target.name.startswith("tpu")
    table.columns = ["step", "bytes", *["cycles"] * is_tpu, "kernels", "temporaries"]
    table.columns += ["copied arrays", "scalars", "waits"]
    table.columns += [*["added collectives"] * (not here), "compile s"]
    param_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    if here:
        params, batch = jax.tree.map(_filled, (params, batch))
        batch = jax.device_put(batch)
    for peer in tqdm(peers, desc=table.title.format(table.case), leave=False):
        made = problems.build(peer, loss_fn, params, optimizer, types_only=not here)
        carries[peer], step = made
        programs[peer], found = compile_step(step, carries[peer], batch, target)
        base = base or found
        table.rows.append([
            peer,
            f"{found.bytes_accessed / base.bytes_accessed:.3f}",
            *[f"{found.cycles / max(base.cycles, 1):.3f}"] * is_tpu,
            f"{found.kernels} ({found.kernels / base.kernels:.2f})",
            f"{found.temporaries * chips / param_bytes:.3f}",
            found.copied_arrays,
            len(found.copies) - found.copied_arrays,
            found.conditionals + found.transfers,
            *[added_collectives(found, base)] * (not here),
            f"{found.compile_seconds:.1f}",
        ])  # fmt: skip
    if here and not args.no_times:
        add_times(table, programs, carries, batch)


def _filled(leaf):
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jnp.full(leaf.shape, 1e-2, leaf.dtype)
    return leaf


def added_collectives(found, base):
    """The collectives that a program has more than another, as text."""
    more = collections.Counter(found.collectives)
    more.subtract(collections.Counter(base.collectives))
    parts = []
    for (kind, types), count in more.items():
        operands = collections.Counter(types).items()
        short = ", ".join(f"{n} x {name}" if n > 1 else name for name, n in operands)
        parts += [f"{count} {kind} of {short}"] * (count > 0)
    return "; ".join(parts) or "none"


def add_times(table, programs, carries, batch):
    """Adds time ratios to the rows, "rejected" where a control shows a busy machine."""

    def runner(peer):
        leaves = jax.tree.map(jnp.copy, jax.tree.leaves(carries[peer]))

        def run():
            nonlocal leaves
            leaves, loss = programs[peer](leaves, batch)
            return leaves, loss

        return run

    base = runner("unscaled")
    before = _harness.paired_ratio(runner("unscaled"), base, "A/A control")
    ratios = {
        row[0]: _harness.paired_ratio(runner(row[0]), base, row[0])
        # The unscaled step, which is the first, comes last: a second control.
        for row in reversed(table.rows)
    }
    controls = before.median, ratios["unscaled"].median
    quiet = QUIET[0] <= min(controls) and max(controls) <= QUIET[1]
    table.notes.append(
        f"{table.case}: A/A control {before} before and {ratios['unscaled']} after, "
        f"{_harness.PAIRS} pairs." + " Rejected: busy machine." * (not quiet)
    )
    table.columns.append("time ratio")
    for row in table.rows:
        row.append(str(ratios[row[0]]) if quiet else "rejected")


def _parser():
    parser = _harness.parser(__doc__)
    several = functools.partial(_harness.add_several, parser)
    several("--parts", PARTS, ("optimizer", "train"), "tables to make")
    several("--dtypes", problems.DTYPES, problems.DTYPES, "of the gradients")
    several("--peers", _steps.PEERS, _steps.PEERS, "steps to compare")
    several("--optimizers", problems.OPTIMIZERS, ["adamw"], "of the steps alone")
    target = {"choices": targets.TARGETS, "help": "compile for this machine"}
    parser.add_argument("--target", **target)
    text = "of the target, parameters sharded over all of them"
    parser.add_argument("--chips", nargs="+", type=int, default=[1], help=text)
    text = "of the optimizer-only step's transformer"
    parser.add_argument("--layers", type=int, default=12, help=text)
    parser.add_argument("--width", type=int, default=256, help="of both transformers")
    parser.add_argument("--no-times", action="store_true", help="no time ratios")
    return parser


if __name__ == "__main__":
    main()
