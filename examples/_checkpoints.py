"""Orbax checkpoints, as `multihost.py` and `rewind.py` keep them."""

import contextlib
import shutil

import _show
import orbax.checkpoint as ocp


def command_line(description, steps):
    """The command line of a run that can be killed and resumed."""
    parser = _show.parser(description, steps, seed=True, out=True)
    _show.add_number(parser, "--kill-at", "batch to stop at, as a crash would")
    parser.add_argument("--resume", action="store_true", help="a run that was killed")
    return parser


def folder(path, resume):
    """The path of checkpoints, emptied unless a run is resumed."""
    if not resume:
        shutil.rmtree(path, ignore_errors=True)
    return path


def manager(folder, keep, every=1):
    """The last `keep` checkpoints, of each `every`-th step, or None for no folder."""
    if folder is None:
        return contextlib.nullcontext()
    # Saved in the foreground: a process that ends has no half of a checkpoint.
    options = ocp.CheckpointManagerOptions(
        save_interval_steps=every, max_to_keep=keep, enable_async_checkpointing=False
    )
    return ocp.CheckpointManager(folder.resolve(), options=options)


def latest(checkpoints):
    """The last step that was saved, or 0."""
    return (checkpoints and checkpoints.latest_step()) or 0


def save(checkpoints, step, state):
    """Whether `step` is one to save, and was saved."""
    return checkpoints and checkpoints.save(step, args=ocp.args.StandardSave(state))


def restored(checkpoints, step, like):
    """The state of `step`, on the devices of `like`."""
    return checkpoints.restore(step, args=ocp.args.StandardRestore(like))
