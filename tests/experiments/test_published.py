"""The paper's tables as data: every label is there, whole, and figures are those of the paper."""

import json
from importlib.resources import files
from statistics import mean, stdev

import pytest

TABLES = json.loads(
    files("smat").joinpath("experiments", "published.json").read_text(encoding="utf-8")
)

# Every label of a table that has numbers. The remaining one, tab:cost, has growth rates only.
LABELS = [
    "tab:mkar",
    "tab:mqar-results",
    "tab:joint_recall",
    "tab:mqar-uniform",
    "tab:mqar-placed",
    "tab:pg19",
    "tab:training",
    "tab:routing",
    "tab:e2e-routing",
    "tab:mkar-seeds",
    "tab:mkar-softmax-sweep",
    "tab:mkar-posctrl",
    "tab:mamba-smat-3seeds-pop",
    "tab:mom_macro",
    "tab:pg19-300m",
    "tab:pg19-750m",
    "tab:pg19-results",
]
# Figures with numbers in their caption or text, and numbers that stand in the text alone.
OTHERS = [
    "fig:prefill",
    "fig:mkar-sanity",
    "text:mkar-learned",
    "text:mkar-chance",
    "text:pg19-parameters",
    "text:pg19-memory",
    "text:e2e-claims",
]
FIELDS = {"caption", "source", "unit", "rows", "columns", "values"}
MORE_FIELDS = {"settings", "notes", "text", "units", "part_of"}

BASELINES = ["softmax", "mamba2", "deltanet", "gated_deltanet", "log_linear"]
SMAT = ["smat_d2", "smat_d3", "smat_d4"]
VARIANTS = ["", "_log_linear", "_smat_d2", "_smat_d3", "_smat_d4"]
RECURRENT = [base + variant for base in ("gated_deltanet", "mamba2") for variant in VARIANTS]
SCHEDULES = ["none", "kept", "rebuilt", "doubling", "window_8", "window_4"]
KEYS = ["k=1", "k=2", "k=3"]
SEEDS = [f"{key},seed={seed}" for key in KEYS for seed in range(3)]
ARMS_AND_CELLS = {
    "tab:routing": (
        [*BASELINES, "smat_d1", *SMAT],
        [*KEYS, "k=4", "k=5", "k=6"],
    ),
    "tab:mkar": (
        ["softmax", "linear_baselines", "lsh_125", *SMAT],
        KEYS,
    ),
    "tab:mkar-seeds": (
        [*BASELINES, "linear", "linear_matched", "lsh_121", "lsh_125", *SMAT],
        SEEDS,
    ),
    "text:mkar-learned": (["smat_d3_learned", "smat_d4_learned"], KEYS),
    "tab:mamba-smat-3seeds-pop": (
        ["mamba2", "mamba2_smat_d2", "mamba2_smat_d3", "mamba2_smat_d4"],
        KEYS,
    ),
    "tab:mkar-posctrl": ([*BASELINES, "linear"], ["T=128", "T=256", "T=1024"]),
    "tab:mqar-results": (RECURRENT, ["width=16", "width=32", "width=64"]),
    "tab:joint_recall": (RECURRENT, ["accuracy"]),
    "tab:mom_macro": (
        ["gated_deltanet", "gated_deltanet_smat_d3", "mom_profile", "mom_storage"],
        ["test"],
    ),
    "tab:mqar-uniform": (SCHEDULES, ["T=1024", "T=2048", "T=4096", "T=8192"]),
    "tab:mqar-placed": (SCHEDULES, ["D=0", "D=256", "D=1024", "D=3072", "D=7678"]),
    "tab:pg19": (SCHEDULES, ["[0,1024)", "[2048,4096)", "[4096,8192)", "[8192,16384)"]),
}


def test_every_label_of_the_paper_is_listed():
    listed = set(TABLES) | {table["part_of"] for table in TABLES.values() if "part_of" in table}
    assert set(LABELS) <= listed
    assert set(OTHERS) <= listed
    assert listed - set(LABELS) - set(OTHERS) == {"derived:mkar-means", "tab:mqar-placed/routed"}


@pytest.mark.parametrize("label", sorted(TABLES))
def test_a_table_is_whole(label):
    table = TABLES[label]
    assert set(table) >= FIELDS
    assert set(table) <= FIELDS | MORE_FIELDS
    assert table["caption"]
    assert table["source"]
    assert list(table["values"]) == list(table["rows"])
    for arm, by_cell in table["values"].items():
        assert list(by_cell) == list(table["columns"]), arm
        for number, deviation in by_cell.values():
            assert number is None or (isinstance(number, int | float) and number >= 0)
            assert deviation is None or (number is not None and deviation >= 0)
            if table["unit"] == "%":
                assert number is not None
                assert 0 <= number <= 100
            if table["unit"] == "fraction":
                assert 0 <= number <= 1


@pytest.mark.parametrize("label", sorted(ARMS_AND_CELLS))
def test_arms_and_cells_have_the_names_of_the_experiments(label):
    arms, cells = ARMS_AND_CELLS[label]
    assert sorted(TABLES[label]["rows"]) == sorted(arms)
    assert list(TABLES[label]["columns"]) == cells


@pytest.mark.parametrize("label", sorted(TABLES))
def test_what_is_not_a_number_is_explained(label):
    table = TABLES[label]
    empty = [
        (arm, cell)
        for arm, by_cell in table["values"].items()
        for cell, pair in by_cell.items()
        if pair[0] is None
    ]
    if label == "tab:training":
        assert all(table["text"][arm][cell] for arm, cell in empty)
    elif label == "tab:e2e-routing":
        # The paper has one prefill at 16K; Log-Linear was measured there or not at all.
        rest = {arm for arm, cell in empty if cell != "prefill_16k"}
        assert rest == {"mamba2_kernel", "log_linear_kernel", "log_linear"}
        assert {note.split("/")[0] for note in table["notes"]} == rest
    else:
        assert empty == []


