"""The table of rules of `check_step`: the text and the cure of each."""

import functools

from .._findings import Rule

_error = functools.partial(Rule, "error")
_warning = functools.partial(Rule, "warning")
_KEEP = (
    "Keep it on a skipped step: new = jmp_scale.select_tree(opt_state.applied, new, "
    "old); TrainState.apply_gradients(name=new) and jmp_scale.nnx.Optimizer do."
)
_TAKE = (
    "Take loss and gradients from jmp_scale.value_and_grad(loss_fn, "
    "opt_state.loss_scale)(params, batch), which scales and unscales once."
)
# The most severe first.
RULES = {
    "not returned": _error(
        "The state of with_loss_scale does not come back, or in other shapes.",
        "Return the state of tx.update as it went in, and pass it to the next step.",
    ),
    "captured parameters": _error(
        "Gradients are the same with other parameters: the loss reads captured ones.",
        "Differentiate by the argument: loss_fn(params, batch) reads its own params.",
    ),
    "S never adjusted": _error(
        "An applied step does not count: S comes back as it went in, or starts over.",
        "Return the state of tx.update as it is (with NNX, call optimizer.update); by "
        "hand, loss_scale = loss_scale.adjust(jmp_scale.all_finite(grads)).",
    ),
    "never unscaled": _error(
        "It grows with S: gradients are not unscaled, by another S, or scaled twice.",
        f"{_TAKE} By hand, call opt_state.loss_scale.unscale(grads) after it.",
    ),
    "clipped while scaled": _error(
        "Changes fall with S from some S on: gradients are clipped while they are "
        "scaled, or a custom rule inside the loss clips.",
        "Unscale first: clip what jmp_scale.value_and_grad returns, or inside, "
        "with_loss_scale(optax.chain(clip, tx), loss_scale). A rule (custom_vjp) sees "
        "S times the gradient: take its bound times S, or bfloat16 without S.",
    ),
    "unscaled twice": _error(
        "It falls with S: gradients are unscaled twice, the loss is not scaled, "
        "something that is not scaled was added to scaled gradients, or a custom rule "
        "inside the loss normalizes.",
        f"{_TAKE} No unscale follows, and what is added is added then.",
    ),
    "unscaled by the next S": _error(
        "It depends on the S of the next step: gradients are unscaled after adjust.",
        "Unscale by the S that scaled, before adjust: jmp_scale.value_and_grad does.",
    ),
    "S not used": _error(
        "With S = inf its optimizer steps as usual: this S does not scale its loss.",
        f"{_TAKE} Not from jax.value_and_grad, nor by an S that the step captures.",
    ),
    "state put back": _error(
        "A step that overflows leaves S as it was, so S never falls.",
        "Return the state of tx.update on each step, without apply_if_finite around. "
        "By hand, adjust outside of the branch: ls = loss_scale.adjust(finite).",
    ),
    "overflow hidden": _error(
        "An overflow counts as a finite step: a clip, nan_to_num or zero_nans hides "
        "it, or S is adjusted by another flag.",
        "Give tx.update what jmp_scale.value_and_grad returns, and clip inside: "
        "with_loss_scale(optax.chain(clip, tx), loss_scale). By hand, adjust by "
        "jmp_scale.all_finite(grads).",
    ),
    "skipped alone": _error(
        "An overflow on one device skips the step there, and others apply it.",
        "with_loss_scale(tx, loss_scale, axis_name=('data', 'model')): name each axis "
        "of the mesh over which the batch or parameters are split.",
    ),
    "changed on a skip": _error(
        "It changes on a skipped step, or is replaced by a copy of another step's.",
        _KEEP,
    ),
    "NaN stays": _error(
        "It is NaN or infinite after a step with such gradients, and stays so.",
        f"{_KEEP} Accumulate inside: with_loss_scale("
        "optax.MultiSteps(tx, k).gradient_transformation(), loss_scale).",
    ),
    "S adjusted twice": _error(
        "S counts more steps than its optimizer: it grows and falls too fast.",
        "Leave out the adjust by hand: tx.update adjusts S.",
    ),
    "update not finite": _error(
        "An applied step makes it infinite or NaN: gradients are checked, updates not.",
        "Look for a schedule that divides by step 0, hyperparameters in half precision "
        "(b2 rounds to 1) or a norm of 0. To leave such updates out, with_loss_scale("
        "optax.chain(tx, optax.apply_if_finite(optax.identity(), 5)), loss_scale).",
    ),
    "not repeatable": _warning(
        "Two calls with the same arguments differ: no calls could be compared.",
        "Pass one batch, and keys, as arguments: the step reads them from elsewhere.",
    ),
    "replicas diverge": _warning(
        "Devices that had the same parameters have other moments after a step.",
        "Take the jax.lax.pmean of grads before tx.update. Right for separate models.",
    ),
    "nothing learned": _warning(
        "No parameters change in {calls} applied steps.",
        "Return params = optax.apply_updates(params, updates); with NNX call "
        "optimizer.update(model, grads, value=loss). Right if the learning rate is 0.",
    ),
    "nothing comes back": _warning(
        "No parameters or moments come back among the results: little was checked.",
        "Return the new state in the form of the old one; carried= names the rest.",
    ),
    "state out of reach": _warning(
        "{what} seems to hold the state, which cannot be copied: nothing was called.",
        "Pass the state as arguments and return it, at least to this check.",
    ),
    "not applied": _warning(
        "The step is skipped at S = {s}.",
        "Pass a batch with a finite loss, or a smaller S; diagnose_nonfinite(loss_fn, "
        "loss_scale, params, batch) finds the operation that is not finite.",
    ),
    "NaN goes in": _warning(
        "It is NaN before the step, which is skipped at each S.",
        "Fix it if it is data. If the step carries it, as a memory, start it anew, and "
        "keep it on a skipped step: select_tree(opt_state.applied, new, old).",
    ),
    "raised": _warning(
        "{count} of {calls} calls raised and checked nothing, the first at {first}.",
        "Leave out the step's own checks; give it data without end and enough memory.",
    ),
    "gradients of zero": _warning(
        "Gradients are 0 with these arguments: whether they are unscaled is not known.",
        "Pass the arguments of a step that learns; the loss may not depend on params.",
    ),
    "guard without a loss": _warning(
        "The guard sees gradients and no loss, whose spikes it cannot skip.",
        "Pass the loss: tx.update(grads, opt_state, params, value=loss).",
    ),
    "comes back in half precision": _warning(
        "It goes in as {old} and comes out as {new}: small updates are lost.",
        "Return the sum in the dtype of params: optax.apply_updates(params, updates).",
    ),
    "reported scaled": _warning(
        "It grows or falls with S: it is scaled, or unscaled twice.",
        "Report what jmp_scale.value_and_grad returns, and pass its loss as value=.",
    ),
    "no loss scale": Rule(
        "note",
        "No state of with_loss_scale and no loss scale is among the arguments: nothing "
        "skips a bad step.",
        "This is right in bfloat16 and float32. In float16 pass opt_state to the step, "
        "and return it: an S that a compiled step closes over never changes.",
    ),
}
