"""What MkDocs calls: links from names to entries, a table of names, old addresses.

Names are those of the pages in docs/api. The addresses of JAX's and Optax's are spelled
out, because the site is built without a network.
"""

import itertools
import json
import os
import pathlib
import re

DOCS = pathlib.Path(__file__).parent
OWN = {
    name: name
    for page in DOCS.glob("api/*.md")
    for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
}
# `scale` or `grad` alone is mostly a method or an argument, `Optimizer` Flax's.
NEVER_ALONE = {"scale", "grad", "adjust", "unscale", "Optimizer", "TrainState"}
JAX = "https://docs.jax.dev/en/latest/_autosummary/"
OPTAX = "https://optax.readthedocs.io/en/latest/api/"
OPTAX_PAGES = {
    "optimizer_wrappers": ("apply_if_finite", "MultiSteps", "masked"),
    "combining_optimizers": ("multi_transform", "partition", "chain"),
    "transformations": ("clip_by_global_norm", "zero_nans", "ema"),
    "optimizers": ("adamw", "adam", "sgd"),
}
OTHERS = {
    f"optax.{name}": f"{OPTAX}{page}.html#optax.{name}"
    for page, names in OPTAX_PAGES.items()
    for name in names
} | {
    name: f"{JAX}{name}.html"
    for name in (
        "jax.checkpoint",
        "jax.debug_nans",
        "jax.default_matmul_precision",
        "jax.grad",
        "jax.jit",
        "jax.lax.dot_general",
        "jax.lax.pmean",
        "jax.lax.reduce_precision",
        "jax.lax.scan",
        "jax.pmap",
        "jax.set_mesh",
        "jax.shard_map",
        "jax.ShapeDtypeStruct",
        "jax.value_and_grad",
        "jax.vmap",
    )
}


def _short_names(identifier):
    """`health` and `diagnostics.health` for `jmp_scale.diagnostics.health`."""
    parts = identifier.split(".")[1:]  # without jmp_scale
    if len(parts) > 1:
        yield ".".join(parts)
    if parts[0] != "presets" and parts[-1] not in NEVER_ALONE:
        yield parts[-1]


NAMES = OWN | {short: name for name in OWN for short in _short_names(name)}
# Code, headings and links as they are; a code span of one name becomes a link.
# In the reference: the types and defaults of arguments and results, which a signature
# shows; and the dash between an attribute's type and its meaning.
ARGUMENTS = re.compile(
    r'<span class="doc-section-title">Parameters:.*?</ul>', re.DOTALL
)
TYPE = re.compile(r"(</b>)\s*\(<code>.*?\)\s*\u2013\s*(?=<div)", re.DOTALL)
RESULT = re.compile(
    r'(doc-section-title">Returns:.*?field-body">)\s*<code>.*?\u2013\s*(?=<div)',
    re.DOTALL,
)
DASH = re.compile(r"(</b>|</code>|\))\s*\u2013\s*(?=<div)")
PARTS = re.compile(
    r"<pre.*?</pre>|<h\d.*?</h\d>|<a[ >].*?</a>|<autoref.*?</autoref>"
    r"|<code>(?P<name>[\w.]+)</code>",
    re.DOTALL,
)


