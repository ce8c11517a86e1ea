"""The built site: what its search answers, and what its pages show.

Needs the group `docs`; the search also Node.js and `npm ci --prefix docs`.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess

import pytest
from test_docs import MODULES, public_names

ROOT = pathlib.Path(__file__).parents[1]
TABLE = (ROOT / "tests/search_questions.txt").read_text()
QUESTIONS = dict(re.findall(r"^([^#\s].*) -> (.*)$", TABLE, re.MULTILINE))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(
        ["mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        check=True,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )
    return folder


@pytest.mark.slow
def test_search_shows_the_right_section_in_the_first_two_results(site):
    """As a browser shows them: a page, and the sections that stand unfolded below."""
    if shutil.which("node") is None or not (site / "minisearch.js").exists():
        pytest.skip("needs Node.js, and MiniSearch from npm")
    answers = subprocess.run(
        ["node", str(ROOT / "docs/search_check.mjs"), str(site)],
        input="\n".join(QUESTIONS),
        capture_output=True,
        check=True,
        text=True,
    ).stdout.splitlines()
    wrong = {}
    for (question, right), answer in zip(QUESTIONS.items(), answers, strict=True):
        shown = [
            place.replace(".html", "")
            for hit in json.loads(answer)[:2]
            for place in [hit["page"], *hit["shown"]]
        ]
        found = [
            place.startswith(section) if "#" in section else place == section
            for place in shown
            for section in right.split()
        ]
        if not any(found):
            wrong[question] = shown
    assert len(wrong) <= 0.05 * len(QUESTIONS), wrong


@pytest.mark.slow
def test_the_table_of_all_names_has_each_with_a_link_to_its_entry(site):
    table = (site / "api/index.html").read_text()
    (table,) = re.findall(r"<th>names</th>.*?</table>", table, re.DOTALL)
    linked = set(re.findall(r'<a [^>]*href="[^"]*#(jmp_scale[\w.]*)"', table))
    assert linked == {name for module in MODULES for name in public_names(module)}


@pytest.mark.slow
def test_pages_load_nothing_from_another_host(site):
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|img|link)[^>]*(?:src|href)="(\w+:[^"]*)', page.read_text()
        )
        assert all(link.startswith("data:") for link in loaded), (page, loaded)
