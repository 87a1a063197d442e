"""Mamba-2 + SMat over a learned hash (tab:mamba-smat-3seeds-pop), where d is what limits.

Four learned reads in four heads answer requests for d keys and more as well (multi-key-recall):
heads share a request out among them, and the token behind a marker, which holds a payload too, is
filed under the marker, so that one cell holds all pairs. Here neither is open to a model.
"""

from __future__ import annotations

from typing import Any

from smat.experiments.run import Arm, Experiment, Preset
from smat.experiments.tables.multi_key_recall import NUM_KEYS, RECIPE
from smat.models import ModelConfig
from smat.tasks import MultiKeyRecall
from smat.training import TrainingConfig

DESCRIBE = """\
The models of multi-key recall without learned positions (the task needs none, and under them a \
key has another address at every place), a short convolution of 3 in every mixer. Mamba-2 + SMat \
reads one hyperplane a head: a model, one for each k, learns a score for each of the last four \
tokens of a query, shared by all heads, and reads the hyperplane through those of them whose \
scores have the largest sum. Its hash is learned, from a balance loss alone (weight 0.01, to the \
end) that spreads what is written evenly over all families of hyperplanes, so that training cannot \
file keys together; what is read, what is written, how strongly, and what becomes of it is \
learned from the task. The keys and queries of Mamba-2 begin about one positive vector, so that a \
read begins as the sum of what its hyperplane holds. Beside it, with the same start: a rule that \
knows k in place of the scores (the hyperplane through all k keys if there is one, through the \
last key's own in direction 0 otherwise, as in the paper's main table); four learned reads a head \
over a hash that learns from the task; the memory as the paper's text has it; and Mamba-2 alone, \
with both starts. All rows have the same steps."""
REQUEST_TOKENS = 4  # that are scored: more than any request names


def rows(task: MultiKeyRecall, width: int, training: TrainingConfig) -> dict[str, Arm]:
    """Return the rows of the table: four heads, and a state as wide as a head."""
    head = width // 4
    layer: dict[str, Any] = {"head_dim": head, "state_dim": head, "expand": 1, "conv_size": 3}

    def arm(label: str, mixer: str, training: TrainingConfig, **options: Any) -> Arm:
        options = {**layer, **options}
        model = ModelConfig(mixer=mixer, width=width, options=options, mlp_ratio=4.0)
        return Arm(label, task, model, training)

    stays = training.changed(balance_weight=0.01, balance_anneal=0)
    falls = training.changed(balance_weight=0.01)
    asked, scored = {"request_tokens": task.num_keys}, {"request_tokens": REQUEST_TOKENS}
    even = {"settings": "even"}
    convolved = {**asked, "selector_conv": 3 if task.num_keys > 1 else 0}
    made = {
        "mamba2": arm("Mamba-2", "mamba2", training),
        "mamba2_positive": arm(
            "Mamba-2, positive keys and queries", "mamba2", training, key_init="positive"
        ),
    }
    for suffix, how, recipe, options in (
        ("", "", stays, {**even, "selector": "learned_request", **scored}),
        ("_rule", ", hyperplane by rule", stays, {**even, "selector": "request", **asked}),
        ("_four", ", four learned reads", falls, {"key_init": "positive", **convolved}),
        ("_text", ", as the text", falls, {"settings": "paper"}),
    ):
        for d in (2, 3, 4):
            label = f"Mamba-2 + SMat (d = {d}){how}"
            made[f"mamba2_smat_d{d}{suffix}"] = arm(
                label, "mamba2_smat", recipe, vc_dim=d, **options
            )
    return made


def cells(seq_len: int, width: int, training: TrainingConfig) -> dict[str, dict[str, Arm]]:
    """Return the table, a column for each number of requested keys."""
    tasks = {f"k={k}": MultiKeyRecall(num_keys=k, seq_len=seq_len) for k in NUM_KEYS}
    return {cell: rows(task, width, training) for cell, task in tasks.items()}


SHORT = RECIPE.changed(steps=750, learning_rate=1e-3, eval_every=250)
MULTI_KEY_LEARNED = Experiment.of_presets(
    name="multi-key-learned",
    title="Multi-key recall: Mamba-2 + SMat over a learned hash",
    published="tab:mamba-smat-3seeds-pop",
    cells={f"k={k}": f"k = {k}" for k in NUM_KEYS},
    presets={
        "quick": Preset(
            "T = 128, width 64, 250 of 12,000 steps at 1e-3, one seed, one hyperplane a head",
            cells(128, 64, SHORT.changed(steps=250)),
            arms=("mamba2", "mamba2_smat_d2", "mamba2_smat_d3", "mamba2_smat_d4"),
        ),
        "standard": Preset(
            "T = 1,024 as in the paper, width 64, 750 of 12,000 steps at 1e-3",
            cells(1024, 64, SHORT),
            seeds=(0, 1, 2),
        ),
        "paper": Preset(
            "as in the paper (T = 1,024, width 256, 12,000 steps, three seeds), but in fp32 (bf16: "
            "--precision bf16) and without learned positions",
            cells(1024, 256, RECIPE),
            seeds=(0, 1, 2),
        ),
    },
    describe=DESCRIBE,
)
