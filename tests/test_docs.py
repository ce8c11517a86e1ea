"""The site: every public name has its page, and all that the pages show runs."""

import ast
import contextlib
import importlib.util
import io
import json
import math
import pathlib
import re
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from helpers import assert_bitwise_equal, by_name
from jax.sharding import PartitionSpec as P

import jmp_scale
from jmp_scale.diagnostics import check_step
from jmp_scale.diagnostics._precision import comparison, sensitivity
from jmp_scale.diagnostics._precision import rules as rules_of_precision
from jmp_scale.diagnostics._run import diagnosis, health, step_rules

pytestmark = pytest.mark.usefixtures("ranks_promote")

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
TEXTS = {
    str(path.relative_to(ROOT)): path.read_text()
    for pattern in ("*.md", "[!.]*/*.md", "docs/*/*.md")
    for path in sorted(ROOT.glob(pattern))
}
FENCE = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
# A block of Python, and what it prints, which the page shows. What is `.about` so much
# depends on the machine.
PYTHON = re.compile(
    r"^```python\n(.*?)^```$(?:\n\n``` ?(text|{ .text [. \w]+})\n(.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)
COMMENT = re.compile(r"^ *print\(.*\)  # (.+)$", re.MULTILINE)
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?")
LINK = re.compile(r"!?\[[^\]]*\]\((?!https?://)([^)\s]+)\)")
# What the site alone knows: admonitions, attributes, included files, metadata.
OF_THE_SITE = re.compile(
    r"^ *(!!!|\?\?\?)|\{ ?([.#:]|width|align)|--8<--|\A---", re.MULTILINE
)
DOORS = ("diagnostics", "plotting", "linen", "nnx", "checkpoints", "presets")
MODULES = ("jmp_scale", *(f"jmp_scale.{name}" for name in DOORS))

# Main programs, which also pass the checkers of JAX.
CHECKED = {"README.md"}
CHECKED |= {f"docs/{name}.md" for name in ("flax", "devices", "half-parameters")}
# What `check_step` is given after the block that defines a step.
STEPS = {
    "README.md": {"train_step": "train_step, params, tx.init(params), x"},
    "docs/quickstart.md": {
        "train_step": "train_step, params, tx.init(params), x",
        "eqx_step": "eqx_step, model, opt_state, x",
        "stateful_step": "stateful_step, model, state, opt_state, x",
        "sgd_step": "sgd_step, params, skip.init(params), x",
    },
    "docs/flax.md": {
        "bfloat16_step": "bfloat16_step, model, optimizer, x",
        "nnx_train_step": "nnx_train_step, model, scaled_optimizer, x",
        "train_step": "train_step, state, x",
    },
    "docs/devices.md": {
        "train_step": "train_step, params, opt_state, x",
        "sharded_step": "jax.jit(step), params, opt_state, x",
        "pmap_step": "jax.pmap(pmap_step, 'batch', in_axes=(None, None, 0), "
        "out_axes=None), params, opt_state, x.reshape(mesh.size, -1, 4)",
    },
    "docs/optax.md": {"train_step": "train_step, params, opt_state, x"},
    "docs/half-parameters.md": {"train_step": "train_step, params, opt_state, x"},
    "docs/spikes.md": {"train_step": "train_step, params, opt_state, gradient"},
    "docs/monitor.md": {"train_step": "train_step, params, opt_state, history, x"},
}


def public_names(module):
    """What a module offers: what a package re-exports, and what a module defines."""
    path = pathlib.Path(importlib.import_module(module).__file__)
    for node in ast.parse(path.read_text()).body:
        names = []
        if isinstance(node, ast.ImportFrom) and path.name == "__init__.py":
            names = [alias.asname for alias in node.names if alias.asname]
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names = [node.name]
        for name in names:
            if not name.startswith("_"):
                yield f"{module}.{name}"


def headings(text):
    return re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)


def entries(text):
    """Names that a page of the reference documents."""
    return re.findall(r"^::: (\S+)$", text, re.MULTILINE)


