"""TensorBoard reads the log, and a resumed run's values replace those after its step."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from smat.training.loop import event_log


def scalars(folder, tag):
    reader = EventAccumulator(str(folder))
    reader.Reload()
    return [(event.step, event.value) for event in reader.Scalars(tag)]


def test_tensorboard_reads_what_was_written(tmp_path):
    with event_log(tmp_path, start_step=0) as log:
        for step in (1, 2, 3):
            log(step, {"train/loss": 1 / step, "train/learning_rate": 0.5})
    assert scalars(tmp_path, "train/loss") == [(s, pytest.approx(1 / s)) for s in (1, 2, 3)]
    assert scalars(tmp_path, "train/learning_rate") == [(s, 0.5) for s in (1, 2, 3)]


def test_a_resumed_run_overwrites_what_came_after_its_checkpoint(tmp_path):
    with event_log(tmp_path, start_step=0) as killed:
        for step in (1, 2, 3, 4):
            killed(step, {"train/loss": 1.0})
    with event_log(tmp_path, start_step=3) as resumed:
        for step in (3, 4):
            resumed(step, {"train/loss": 2.0})
    assert scalars(tmp_path, "train/loss") == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]
