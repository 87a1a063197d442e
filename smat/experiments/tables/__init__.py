"""The experiments that can be run, one file a family of tables of the paper."""

from smat.experiments.run import Experiment
from smat.experiments.tables.length_generalization import LENGTH_GENERALIZATION
from smat.experiments.tables.multi_key_learned import MULTI_KEY_LEARNED
from smat.experiments.tables.multi_key_recall import (
    MULTI_KEY_CONTROL,
    MULTI_KEY_RECALL,
    SOFTMAX_SWEEP,
)
from smat.experiments.tables.pg19 import PG19_300M, PG19_750M, PG19_BYTES
from smat.experiments.tables.recall import JOINT_RECALL, MQAR_TABLE
from smat.experiments.tables.subset_routing import SUBSET_ROUTING

EXPERIMENTS: dict[str, Experiment] = {
    table.name: table
    for table in (
        SUBSET_ROUTING,
        MULTI_KEY_RECALL,
        MULTI_KEY_LEARNED,
        MULTI_KEY_CONTROL,
        SOFTMAX_SWEEP,
        MQAR_TABLE,
        JOINT_RECALL,
        LENGTH_GENERALIZATION,
        PG19_BYTES,
        PG19_300M,
        PG19_750M,
    )
}


def find_experiment(name: str) -> Experiment:
    """Return an experiment by its name.

    >>> find_experiment("subset-rooting")
    Traceback (most recent call last):
    ValueError: there is no experiment 'subset-rooting'; known: subset-routing, ...
    """
    if name not in EXPERIMENTS:
        raise ValueError(f"there is no experiment {name!r}; known: {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name]