def anchors(text):
    """The anchors that the repository's host makes of headings, as the site does."""
    shown = [re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", h) for h in headings(text)]
    return [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in shown]


def test_every_public_name_is_on_exactly_one_page_of_the_reference():
    documented = [name for text in TEXTS.values() for name in entries(text)]
    wanted = {name for module in MODULES for name in public_names(module)}
    assert sorted(documented) == sorted(wanted)


def run(page):
    """The names that a page leaves: its blocks run one after the other.

    So do this library's calls within sentences, if the page so far has their names.
    """
    namespace, text, end = {"__name__": "__main__"}, TEXTS[page], 0
    for match in PYTHON.finditer(text):
        run_sentences(text[end : match.start()], namespace)
        end = match.end()
        code, kind, shown = match.groups()
        # So that a traceback names the page's line.
        source = "\n" * text[: match.start(1)].count("\n") + code
        execute = checked(exec) if page in CHECKED else exec
        with contextlib.redirect_stdout(io.StringIO()) as out:
            execute(compile(source, page, "exec"), namespace)
        printed = out.getvalue().replace(page, "model.py")
        shown = shown or "\n".join(COMMENT.findall(code))
        if "about" in (kind or ""):
            assert printed.count("\n") == shown.count("\n")
        else:
            assert_prints(printed, shown)
        for name, arguments in STEPS.get(page, {}).items():
            if f"def {name}(" in code:  # steps that readers copy are right
                found = check_step(*eval(arguments, namespace))
                assert found.ok, f"{page}: {found}"
    run_sentences(text[end:], namespace)
    return namespace


def checked(fun):
    """Under the checkers of JAX."""
    return jax.checking_leaks()(jax.debug_key_reuse(True)(fun))


def run_sentences(text, names):
    """Runs calls of this library in a text's code spans, with the page's own names."""
    for span in re.findall(r"`([^`\n]+\))`", FENCE.sub("", text)):
        if "..." not in span and calls_own(span, names):
            eval(span, dict(names))


def calls_own(span, names):
    """Whether a code span is a call of this library with arguments of the page."""
    try:
        call = ast.parse(span, mode="eval").body
        module = eval(ast.unparse(call.func), dict(names)).__module__
    except (SyntaxError, NameError, AttributeError):
        return False
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    used = {node.id for node in ast.walk(call) if isinstance(node, ast.Name)}
    constant = all(isinstance(argument, ast.Constant) for argument in arguments)
    return str(module).startswith("jmp_scale") and used <= names.keys() and not constant


def assert_prints(printed, shown):
    """The words are equal, and numbers nearly: some CPUs round elsewhere."""
    words, words_shown = (NUMBER.sub("#", text).split() for text in (printed, shown))
    assert words == words_shown, printed
    numbers = [
        [float(number.replace(",", "")) for number in NUMBER.findall(text)]
        for text in (printed, shown)
    ]
    for a, b in zip(*numbers, strict=True):
        assert math.isclose(a, b, rel_tol=0.1, abs_tol=3 if b == int(b) else 0), printed


PAGES = {name for name, text in TEXTS.items() if PYTHON.search(text)}
# Run by tests of their own.
OWN = {"docs/accumulate.md", "docs/checkpoints.md"}


@pytest.mark.parametrize("page", by_name(["README.md"], sorted(PAGES - OWN)))
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(page)


@pytest.mark.slow
def test_the_page_on_accumulation_adds_up_micro_batches_and_devices_in_one_program():
    page, size = run("docs/accumulate.md"), (3, 64, 64)
    assert page["accumulated_step"]._cache_size() == 1

    random = np.random.RandomState(0)
    x, w = random.normal(size=size).astype("f"), random.normal(size=(64, 1024)) / 8
    weights = random.randint(0, 2, size[:2]).astype("f")
    residuals = (x.astype(float) @ w - 1) * weights[..., None] / weights.sum()
    exact = 2 / 1024 * np.einsum("nbi,nbj->ij", x, residuals)
    page["tx"] = jmp_scale.with_loss_scale(optax.sgd(1.0), jmp_scale.DynamicLossScale())

    def state(mesh):
        params = {"w": jnp.asarray(w, jnp.float32)}
        state = params, page["tx"].init(params)
        return jax.device_put(state, jax.NamedSharding(mesh, P()))

    def assert_close(gradient):
        assert np.linalg.norm(gradient - exact) < 4e-3 * np.linalg.norm(exact)

    params, opt_state = state(page["both"])
    split = page["tensor_parallel_gradients"]
    (_, count), grads = split(params, opt_state.loss_scale, (x, weights))
    assert_close(np.asarray(grads["w"]) / count)

    params, *_ = page["accumulated_step"](*state(page["mesh"]), (x, weights))
    assert_close(w - jax.device_get(params["w"]))

    tree = {"params": jnp.ones(2), "_overwrite_with_gradient": {"scale": jnp.ones(2)}}
    added = jax.tree.map_with_path(page["add_float8"], tree, tree)
    assert [x.tolist() for x in jax.tree.leaves(added)] == [[1, 1], [2, 2]]


@pytest.mark.slow
def test_the_page_on_checkpoints_resumes_bit_for_bit():
    page = run("docs/checkpoints.md")
    page["ocp"] = orbax.checkpoint  # later blocks give the name to Orbax's v1
    at_once = page["train_linen"](tempfile.mkdtemp(), steps=5)
    states = page["linen_state"], at_once
    assert_bitwise_equal(*map(jax.tree.leaves, states))


@pytest.mark.parametrize("name", TEXTS)
def test_links_and_images_of_a_page_resolve(name):
    for link in LINK.findall(FENCE.sub("", TEXTS[name])):
        target, _, anchor = link.partition("#")
        path = (ROOT / name).parent / target if target else ROOT / name
        assert path.exists(), link
        if anchor:
            assert anchors(path.read_text()).count(anchor) == 1, link


def test_search_words_and_the_answers_of_questions_name_sections_that_there_are():
    words = re.findall(r"^(\S+): \[", (DOCS / "search_words.yml").read_text(), re.M)
    questions = (ROOT / "tests/search_questions.txt").read_text()
    answers = " ".join(re.findall(r"^[^#\s].* -> (.*)$", questions, re.M)).split()
    for place in {*words, *answers}:
        page, _, anchor = place.partition("#")
        text = TEXTS[f"docs/{page.removesuffix('.md')}.md"]
        names = anchors(text) + entries(text)
        known = not anchor or any(name.startswith(anchor) for name in names)
        assert known or page in ("notebook", "stability"), place  # which show others


@pytest.mark.parametrize("name", TEXTS)
def test_a_page_reads_well_where_only_plain_markdown_is_known(name):
    text = FENCE.sub("", TEXTS[name])
    assert not OF_THE_SITE.search(text)
    assert ":::" not in re.sub("<!--.*?-->", "", text, flags=re.DOTALL)


@pytest.mark.parametrize("name", TEXTS)
def test_an_empty_line_ends_each_body_as_pythons_own_prompt_needs(name):
    for code, *_ in PYTHON.findall(TEXTS[name]):
        lines = [*code.splitlines(), ""]
        bodies = [node for node in ast.parse(code).body if hasattr(node, "body")]
        assert [lines[node.end_lineno] for node in bodies] == [""] * len(bodies)


def test_every_rule_of_every_table_has_its_section():
    """Of `precision_report` on its page, of all others on that of troubles."""
    tables = comparison, sensitivity, diagnosis, health, step_rules
    titles = headings(TEXTS["docs/troubleshoot.md"])
    named = [name for title in titles for name in title.split(", ")]
    rules = {rule for table in tables for rule in table.RULES}
    assert {rule: named.count(rule) for rule in rules} == dict.fromkeys(rules, 1)


def test_every_rule_of_the_precision_report_has_its_section_and_its_row():
    page = TEXTS["docs/precision.md"]
    rules = {n for n in headings(page) if re.match("half-|full-", n)}
    assert rules == rules_of_precision.RULES.keys()
    assert set(re.findall(r"^\| \[([a-z-]+)\]\(#\1\)", page, re.MULTILINE)) == rules


@pytest.mark.slow
def test_the_notebook_runs(monkeypatch):
    # The kernel draws into the page; MPLBACKEND=Agg, as servers set it, draws nowhere.
    monkeypatch.delenv("MPLBACKEND", raising=False)
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    path = DOCS / "float16_on_a_free_gpu.ipynb"
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    client = nbclient.NotebookClient(notebook, timeout=900, kernel_name="python3")
    client.execute(cwd=str(ROOT))
    outputs = json.dumps([cell.get("outputs", []) for cell in notebook.cells])
    assert "image/png" in outputs


def test_changelog_and_citation_know_the_version():
    version = jmp_scale.__version__
    date = "unreleased" if ".dev" in version else r"\d{4}-\d\d-\d\d"
    heading = rf"^## {re.escape(version.partition('.dev')[0])} \({date}\)$"
    assert re.search(heading, TEXTS["CHANGELOG.md"], re.MULTILINE)
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


# How each page's programs go on.
USES = {
    "README.md": """
print(opt_state.loss_scale, opt_state.applied, opt_state.skipped)
print(optax.chain(tx, optax.identity()))
""",
    "docs/flax.md": """
print(state.loss_scale, state.opt_state.applied, state.step)
print(scaled_optimizer.loss_scale, scaled_optimizer.step)
""",
}


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("pyright"), reason="no pyright")
def test_the_programs_of_pages_have_no_type_errors(tmp_path, monkeypatch):
    for i, (page, uses) in enumerate(USES.items()):
        program = "\n".join(code for code, *_ in PYTHON.findall(TEXTS[page]))
        (tmp_path / f"page{i}.py").write_text(program + uses)
    configuration = {"extraPaths": [str(ROOT)], "typeCheckingMode": "basic"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(configuration))
    monkeypatch.setenv("PYRIGHT_PYTHON_IGNORE_WARNINGS", "1")
    command = f"{sys.executable} -m pyright -p {tmp_path} --pythonpath {sys.executable}"
    run = subprocess.run(command.split(), capture_output=True, text=True, timeout=300)
    if run.returncode not in (0, 1):
        pytest.skip(f"pyright does not run here: {run.stderr.strip()[-200:]}")
    assert run.returncode == 0, run.stdout
