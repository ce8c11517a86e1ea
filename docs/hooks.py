"""What MkDocs calls: search, links of names, a table of names, programs, the notebook.

Names are those of the pages in docs/api. The addresses of JAX's and Optax's are spelled
out, because the site is built without a network.
"""

import itertools
import json
import logging
import pathlib
import re
import tomllib

import griffe
import pygments
import yaml
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

DOCS = pathlib.Path(__file__).parent
WORDS = yaml.safe_load((DOCS / "search_words.yml").read_text())
PACKAGE = griffe.load("jmp_scale", search_paths=[DOCS.parent])
# What `npm ci --prefix docs` installs.
MINISEARCH = DOCS / "node_modules/minisearch"
MATERIALS_WORKER = re.compile(r"assets/javascripts/workers/search\.\w+\.min\.js")
# On the repository's host only the sentence shows; on the site only the entries.
ENTRIES = re.compile(r"^Entries: .*\n\n|^<!-- entries$|^-->$", re.MULTILINE)
# A program that a page links, alone on its line; before it, what it prints.
PROGRAMS = re.compile(
    r"^(```[^\n]*\n[^`]*```\n\n)?"
    r"((?:\[The [^\n]+\]\(\S+\.(?:py|txt|cff)\)\n+)+)",
    re.MULTILINE,
)
PROGRAM = re.compile(r"\[(.+)\]\((.+)\)")
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
    """`metrics` and `diagnostics.metrics` for `jmp_scale.diagnostics.metrics`."""
    parts = identifier.split(".")[1:]  # without jmp_scale
    if len(parts) > 1:
        yield ".".join(parts)
    if parts[0] != "presets" and parts[-1] not in NEVER_ALONE:
        yield parts[-1]


NAMES = OWN | {short: name for name in OWN for short in _short_names(name)}
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
# The statistics of a guard, which are no arguments of its users.
STATISTICS = re.compile(
    r' *<span class="o">\*</span><span class="p">,</span>\n'
    r'(?: *<span class="n">\w+</span>[^\n]*>LeafField</span>[^\n]*\n)+'
)
HEADING = re.compile(r'<h2 id="([\w.]+)" class="doc doc-heading">.*?</h2>', re.DOTALL)
DASH = re.compile(r"(</b>|</code>|\))\s*\u2013\s*(?=<div)")
# A narrow column of a table breaks a name behind its dots.
DOTTED = re.compile(r"(?<=<code>)\w+\.[\w.]+(?=</code>)")
# Code, headings and links as they are; a code span of one name becomes a link.
PARTS = re.compile(
    r"<pre.*?</pre>|<h\d.*?</h\d>|<a[ >].*?</a>|<autoref.*?</autoref>"
    r"|<code>(?P<name>[\w.]+)</code>",
    re.DOTALL,
)


def on_config(config):
    """The site's address and the repository's are those of pyproject.toml, if known."""
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]
    urls = project["urls"]
    if "/OWNER/" not in urls["Repository"]:
        config.site_url = f"{urls['Documentation']}/"
        config.repo_url = urls["Repository"]
        config.repo_name = config.site_name
    return config


def on_files(files, config, **_):
    """The site's search needs MiniSearch; without it Material's own stays."""
    if not MINISEARCH.exists():
        message = "npm ci --prefix docs was not run: the site has Material's own search"
        logging.getLogger("mkdocs.hooks").info(message)
        return files
    for name, source in {
        "minisearch.js": "dist/umd/index.js",
        "minisearch-license.txt": "LICENSE.txt",
    }.items():
        path = str(MINISEARCH / source)
        files.append(File.generated(config, name, abs_src_path=path))
    return files


def on_post_page(output, **_):
    """The site's search runs `search_worker.js` in place of Material's worker."""
    if not MINISEARCH.exists():
        return output
    return MATERIALS_WORKER.sub("search_worker.js", output)


def on_post_build(config, **_):
    """Gives the words of search_words.yml to the entries of the search's index."""
    path = pathlib.Path(config.site_dir, "search/search_index.json")
    index = json.loads(path.read_text())
    for key, words in WORDS.items():
        place = key.replace(".md", ".html")
        entries = [
            entry
            for entry in index["docs"]
            if entry["location"] == place
            or ("#" in place and entry["location"].startswith(place))
        ]
        if not entries:
            raise PluginError(f"search_words.yml: there is no page or section {key}")
        entries[0]["tags"] = words
    path.write_text(json.dumps(index, separators=(",", ":")))


def on_page_markdown(markdown, page, **_):
    """What the repository's host links, the site shows: programs, notebook, changes."""
    if page.file.src_uri.startswith("api/"):
        markdown = ENTRIES.sub("", markdown)
        return markdown.replace("<!-- all names -->", _table())
    if page.file.src_uri == "notebook.md":
        return markdown.replace(
            "[The notebook](float16_on_a_free_gpu.ipynb)", _notebook()
        )
    if page.file.src_uri == "stability.md":
        changes = (DOCS.parent / "CHANGELOG.md").read_text().partition("\n## ")
        markdown = markdown.replace(
            "[The changes](../CHANGELOG.md)", "## " + changes[2]
        )
    return PROGRAMS.sub(_with_programs, markdown)


def _with_programs(match):
    """Programs that the repository's host links are shown here, folded."""
    parts = ["<div data-search-exclude markdown>", match[1] or ""]
    for title, path in PROGRAM.findall(match[2]):
        code = f"```py\n{(DOCS / path).read_text()}```"
        parts.append(f"<details markdown>\n<summary>{title}</summary>\n\n{code}")
        parts.append("</details>")
    return "\n\n".join([*parts, "</div>\n\n"])


def _notebook():
    """The notebook as Markdown: its text, its code, and what it printed and drew."""
    notebook = json.loads((DOCS / "float16_on_a_free_gpu.ipynb").read_text())
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```py\n{source}\n```")
        parts.extend(_output(output) for output in cell["outputs"])
    link = "[Download it](float16_on_a_free_gpu.ipynb) to run it in Jupyter or Colab."
    parts.insert(1, link)
    return "\n\n".join(parts)


def _output(output):
    """A cell's output as Markdown: text, or a picture within the page."""
    if "text" in output:
        return f"```text\n{''.join(output['text']).rstrip()}\n```"
    data = output["data"]
    if "image/png" in data:
        picture = "".join(data["image/png"]).replace("\n", "")
        alt = "The figure that this cell draws"
        return f'<img alt="{alt}" src="data:image/png;base64,{picture}">'
    return f"```text\n{''.join(data['text/plain'])}\n```"


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
    html = STATISTICS.sub("", DASH.sub(r"\1:", RESULT.sub(r"\1", html)))
    html = HEADING.sub(lambda heading: heading[0] + _source(heading[1]), html)
    html = PARTS.sub(linked, html)
    return DOTTED.sub(lambda name: name[0].replace(".", ".<wbr>"), html)


def _source(name):
    """The source of a name of the package, folded."""
    found = PACKAGE[name.removeprefix("jmp_scale.")]
    found = found.final_target if found.is_alias else found
    place = f"{found.filepath.relative_to(DOCS.parent)}, line {found.lineno}"
    code = pygments.highlight(found.source, PythonLexer(), HtmlFormatter())
    summary = f'<summary title="{place}">source</summary>'
    return f'<details class="source" data-search-exclude>{summary}{code}</details>'
