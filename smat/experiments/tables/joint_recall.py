"""Joint context-key recall (tab:joint_recall): a value is found by a context and a key together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from smat.experiments.recall_models import BACKBONES, recall_arms, recall_model
from smat.experiments.run import Experiment, Run
from smat.models import ModelConfig
from smat.tasks import JointRecall
from smat.training import TrainingConfig

DESCRIBE = """\
The two-layer models of multi-query recall at width 64, AdamW at 3e-3 with weight decay 0.1, batch \
256, 32 epochs, cosine to a tenth and clipping at 1 as the paper's appendix has it. The accuracy \
is the last step's, the equal mean over loads. SMat adds parameters (a scorer for every field \
size), so each backbone also appears widened until it has as many as with d = 3; and the best \
guess from one field of the query alone is among the controls. The mixtures of memories take the \
updates of Gated DeltaNet in the four memories that a router chooses for each token, as many in \
all as d = 3 has profiles, or profiles and types; no memory is shared, nothing is reset."""

MATCHED_WIDTH = {"mamba2": 168, "gated_deltanet": 168}  # within 1 % of the parameters of d = 3
MIXTURES = {
    "mom_profile": "Mixture of memories, as many as profiles of d = 3",
    "mom_storage": "Mixture of memories, as many as profiles and types",
}
ARMS = (
    recall_arms()
    | {f"{name}_matched": f"{label}, parameters matched" for name, label in BACKBONES.items()}
    | MIXTURES
)
CELLS = {"accuracy": "accuracy"}
PRESETS = {
    "quick": "loads of 4 and 16 bindings, width 32, Mamba-2 alone and with d = 2, 300 steps of 64",
    "standard": "loads of 4, 16 and 32 bindings, width 32, Mamba-2 forms, 3,000 steps of 64",
    "paper": "as in the paper: five loads, 32 epochs of 180,000 examples, three seeds, in fp32",
}
SEEDS = {"quick": (0,), "standard": (0,), "paper": (123, 456, 789)}
LOADS = {"quick": ((1, 4), (2, 8)), "standard": ((1, 4), (2, 8), (4, 8))}
QUICK_ARMS = ("mamba2", "mamba2_smat_d2")
STANDARD_ARMS = ("mamba2", "mamba2_log_linear", "mamba2_smat_d2", "mamba2_smat_d3")


def model_of(arm: str, width: int) -> ModelConfig:
    """Return the model of an arm; a matched backbone is wider."""
    if arm in MIXTURES:
        options = {"num_heads": 2, "head_dim": 16, "vc_dim": 3}
        options["count_types"] = int(arm == "mom_storage")
        return ModelConfig("mixture_of_memories", width, num_layers=2, options=options, tied=True)
    if not arm.endswith("_matched"):
        return recall_model(arm, width)
    backbone = arm.removesuffix("_matched")
    return replace(recall_model(backbone, width), width=MATCHED_WIDTH[backbone])


def run(preset: str, arm: str, seed: int) -> Run:
    """Return one run of the table."""
    is_paper = preset == "paper"
    task = JointRecall() if is_paper else JointRecall(loads=LOADS[preset], num_validation=500)
    batch_size = 256 if is_paper else 64
    steps = {"quick": 300, "standard": 3000}.get(preset)
    training = TrainingConfig(
        steps=32 * task.steps_per_epoch(batch_size) if steps is None else steps,
        batch_size=batch_size,
        learning_rate=3e-3,
        optimizer="adamw",
        weight_decay=0.1,
        schedule="cosine",
        eval_every=0 if is_paper else 500,
        balance_weight=0.01 if "smat" in arm or arm in MIXTURES else 0.0,
    )
    model = model_of(arm, 64 if is_paper else 32)
    return Run("joint-recall", preset, arm, "accuracy", seed, task, model, training)


def runs(preset: str, seeds: Sequence[int] | None = None) -> list[Run]:
    """Return the runs of a preset."""
    arms = {"quick": QUICK_ARMS, "standard": STANDARD_ARMS}.get(preset, tuple(ARMS))
    return [
        run(preset, arm, seed)
        for seed in (SEEDS[preset] if seeds is None else seeds)
        for arm in arms
    ]


JOINT_RECALL = Experiment(
    name="joint-recall",
    title="Joint context-key recall",
    published="tab:joint_recall, tab:mom_macro",
    arms=ARMS,
    cells=CELLS,
    presets=PRESETS,
    runs=runs,
    describe=DESCRIBE,
)