@pytest.mark.parametrize(
    ("label", "arm", "cell", "number", "deviation"),
    [
        ("tab:routing", "softmax", "k=6", 5.27, 0.90),
        ("tab:routing", "gated_deltanet", "k=4", 24.22, 6.80),
        ("tab:routing", "smat_d3", "k=4", 89.45, 3.07),
        ("tab:routing", "smat_d4", "k=2", 99.54, 0.11),
        ("tab:mkar", "softmax", "k=1", 44.29, 49.00),
        ("tab:mkar", "smat_d3", "k=3", 34.20, 1.21),
        ("tab:mkar-seeds", "smat_d2", "k=2,seed=2", 16.0, None),
        ("tab:mkar-seeds", "softmax", "k=1,seed=1", 7.9, None),
        ("tab:mkar-softmax-sweep", "warmup_3e-4", "k=2,seed=2", 2.8, None),
        ("tab:mkar-softmax-sweep", "warmup_1e-3", "k=1,seed=2", 100.0, None),
        ("tab:mkar-posctrl", "linear", "T=256", 35.6, None),
        ("text:mkar-learned", "smat_d3_learned", "k=3", 44.6, None),
        ("text:mkar-learned", "smat_d4_learned", "k=2", 74.2, None),
        ("text:mkar-chance", "random_guess", "k=2", 3.6, None),
        ("fig:mkar-sanity", "constant", "k=2", 0.562, None),
        ("tab:mamba-smat-3seeds-pop", "mamba2_smat_d3", "k=2", 84.29, 19.86),
        ("tab:mqar-results", "gated_deltanet", "width=16", 44.34, 7.58),
        ("tab:mqar-results", "gated_deltanet_smat_d3", "width=64", 87.37, 4.12),
        ("tab:mqar-results", "mamba2_log_linear", "width=32", 76.57, 4.90),
        ("tab:joint_recall", "mamba2_log_linear", "accuracy", 66.01, 19.88),
        ("tab:joint_recall", "gated_deltanet_smat_d4", "accuracy", 59.89, 9.34),
        ("tab:mom_macro", "gated_deltanet_smat_d3", "test", 58.92, 4.22),
        ("tab:mom_macro", "mom_storage", "test", 35.10, 3.82),
        ("tab:mqar-uniform", "window_8", "T=8192", 90.1, 13.9),
        ("tab:mqar-uniform", "doubling", "T=4096", 62.6, 1.8),
        ("tab:mqar-placed", "window_4", "D=0", 27.1, 3.0),
        ("tab:mqar-placed", "rebuilt", "D=7678", 99.7, 0.3),
        ("tab:mqar-placed/routed", "window_4", "D=256", 1.00, None),
        ("tab:pg19", "window_8", "[8192,16384)", 1.559, 0.004),
        ("tab:pg19-300m", "smat_d3", "T=32768", 3.787, None),
        ("tab:pg19-750m", "mamba2_smat_d2", "perplexity", 24.117, None),
        ("text:pg19-parameters", "softmax", "parameters", 33.5, None),
        ("tab:e2e-routing", "smat_d3", "train_64k", 107.0, None),
        ("tab:e2e-routing", "gated_deltanet", "prefill_256k", 534.4, None),
        ("tab:e2e-routing", "log_linear", "prefill_16k", 340.7, None),
        ("tab:e2e-routing", "softmax", "cache", 4295, None),
        ("text:e2e-claims", "prefill_speedup_256k", "high", 300, None),
        ("tab:training", "learning_rate", "multi-key-recall", 3e-4, None),
        ("tab:training", "vocabulary", "joint-recall", 563, None),
        ("tab:training", "budget", "pg19", 9155, None),
        ("fig:prefill", "timed_runs", "setting", 15, None),
    ],
)
def test_figures_read_off_the_paper(label, arm, cell, number, deviation):
    assert TABLES[label]["values"][arm][cell] == [number, deviation]


def test_means_over_seeds_agree_with_the_seeds():
    seeds = TABLES["tab:mkar-seeds"]["values"]
    for label, arms in (
        ("tab:mkar", ["softmax", "lsh_125", "smat_d2", "smat_d3", "smat_d4"]),
        ("derived:mkar-means", list(TABLES["derived:mkar-means"]["rows"])),
    ):
        for arm in arms:
            for key in KEYS:
                runs = [seeds[arm][f"{key},seed={seed}"][0] for seed in range(3)]
                number, deviation = TABLES[label]["values"][arm][key]
                # Seeds are printed with one decimal, means with two.
                assert number == pytest.approx(mean(runs), abs=0.056)
                assert deviation == pytest.approx(stdev(runs), abs=0.1)


def test_tables_that_share_an_arm_agree_about_it():
    main, seeds = TABLES["tab:mkar-posctrl"]["values"], TABLES["tab:mkar-seeds"]["values"]
    for arm, by_length in main.items():
        assert by_length["T=1024"][0] == seeds[arm]["k=1,seed=0"][0]
    sweep = TABLES["tab:mkar-softmax-sweep"]["values"]["no_warmup_3e-4"]
    assert sweep == seeds["softmax"]
    for key in KEYS:
        assert TABLES["tab:mkar"]["values"]["linear_baselines"][key] == [0, 0]
        for arm in ("mamba2", "deltanet", "gated_deltanet", "log_linear", "linear"):
            assert TABLES["derived:mkar-means"]["values"][arm][key] == [0, 0]
