"""Subset routing (tab:routing): how many subsets of k landmarks the rows of a mask can select."""

from __future__ import annotations

from smat.experiments.run import Arm, Experiment, Preset
from smat.models import RoutingModelConfig
from smat.tasks import SubsetRouting
from smat.training import TrainingConfig

DESCRIBE = """\
One layer of width 64 with 32-dimensional queries, keys and values, Adam at 3e-3, batch 64, 1500 \
steps, fp32, as the paper has it. The paper leaves open, and here is chosen: payloads N(0, 1), \
requests uniform over all subsets, the request named by the query's row alone (the nearest \
realisable row where the mask has none); queries, keys and gates from a learned position table \
and values from payloads alone by one linear map, as the task's definition has zero values \
elsewhere (a second map only added cross-talk of about the metric's 1 %); no bias, and no factor \
for the number of positions that a row sees. The models without a mask are asked at the rows of \
the causal mask, so that (k + 1) / 2^k bounds them whatever they learn; one softmax model is \
told the request as content, at a row that sees everything. Recurrences run bare, one head of 32 \
without convolution. The learning rate is constant, as the paper's text has it, and the accuracy \
that of 2,048 fresh examples a seed. At a constant rate the jitter of the last steps alone \
exceeds the 1 % threshold of the metric for k > d, so every row stands there again with a rate \
that falls on a cosine to 0, evaluated on 4,096 examples."""

LANDMARKS = range(1, 7)
RECIPE = TrainingConfig(steps=1500, batch_size=64, learning_rate=3e-3)
PAPER_EVAL, COSINE_EVAL = 2048, 4096  # fresh examples a seed
ROWS = (  # name, label, mixer, d, and whether the model is told the request
    ("softmax", "Softmax", "softmax", 1, False),
    ("mamba2", "Mamba-2", "mamba2", 1, False),
    ("deltanet", "DeltaNet", "deltanet", 1, False),
    ("gated_deltanet", "Gated DeltaNet", "gated_deltanet", 1, False),
    ("log_linear", "Log-Linear", "log_linear", 1, False),
    *((f"smat_d{d}", f"SMat (d = {d})", "smat", d, False) for d in (1, 2, 3, 4)),
    ("softmax_content", "Softmax, told the request", "softmax", 1, True),
)


def rows(num_landmarks: int, recipe: TrainingConfig) -> dict[str, Arm]:
    """Return the rows of the table; a model without a mask is asked at rows of the causal one."""
    falling = recipe.changed(schedule="cosine", final_fraction=0.0)
    return {
        f"{name}{suffix}": Arm(
            f"{label}{how}",
            SubsetRouting(num_landmarks, vc_dim, content=content, num_eval=num_eval),
            RoutingModelConfig(mixer=mixer, vc_dim=vc_dim),
            training,
        )
        for suffix, how, training, num_eval in (
            ("", "", recipe, PAPER_EVAL),
            ("_cosine", ", cosine rate", falling, COSINE_EVAL),
        )
        for name, label, mixer, vc_dim, content in ROWS
    }


def cells(recipe: TrainingConfig) -> dict[str, dict[str, Arm]]:
    """Return the table, column by column."""
    return {f"k={k}": rows(k, recipe) for k in LANDMARKS}


SUBSET_ROUTING = Experiment.of_presets(
    name="subset-routing",
    title="Subset routing",
    published="tab:routing",
    cells={f"k={k}": f"k = {k}" for k in LANDMARKS},
    presets={
        "quick": Preset(
            "300 of 1,500 steps at a constant rate, one seed",
            cells(RECIPE.changed(steps=300)),
            arms=tuple(name for name, *_ in ROWS),
        ),
        "standard": Preset("1,500 steps as in the paper, one seed", cells(RECIPE)),
        "paper": Preset(
            "as in the paper: 1,500 steps at a constant rate, three seeds, fp32; cosine beside it",
            cells(RECIPE),
            (0, 1, 2),
        ),
    },
    describe=DESCRIBE,
)
