"""Every test of the delta rule runs on both backends, however short its sequences are."""

from unittest import mock

import pytest

from smat.ops import backend
from smat.ops.native import build


@pytest.fixture(scope="module", autouse=True, params=["torch", "native"])
def rule_backend(request):
    if request.param == "native" and (reason := build.why_not()) is not None:
        pytest.skip(f"no native kernels: {reason}")
    tokens = 0 if request.param == "native" else 1 << 62
    with mock.patch.object(backend, "NATIVE_TOKENS", tokens):
        yield request.param
