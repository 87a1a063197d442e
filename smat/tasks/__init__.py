"""Tasks of the paper: examples, the rows that count, losses and metrics."""

from smat.tasks.task import Batch, Task, generator_of, seed_of

__all__ = ["Batch", "Task", "generator_of", "seed_of"]
