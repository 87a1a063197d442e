"""Train a model to the end, through evaluations, checkpoints and interruptions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from smat.extras import require
from smat.tasks.task import Task
from smat.training.checkpoint import explain_full_disk, save_weights
from smat.training.fabric import make_fabric
from smat.training.recipe import TrainingConfig, learning_rate
from smat.training.sharding import whole
from smat.training.trainer import Progress, Trainer

if TYPE_CHECKING:
    from lightning.fabric import Fabric

PROGRESS_SECONDS = 0.5
CURVE_STEPS = 100  # points of the learning curve, evaluations apart
OnProgress = Callable[[Progress], None]
Log = Callable[[int, Mapping[str, float]], None]


class Interrupted(Exception):
    """A run was asked to stop, and has written its checkpoint."""

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped at step {step}, which is kept" if step else "not begun")


def train(
    model: nn.Module,
    task: Task,
    config: TrainingConfig,
    folder: Path | str,
    *,
    seed: int = 0,
    device: str = "auto",
    on_progress: OnProgress | None = None,
    should_stop: Callable[[], bool] | None = None,
    fabric: Fabric | None = None,
    sharded: bool = False,
    over_heads: bool = False,
) -> dict[str, Any]:
    """Train a model, from the folder's checkpoint if there is one, and score it.

    Returns accuracy and by_cell (in % or the task's unit), loss, curve, parameters, minutes, steps
    and tokens per second, of the test split unless the task has other `scored_splits`; by_cell has
    the mean of each further one by its name. The folder gets weights.safetensors and a TensorBoard
    log. A run that was killed and is started again with the same arguments ends in the same
    weights, bit for bit on as many CPU threads.
    `should_stop` is asked after every step: True writes a checkpoint and raises `Interrupted`.
    A `fabric` brings another strategy or several devices, each of which takes some of a batch; with
    `sharded` each process that torchrun started holds a part of every parameter (FSDP2), and with
    `over_heads` some heads of every mixer, on the same batch (`smat.tensor_parallel`).
    """
    folder = Path(folder)
    fabric = fabric or make_fabric(device, config.precision)
    trainer = Trainer(fabric, model, task, config, seed, sharded, over_heads)
    message = trainer.resume(folder)
    is_first = trainer.rank == 0
    if on_progress is not None:
        on_progress(trainer.progress(message))
    if trainer.step < config.steps:
        trainer.wrapped.train()
        with event_log(folder, trainer.step) if is_first else nullcontext() as log:
            _take_steps(trainer, folder, log, on_progress, should_stop)
    first, *further = task.scored_splits
    found = trainer.evaluate(first)
    found.by_cell.update({split: trainer.evaluate(split).accuracy for split in further})
    weights = whole(trainer.model.state_dict())
    if is_first:
        save_weights(folder, weights)
    trainer.curve[-1][2] = found.accuracy
    return {
        **asdict(found),
        "curve": trainer.curve,
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "minutes": trainer.seconds / 60,
        "steps_per_second": config.steps / trainer.seconds,
        "tokens_per_second": trainer.num_tokens / trainer.seconds,
    }


def _take_steps(
    trainer: Trainer,
    folder: Path,
    log: Log | None,
    on_progress: OnProgress | None,
    should_stop: Callable[[], bool] | None,
) -> None:
    """Take the steps that are left; the last one is always kept."""
    config = trainer.config
    last_save = last_told = time.monotonic()
    start = last_save - trainer.seconds
    while trainer.step < config.steps:
        trainer.train_step()
        _note_point(trainer, log)
        now = time.monotonic()
        trainer.seconds = now - start
        if on_progress is not None and now - last_told >= PROGRESS_SECONDS:
            on_progress(trainer.progress())
            last_told = now
        stop, save = trainer.agree(
            should_stop is not None and should_stop(), now - last_save >= config.checkpoint_seconds
        )
        if stop or save or trainer.step == config.steps:
            trainer.save(folder)
            last_save = now
        if stop and trainer.step < config.steps:
            raise Interrupted(trainer.step)


def _note_point(trainer: Trainer, log: Log | None) -> None:
    """Evaluate where the recipe asks for it, and add a point to the curve where one is due."""
    config, step = trainer.config, trainer.step
    is_last = step == config.steps  # what the task is scored on comes instead
    evaluates = config.eval_every > 0 and step % config.eval_every == 0 and not is_last
    if not (evaluates or is_last or step % max(1, config.steps // CURVE_STEPS) == 0):
        return
    loss = trainer.mean_loss() or 0.0
    values = {"train/loss": loss, "train/learning_rate": learning_rate(step - 1, config)}
    if trainer.gradient_norm is not None:
        values["train/gradient_norm"] = trainer.gradient_norm.item()
    accuracy = None
    if evaluates:
        found = trainer.evaluate("validation")
        accuracy = trainer.accuracy = found.accuracy
        shown = "accuracy" if trainer.task.unit == "%" else trainer.task.unit.replace(" ", "_")
        values |= {f"validation/{shown}": found.accuracy, "validation/loss": found.loss}
    trainer.curve.append([step, loss, accuracy])
    trainer.loss_sum, trainer.loss_count = 0.0, 0
    if log is not None:
        log(step, values)


@contextmanager
def event_log(folder: Path, start_step: int) -> Iterator[Log]:
    """Open a TensorBoard log; values of a resumed run replace those after its step.

    torch's SummaryWriter writes from a thread of its own, where a full disk becomes a hang or a
    traceback; this one writes in the thread that trains, where it is an error.
    """
    events = require("tensorboard.compat.proto.event_pb2", extra="train")
    summaries = require("tensorboard.compat.proto.summary_pb2", extra="train")
    records = require("tensorboard.summary.writer.record_writer", extra="train")
    path = folder / f"events.out.tfevents.{time.time_ns() // 1000}.smat"
    folder.mkdir(parents=True, exist_ok=True)
    with explain_full_disk(path), path.open("wb") as file:
        writer = records.RecordWriter(file)

        def write(**fields: Any) -> None:
            writer.write(events.Event(wall_time=time.time(), **fields).SerializeToString())
            writer.flush()

        def add(step: int, values: Mapping[str, float]) -> None:
            entry = summaries.Summary.Value
            entries = [entry(tag=tag, simple_value=number) for tag, number in values.items()]
            write(summary=summaries.Summary(value=entries), step=step)

        write(file_version="brain.Event:2")
        write(session_log=events.SessionLog(status=events.SessionLog.START), step=start_step)
        yield add
