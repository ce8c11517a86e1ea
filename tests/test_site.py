"""The built site: what its search answers, and what its pages show.

Needs the group `docs` and Node.js, which runs the search as a browser would.
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
# What people type, and the pages that answer it.
QUESTIONS = {
    # asked of the site by people who had not read it
    "loss is NaN from step 1": "troubleshoot faq",
    "gradient accumulation": "optax",
    "with pmap": "devices",
    "resume": "checkpoints faq",
    "what S should I start at": "choose-a-scale faq",
    "multi_transform": "faq",
    "bf16 why": "faq spikes",
    "wandb": "faq monitor",
    "EMA": "optax",
    "off in eval": "faq",
    "vmap over seeds": "faq",
    "LoRA": "faq",
    "fp8": "flax faq",
    "how many skipped": "faq monitor",
    "S went to 1": "troubleshoot faq",
    "from Flax DynamicScale": "coming-from/flax-dynamicscale",
    "what does it cost": "compare faq",
    "how do I test it": "faq",
    "x64": "faq",
    "complex": "faq",
    # and twenty more
    "install": "quickstart",
    "quick start": "quickstart",
    "autocast": "autocast",
    "mixed precision": "autocast",
    "initial loss scale": "choose-a-scale faq",
    "frozen parameters": "faq",
    "GradScaler": "coming-from/pytorch",
    "torch.amp": "coming-from/pytorch",
    "mixed_float16": "coming-from/keras",
    "clip gradients": "optax",
    "batchnorm": "flax",
    "apply_if_finite": "coming-from/apply-if-finite",
    "GAN": "several-losses",
    "steps are skipped": "troubleshoot",
    "loss spike": "spikes",
    "T4": "which-half",
    "bfloat16 on TPU": "which-half faq spikes",
    "attention mask of 1e9": "precision",
    "Equinox": "choose half-precision",
    "shard_map": "devices",
    "FSDP": "devices",
    "remat": "faq",
    "donate": "faq",
    "jmp or mpx": "compare coming-from/jmp",
    "TensorBoard": "faq monitor",
    "master weights": "half-precision",
    "cite": "citation",
    "DeepSpeed fp16": "coming-from/deepspeed-megatron",
    "checkpoint from PyTorch": "coming-from/state-dicts",
    "hysteresis": "choose-a-scale api/loss-scales",
    "gradient penalty": "optax",
    # of a user of torch.amp with a T4
    "does my T4 need float16 or bfloat16": "do-i-need-it which-half",
    "where is scaler.unscale_ before clipping": "coming-from/pytorch",
    "torch.cuda.amp": "coming-from/pytorch",
    "scaler.step equivalent": "coming-from/pytorch",
    "resume GradScaler state_dict": "coming-from/state-dicts",
    "how much slower is it": "compare faq",
    "which ops are float16": "autocast faq",
    # of a user of Flax with bfloat16 on TPUs
    "is loss scaling needed for bfloat16": "do-i-need-it faq myths",
    "skip NaN steps in bfloat16": "spikes",
    "NNX BatchNorm": "flax",
    "data parallel sharding": "devices",
    "loss spikes during training": "spikes",
    "Orbax checkpoint": "checkpoints",
    "keep layernorm in float32": "autocast faq",
    # of a user of Optax and Equinox
    "filter_value_and_grad": "choose",
    "eqx.nn.MLP": "choose half-precision",
    "clip_by_global_norm order": "optax",
    "inject_hyperparams learning rate": "faq optax",
    "get loss scale from opt_state": "coming-from/pytorch optax",
    "does it work with optax.chain": "optax",
}


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
def test_search_answers_with_the_first_or_second_page(site):
    if shutil.which("node") is None:
        pytest.skip("needs Node.js to run the site's search")
    answers = subprocess.run(
        ["node", str(ROOT / "docs/search_check.mjs"), str(site)],
        input="\n".join(QUESTIONS),
        capture_output=True,
        check=True,
        text=True,
    ).stdout.splitlines()
    wrong = {}
    for (question, right), answer in zip(QUESTIONS.items(), answers, strict=True):
        found = [hit["page"].removesuffix(".html") for hit in json.loads(answer)]
        if not set(found[:2]) & set(right.split()):
            wrong[question] = found[:4]
    assert not wrong


@pytest.mark.slow
def test_the_table_of_all_names_has_each_with_a_link_to_its_entry(site):
    table = (site / "api/index.html").read_text()
    linked = set(re.findall(r'<td><a [^>]*href="[^"]*#(jmp_scale[\w.]*)"', table))
    assert linked == {name for module in MODULES for name in public_names(module)}


@pytest.mark.slow
def test_signatures_show_no_private_argument(site):
    signature = re.compile(r'doc-signature highlight">.*?</pre>', re.DOTALL)
    pages = [page.read_text() for page in site.glob("api/*.html")]
    shown = "\n".join(found for page in pages for found in signature.findall(page))
    arguments = re.findall(r"^ +(\w+)", re.sub(r"<[^>]+>", "", shown), re.MULTILINE)
    assert "loss_scale" in arguments
    assert not [name for name in arguments if name.startswith("_")]


@pytest.mark.slow
def test_pages_load_nothing_from_another_host(site):
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|img|link)[^>]*(?:src|href)="(\w+:[^"]*)', page.read_text()
        )
        assert all(link.startswith("data:") for link in loaded), (page, loaded)
