"""Multi-key subset recall (tab:mkar): one query, k keys, exactly their payloads; its controls."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from smat.experiments.run import Arm, Experiment, Preset
from smat.geometry import Geometry
from smat.models import ModelConfig
from smat.tasks import MultiKeyRecall
from smat.training import TrainingConfig

DESCRIBE = """\
One layer: learned positions, short convolution of width 3 in every mixer, four heads, RMSNorm \
of queries and keys, a scalar decay, an MLP of four times the width; AdamW at a constant rate, \
weight decay 0.1 on matrices, clipping at 1, a separate model for each k. Under SMat's masks \
only recent keys decay, as the paper gates the recurrent section; one row shows the decay of all \
keys. SMat files every token under the hash of the token before it, one random table of token \
ids a head and seed, and an answer row reads the hyperplane through its own cell in the first \
direction on which the cells of all k keys agree (direction 0 if none does). LSH reads its own \
cell alone, of as many cells as d = 3 (121 at the paper's length) or d = 4 (125) have. \
Memory-matched linear attention has keys of B + 1 times the width of d = 3. A learned direction \
is the argmax of a linear map of the answer row's queries behind the convolution, trained \
straight through. Mamba-2 + SMat is the additive memory with four learned reads, and with the \
settings that we found to learn: no decay of the memory, values without the step, gates at 0.5, a \
hash that starts as the token before and a scorer aligned with it, the gradient of neighbouring \
bins, and before the scorer a convolution of width 3, which starts as the sum of the k tokens of \
a request (none for k = 1); the rows "as the text" have none of these. Answer rows are the same \
in all examples, and only they are computed behind keys and values. In preset paper positions \
start at 0 in every row (the paper names no start): a key then has one address wherever it stands, \
without which learned memories left the plateau late or not at all at T = 256. The accuracy is \
that of 2,048 fresh queries. The paper trains in bf16; here training is in fp32 unless \
`--precision bf16` asks for it, which brings speed on CPUs that multiply in bf16 alone."""

NUM_KEYS = (1, 2, 3)
RECIPE = TrainingConfig(
    steps=12_000, batch_size=32, learning_rate=3e-4, optimizer="adamw", weight_decay=0.1,
    eval_every=2000,
)  # fmt: skip


@dataclass(frozen=True)
class Size:
    """What the presets vary: the length, the width of models, the recipe, and the control."""

    seq_len: int
    width: int
    training: TrainingConfig
    control_lengths: tuple[int, ...]
    position_std: float = 0.02


QUICK = Size(128, 64, RECIPE.changed(steps=300, learning_rate=2e-3, eval_every=100), (128,))
STANDARD = Size(128, 64, RECIPE.changed(steps=6000, learning_rate=1e-3, eval_every=500), (128, 256))
PAPER = Size(1024, 256, RECIPE, (128, 256, 1024), position_std=0.0)


