"""`smat bench` checks before it times, and writes what it prints. No test asserts a time."""

import json
import math

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
pytest.importorskip("pydantic")

import smat
from smat.__main__ import main
from smat.bench import config

SMALL = [
    "--heads", "2", "--key-dim", "4", "--value-dim", "4", "--chunk-size", "8", "--repeats", "2",
    "--gemm-size", "64",  # a product of 2048^3 takes longer than all of these tests
]  # fmt: skip
ENVIRONMENT = {
    "time", "machine", "processor", "device", "num_cores", "num_threads", "load_average", "system",
    "python", "torch", "backend", "smat", "commit",
}  # fmt: skip
TIMING = {"median", "low", "high", "slowest", "num_runs", "minor_faults", "major_faults"}


def run(capsys, tmp_path, *arguments):
    """Run a command that writes into a fresh folder; return status, output, error, result."""
    written = tmp_path / "result.json"
    status = main(["bench", *arguments, "--json-out", str(written)])
    printed = capsys.readouterr()
    result = json.loads(written.read_text()) if written.exists() else None
    return status, printed.out, printed.err, result


def assert_sound(result, name):
    assert result["benchmark"] == name
    assert set(result["environment"]) == ENVIRONMENT
    assert result["checks"]
    for check in result["checks"]:
        assert check["error"] <= check["tolerance"]
    for row in result["rows"]:
        assert set(row["timing"]) == TIMING
        assert all(math.isfinite(value) for value in row["timing"].values())


def test_tabulate(capsys, tmp_path):
    status, out, _, result = run(
        capsys, tmp_path, "tabulate", "--case", "3,3", "--case", "5,4", "--columns", "7",
        "--repeats", "2", "--dense-limit", "0.01", "--no-memory",
    )  # fmt: skip
    assert status == 0
    assert_sound(result, "tabulate")
    found = [(row["field_size"], row["vc_dim"], row["method"]) for row in result["rows"]]
    assert found == [
        (3, 3, "factored"), (3, 3, "algorithm2"), (3, 3, "dense"),
        (5, 4, "factored"), (5, 4, "algorithm2"),
    ]  # fmt: skip
    assert result["rows"][0]["ratio_to_factored"] == 1
    assert result["rows"][2]["kept_bytes"] == 4 * 9 * 12  # fp32, 9 points on 12 lines
    assert result["rows"][4]["kept_bytes"] == 8 * 155 * 26  # int64, 25 points on 155 planes
    assert "algorithm2" in out
    assert "…" not in out


def test_tabulate_measures_working_memory(capsys, tmp_path):
    _, _, _, result = run(
        capsys, tmp_path, "tabulate", "--case", "3,2", "--columns", "5", "--repeats", "1",
        "--dense-limit", "0",
    )  # fmt: skip
    assert [row["working_bytes"] >= 0 for row in result["rows"]] == [True, True]


def test_prefill(capsys, tmp_path):
    figure = tmp_path / "figure.png"
    status, out, _, result = run(
        capsys, tmp_path, "prefill", "--seq-len", "64", "--seq-len", "128", "--vc-dim", "3",
        "--both", "--window-step", "16", "--softmax-up-to", "64", "--no-memory",
        "--figure-out", str(figure), *SMALL,
    )  # fmt: skip
    assert status == 0
    assert_sound(result, "prefill")
    variants = [
        "d=1", "d=3", "d=3 window(16)", "d=1 gated", "d=3 gated", "d=3 gated window(16)",
    ]  # fmt: skip
    assert [row["name"] for row in result["rows"]] == [*variants, "softmax", *variants]
    assert set(result["growth"]) == set(variants)
    first = {row["name"]: row for row in result["rows"] if row["seq_len"] == 64}
    assert first["d=1"]["ratio_to_d1"] == first["d=3"]["ratio_to_plain"] == 1
    assert first["d=1 gated"]["ratio_to_d1"] == first["softmax"]["softmax_ratio"] == 1
    assert first["d=3"]["io_bytes"] == 4 * 64 * 2 * 16
    bound = 2 * ((64 ** (2 / 3) + 64 / 8) * 4 * 5 + 64)
    assert math.isclose(first["d=3"]["bound_bytes"], 4 * bound)
    assert [rate["seq_len"] for rate in result["rates"]] == [64, 128]
    assert all(rate["fraction_of_gemm"] > 0 for rate in result["rates"])
    assert figure.stat().st_size > 1000
    assert "d=3 gated window(16)" in out
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= 100


def test_train_compares_softmax_on_fewer_heads(capsys, tmp_path):
    status, out, _, result = run(
        capsys, tmp_path, "train", "--seq-len", "64", "--vc-dim", "2", "--gated",
        "--softmax-heads", "1", "--no-memory", "--figure-out", str(tmp_path / "f.svg"), *SMALL,
    )  # fmt: skip
    assert status == 0
    assert_sound(result, "train")
    quantities = {check["quantity"] for check in result["checks"]}
    assert quantities == {"output", *(f"gradient of {name}" for name in "qkv"),
                          "gradient of log_decay"}  # fmt: skip
    assert [row["heads"] for row in result["rows"]] == [2, 2, 1]
    assert result["growth"] == {}
    printed, *_ = (line for line in out.splitlines() if "softmax " in line and "│" in line)
    assert [cell.strip() for cell in printed.split("│")][1:4] == ["64", "softmax", "1"]


