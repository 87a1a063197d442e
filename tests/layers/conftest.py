"""Layers are tested on the op itself, at lengths where they would write its mask out."""

import pytest

from smat.layers import call


@pytest.fixture(autouse=True)
def _no_length_is_short(request, monkeypatch):
    if "short" not in request.module.__name__:
        monkeypatch.setattr(call, "SHORT", 0)
