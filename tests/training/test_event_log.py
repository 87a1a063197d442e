"""TensorBoard reads the log, and a resumed run's values replace those after its step."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from smat.training.event_log import EventLog


def scalars(folder, tag):
    reader = EventAccumulator(str(folder))
    reader.Reload()
    return [(event.step, event.value) for event in reader.Scalars(tag)]


def test_tensorboard_reads_what_was_written(tmp_path):
    log = EventLog(tmp_path, start_step=0)
    for step in (1, 2, 3):
        log.add(step, {"train/loss": 1 / step, "train/learning_rate": 0.5})
    log.close()
    assert scalars(tmp_path, "train/loss") == [(s, pytest.approx(1 / s)) for s in (1, 2, 3)]
    assert scalars(tmp_path, "train/learning_rate") == [(s, 0.5) for s in (1, 2, 3)]


def test_a_resumed_run_overwrites_what_came_after_its_checkpoint(tmp_path):
    killed = EventLog(tmp_path, start_step=0)
    for step in (1, 2, 3, 4):
        killed.add(step, {"train/loss": 1.0})
    killed.close()
    resumed = EventLog(tmp_path, start_step=3)
    for step in (3, 4):
        resumed.add(step, {"train/loss": 2.0})
    resumed.close()
    assert scalars(tmp_path, "train/loss") == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]