def test_train_measures_peak_memory(capsys, tmp_path):
    _, _, _, result = run(
        capsys, tmp_path, "train", "--seq-len", "64", "--vc-dim", "1", "--against", "none",
        "--figure-out", str(tmp_path / "f.png"), *SMALL,
    )  # fmt: skip
    assert [row["peak_extra_bytes"] >= 0 for row in result["rows"]] == [True]


@pytest.mark.parametrize("wrong", [lambda out: out * 1.001, lambda out: out / 0])
@pytest.mark.parametrize("command", ["prefill", "train"])
def test_a_wrong_op_is_not_timed(capsys, tmp_path, monkeypatch, command, wrong):
    right = smat.smat_attention

    def broken(q, k, v, mask, **options):
        out, state = right(q, k, v, mask, **options)
        return wrong(out) if mask.vc_dim == 3 else out, state

    monkeypatch.setattr(smat, "smat_attention", broken)
    status, _, err, result = run(
        capsys, tmp_path, command, "--seq-len", "64", "--vc-dim", "3", "--no-memory", *SMALL
    )
    assert (status, result) == (1, None)
    (line,) = (line for line in err.splitlines() if line.strip())
    assert line.startswith("smat: error: d=3: the output at T = 61 is off by")
    assert line.endswith("nothing was timed")


def test_a_wrong_gradient_is_not_timed(capsys, tmp_path, monkeypatch):
    right = smat.smat_attention

    def broken(q, k, v, mask, **options):
        out, state = right(q, k, v, mask, **options)
        return out + (v - v.detach()).mul(0.01), state

    monkeypatch.setattr(smat, "smat_attention", broken)
    arguments = ["--seq-len", "64", "--vc-dim", "1", "--no-memory", *SMALL]
    status, _, err, _ = run(capsys, tmp_path, "train", *arguments)
    assert status == 1
    assert "d=1: the gradient of v" in err


def test_a_wrong_tabulation_is_not_timed(capsys, tmp_path, monkeypatch):
    from smat.geometry import radon

    right = radon.tabulate_tables

    def broken(table, field_size, ambient_dim, out):
        return right(table, field_size, ambient_dim, out=out).mul_(1.01)

    monkeypatch.setattr(radon, "tabulate_tables", broken)
    status, _, err, result = run(capsys, tmp_path, "tabulate", "--case", "3,3")
    assert (status, result) == (1, None)
    assert "q=3, d=3, factored: the type table" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tabulate", "--case", "4,3"], "must be prime, got 4"),
        (["tabulate", "--case", "seventeen"], "but it is seventeen"),
        (["prefill", "--seq-len", "0"], "seq_len must be 1 or more, but it is 0"),
        (["prefill", "--seq-len", "8", "--seq-len", "8"], "once, but they are [8, 8]"),
        (["train", "--dtype", "bf16"], "use fp32 or fp64"),
        (["train", "--softmax-heads", "5"], "must lie in 1..4, but it is 5"),
        (["prefill", "--schedule", "fixed", "--window-step", "8"], "needs --schedule window"),
        (["decode", "--context", "3"], "context must be 8 or more, but it is 3"),
        (["decode", "--schedule", "moving"], "should be 'fixed' or 'window', but it is moving"),
        (["layers", "--num-groups", "3"], "4 heads do not fall into 3 groups"),
    ],
)
def test_bad_options_are_one_line(capsys, tmp_path, arguments, message):
    status, _, err, result = run(capsys, tmp_path, *arguments)
    assert (status, result) == (1, None)
    (line,) = (line for line in err.splitlines() if line.strip())
    assert line.startswith("smat: error: ")
    assert message in line


CONFIGS = {
    "tabulate": config.TabulateConfig,
    "prefill": config.PrefillConfig,
    "train": config.TrainConfig,
    "decode": config.DecodeConfig,
    "layers": config.LayersConfig,
}


