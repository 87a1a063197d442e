"""What several tests of decoding ask for."""

import pytest

from smat.ops.smat import fold


@pytest.fixture
def thin_shares(monkeypatch):
    """Let folds as small as those of tests be spread over many tokens, too."""
    monkeypatch.setattr(fold, "LINE", 1)
    monkeypatch.setattr(fold, "SLAB_ELEMENTS", 1)
