"""Subset routing (tab:routing): how many subsets of k landmarks the rows of a mask can select."""

from __future__ import annotations

from collections.abc import Sequence

from smat.experiments.run import Experiment, Run
from smat.models import RoutingModelConfig
from smat.tasks import SubsetRouting
from smat.training import TrainingConfig

DESCRIBE = """\
One layer of width 64 with 32-dimensional queries, keys and values, Adam at 3e-3, batch 64, 1500 \
steps, fp32, as the paper has it. The paper leaves open, and here is chosen: payloads N(0, 1), \
requests uniform over all subsets, the request named by the query's row alone (the nearest \
realisable row where the mask has none); queries, keys and gates from a learned position table and \
values from payloads alone by one linear map, as the task's definition has zero values elsewhere \
(a second map only added cross-talk of about the metric's 1 %); no bias, and no factor for the \
number of positions that a row sees. The models without a mask are asked at \
the rows of the causal mask, so that (k + 1) / 2^k bounds them whatever they learn; one softmax \
model is told the request as content, at a row that sees everything. Recurrences run bare, one \
head of 32 without convolution. The learning rate falls on a cosine to 0: at the constant rate \
that the paper's text names, the jitter of the last steps alone exceeds the 1 % threshold of the \
metric for k > d (`constant` rows). Evaluation takes 4,096 fresh examples a seed."""

ARMS = {
    "softmax": "Softmax",
    "mamba2": "Mamba-2",
    "deltanet": "DeltaNet",
    "gated_deltanet": "Gated DeltaNet",
    "log_linear": "Log-Linear",
    "smat_d1": "SMat (d = 1)",
    "smat_d2": "SMat (d = 2)",
    "smat_d3": "SMat (d = 3)",
    "smat_d4": "SMat (d = 4)",
    "softmax_content": "Softmax, told the request",
    "smat_d3_constant": "SMat (d = 3), constant rate",
}
CELLS = {f"k={k}": f"k = {k}" for k in range(1, 7)}
PRESETS = {
    "quick": "300 of 1,500 steps, one seed",
    "standard": "1,500 steps as in the paper, one seed",
    "paper": "as in the paper: 1,500 steps, three seeds",
}
STEPS = {"quick": 300, "standard": 1500, "paper": 1500}
SEEDS = {"quick": (0,), "standard": (0,), "paper": (0, 1, 2)}


def run(preset: str, arm: str, num_landmarks: int, seed: int) -> Run:
    """Return one run of the table."""
    mixer, _, kind = arm.partition("_") if arm.startswith(("smat", "softmax")) else (arm, "", "")
    vc_dim = int(kind[1]) if mixer == "smat" else 1
    training = TrainingConfig(
        steps=STEPS[preset],
        batch_size=64,
        learning_rate=3e-3,
        schedule="constant" if arm.endswith("constant") else "cosine",
        final_fraction=0.0,
    )
    task = SubsetRouting(num_landmarks, vc_dim, content=arm == "softmax_content")
    model = RoutingModelConfig(mixer, vc_dim=vc_dim)
    cell = f"k={num_landmarks}"
    return Run("subset-routing", preset, arm, cell, seed, task, model, training)


def runs(preset: str, seeds: Sequence[int] | None = None) -> list[Run]:
    """Return the runs of a preset."""
    return [
        run(preset, arm, num_landmarks, seed)
        for seed in (SEEDS[preset] if seeds is None else seeds)
        for arm in ARMS
        for num_landmarks in range(1, 7)
    ]


SUBSET_ROUTING = Experiment(
    name="subset-routing",
    title="Subset routing",
    published="tab:routing",
    arms=ARMS,
    cells=CELLS,
    presets=PRESETS,
    runs=runs,
    describe=DESCRIBE,
)
