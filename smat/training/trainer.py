"""One step of training, the state that a checkpoint holds, and the paper's metric on a split."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smat.distributed import tensor_parallel
from smat.layers import balance_weight
from smat.tasks.task import Task, seed_of
from smat.training.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from smat.training.recipe import TrainingConfig, learning_rate, make_optimizer
from smat.training.sharding import load_whole, own_part, shard, whole, whole_moments

if TYPE_CHECKING:
    from lightning.fabric import Fabric

LOOK_EVERY = 25  # steps between looks at the loss where looking means waiting for the device


class NonFiniteLossError(ArithmeticError):
    """The loss became infinite or not a number."""


@dataclass(frozen=True)
class Progress:
    """Where a run is: how many of its steps are done, and how well it does."""

    step: int
    steps: int
    loss: float | None = None  # of training, averaged since the last point of the curve
    accuracy: float | None = None  # the last evaluation's, in the unit of the task
    message: str | None = None  # what the user should read, such as of a damaged checkpoint


@dataclass(frozen=True)
class Evaluation:
    """What a model reaches, accuracies in %, or losses in the unit of the task."""

    accuracy: float  # the mean over cells of each cell's result
    by_cell: dict[str, float]  # the result of each cell, a load or a bin of positions
    loss: float  # the mean over examples


@torch.no_grad()
def evaluate(
    model: nn.Module,
    task: Task,
    *,
    seed: int,
    split: str = "test",
    device: torch.device | str = "cpu",
) -> Evaluation:
    """Score a model on a split; the model is in evaluation mode meanwhile."""
    scores: dict[str, list[Tensor]] = defaultdict(list)
    losses: list[Tensor] = []
    num_examples = 0
    was_training = model.training
    model.eval()
    try:
        for batch in task.eval_batches(seed, split):
            batch = batch.to(device)
            outputs = model(rows=batch.rows, **batch.inputs).float()
            for cell, score in task.scores(outputs, batch).items():
                scores[cell].append(score.double().flatten())
            losses.append(task.loss(outputs, batch).double() * len(batch.rows))
            num_examples += len(batch.rows)
    finally:
        model.train(was_training)
    if not losses:
        raise ValueError(f"task {task.name} has no examples in split {split!r}")
    by_cell = task.values({cell: torch.cat(each).mean().item() for cell, each in scores.items()})
    loss = torch.stack(losses).sum().item() / num_examples
    return Evaluation(sum(by_cell.values()) / len(by_cell), by_cell, loss)


class Trainer:
    """A model, its optimiser and how far they are: what a checkpoint holds."""

    def __init__(
        self, fabric: Fabric, model: nn.Module, task: Task, config: TrainingConfig, seed: int,
        sharded: bool = False, over_heads: bool = False,
    ) -> None:  # fmt: skip
        self.rank, self.size, self.is_copied = fabric.global_rank, fabric.world_size, True
        if sharded or over_heads:
            self.rank, self.size, self.is_copied = dist.get_rank(), dist.get_world_size(), False
        # Which of how many parts of a batch is this device's; of heads, each takes all of it.
        self.part, self.num_parts = (0, 1) if over_heads else (self.rank, self.size)
        if config.batch_size % (self.num_parts * config.accumulate):
            count = f"a batch of {config.batch_size} does not divide over {self.num_parts} devices"
            raise ValueError(count + f" in {config.accumulate} parts" * (config.accumulate > 1))
        self.fabric, self.task, self.config, self.seed = fabric, task, config, seed
        self.model = model.to(fabric.device)
        if over_heads:
            tensor_parallel(model)
        elif sharded:
            shard(model)
        self.wrapped, self.optimizer = fabric.setup(model, make_optimizer(model, config))
        self.step = 0
        self.seconds = 0.0  # spent in this process and in those that a kill ended
        self.num_tokens = 0  # trained on, as `seconds` counts
        self.loss_sum, self.loss_count = 0.0, 0  # since the last point of the curve
        self.curve: list[list[Any]] = []  # [step, mean training loss, accuracy or None]
        self.accuracy: float | None = None  # the last evaluation's
        self.gradient_norm: Tensor | None = None
        self.is_cuda = fabric.device.type == "cuda"
        self.look_every = 1 if fabric.device.type == "cpu" else LOOK_EVERY
        self._recent: list[Tensor] = []  # losses that nobody has looked at
        self._num_looked_at = 0

    def resume(self, folder: Path) -> str | None:
        """Take up a folder's newest whole checkpoint, or seed a new run; return what to tell."""
        state, message = load_checkpoint(folder)
        if state is None:
            self._seed()
            return None
        try:
            load_whole(self.model, self.optimizer, state["model"], state["optimizer"])
        except (RuntimeError, ValueError) as error:
            message = f"the checkpoint in {folder} is of another model or optimiser; train in "
            message += f"another folder, or delete this one: rm -r {folder}"
            raise CheckpointError(message) from error
        torch.set_rng_state(state["random"]["cpu"])
        if self.is_cuda and "cuda" in state["random"]:
            torch.cuda.set_rng_state(state["random"]["cuda"], self.fabric.device)
        self.step, self.seconds = state["step"], state["seconds"]
        self.num_tokens = state.get("num_tokens", 0)
        self.loss_sum, self.loss_count = state["loss_sum"], state["loss_count"]
        self.curve, self.accuracy = state["curve"], state["accuracy"]
        if self.part:  # the checkpoint has the generators of the first device
            self._seed()
        self._num_looked_at = self.step * self.config.accumulate
        return message

    def save(self, folder: Path) -> None:
        """Write a checkpoint, from the first device; a loss that is no number is never kept."""
        self.look()
        weights = whole(self.model.state_dict())
        moments = whole_moments(self.model, self.optimizer)
        if self.rank == 0:
            random = {"cpu": torch.get_rng_state()}
            if self.is_cuda:
                random["cuda"] = torch.cuda.get_rng_state(self.fabric.device)
            state = {
                "step": self.step, "seconds": self.seconds, "num_tokens": self.num_tokens,
                "loss_sum": self.loss_sum, "loss_count": self.loss_count, "curve": self.curve,
                "accuracy": self.accuracy, "model": weights, "optimizer": moments,
                "random": random,
            }  # fmt: skip
            save_checkpoint(folder, state)

    def train_step(self) -> None:
        """Change the weights once, by the batch that the step's number names."""
        batch = self.task.train_batch(self.step, self.config.batch_size, self.seed)
        self.num_tokens += next(iter(batch.inputs.values())).shape[:2].numel()
        batch = batch.select(slice(self.part, None, self.num_parts)).to(self.fabric.device)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.config)
        parts = list(batch.split(len(batch.rows) // self.config.accumulate))
        for number, part in enumerate(parts):
            waits = self.size > 1 and self.is_copied and number + 1 < len(parts)
            with self.fabric.no_backward_sync(self.wrapped, enabled=waits):
                loss = self.task.loss(self.wrapped(rows=part.rows, **part.inputs), part)
                total = self.with_balance(loss)
                self._recent += (loss.detach(), total.detach())
                if number == 0:
                    if len(self._recent) > 2 * (self.look_every - 1) * len(parts):
                        self.look()  # before the last gradients are gone, which an error tells of
                    self.optimizer.zero_grad(set_to_none=True)
                self.fabric.backward(total / len(parts))
        if self.config.clip is not None:
            self.gradient_norm = whole(
                self.fabric.clip_gradients(
                    self.wrapped, self.optimizer, max_norm=self.config.clip,
                    error_if_nonfinite=False,
                )
            )  # fmt: skip
        self.optimizer.step()
        self.step += 1

    def look(self) -> None:
        """Wait for the losses of the last steps, and stop if one is no number."""
        if not self._recent:
            return
        pairs = torch.stack(self._recent).view(-1, 2).tolist()
        self._recent.clear()
        for loss, total in pairs:
            if not math.isfinite(total):
                raise self._non_finite_loss(total, self._num_looked_at // self.config.accumulate)
            self._num_looked_at += 1
            self.loss_sum += loss
            self.loss_count += 1

    def agree(self, *wishes: bool) -> list[bool]:
        """Return what any of the devices wishes: all of them must do the same."""
        if self.size == 1:
            return list(wishes)
        flags = torch.tensor(wishes, dtype=torch.int32, device=self.fabric.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return [bool(flag) for flag in flags.tolist()]

    def mean_loss(self) -> float | None:
        """Return the mean training loss since the last point of the curve."""
        self.look()
        return self.loss_sum / self.loss_count if self.loss_count else None

    def progress(self, message: str | None = None) -> Progress:
        """Say where the run is."""
        loss = self.mean_loss()
        if loss is None and self.curve:
            loss = self.curve[-1][1]
        return Progress(self.step, self.config.steps, loss, self.accuracy, message)

    def evaluate(self, split: str) -> Evaluation:
        """Score the model, cast as it is in training; every device does all of it."""
        device = self.fabric.device
        return evaluate(self.wrapped, self.task, seed=self.seed, split=split, device=device)

    def with_balance(self, loss: Tensor) -> Tensor:
        """Add the model's balance loss, where it has one, with the weight of this step."""
        weight = balance_weight(self.step, self.config.balance_weight, self.config.balance_anneal)
        measure: Any = getattr(self.model, "balance_loss", None)
        balance = measure() if weight and measure is not None else None
        return loss if balance is None else loss + weight * balance

    def _non_finite_loss(self, loss: float, step: int) -> NonFiniteLossError:
        """Say where it happened, and how large the gradient of the step before was, unclipped."""
        rate = learning_rate(step, self.config)
        message = f"the loss is {loss} at step {step} (learning rate {rate:.3g})"
        gradients = {
            name: grad.abs().max().item()
            for name, parameter in self.model.named_parameters()
            if (grad := own_part(parameter.grad)) is not None and grad.numel()
        }
        if not gradients:
            message += ", before any gradient: the model or its input is off"
            return NonFiniteLossError(message)
        # The largest, and one that is no number before all others.
        name, largest = max(gradients.items(), key=lambda item: (math.isnan(item[1]), item[1]))
        if self.config.clip is not None and self.gradient_norm is not None:
            largest *= max(1.0, self.gradient_norm.item() / self.config.clip)
        advice = "try a lower learning rate, a longer warmup or a smaller clip"
        message += f"; the largest gradient of the last step was {largest:.3g}, in {name}; {advice}"
        return NonFiniteLossError(message)

    def _seed(self) -> None:
        part = self.part
        parts = ("training", self.seed, part, self.step) if part else ("training", self.seed)
        torch.manual_seed(seed_of(*parts))
