"""`import smat` needs torch alone, and a missing extra is named in one line."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import smat

# What torch itself needs; everything else outside the standard library is hidden.
TORCH_AND_ITS_NEEDS = {
    "torch", "torchgen", "functorch", "filelock", "fsspec", "jinja2", "markupsafe", "mpmath",
    "networkx", "sympy", "typing_extensions",
}  # fmt: skip

HIDE = """
import sys

class Hide:
    def __init__(self, visible, hidden):
        self.visible, self.hidden = visible, hidden

    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        known = top in sys.stdlib_module_names or top in self.visible
        if top in self.hidden or (self.visible and not known):
            raise ModuleNotFoundError(f"No module named {top!r}", name=top)
        return None
"""


def run_hiding(script, *, visible=frozenset(), hidden=frozenset()):
    """Run a script in a fresh interpreter that cannot import the hidden packages."""
    hook = f"sys.meta_path.insert(0, Hide({set(visible)!r}, {set(hidden)!r}))"
    source = "\n".join([HIDE, hook, textwrap.dedent(script)])
    return subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=120, check=False
    )


def test_import_works_with_torch_alone():
    done = run_hiding(
        """
        try:
            import numpy
        except ModuleNotFoundError:
            pass
        else:
            raise AssertionError("the hook hides nothing")
        import smat
        geometry = smat.Geometry(vc_dim=3, field_size=5)
        print(geometry.num_types)
        """,
        visible=TORCH_AND_ITS_NEEDS | {"smat"},
    )
    assert (done.returncode, done.stdout) == (0, "30\n"), done.stderr


def test_unknown_names_are_refused_and_known_ones_listed():
    with pytest.raises(AttributeError, match="module 'smat' has no attribute 'attention'"):
        _ = smat.attention
    assert set(smat.__all__) <= set(dir(smat))
    assert all(getattr(smat, name) is not None for name in smat.__all__)


def test_the_citation_has_the_version_of_the_package():
    lines = (Path(smat.__file__).parents[1] / "CITATION.cff").read_text().splitlines()
    assert f"version: {smat.__version__}" in lines


def test_import_loads_no_optional_package():
    optional = ["triton", "transformers", "lightning", "ray", "matplotlib", "typer", "safetensors"]
    done = run_hiding(
        f"""
        import torch
        before = set(sys.modules)
        import smat
        loaded = {{name.partition(".")[0] for name in set(sys.modules) - before}}
        print(sorted(loaded & set({optional!r})))
        """
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@pytest.mark.parametrize(
    "words", [[], ["bench"], ["bench", "prefill"], ["run"], ["mask"], ["data", "prepare"]]
)
def test_help_is_printed_without_torch_within_a_second(words):
    done = run_hiding(
        f"""
        import time
        from smat.__main__ import main
        assert main({[*words, "--help"]!r}) == 0
        print("torch" in sys.modules, time.process_time() < 1)
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False True"


@pytest.mark.parametrize(
    ("hidden", "arguments"),
    [
        ("typer", ["geometry", "--seq-len", "64"]),
        ("rich", ["geometry", "--seq-len", "64"]),
        ("matplotlib", ["mask", "--seq-len", "64", "--out", "never-written.png"]),
        ("pandas", ["report", "--out", "never-written"]),
        ("jinja2", ["report", "--out", "never-written"]),
    ],
)
def test_a_missing_extra_is_one_line_that_names_it(hidden, arguments):
    done = run_hiding(
        f"from smat.__main__ import main\nsys.exit(main({arguments!r}))", hidden={hidden}
    )
    assert done.returncode == 1
    assert done.stderr == (
        f'smat: error: {hidden} is not installed; install it with: pip install "smat[cli]"\n'
    )