@pytest.mark.parametrize("command", CONFIGS)
def test_help_has_examples_and_an_option_for_every_field(capsys, command):
    assert main(["bench", command, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"smat bench {command} --" in out
    for name, field in CONFIGS[command].model_fields.items():
        assert f"--{(field.validation_alias or name).replace('_', '-')}" in out


@pytest.mark.parametrize("model", CONFIGS.values())
def test_a_configuration_refuses_a_field_that_it_does_not_have(model):
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        model(heat=3)


def test_a_record_holds_what_was_asked_for_in_the_units_of_the_record():
    found = config.PrefillConfig(seq_len=(64, 32), both=True, schedule=("window",)).record()
    assert (found["seq_lens"], found["gates"]) == ([64, 32], (False, True))
    assert (found["window_steps"], found["softmax"], found["backward"]) == ((None, 2), True, False)
    assert config.TabulateConfig(dense_limit=0.5).record()["dense_limit"] == 500_000
    assert config.DecodeConfig(max_gb=1.5).record()["max_bytes"] == 1_500_000_000


def test_presets_give_way_to_options(capsys, tmp_path):
    status, _, _, result = run(
        capsys, tmp_path, "prefill", "--preset", "window", "--seq-len", "64", "--window-step", "16",
        "--vc-dim", "2", "--no-memory", "--figure-out", str(tmp_path / "f.png"), *SMALL,
    )  # fmt: skip
    assert status == 0
    assert [row["name"] for row in result["rows"]] == ["d=1", "d=2", "d=2 window(16)"]
    assert torch.get_num_threads() == result["environment"]["num_threads"]


LAYERS = ["--seq-len", "64", "--heads", "2", "--head-dim", "8", "--repeats", "1", "--vc-dim", "2"]
PEER_ROWS = {
    "transformers mamba2_chunk_scan, chunk 256",
    "transformers mamba2_chunk_scan, chunk 64",
    "transformers torch_chunk_gated_delta_rule, chunk 64",
}


@pytest.mark.filterwarnings("ignore::smat.SMatWarning")  # d is without effect at T = 64
def test_layers(capsys, tmp_path):
    pytest.importorskip("transformers")
    status, out, _, result = run(capsys, tmp_path, "layers", *LAYERS)
    assert status == 0
    assert_sound(result, "layers")
    rows = {row["name"]: row for row in result["rows"]}
    assert rows.keys() > PEER_ROWS
    assert not result["missing"]
    for name, row in rows.items():
        baseline = rows[row["baseline"]]
        assert row["ratio"] == row["timing"]["median"] / baseline["timing"]["median"]
        assert name in out
    assert rows["Mamba-2 + SMat layer"]["baseline"] == "Mamba-2 layer"


@pytest.mark.filterwarnings("ignore::smat.SMatWarning")
def test_layers_without_transformers_says_so_in_one_line(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("smat.bench.layers.load_peer", lambda peer: None)
    status, out, _, result = run(capsys, tmp_path, "layers", *LAYERS)
    assert status == 0
    assert set(result["missing"]) == PEER_ROWS
    assert "pip install smat[hf]" in " ".join(out[out.index("Not timed") :].split())


def test_layers_that_are_wrong_are_not_timed(capsys, tmp_path, monkeypatch):
    from smat.bench import layers

    wrong = {"Mamba-2": lambda **given: 1.01 * layers.scan(**given)}
    monkeypatch.setattr(layers, "OURS", {**layers.OURS, **wrong})
    status, _, error, result = run(capsys, tmp_path, "layers", *LAYERS)
    assert status != 0
    assert result is None
    assert "Mamba-2" in error
    assert "nothing was timed" in error


@pytest.mark.slow
def test_ranks_send_what_the_formula_says_and_hold_less_than_one(capsys, tmp_path):
    sizes = ["--seq-len", "16384", "--heads", "4", "--key-dim", "16", "--value-dim", "16"]
    status, _, error, result = run(capsys, tmp_path, "ranks", *sizes, "--repeats", "1")
    assert status == 0, error
    by_ranks = {row["ranks"]: row["peak_extra_bytes"] for row in result["rows"]}
    assert by_ranks[4] < 0.5 * by_ranks[1]
    assert all(row["sent_bytes"] == row["formula_bytes"] for row in result["rows"])


@pytest.mark.slow
def test_ranks_under_a_window_send_what_the_formula_says(capsys, tmp_path):
    sizes = ["--seq-len", "4096", "--heads", "2", "--key-dim", "8", "--value-dim", "8"]
    more = ["--window-step", "512", "--ranks", "2", "--ranks", "4", "--repeats", "1"]
    status, _, error, result = run(capsys, tmp_path, "ranks", *sizes, *more)
    assert status == 0, error
    assert {row["ranks"] for row in result["rows"]} == {2, 4}


def test_backends(capsys, tmp_path):
    sizes = ["--heads", "1", "--key-dim", "4", "--value-dim", "4", "--repeats", "2"]
    status, _, _, result = run(
        capsys, tmp_path, "backends", "--seq-len", "100", "--vc-dim", "1", *sizes
    )
    assert status == 0
    assert_sound(result, "backends")
    names = smat.ops.backend.available_backends("cpu")
    found = {(row["pass"], row["name"]): row["ratio"] for row in result["rows"]}
    passes = ("forward", "with backward", "32 tokens decoded")
    assert list(found) == [
        (each, name + gated) for each in passes for gated in ("", ", gated") for name in names
    ]
    assert all(found[each, f"torch{gated}"] == 1 for each in passes for gated in ("", ", gated"))
    plain = [row["ratio_to_plain"] is None for row in result["rows"]]
    assert plain == [", gated" not in row["name"] for row in result["rows"]]
    checked = {(each["name"], each["size"]) for each in result["checks"]}
    assert {(name, f"T = 600, d = 1{gated}{more}") for name in names for gated in ("", ", gated")
            for more in ("", ", decoded")} == checked  # fmt: skip
