"""Weights of neighbouring libraries, so that a pretrained model can be given a memory.

Where they differ for several groups of heads: mamba_ssm, with which such models are trained, norms
every group alone, and transformers' torch path all of them together. Both have the heads of a group
side by side; fla's prefill on a CPU, which repeats groups as a whole, deals them out in turn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from smat.layers import GatedDeltaNet, TransportedMemory
from smat.models.hf.configuration import SMatConfig
from smat.models.hf.modeling import SMatForCausalLM

NAMES = {  # transformers' Mamba-2, and ours
    "backbone.embeddings.": "model.embed_tokens.",
    "backbone.norm_f.": "model.norm.",
    "backbone.layers.": "model.layers.",
    ".conv1d.": ".conv.",
}


def convert_mamba2(
    model: nn.Module,
    memory: Mapping[str, Any] | None = None,
    *,
    grouped_norm: bool = False,
    tiled_heads: bool = False,
    **config: Any,
) -> SMatForCausalLM:
    """Make the same model of a Mamba2ForCausalLM of transformers, in fp32 with the same logits.

    >>> from transformers import Mamba2Config, Mamba2ForCausalLM
    >>> small = {"hidden_size": 16, "num_heads": 4, "head_dim": 8, "state_size": 4, "n_groups": 2}
    >>> theirs = Mamba2ForCausalLM(Mamba2Config(vocab_size=32, num_hidden_layers=2, **small))
    >>> ours = convert_mamba2(theirs, memory={"vc_dim": 2}, context_length=64)
    >>> ours.config.mixers[0]["mixer"], ours.model.layers[0].mixer.memory.mask.vc_dim
    ('mamba2_smat', 2)

    Args:
        model: The other model; it stays as it is.
        memory: Options of "mamba2_smat" for a new memory in every layer: its weights are drawn, and
            with a window as long as the text nothing of it is heard yet.
        grouped_norm: Norm every group alone, as mamba_ssm does, instead of what `model` does.
        tiled_heads: The heads of `model` take groups in turn; ours are put side by side.
        config: More of `SMatConfig`, such as `context_length`.
    """
    theirs: Any = model.config
    low, high = theirs.time_step_limit
    if low > 0 or high < math.inf or theirs.hidden_act not in ("silu", "swish"):
        limits = f"time_step_limit = ({low}, {high}) and hidden_act = {theirs.hidden_act!r}"
        raise ValueError(f"a layer without limits and with SiLU cannot follow {limits}")
    if grouped_norm and tiled_heads:
        raise ValueError("heads that take groups in turn have no norm of a group")
    spec = {
        "mixer": "mamba2" if memory is None else "mamba2_smat",
        "head_dim": theirs.head_dim,
        "state_dim": theirs.state_size,
        "expand": theirs.expand,
        "num_groups": theirs.n_groups,
        "norm_groups": theirs.n_groups if grouped_norm else 1,
        "conv_size": theirs.conv_kernel,
        "conv_bias": theirs.use_conv_bias,
        "bias": theirs.use_bias,
        "norm_eps": theirs.layer_norm_epsilon,
        **(memory or {}),
    }
    tokens = {name: getattr(theirs, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    ours = SMatForCausalLM(
        SMatConfig(
            vocab_size=theirs.vocab_size, hidden_size=theirs.hidden_size, mixers=[spec],
            num_hidden_layers=theirs.num_hidden_layers, norm_eps=theirs.layer_norm_epsilon,
            tie_word_embeddings=theirs.tie_word_embeddings,
            **{f"{name}_token_id": value for name, value in tokens.items()}, **config,
        )
    )  # fmt: skip
    weights = {_renamed(name): x for name, x in model.state_dict().items()}
    weights = {name: x.squeeze(1) if ".conv.w" in name else x for name, x in weights.items()}
    if tiled_heads:
        weights = {name: _untiled(name, x, theirs) for name, x in weights.items()}
    found = ours.load_state_dict(weights, strict=False)
    missing = [name for name in found.missing_keys if ".memory." not in name]
    if missing or found.unexpected_keys:
        raise ValueError(f"missing are {missing}, and not known {found.unexpected_keys}")
    return ours.to(next(model.parameters()).dtype).train(model.training)


def _renamed(name: str) -> str:
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


def _untiled(name: str, x: Tensor, theirs: Any) -> Tensor:
    """Put heads that take groups in turn side by side with those of their group."""
    kind = name.split(".mixer.")[-1]
    heads, width, shared = theirs.num_heads, theirs.head_dim, theirs.n_groups * theirs.state_size
    head = torch.arange(heads).view(-1, theirs.n_groups).t().flatten()
    channel = (head[:, None] * width + torch.arange(width)).flatten()
    inner = len(channel)
    convolved = torch.cat([channel, torch.arange(inner, inner + 2 * shared)])
    projected = torch.cat([channel, inner + convolved, 2 * inner + 2 * shared + head])
    rows = {
        "in_proj.weight": projected, "in_proj.bias": projected, "conv.weight": convolved,
        "conv.bias": convolved, "norm.weight": channel, "A_log": head, "D": head, "dt_bias": head,
    }  # fmt: skip
    if ".mixer." not in name:
        return x
    return x[:, channel] if kind == "out_proj.weight" else x[rows[kind]] if kind in rows else x


def convert_gated_deltanet(
    layer: nn.Module, memory: TransportedMemory | None = None
) -> GatedDeltaNet:
    """Make the same layer of a GatedDeltaNet of flash-linear-attention.

    Its convolutions have no bias, its gate is SiLU, and there are as many heads of values as of
    keys; others are refused.
    """
    theirs: Any = layer
    gate = getattr(theirs.o_norm, "activation", "swish")
    if (
        theirs.num_v_heads != theirs.num_heads or theirs.conv_bias or not theirs.use_short_conv
        or gate not in ("swish", "silu")
    ):  # fmt: skip
        raise ValueError(
            f"num_v_heads = {theirs.num_v_heads} of {theirs.num_heads} heads, conv_bias = "
            f"{theirs.conv_bias}, use_short_conv = {theirs.use_short_conv}, gate {gate!r}: only "
            "as many value heads as key heads, a convolution without bias, and SiLU are known"
        )
    ours = GatedDeltaNet(
        theirs.hidden_size, num_heads=theirs.num_heads, head_dim=theirs.head_dim,
        expand_v=theirs.expand_v, conv_size=theirs.conv_size, output_gate=theirs.use_gate,
        allow_neg_eigval=theirs.allow_neg_eigval, norm_eps=theirs.o_norm.eps, memory=memory,
        layer_idx=theirs.layer_idx,
    )  # fmt: skip
    weights = {name.replace("o_norm.", "norm."): x for name, x in layer.state_dict().items()}
    parts = [
        [weights.pop(f"{each}_{kind}.weight") for each in "qkv"] for kind in ("proj", "conv1d")
    ]
    weights["qkv_proj.weight"], conv = (torch.cat(each) for each in parts)
    weights["conv.weight"] = conv.squeeze(1)
    ours.load_state_dict(weights, strict=memory is None)
    return ours
