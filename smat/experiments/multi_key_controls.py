"""Controls of multi-key recall: shorter sequences, and other schedules for softmax (appendix)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from smat.experiments import multi_key_recall as table
from smat.experiments.run import Experiment, Run
from smat.tasks import MultiKeyRecall

LENGTHS = (128, 256, 1024)
CONTROL_ARMS = ("softmax", "mamba2", "deltanet", "gated_deltanet", "log_linear", "linear")
# warmup steps and learning rate, at the paper's 12,000 steps
SWEEP = {
    "no_warmup_3e-4": (0, 3e-4),
    "warmup_1e-4": (1000, 1e-4),
    "warmup_3e-4": (1000, 3e-4),
    "warmup_1e-3": (1000, 1e-3),
}
PRESETS = {
    "quick": "width 64, 300 of 12,000 steps at 2e-3",
    "standard": "width 128, 700 of 12,000 steps at 1.5e-3",
    "paper": "as in the paper: width 256, 12,000 steps, but in fp32",
}


def control(preset: str, arm: str, seq_len: int, seed: int) -> Run:
    """Return a run with one key, at a length of its own."""
    base = table.run(preset, arm, 1, seed)
    width = table.SIZES[preset][1]
    model = table.model_of(arm, width, seq_len)
    task = MultiKeyRecall(1, seq_len=seq_len)
    name, cell = "multi-key-control", f"T={seq_len}"
    return replace(base, experiment=name, cell=cell, task=task, model=model)


def controls(preset: str, seeds: Sequence[int] | None = None) -> list[Run]:
    """Return the runs of the positive control; the reduced presets leave the paper's length out."""
    lengths = LENGTHS if preset == "paper" else LENGTHS[:1] if preset == "quick" else LENGTHS[:2]
    return [
        control(preset, arm, seq_len, seed)
        for seed in ((0,) if seeds is None else seeds)
        for arm in CONTROL_ARMS
        for seq_len in lengths
    ]


def sweep(preset: str, arm: str, num_keys: int, seed: int) -> Run:
    """Return a softmax run with another warmup and rate, both scaled with the preset."""
    base = table.run(preset, "softmax", num_keys, seed)
    warmup, rate = SWEEP[arm]
    steps, peak = base.training.steps, table.SIZES[preset][2]
    training = replace(
        base.training,
        warmup_steps=warmup * steps // 12_000,
        learning_rate=rate * peak / table.SIZES["paper"][2],
    )
    cell = f"k={num_keys},seed={seed}"
    return replace(
        base, experiment="multi-key-softmax-sweep", arm=arm, cell=cell, training=training
    )


def sweeps(preset: str, seeds: Sequence[int] | None = None) -> list[Run]:
    """Return the runs of the softmax sweep: every seed is a column of the paper's table."""
    default = (0, 1, 2) if preset == "paper" else (0,)
    return [
        sweep(preset, arm, num_keys, seed)
        for seed in (default if seeds is None else seeds)
        for arm in SWEEP
        for num_keys in (1, 2, 3)
    ]


MULTI_KEY_CONTROL = Experiment(
    name="multi-key-control",
    title="Multi-key recall: positive control with one key",
    published="tab:mkar-posctrl",
    arms={arm: table.ARMS[arm] for arm in CONTROL_ARMS},
    cells={f"T={seq_len}": f"T = {seq_len}" for seq_len in LENGTHS},
    presets=PRESETS,
    runs=controls,
    describe="The models without routing on shorter sequences, where some do learn to recall one "
    "key: their zeros at the paper's length are a matter of optimisation within the budget.",
)
SOFTMAX_SWEEP = Experiment(
    name="multi-key-softmax-sweep",
    title="Multi-key recall: warmup and learning rate of softmax",
    published="tab:mkar-softmax-sweep",
    arms={
        "no_warmup_3e-4": "no warmup, 3e-4",
        "warmup_1e-4": "1,000 steps of warmup, 1e-4",
        "warmup_3e-4": "1,000 steps of warmup, 3e-4",
        "warmup_1e-3": "1,000 steps of warmup, 1e-3",
    },
    cells={f"k={k},seed={seed}": f"k = {k}, seed {seed}" for k in (1, 2, 3) for seed in (0, 1, 2)},
    presets=PRESETS,
    runs=sweeps,
    describe="Whether softmax leaves the plateau of the constant predictor depends on the seed; "
    "other schedules do not change that. Reduced presets scale warmup and rate with their own.",
)
