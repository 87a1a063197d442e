"""Multi-key subset recall (tab:mkar): one query, k keys, exactly their payloads; its controls."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from smat.experiments.run import Arm, Experiment, Preset, Run, Seeds
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

NUM_KEYS = (1, 2, 3)
RECIPE = TrainingConfig(
    steps=12_000,
    batch_size=32,
    learning_rate=3e-4,
    optimizer="adamw",
    weight_decay=0.1,
    eval_every=2000,
)


@dataclass(frozen=True, kw_only=True)
class MultiKeyPreset(Preset):
    """The length of sequences, the width of models, and the lengths of the control."""

    seq_len: int
    width: int
    control_lengths: tuple[int, ...]


PRESETS = {
    "quick": MultiKeyPreset(
        reduced="T = 128, width 64, 300 of 12,000 steps at 2e-3, one seed, "
        "softmax, linear and SMat",
        seq_len=128,
        width=64,
        training=RECIPE.changed(steps=300, learning_rate=2e-3, eval_every=100),
        arms=("softmax", "linear", "smat_d2", "smat_d3", "smat_d4"),
        control_lengths=(128,),
    ),
    "standard": MultiKeyPreset(
        reduced="T = 256, width 128, 700 of 12,000 steps at 1.5e-3, one seed",
        seq_len=256,
        width=128,
        training=RECIPE.changed(steps=700, learning_rate=1.5e-3, eval_every=116),
        control_lengths=(128, 256),
    ),
    "paper": MultiKeyPreset(
        reduced="as in the paper (T = 1,024, width 256, 12,000 steps, three seeds), but in fp32",
        seq_len=1024,
        width=256,
        training=RECIPE,
        seeds=(0, 1, 2),
        control_lengths=(128, 256, 1024),
    ),
}


def arms(preset: MultiKeyPreset, task: MultiKeyRecall) -> dict[str, Arm]:
    """Return the rows of the table: four heads, and a state as wide as a head."""
    head = preset.width // 4
    # Linear attention with as much memory as d = 3 has in its types and the causal branch.
    num_states = Geometry.for_distant(task.seq_len // 2, 3).num_types + 1
    balanced = preset.training.changed(balance_weight=0.01)
    recurrent: dict[str, Any] = {"head_dim": head, "state_dim": head, "expand": 1}
    delta: dict[str, Any] = {"num_heads": 4, "head_dim": head, "expand_v": 1.0}
    gated: dict[str, Any] = {
        "num_heads": 4, "head_dim": head, "conv_size": 3, "qk_norm": True, "decay_gate": True,
        "chunk_size": max(16, task.seq_len // 4),
    }  # fmt: skip

    def arm(
        label: str, mixer: str, training: TrainingConfig = preset.training, **options: Any
    ) -> Arm:
        model = ModelConfig(
            mixer=mixer, width=preset.width, options=options, learned_positions=True, mlp_ratio=4.0
        )
        return Arm(label, task, model, training)

    def smat(label: str, vc_dim: int, **options: Any) -> Arm:
        return arm(label, "smat_hashed", **gated, vc_dim=vc_dim, **options)

    def mamba2_smat(label: str, vc_dim: int) -> Arm:
        return arm(label, "mamba2_smat", balanced, **recurrent, vc_dim=vc_dim)

    return {
        "softmax": arm("Softmax", "softmax", num_heads=4, qk_norm=True, positions="none"),
        "mamba2": arm("Mamba-2", "mamba2", **recurrent),
        "deltanet": arm("DeltaNet", "deltanet", **delta),
        "gated_deltanet": arm("Gated DeltaNet", "gated_deltanet", **delta),
        "log_linear": arm("Log-Linear", "mamba2_log_linear", **recurrent),
        "linear": arm("Linear attention", "linear", **gated),
        "linear_matched": arm(
            "Linear attention (memory matched)", "linear", **gated, feature_dim=head * num_states
        ),
        "lsh_121": smat("LSH bucketing, cells of d = 3", 3, point_read=True),
        "lsh_125": smat("LSH bucketing, cells of d = 4", 4, point_read=True),
        "smat_d2": smat("SMat (d = 2)", 2),
        "smat_d3": smat("SMat (d = 3)", 3),
        "smat_d4": smat("SMat (d = 4)", 4),
        "smat_d3_learned": smat("SMat (d = 3), learned direction", 3, learned_direction=True),
        "smat_d4_learned": smat("SMat (d = 4), learned direction", 4, learned_direction=True),
        "mamba2_smat_d2": mamba2_smat("Mamba-2 + SMat (d = 2)", 2),
        "mamba2_smat_d3": mamba2_smat("Mamba-2 + SMat (d = 3)", 3),
        "mamba2_smat_d4": mamba2_smat("Mamba-2 + SMat (d = 4)", 4),
    }


def runs(preset: str, seeds: Seeds = None) -> list[Run]:
    """Return the runs of a preset."""
    size = PRESETS[preset]
    tasks = {f"k={k}": MultiKeyRecall(num_keys=k, seq_len=size.seq_len) for k in NUM_KEYS}
    cells = {cell: arms(size, task) for cell, task in tasks.items()}
    return size.runs("multi-key-recall", preset, cells, seeds)


def control_runs(preset: str, seeds: Seeds = None) -> list[Run]:
    """Return the runs with one key at several lengths; reduced presets leave the paper's out."""
    size = replace(PRESETS[preset], seeds=(0,), arms=CONTROL_ARMS)
    lengths = size.control_lengths
    tasks = {f"T={seq_len}": MultiKeyRecall(num_keys=1, seq_len=seq_len) for seq_len in lengths}
    cells = {cell: arms(size, task) for cell, task in tasks.items()}
    return size.runs("multi-key-control", preset, cells, seeds)