# Addresses that the site had, and where what stood there is now. A section (#) of an
# old page that has the same name on the new one is found there.
MOVED = {
    "api/checkpoints": "api/flax",
    "api/finite": "api/index#jmp_scale.all_finite",
    "api/gradients": "api/index#jmp_scale.value_and_grad",
    "api/loss-scales": "api/index#jmp_scale.DynamicLossScale",
    "api/optax": "api/index#jmp_scale.with_loss_scale",
    "api/plotting": "api/diagnostics#jmp_scale.plotting.plot_loss_scale",
    "api/policy": "api/index#jmp_scale.autocast",
    "api/runs": "api/diagnostics#jmp_scale.diagnostics.LossScaleHistory",
    "benchmarks": "memory#measure",
    "choose": "quickstart#your-library",
    "choose-a-scale": "how-it-works#choose",
    "citation": "stability#cite",
    "coming-from/apply-if-finite": "coming-from/others#apply_if_finite",
    "coming-from/deepspeed-megatron": "coming-from/others#deepspeed-megatron",
    "coming-from/flax-dynamicscale": "coming-from/others#dynamicscale",
    "coming-from/jmp": "coming-from/others#jmp",
    "coming-from/keras": "coming-from/others#keras",
    "coming-from/presets": "coming-from/others#presets",
    "coming-from/state-dicts": "checkpoints#state-dicts",
    "coming-from/version-0.1": "checkpoints#version-01",
    "contributing": "stability#contribute",
    "half-precision": "precision#by-hand",
    "myths": "do-i-need-it#claims",
    "notebook": "examples#notebook",
    "several-losses": "optax#several-losses",
    "spike-rules": "spikes#how-often-it-is-wrong",
    "which-half": "do-i-need-it#which-half",
}
# Sections that left a page that is still there.
MOVED_SECTIONS = {
    "autocast": {
        "memory": "memory#memory",
        "how-much-memory-do-i-save": "memory#memory",
        "what-it-costs-compile-time-a-slow-first-step": "memory#compile-time",
        "beside-jaxs-own-means-and-other-libraries": "compare#autocast",
        "from-torchautocast-keras-and-jmp": "coming-from/pytorch#autocast",
    },
}
IDS = {}  # of each page, by its address
LEADS_ON = """<!doctype html>
<meta charset="utf-8">
<title>Moved</title>
<noscript><meta http-equiv="refresh" content="0; url={new}"></noscript>
<script>
const to = new URL("{new}", location), section = location.hash
if ({ids}.includes(section.slice(1))) to.hash = section
location.replace(to)
</script>
<a href="{new}">This page has moved.</a>
"""


def on_page_markdown(markdown, page, **_):
    """The reference gets its table of all names."""
    if page.file.src_uri == "api/index.md":
        return markdown.replace("<!-- all names -->", _table())
    return markdown


def _table():
    """All public names by module, each with a link to its entry."""
    rows = ["| module | names |", "|---|---|"]
    entries = sorted(OWN, key=lambda name: (name.rpartition(".")[0], name))
    for module, names in itertools.groupby(entries, lambda n: n.rpartition(".")[0]):
        links = [f"[`{name.rpartition('.')[2]}`][{name}]" for name in names if module]
        if links:
            rows.append(f"| `{module}` | {', '.join(links)} |")
    return "\n".join(rows)


def on_page_content(html, page, **_):
    """A code span that is a name becomes a link, the first time the page has it."""
    own_page = DOCS / page.file.src_uri
    seen = set(re.findall(r"^::: (\S+)$", own_page.read_text(), re.MULTILINE))

    def linked(match):
        name, whole = match["name"], match[0]
        target = NAMES.get(name or "") or OTHERS.get(name or "")
        if target is None or target in seen:
            return whole
        seen.add(target)
        if target.startswith("http"):
            return f'<a href="{target}">{whole}</a>'
        return f'<autoref identifier="{target}" optional>{whole}</autoref>'

    html = ARGUMENTS.sub(lambda part: TYPE.sub(r"\1:", part[0]), html)
    html = DASH.sub(r"\1:", RESULT.sub(r"\1", html))
    return PARTS.sub(linked, html)


def on_post_page(output, page, **_):
    """Remembers the page's anchors, and leads on from sections that have left it."""
    name = page.file.dest_uri.removesuffix(".html")
    IDS[name] = re.findall(r' id="([^"]+)"', output)
    sections = {
        f"#{section}": _address(name, target)
        for section, target in MOVED_SECTIONS.get(name, {}).items()
    }
    if not sections:
        return output
    script = (
        f"const to = {json.dumps(sections)}[location.hash];if (to) location.replace(to)"
    )
    return output.replace("</head>", f"<script>{script}</script></head>")


def on_post_build(config, **_):
    """A small page at each old address, which leads on to the new one."""
    for old, target in MOVED.items():
        address = _address(old, target)
        page, _, section = target.partition("#")
        assert not section or section in IDS[page], (old, target)
        path = pathlib.Path(config.site_dir, f"{old}.html")
        path.parent.mkdir(exist_ok=True)
        ids = json.dumps(IDS[page])
        path.write_text(LEADS_ON.format(new=address, ids=ids))


def _address(start, target):
    """The address of `page#section`, relative to the page `start`."""
    page, hash_, section = target.partition("#")
    return (
        os.path.relpath(page, os.path.dirname(start) or ".") + ".html" + hash_ + section
    )
