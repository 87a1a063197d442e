"""Language modelling on PG-19 (tab:pg19, tab:pg19-300m, tab:pg19-750m)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smat.experiments.run import Arm, Experiment, Preset
from smat.experiments.tables.length_generalization import LABELS
from smat.models import ModelConfig
from smat.tasks import LanguageModelling
from smat.training import TrainingConfig

BYTES_DESCRIBE = """\
The layers of length generalisation, trained at one length and evaluated at eight times that \
length: linear attention with a scalar decay of recent keys under the mask of d = 2, bytes filed \
under a random hash of the byte before them, fixed for a seed, with the geometry of the training \
length. A learned gate weighs what is read of distant bytes: they do not decay, and would drown \
recent ones the more the longer the text. Arms differ in the boundary n(t) alone; rebuilt is \
trained as kept is. The paper names neither model nor budget; chosen: four layers of width 256, \
four heads, an output gate, an MLP of four times the width, short convolution 4, tied read-out, \
AdamW at 1e-3, weight decay 0.1, warm-up of 300 steps, 10,000 steps of 8 excerpts. Bits per byte \
by position, over excerpts of the test books, spread evenly; the first bytes of an excerpt have \
little context."""

TOKENS_DESCRIBE = """\
Mamba-2 as in the paper's appendix: width 384, expansion 2, heads and states of 64, short \
convolution 4, eight layers without MLP, tied read-out; with it the models have 26.9 M parameters \
as the paper's do. The transformer has rotary positions, eight heads and an MLP of four times the \
width (33.5 M). Section 4 has the four-read routing for the 750M-token table alone, and 27.8 M \
parameters are those of d = 3 with one read of a hyperplane through the token's own hash, so SMat \
reads that here; rows with four reads stand beside it. Memories have the settings that learn; as \
the paper's text has them they are rows of their own. Balance loss 0.01 annealed over 1,000 \
steps, AdamW at 6e-4, warm-up of 300 steps, 32,768 tokens a step. The paper trains in bf16; here \
it is fp32 unless `--precision bf16` asks for it."""

LARGE_DESCRIBE = """\
Sixteen layers of width 768, four-read routing, 22,889 steps of 32,768 tokens; validation \
perplexity. Heads, rate and batch are not in the paper; chosen as in the 300M-token table: heads \
and states of 64 for Mamba-2 (expansion 2) and Gated DeltaNet (12 heads, values as wide as keys, \
an output gate), AdamW at 6e-4 with a warm-up of 300 steps."""

RECIPE = TrainingConfig(
    steps=9155, batch_size=2, learning_rate=6e-4, optimizer="adamw", weight_decay=0.1,
    schedule="cosine", warmup_steps=300,
)  # fmt: skip
BYTES_RECIPE = RECIPE.changed(steps=10_000, batch_size=8, learning_rate=1e-3)
SMALL_RECIPE = RECIPE.changed(steps=1800, batch_size=8, learning_rate=3e-3, warmup_steps=100)
MAMBA2: dict[str, Any] = {"state_dim": 64, "head_dim": 64, "expand": 2}


def byte_task(seq_len: int, num_eval: int, **options: Any) -> LanguageModelling:
    """Return bytes to be trained at one length and evaluated at eight times that length.

    >>> byte_task(512, num_eval=128).cells
    ['[0,256)', '[256,512)', '[512,1024)', '[1024,2048)', '[2048,4096)']
    """
    bins = (0, seq_len // 2, seq_len, 2 * seq_len, 4 * seq_len, 8 * seq_len)
    options = {"eval_length": 8 * seq_len, "bins": bins, "num_eval": num_eval, **options}
    return LanguageModelling(seq_len=seq_len, **options)


def byte_rows(
    task: LanguageModelling, width: int, num_layers: int, training: TrainingConfig
) -> dict[str, dict[str, Arm]]:
    """Return the boundary schedules; each run fills all bins of its row."""
    options: dict[str, Any] = {"num_heads": 4, "vc_dim": 2, "decay_gate": True, "conv_size": 4}
    options |= {"decay_scope": "recurrent", "output_gate": True, "output_norm": True}
    options["read_gate"] = True
    rows = {}
    for name, label in LABELS.items():
        model = ModelConfig(
            mixer="smat_schedule", width=width, num_layers=num_layers, mlp_ratio=4, tied=True,
            options=options | {"boundary": name},
        )  # fmt: skip
        rows[name] = Arm(label, task, model, training)
    return {"all": rows}


def token_task(seq_len: int, vocab_size: int = 50_257, **options: Any) -> LanguageModelling:
    """Return GPT-2's tokens, or as many others made of the same books."""
    tokens = "gpt2" if vocab_size == 50_257 else f"bpe{vocab_size}"
    options = {"unit": "nats", "num_eval": 5_000_000 // seq_len, "num_validation": 16, **options}
    return LanguageModelling(tokens, vocab_size, seq_len, seq_len, **options)


def token_rows(
    task: LanguageModelling, width: int, num_layers: int, training: TrainingConfig
) -> dict[str, Arm]:
    """Return Mamba-2 with two starts, with a memory in four forms, and a transformer."""
    sizes, positive = (task, width, num_layers), MAMBA2 | {"key_init": "positive"}
    rows = {
        "mamba2": _arm("Mamba-2", "mamba2", *sizes, training, MAMBA2),
        "mamba2_positive": _arm(
            "Mamba-2, positive keys and queries", "mamba2", *sizes, training, positive
        ),
    }
    one_read = {"selector": "own_hyperplane"}
    language = {"selector": "request", "settings": "language", "boundary": "window_8"}
    stays = training.changed(balance_anneal=0)
    for suffix, text, recipe, memory in (
        ("", "", training, one_read),
        ("_four_reads", ", four reads", training, {}),
        ("_language", ", settings for language", stays, language),
        ("_text", ", as the text", training, one_read | {"settings": "paper"}),
    ):
        for d in (2, 3, 4):
            label, options = f"Mamba-2 + SMat (d = {d}){text}", MAMBA2 | memory | {"vc_dim": d}
            arm = _arm(label, "mamba2_smat", *sizes, recipe, options)
            rows[f"smat_d{d}{suffix}"] = arm
    transformer = {"num_heads": 8, "mlp_ratio": 4}
    rows["softmax"] = _arm("Softmax", "softmax", *sizes, training, transformer)
    return rows


def large_rows(
    task: LanguageModelling, width: int, num_layers: int, training: TrainingConfig
) -> dict[str, Arm]:
    """Return both backbones, alone and with a memory of four reads."""
    delta = {"num_heads": width // 64, "head_dim": 64, "expand_v": 1.0}
    sizes = (task, width, num_layers, training)
    rows = {}
    for name, label, options in (
        ("gated_deltanet", "Gated DeltaNet", delta),
        ("mamba2", "Mamba-2", MAMBA2),
    ):
        rows[name] = _arm(label, name, *sizes, options)
        for suffix, text, settings in (
            ("", "", "default"),
            ("_text", ", as the text", "paper"),
        ):
            for d in (2, 3):
                memory = options | {"vc_dim": d, "settings": settings}
                row = _arm(f"{label} + SMat (d = {d}){text}", f"{name}_smat", *sizes, memory)
                rows[f"{name}_smat_d{d}{suffix}"] = row
    return rows


def _arm(
    label: str,
    mixer: str,
    task: LanguageModelling,
    width: int,
    num_layers: int,
    training: TrainingConfig,
    options: Mapping[str, Any],
) -> Arm:
    options = dict(options)
    mlp_ratio = options.pop("mlp_ratio", 0)
    model = ModelConfig(mixer, width, num_layers, options, mlp_ratio=mlp_ratio, tied=True)
    balanced = training.changed(balance_weight=0.01) if "vc_dim" in options else training
    return Arm(label, task, model, balanced)


PAPER_BYTES = byte_task(2048, num_eval=222)
PG19_BYTES = Experiment.of_presets(
    name="pg19-bytes",
    title="PG-19 in bytes",
    published="tab:pg19",
    cells={cell: cell for cell in PAPER_BYTES.cells},
    presets={
        "quick": Preset(
            "two layers of width 64 trained at T = 128 for 150 steps, evaluated up to 1024; kept "
            "and T/4",
            byte_rows(
                byte_task(128, num_eval=32, eval_batch_size=4), 64, 2,
                SMALL_RECIPE.changed(steps=150, warmup_steps=20),
            ),
            arms=("kept", "window_4"),
        ),
        "standard": Preset(
            "two layers of width 128 trained at T = 512 for 1,800 steps, evaluated up to 4096",
            byte_rows(
                byte_task(512, num_eval=128, eval_batch_size=2), 128, 2,
                SMALL_RECIPE.changed(eval_every=300),
            ),
            seeds=(0, 1, 2),
        ),
        "paper": Preset(
            "as in the paper, where it says: trained at T = 2048, evaluated up to 16384, 3 seeds",
            byte_rows(PAPER_BYTES, 256, 4, BYTES_RECIPE),
            seeds=(0, 1, 2),
        ),
    },
    describe=BYTES_DESCRIBE,
)  # fmt: skip
SMALL_TOKENS = token_task(1024, 4096, unit="perplexity", num_eval=128, eval_batch_size=4)
QUICK_TOKENS = token_task(256, 4096, unit="perplexity", num_eval=32, eval_batch_size=4)
QUICK_RECIPE = SMALL_RECIPE.changed(steps=100, batch_size=4, warmup_steps=10)
PG19_300M = Experiment.of_presets(
    name="pg19-300m",
    title="PG-19, 300M tokens",
    published="tab:pg19-300m",
    cells={"T=16384": "16K context", "T=32768": "32K context"},
    presets={
        "quick": Preset(
            "4,096 tokens instead of 50,257, two layers of width 64 at T = 256, 100 steps, Mamba-2 "
            "alone and with d = 2",
            {"all": token_rows(QUICK_TOKENS, 64, 2, QUICK_RECIPE)},
            arms=("mamba2", "smat_d2"),
        ),
        "standard": Preset(
            "4,096 tokens instead of 50,257, two layers of width 128 at T = 1024, 800 steps",
            {
                "all": token_rows(
                    SMALL_TOKENS, 128, 2,
                    SMALL_RECIPE.changed(steps=800, batch_size=4, eval_every=200),
                )
            },
            arms=(
                "mamba2", "mamba2_positive", "smat_d2", "smat_d3", "smat_d3_four_reads",
                "smat_d2_language", "smat_d3_text", "softmax",
            ),
        ),
        "paper": Preset(
            "as in the paper: 9,155 steps of 32,768 tokens, but in fp32 (bf16: --precision bf16)",
            {
                f"T={length}": token_rows(
                    token_task(length), 384, 8, RECIPE.changed(batch_size=32_768 // length)
                )
                for length in (16_384, 32_768)
            },
            seeds=(1,),
        ),
    },
    describe=TOKENS_DESCRIBE,
)  # fmt: skip
PG19_750M = Experiment.of_presets(
    name="pg19-750m",
    title="PG-19, 750M tokens",
    published="tab:pg19-750m",
    cells={"perplexity": "perplexity"},
    presets={
        "quick": Preset(
            "4,096 tokens instead of 50,257, two layers of width 64 at T = 256, 100 steps, Gated "
            "DeltaNet alone and with d = 2",
            {"all": large_rows(QUICK_TOKENS, 64, 2, QUICK_RECIPE)},
            arms=("gated_deltanet", "gated_deltanet_smat_d2"),
        ),
        "standard": Preset(
            "4,096 tokens instead of 50,257, two layers of width 128 at T = 1024, 800 steps",
            {
                "all": large_rows(
                    SMALL_TOKENS, 128, 2,
                    SMALL_RECIPE.changed(steps=800, batch_size=4, eval_every=200),
                )
            },
            arms=("gated_deltanet", "gated_deltanet_smat_d2", "gated_deltanet_smat_d3"),
        ),
        "paper": Preset(
            "as in the paper: 750M tokens at a context of 16,384, but in fp32 (bf16: --precision "
            "bf16)",
            {
                "perplexity": large_rows(
                    token_task(16_384, unit="perplexity", scored_split="validation"), 768, 16,
                    RECIPE.changed(steps=22_889),
                )
            },
            seeds=(123,),
        ),
    },
    describe=LARGE_DESCRIBE,
)  # fmt: skip
