"""The table of rules of `check_step`: the text and the cure of each."""

from typing import Literal, NamedTuple

Level = Literal["error", "warning", "note"]


class Rule(NamedTuple):
    """A row of the table."""

    level: Level
    text: str
    cure: str


_KEEP = (
    "Keep it on a skipped step: new = jmp_scale.select_tree(opt_state.applied, new, "
    "old); TrainState.apply_gradients(name=new) and jmp_scale.nnx.Optimizer do."
)
_TAKE = (
    "Take loss and gradients from jmp_scale.value_and_grad(loss_fn, "
    "opt_state.loss_scale)(params, batch), which scales and unscales once."
)
# By level and name, the most severe first: text and cure.
_ERRORS: dict[str, tuple[str, str]] = {
    "not returned": (
        "The state of with_loss_scale does not come back, or in other shapes.",
        "Return the state of tx.update as it went in, and pass it to the next step.",
    ),
    "captured parameters": (
        "Gradients are the same with other parameters: the loss reads captured ones.",
        "Differentiate by the argument: loss_fn(params, batch) reads its own params.",
    ),
    "S never adjusted": (
        "An applied step does not count: S comes back as it went in, or starts over.",
        "Return the state of tx.update as it is (with NNX, call optimizer.update); by "
        "hand, loss_scale = loss_scale.adjust(jmp_scale.all_finite(grads)).",
    ),
    "never unscaled": (
        "It grows with S: gradients are never unscaled, or the loss is scaled twice.",
        f"{_TAKE} By hand, grads = opt_state.loss_scale.unscale(grads) after the "
        "gradient of the scaled loss.",
    ),
    "clipped while scaled": (
        "It falls with S from some S on: gradients are clipped while they are scaled.",
        "Unscale first: clip what jmp_scale.value_and_grad returns, or inside, "
        "with_loss_scale(optax.chain(clip, tx), loss_scale).",
    ),
    "unscaled twice": (
        "It falls with S: gradients are unscaled twice, the loss is not scaled, or "
        "something that is not scaled was added to scaled gradients.",
        f"{_TAKE} No unscale follows, and what is added is added then.",
    ),
    "unscaled by the next S": (
        "It depends on the S of the next step: gradients are unscaled after adjust.",
        "Unscale by the S that scaled, before adjust: jmp_scale.value_and_grad does.",
    ),
    "S not used": (
        "With S = inf the step is applied as usual: this S does not scale the loss.",
        f"{_TAKE} Not from jax.value_and_grad, nor by an S that the step captures.",
    ),
    "state put back": (
        "A step that overflows leaves opt_state as it was, so S never falls.",
        "Return the state of tx.update on skipped steps, too, without "
        "optax.apply_if_finite around it.",
    ),
    "overflow hidden": (
        "Overflowed gradients are applied: a clip, nan_to_num or zero_nans hides them.",
        "Give tx.update what jmp_scale.value_and_grad returns, and clip inside: "
        "with_loss_scale(optax.chain(clip, tx), loss_scale).",
    ),
    "put back": (
        "A skipped step replaces it by a copy of another step's, or of a captured one.",
        _KEEP,
    ),
    "changed on a skip": (
        "It changes on a skipped step.",
        _KEEP,
    ),
    "NaN stays": (
        "It is NaN or infinite after a step with such gradients, and stays so.",
        f"{_KEEP} Accumulate inside: with_loss_scale("
        "optax.MultiSteps(tx, k).gradient_transformation(), loss_scale).",
    ),
}
_WARNINGS: dict[str, tuple[str, str]] = {
    "nothing learned": (
        "No parameters change in {calls} applied steps.",
        "Return params = optax.apply_updates(params, updates); with NNX call "
        "optimizer.update(model, grads, value=loss). Right if the learning rate is 0.",
    ),
    "nothing comes back": (
        "No parameters or moments come back among the results: little was checked.",
        "Return the new state in the form of the old one; carried= names bare arrays.",
    ),
    "state out of reach": (
        "{what} seems to hold the state, which cannot be copied: nothing was called.",
        "Pass the state as arguments and return it, at least to this check.",
    ),
    "not applied": (
        "The step is skipped at S = {s}.",
        "Pass a batch with a finite loss, or a smaller S; diagnose_nonfinite(loss_fn, "
        "loss_scale, params, batch) finds the operation that is not finite.",
    ),
    "raised": (
        "{count} of {calls} calls raised and checked nothing, the first at {first}.",
        "Leave out the step's own checks; give it data without end and enough memory.",
    ),
    "gradients of zero": (
        "Gradients are 0 with these arguments: whether they are unscaled is not known.",
        "Pass the arguments of a step that learns; the loss may not depend on params.",
    ),
    "guard without a loss": (
        "The guard sees gradients and no loss, whose spikes it cannot skip.",
        "Pass the loss: tx.update(grads, opt_state, params, value=loss).",
    ),
    "comes back in half precision": (
        "It goes in as {old} and comes out as {new}: small updates are lost.",
        "Return the sum in the dtype of params: optax.apply_updates(params, updates).",
    ),
    "reported scaled": (
        "It grows or falls with S: it is scaled, or unscaled twice.",
        "Report what jmp_scale.value_and_grad returns, and pass its loss as value=.",
    ),
}
_NOTES: dict[str, tuple[str, str]] = {
    "no loss scale": (
        "No state of with_loss_scale and no loss scale is among the arguments: nothing "
        "skips a bad step.",
        "This is right in bfloat16 and float32. In float16 pass opt_state to the step, "
        "and return it: an S that a compiled step closes over never changes.",
    ),
}
RULES = {
    **{name: Rule("error", *row) for name, row in _ERRORS.items()},
    **{name: Rule("warning", *row) for name, row in _WARNINGS.items()},
    **{name: Rule("note", *row) for name, row in _NOTES.items()},
}
