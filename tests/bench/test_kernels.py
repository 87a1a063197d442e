"""What kernels need when compiled, and what they move: in a process without the interpreter."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("triton")
pytest.importorskip("pydantic")
pytest.importorskip("typer")

from smat.bench.compiled import DEVICES


def run(tmp_path, *options):
    """Run the command in a process of its own; return its record and what it printed."""
    written = tmp_path / "kernels.json"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "smat", "bench", "kernels", *options,
         "--json-out", str(written)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(written.read_text()), done.stdout


def test_bytes_are_near_the_least(tmp_path):
    record, printed = run(tmp_path, "--no-compile")
    rows = {(row["name"], row["pass"], row["dtype"]): row for row in record["bytes"]}
    assert len(rows) == 4 * 2 * 2 * 2  # d, gates, passes, dtypes
    for (name, direction, dtype), row in rows.items():
        kernels = [each for kernel, each in row["by_kernel"].items() if kernel != "torch"]
        moved = sum(each["loads"] + each["stores"] for each in kernels)
        assert moved == row["moved_bytes"]
        assert row["ratio_to_least"] == moved / row["least_bytes"] >= 1
        if name.startswith("d=3") and dtype == "bf16":  # fp32 takes chunks of 32, twice the states
            assert row["ratio_to_least"] <= (1.5 if direction == "forward" else 2)
    assert "estimate" in printed
    assert "…" not in printed


def assert_fits(rows):
    """Nothing is spilled, shared memory is within limits, and two blocks fit where one is small."""
    assert rows
    for row in rows:
        device = DEVICES[row["compiled_for"]]
        assert row["spilled_bytes"] == 0, row
        assert row["shared_bytes"] <= device.shared_of_block, row
        assert row["blocks"] >= 1, row


def test_kernels_fit_one_device(tmp_path):
    record, printed = run(
        tmp_path, "--no-bytes", "--device", "sm_80", "--width", "64", "--dtype", "bf16"
    )
    assert_fits(record["compiled"])
    assert {"step_kernel", "attend_chunks", "pool_kernel"} <= {
        row["kernel"] for row in record["compiled"]
    }
    assert "registers" in printed


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_kernels_fit_everywhere(device, tmp_path):
    record, _ = run(tmp_path, "--no-bytes", "--device", device)
    assert_fits(record["compiled"])


def test_occupancy_follows_from_published_limits():
    device = DEVICES["sm_90"]
    assert device.blocks_at_once(num_warps=8, registers=255, shared=0) == (1, "registers")
    assert device.blocks_at_once(4, 32, 227 << 10) == (1, "shared memory")
    assert device.blocks_at_once(4, 32, 0) == (16, "registers, warps")
    assert device.blocks_at_once(1, 32, 0) == (32, "blocks")
    amd = DEVICES["gfx942"]
    assert amd.blocks_at_once(4, 128, 0) == (4, "registers")
    assert amd.blocks_at_once(4, 64, 32 << 10) == (2, "shared memory")
