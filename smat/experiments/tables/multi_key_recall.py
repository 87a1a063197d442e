"""Multi-key subset recall (tab:mkar): one query, k keys, exactly their payloads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smat.experiments.run import Experiment, Run
from smat.geometry import Geometry
from smat.models import ModelConfig
from smat.tasks import MultiKeyRecall
from smat.training import TrainingConfig

DESCRIBE = """\
One layer: learned positions, short convolution of width 3, mixer with four heads, RMSNorm of \
queries and keys, a scalar decay, an MLP of four times the width; AdamW at a constant rate, weight \
decay 0.1 on matrices, clipping at 1, a separate model for each k. SMat files every token under \
the hash of the token before it, one random table of token ids a head, and an answer row reads the \
hyperplane through its own cell in the first direction on which the cells of all k keys agree \
(direction 0 if none does). LSH reads its own cell alone, of as many cells as d = 3 (121 at the \
paper's length) or d = 4 (125) have. Memory-matched linear attention has keys of B + 1 times the \
width of d = 3. A learned direction is the argmax of a linear map of the answer row, trained \
straight through; Mamba-2 + SMat is the additive memory with four learned reads. Answer rows are \
the same in all examples, and only they are computed behind keys and values. Training is in fp32: \
bf16 brings no speed on a CPU."""

ARMS = {
    "softmax": "Softmax",
    "mamba2": "Mamba-2",
    "deltanet": "DeltaNet",
    "gated_deltanet": "Gated DeltaNet",
    "log_linear": "Log-Linear",
    "linear": "Linear attention",
    "linear_matched": "Linear attention (memory matched)",
    "lsh_121": "LSH bucketing, cells of d = 3",
    "lsh_125": "LSH bucketing, cells of d = 4",
    "smat_d2": "SMat (d = 2)",
    "smat_d3": "SMat (d = 3)",
    "smat_d4": "SMat (d = 4)",
    "smat_d3_learned": "SMat (d = 3), learned direction",
    "smat_d4_learned": "SMat (d = 4), learned direction",
    "mamba2_smat_d2": "Mamba-2 + SMat (d = 2)",
    "mamba2_smat_d3": "Mamba-2 + SMat (d = 3)",
    "mamba2_smat_d4": "Mamba-2 + SMat (d = 4)",
}
CELLS = {f"k={k}": f"k = {k}" for k in (1, 2, 3)}
PRESETS = {
    "quick": "T = 128, width 64, 300 of 12,000 steps at 2e-3, one seed, softmax, linear and SMat",
    "standard": "T = 256, width 128, 700 of 12,000 steps at 1.5e-3, one seed",
    "paper": "as in the paper (T = 1,024, width 256, 12,000 steps, three seeds), but in fp32",
}
# sequence length, width, learning rate, steps
SIZES = {
    "quick": (128, 64, 2e-3, 300),
    "standard": (256, 128, 1.5e-3, 700),
    "paper": (1024, 256, 3e-4, 12_000),
}
SEEDS = {"quick": (0,), "standard": (0,), "paper": (0, 1, 2)}
QUICK_ARMS = ("softmax", "linear", "smat_d2", "smat_d3", "smat_d4")


def model_of(arm: str, width: int, seq_len: int) -> ModelConfig:
    """Return the model of an arm: four heads, and a state as wide as a head."""
    head = width // 4
    if arm == "softmax":
        mixer, options = arm, {"num_heads": 4, "qk_norm": True, "positions": "none"}
    elif arm in ("mamba2", "log_linear"):
        mixer = "mamba2" if arm == "mamba2" else "mamba2_log_linear"
        options = {"head_dim": head, "state_dim": head, "expand": 1}
    elif arm.startswith("mamba2_smat"):
        mixer = "mamba2_smat"
        options = {"head_dim": head, "state_dim": head, "expand": 1, "vc_dim": int(arm[-1])}
    elif arm in ("deltanet", "gated_deltanet"):
        mixer, options = arm, {"num_heads": 4, "head_dim": head, "expand_v": 1.0}
    else:
        mixer, options = _smat(arm, head, seq_len)
    return ModelConfig(mixer, width, options=options, learned_positions=True, mlp_ratio=4.0)


def _smat(arm: str, head: int, seq_len: int) -> tuple[str, dict[str, Any]]:
    options: dict[str, Any] = {
        "num_heads": 4, "head_dim": head, "conv_size": 3, "qk_norm": True, "decay_gate": True,
        "chunk_size": max(16, seq_len // 4),
    }  # fmt: skip
    if arm == "linear_matched":
        options["feature_dim"] = head * (Geometry.for_distant(seq_len // 2, 3).num_types + 1)
    if arm.startswith("linear"):
        return "linear", options
    if arm.startswith("lsh"):
        return "smat_hashed", options | {"vc_dim": 3 if arm == "lsh_121" else 4, "point_read": True}
    options["vc_dim"] = int(arm.removeprefix("smat_d")[0])
    if arm.endswith("learned"):
        options["learned_direction"] = True
    return "smat_hashed", options


def run(preset: str, arm: str, num_keys: int, seed: int) -> Run:
    """Return one run of the table."""
    seq_len, width, rate, steps = SIZES[preset]
    training = TrainingConfig(
        steps=steps,
        batch_size=32,
        learning_rate=rate,
        optimizer="adamw",
        weight_decay=0.1,
        eval_every=max(100, steps // 6),
        balance_weight=0.01 if arm.startswith("mamba2_smat") else 0.0,
    )
    task = MultiKeyRecall(num_keys, seq_len=seq_len)
    model = model_of(arm, width, seq_len)
    return Run("multi-key-recall", preset, arm, f"k={num_keys}", seed, task, model, training)


def runs(preset: str, seeds: Sequence[int] | None = None) -> list[Run]:
    """Return the runs of a preset."""
    arms = QUICK_ARMS if preset == "quick" else tuple(ARMS)
    return [
        run(preset, arm, num_keys, seed)
        for seed in (SEEDS[preset] if seeds is None else seeds)
        for arm in arms
        for num_keys in (1, 2, 3)
    ]


MULTI_KEY_RECALL = Experiment(
    name="multi-key-recall",
    title="Multi-key subset recall",
    published="tab:mkar, derived:mkar-means, text:mkar-learned, tab:mamba-smat-3seeds-pop",
    arms=ARMS,
    cells=CELLS,
    presets=PRESETS,
    runs=runs,
    describe=DESCRIBE,
)
