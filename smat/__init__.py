"""SMat-Attention: causal linear attention with a mask of chosen VC dimension."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smat import schedules
    from smat.distributed import context_parallel, tensor_parallel
    from smat.geometry import Geometry
    from smat.layers import GatedDeltaNet, Mamba2, SMatAttention
    from smat.masks import SMatMask, SMatWarning, vc_dimension
    from smat.ops import SMatState, reference_attention, smat_attention

__all__ = [
    "GatedDeltaNet",
    "Geometry",
    "Mamba2",
    "SMatAttention",
    "SMatMask",
    "SMatState",
    "SMatWarning",
    "context_parallel",
    "reference_attention",
    "schedules",
    "smat_attention",
    "tensor_parallel",
    "vc_dimension",
]
__version__ = "0.1.0"  # the one place that says so: packages and `smat --version` read it here


def __getattr__(name: str) -> Any:
    """Import the library when a name of it is first asked for: help texts do without torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()["schedules"] = import_module("smat.schedules")
    for room in ("geometry", "masks", "distributed", "ops", "layers"):
        module = import_module(f"smat.{room}")
        names = set(module.__all__) & set(__all__)
        globals().update({each: getattr(module, each) for each in names})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
