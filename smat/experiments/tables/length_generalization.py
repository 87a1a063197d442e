"""Length generalisation (tab:mqar-uniform, tab:mqar-placed): boundaries past the trained length."""

from __future__ import annotations

from collections.abc import Sequence

from smat.experiments.run import Experiment, Run
from smat.models import ModelConfig
from smat.tasks import LengthRecall
from smat.training import TrainingConfig

DESCRIBE = """\
One model an arm, trained at one length and evaluated at longer ones: linear attention with a \
scalar decay under the mask of d = 2, tokens filed under a fixed random hash of the token before \
them, with the geometry of the training length throughout. Arms differ in the boundary n(t) alone: \
none, kept at half of the training length, rebuilt at half of each length (trained as kept), \
doubling, and stepped windows with a step of an eighth or a quarter of the training length. The \
paper leaves nearly all else open; chosen: two layers of width 64, heads and states of 16, short \
convolution 4, AdamW at 1e-3, weight decay 0.1, batch 32, 10,000 steps, 64 pairs with keys, values \
and noise of 256 tokens each."""

ARMS = {
    "none": "no boundary",
    "kept": "kept",
    "rebuilt": "rebuilt",
    "doubling": "doubling",
    "window_8": "window, T/8",
    "window_4": "window, T/4",
}
CELLS = {f"T={length}": f"T = {length}" for length in (1024, 2048, 4096, 8192)} | {
    f"D={gap}": f"D = {gap}" for gap in (0, 256, 1024, 3072, 7678)
}
PRESETS = {
    "quick": "trained at T = 128 with 8 pairs for 300 steps, evaluated up to 512; kept and T/4",
    "standard": "trained at T = 256 with 16 pairs for 1,500 steps, evaluated up to 2048",
    "paper": "as in the paper: trained at T = 1024 with 64 pairs, evaluated up to 8192",
}
SEEDS = {"quick": (0,), "standard": (0,), "paper": (0, 1, 2)}
STEPS = {"quick": 300, "standard": 1500, "paper": 10_000}


def task_of(preset: str) -> LengthRecall:
    """Return the task of a preset: reduced ones scale every length alike."""
    if preset == "paper":
        return LengthRecall()
    train, pairs = {"quick": (128, 8), "standard": (256, 16)}[preset]
    longest = 4 * train if preset == "quick" else 8 * train
    lengths = tuple(train << step for step in range(4) if train << step <= longest)
    region = train // 4
    gaps = (0, region, train, longest - 2 * region - 2)
    return LengthRecall(
        train, pairs, lengths, longest, gaps, region, num_keys=64, num_values=64, num_noise=64,
        num_eval=64,
    )  # fmt: skip


def run(preset: str, arm: str, seed: int) -> Run:
    """Return one run: it fills all cells of its row."""
    task = task_of(preset)
    options = {"num_heads": 4, "vc_dim": 2, "decay_gate": True, "conv_size": 4, "boundary": arm}
    training = TrainingConfig(
        steps=STEPS[preset],
        batch_size=32,
        learning_rate=1e-3 if preset == "paper" else 2e-3,
        optimizer="adamw",
        weight_decay=0.1,
        schedule="cosine",
        eval_every=0 if preset == "paper" else 250,
    )
    model = ModelConfig("smat_schedule", 64, num_layers=2, options=options)
    return Run("length-generalization", preset, arm, "all", seed, task, model, training)


def runs(preset: str, seeds: Sequence[int] | None = None) -> list[Run]:
    """Return the runs of a preset."""
    arms = ("kept", "window_4") if preset == "quick" else tuple(ARMS)
    return [
        run(preset, arm, seed)
        for seed in (SEEDS[preset] if seeds is None else seeds)
        for arm in arms
    ]


LENGTH_GENERALIZATION = Experiment(
    name="length-generalization",
    title="Length generalisation",
    published="tab:mqar-uniform, tab:mqar-placed",
    arms=ARMS,
    cells=CELLS,
    presets=PRESETS,
    runs=runs,
    describe=DESCRIBE,
)