def rows(size: Size, task: MultiKeyRecall) -> dict[str, Arm]:
    """Return the rows of the table: four heads, and a state as wide as a head."""
    head = size.width // 4
    # Linear attention with as much memory as d = 3 has in its types and the causal branch.
    num_states = Geometry.for_distant(task.seq_len // 2, 3).num_types + 1
    balanced = size.training.changed(balance_weight=0.01)
    conv: dict[str, Any] = {"conv_size": 3}
    recurrent = {"head_dim": head, "state_dim": head, "expand": 1, **conv}
    delta = {"num_heads": 4, "head_dim": head, "expand_v": 1.0, **conv}
    gated = {
        "num_heads": 4, "head_dim": head, "qk_norm": True, "decay_gate": True,
        "chunk_size": max(16, task.seq_len // 4), **conv,
    }  # fmt: skip

    def arm(
        label: str, mixer: str, training: TrainingConfig = size.training, **options: Any
    ) -> Arm:
        model = ModelConfig(
            mixer=mixer, width=size.width, options=options, mlp_ratio=4.0,
            learned_positions=True, position_std=size.position_std,
        )  # fmt: skip
        return Arm(label, task, model, training)

    def smat(label: str, vc_dim: int, decay_scope: str = "recurrent", **options: Any) -> Arm:
        chosen = {**gated, **options, "vc_dim": vc_dim, "decay_scope": decay_scope}
        made = arm(label, "smat_hashed", **chosen)
        return replace(made, revision=2)  # one hash table for all seeds before

    return {
        "softmax": arm("Softmax", "softmax", num_heads=4, qk_norm=True, positions="none", **conv),
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
        **{f"smat_d{d}": smat(f"SMat (d = {d})", d) for d in (2, 3, 4)},
        "smat_d3_decay_all": smat("SMat (d = 3), distant keys decay too", 3, decay_scope="all"),
        "smat_d3_learned": smat("SMat (d = 3), learned direction", 3, learned_direction=True),
        "smat_d4_learned": smat("SMat (d = 4), learned direction", 4, learned_direction=True),
        **{
            f"mamba2_smat_d{d}{suffix}": arm(
                f"Mamba-2 + SMat (d = {d}){how}",
                "mamba2_smat",
                balanced,
                **recurrent,
                vc_dim=d,
                settings=settings,
                selector_conv=selector_conv,
                request_tokens=request_tokens,
            )
            for suffix, how, settings, selector_conv, request_tokens in (
                ("", "", "default", 3 if task.num_keys > 1 else 0, task.num_keys),
                ("_text", ", as the text", "paper", 0, 1),
            )
            for d in (2, 3, 4)
        },
    }


def cells(size: Size) -> dict[str, dict[str, Arm]]:
    """Return the table, column by column."""
    return {
        f"k={k}": rows(size, MultiKeyRecall(num_keys=k, seq_len=size.seq_len)) for k in NUM_KEYS
    }


def control_cells(size: Size) -> dict[str, dict[str, Arm]]:
    """Return columns with one key at several lengths; reduced presets leave the paper's out."""
    tasks = {f"T={t}": MultiKeyRecall(num_keys=1, seq_len=t) for t in size.control_lengths}
    return {cell: rows(size, task) for cell, task in tasks.items()}


def sweep_cells(size: Size) -> dict[str, dict[str, Arm]]:
    """Return other schedules of softmax, scaled as the preset scales its own; a column a seed."""
    columns: dict[str, dict[str, Arm]] = {}
    for cell, arms in cells(size).items():
        column = columns[f"{cell},seed={{seed}}"] = {}
        for name, label, warmup, rate in SWEEP:
            training = size.training.changed(
                warmup_steps=warmup * size.training.steps // RECIPE.steps,
                learning_rate=rate * size.training.learning_rate / RECIPE.learning_rate,
            )
            column[name] = replace(arms["softmax"], label=label, training=training)
    return columns


CONTROL_ARMS = ("softmax", "mamba2", "deltanet", "gated_deltanet", "log_linear", "linear")
SWEEP = (  # steps of warmup and learning rate at the paper's 12,000 steps
    ("no_warmup_3e-4", "no warmup, 3e-4", 0, 3e-4),
    ("warmup_1e-4", "1,000 steps of warmup, 1e-4", 1000, 1e-4),
    ("warmup_3e-4", "1,000 steps of warmup, 3e-4", 1000, 3e-4),
    ("warmup_1e-3", "1,000 steps of warmup, 1e-3", 1000, 1e-3),
)
REDUCED = {
    "quick": "width 64, 300 of 12,000 steps at 2e-3",
    "standard": "width 64, 6,000 of 12,000 steps at 1e-3",
    "paper": "as in the paper: width 256, 12,000 steps, but in fp32 (bf16: --precision bf16)",
}
SIZES = {"quick": QUICK, "standard": STANDARD, "paper": PAPER}
MULTI_KEY_RECALL = Experiment.of_presets(
    name="multi-key-recall",
    title="Multi-key subset recall",
    published="tab:mkar, derived:mkar-means, text:mkar-learned, tab:mamba-smat-3seeds-pop",
    cells={f"k={k}": f"k = {k}" for k in NUM_KEYS},
    presets={
        "quick": Preset(
            "T = 128, width 64, 300 of 12,000 steps at 2e-3, one seed, softmax, linear and SMat",
            cells(QUICK),
            arms=("softmax", "linear", "smat_d2", "smat_d3", "smat_d4"),
        ),
        "standard": Preset(
            "T = 128, width 64, 6,000 of 12,000 steps at 1e-3",
            cells(STANDARD),
            seeds=(0, 1, 2),
        ),
        "paper": Preset(
            "as in the paper (T = 1,024, width 256, 12,000 steps, three seeds), but in fp32 (bf16: "
            "--precision bf16)",
            cells(PAPER),
            seeds=(0, 1, 2),
        ),
    },
    describe=DESCRIBE,
)
MULTI_KEY_CONTROL = Experiment.of_presets(
    name="multi-key-control",
    title="Multi-key recall: positive control with one key",
    published="tab:mkar-posctrl",
    cells={f"T={seq_len}": f"T = {seq_len}" for seq_len in PAPER.control_lengths},
    presets={
        name: Preset(REDUCED[name], control_cells(size), arms=CONTROL_ARMS)
        for name, size in SIZES.items()
    },
    describe="The models without routing on shorter sequences, where some do learn to recall one "
    "key: their zeros at the paper's length are a matter of optimisation within the budget.",
)
SOFTMAX_SWEEP = Experiment.of_presets(
    name="multi-key-softmax-sweep",
    title="Multi-key recall: warmup and learning rate of softmax",
    published="tab:mkar-softmax-sweep",
    cells={f"k={k},seed={seed}": f"k = {k}, seed {seed}" for k in NUM_KEYS for seed in (0, 1, 2)},
    presets={
        name: Preset(REDUCED[name], sweep_cells(size), (0, 1, 2) if name == "paper" else (0,))
        for name, size in SIZES.items()
    },
    describe="Whether softmax leaves the plateau of the constant predictor depends on the seed; "
    "other schedules do not change that. Reduced presets scale warmup and rate with their own.",
)
