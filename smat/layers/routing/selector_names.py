"""The selectors by the names that layers take: `selector="top_types"`."""

from __future__ import annotations

from collections.abc import Mapping

from smat.layers.routing.request import LearnedRequest, RequestHyperplane
from smat.layers.routing.selectors import (
    FactoredTopTypes,
    OwnCell,
    OwnHyperplane,
    Selector,
    TopTypes,
)

SELECTORS: Mapping[str, type[Selector]] = {
    "top_types": TopTypes,
    "factored": FactoredTopTypes,
    "own_hyperplane": OwnHyperplane,
    "own_cell": OwnCell,
    "request": RequestHyperplane,
    "learned_request": LearnedRequest,
}
