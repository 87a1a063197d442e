"""The two-layer models of MQAR and joint recall: a backbone, its log-linear form, and with SMat."""

from __future__ import annotations

from typing import Any

from smat.models import ModelConfig

BACKBONES = {"gated_deltanet": "Gated DeltaNet", "mamba2": "Mamba-2"}
VC_DIMS = (2, 3, 4)
GDN_HEADS = {16: 1, 32: 2, 64: 2}  # heads of dimension 16, by width


def recall_arms() -> dict[str, str]:
    """Name the rows of both tables.

    >>> list(recall_arms())[:3]
    ['gated_deltanet', 'gated_deltanet_log_linear', 'gated_deltanet_smat_d2']
    """
    arms = {}
    for name, label in BACKBONES.items():
        arms[name] = label
        arms[f"{name}_log_linear"] = f"{label}, Log-Linear"
        arms |= {f"{name}_smat_d{d}": f"{label} + SMat (d = {d})" for d in VC_DIMS}
    return arms


def recall_model(arm: str, width: int) -> ModelConfig:
    """Return a model with heads and states of dimension 16.

    >>> recall_model("mamba2_smat_d3", 32).options["vc_dim"]
    3
    """
    backbone = next(name for name in BACKBONES if arm.startswith(name))
    options: dict[str, Any] = {"head_dim": 16}
    if backbone == "mamba2":
        options |= {"state_dim": 16, "expand": 2}
    else:
        options |= {"num_heads": GDN_HEADS.get(width, max(1, width // 32)), "expand_v": 1.0}
    mixer = backbone
    if arm.endswith("log_linear"):
        mixer = f"{backbone}_log_linear"
    elif "smat" in arm:
        mixer, options["vc_dim"] = f"{backbone}_smat", int(arm[-1])
    return ModelConfig(mixer, width, num_layers=2, options=options, tied=True)