@dataclass(frozen=True)
class Sweep:
    """Another schedule of softmax, at the paper's 12,000 steps."""

    label: str
    warmup_steps: int
    learning_rate: float

    def arm(self, preset: MultiKeyPreset, num_keys: int) -> Arm:
        """Return a row of the sweep; warmup and rate are scaled as the preset scales its own."""
        task = MultiKeyRecall(num_keys=num_keys, seq_len=preset.seq_len)
        steps, rate = preset.training.steps, preset.training.learning_rate
        training = preset.training.changed(
            warmup_steps=self.warmup_steps * steps // RECIPE.steps,
            learning_rate=self.learning_rate * rate / RECIPE.learning_rate,
        )
        return Arm(self.label, task, arms(preset, task)["softmax"].model, training)


def sweep_runs(preset: str, seeds: Seeds = None) -> list[Run]:
    """Return the runs of the softmax sweep: every seed is a column of the paper's table."""
    size = replace(PRESETS[preset], arms=tuple(SWEEP))
    found: list[Run] = []
    for seed in size.seeds if seeds is None else seeds:
        cells = {
            f"k={k},seed={seed}": {name: sweep.arm(size, k) for name, sweep in SWEEP.items()}
            for k in NUM_KEYS
        }
        found += size.runs("multi-key-softmax-sweep", preset, cells, [seed])
    return found


CONTROL_ARMS = ("softmax", "mamba2", "deltanet", "gated_deltanet", "log_linear", "linear")
SWEEP = {
    "no_warmup_3e-4": Sweep("no warmup, 3e-4", 0, 3e-4),
    "warmup_1e-4": Sweep("1,000 steps of warmup, 1e-4", 1000, 1e-4),
    "warmup_3e-4": Sweep("1,000 steps of warmup, 3e-4", 1000, 3e-4),
    "warmup_1e-3": Sweep("1,000 steps of warmup, 1e-3", 1000, 1e-3),
}
CONTROL_PRESETS = {
    "quick": "width 64, 300 of 12,000 steps at 2e-3",
    "standard": "width 128, 700 of 12,000 steps at 1.5e-3",
    "paper": "as in the paper: width 256, 12,000 steps, but in fp32",
}
LABELS = {
    name: arm.label for name, arm in arms(PRESETS["paper"], MultiKeyRecall(num_keys=1)).items()
}
MULTI_KEY_RECALL = Experiment(
    name="multi-key-recall",
    title="Multi-key subset recall",
    published="tab:mkar, derived:mkar-means, text:mkar-learned, tab:mamba-smat-3seeds-pop",
    arms=LABELS,
    cells={f"k={k}": f"k = {k}" for k in NUM_KEYS},
    presets={name: preset.reduced for name, preset in PRESETS.items()},
    runs=runs,
    describe=DESCRIBE,
)
MULTI_KEY_CONTROL = Experiment(
    name="multi-key-control",
    title="Multi-key recall: positive control with one key",
    published="tab:mkar-posctrl",
    arms={name: LABELS[name] for name in CONTROL_ARMS},
    cells={f"T={seq_len}": f"T = {seq_len}" for seq_len in PRESETS["paper"].control_lengths},
    presets=CONTROL_PRESETS,
    runs=control_runs,
    describe="The models without routing on shorter sequences, where some do learn to recall one "
    "key: their zeros at the paper's length are a matter of optimisation within the budget.",
)
SOFTMAX_SWEEP = Experiment(
    name="multi-key-softmax-sweep",
    title="Multi-key recall: warmup and learning rate of softmax",
    published="tab:mkar-softmax-sweep",
    arms={name: sweep.label for name, sweep in SWEEP.items()},
    cells={f"k={k},seed={seed}": f"k = {k}, seed {seed}" for k in NUM_KEYS for seed in (0, 1, 2)},
    presets=CONTROL_PRESETS,
    runs=sweep_runs,
    describe="Whether softmax leaves the plateau of the constant predictor depends on the seed; "
    "other schedules do not change that. Reduced presets scale warmup and rate with their own.",
)
