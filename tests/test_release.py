"""A release, rehearsed on a copy of the repository: its checks, files and site.

Needs the groups `dev` and `docs`.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

pytestmark = pytest.mark.slow
ROOT = pathlib.Path(__file__).parents[1]
ADDRESS = "https://github.com/an-owner/jmp_scale"
WORKFLOW = (ROOT / ".github/workflows/release.yml").read_text()
# Its own lines that refuse a tag.
GUARDS = re.findall(r"- run: '?((?:! grep|test ).*?)'?$", WORKFLOW, re.MULTILINE)
NOT_COPIED = (".git", ".?*_cache", ".venv*", "__pycache__", "mutants")


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy with the address of an owner, and the version of a candidate."""
    folder = tmp_path_factory.mktemp("copy") / "jmp_scale"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*NOT_COPIED))
    run(folder, sys.executable, ".ci/release", "an-owner")
    for name in ("jmp_scale/__init__.py", "CITATION.cff"):
        text = (folder / name).read_text()
        (folder / name).write_text(text.replace(".dev0", "rc1"))
    return folder


def run(folder, *command):
    paths = os.environ | {
        "NO_MKDOCS_2_WARNING": "1",
        "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
    }
    subprocess.run(command, cwd=folder, check=True, env=paths)


def refused(folder, tag):
    """Which lines of the workflow fail, each as a step of its own."""
    shell = {"cwd": folder, "env": os.environ | {"GITHUB_REF_NAME": tag}}
    return [subprocess.run(["bash", "-c", line], **shell).returncode for line in GUARDS]


def test_a_tag_is_refused_without_an_owner_or_with_another_version(copy):
    assert len(GUARDS) == 2
    assert refused(ROOT, "v0.2.0rc1") == [1, 1]
    assert refused(copy, "v0.2.0") == [0, 1]
    assert refused(copy, "v0.2.0rc1") == [0, 0]


def test_the_wheel_tells_an_index_how_to_install_it(copy, tmp_path):
    for package in ("hatchling", "hatch_fancy_pypi_readme", "twine"):
        pytest.importorskip(package)
    run(copy, sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path))
    files = sorted(map(str, tmp_path.iterdir()))
    assert [pathlib.Path(file).suffix for file in files] == [".whl", ".gz"]
    run(copy, sys.executable, "-m", "twine", "check", "--strict", *files)
    wheel = zipfile.ZipFile(files[0])
    metadata = wheel.read("jmp_scale-0.2.0rc1.dist-info/METADATA").decode()
    assert 'pip install "jmp_scale[flax]"' in metadata
    assert f"]({ADDRESS}/blob/main/docs/quickstart.md)" in metadata
    assert "OWNER" not in metadata
    assert "git clone" not in metadata


def test_the_site_links_the_repository_and_the_notebook_on_colab(copy, tmp_path):
    pytest.importorskip("mkdocs")
    mkdocs = (sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict")
    run(copy, *mkdocs, "--site-dir", str(tmp_path))
    index = (tmp_path / "index.html").read_text()
    assert '<link rel="canonical" href="https://an-owner.github.io/jmp_scale/' in index
    assert f'<a href="{ADDRESS}"' in index
    assert f'<a href="{ADDRESS}/issues"' in index
    assert '<code>pip install "jmp_scale[flax]"</code>' in index
    colab = ADDRESS.replace("github.com", "colab.research.google.com/github")
    assert f'href="{colab}/blob/main/docs/' in (tmp_path / "notebook.html").read_text()


def test_what_the_tests_say_of_readme_holds_afterwards(copy):
    words = "install_line or absolute or keywords"
    run(
        copy, sys.executable, "-m", "pytest", "-n0", "-k", words, "tests/test_readme.py"
    )
    assert f"\nrepository-code: {ADDRESS}\n" in (copy / "CITATION.cff").read_text()
