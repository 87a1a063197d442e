"""Advise on d, boundary and step for a length: what each d costs, and which one to take."""

from __future__ import annotations

import re
from typing import Any

from smat.console import WIDTH
from smat.report.terminal_tables import DTYPE_BYTES, format_bytes, geometry_row

SOFTMAX_WINS_BELOW = 1024  # tokens, on a CPU: `smat bench prefill --preset quick`
STEPS = 8  # a window of an eighth of the length, the better of the paper's two at that length
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def parse_bytes(text: str) -> int:
    """Read a size.

    >>> parse_bytes("500MB"), parse_bytes("2 g"), parse_bytes("1.5e6")
    (500000000, 2000000000, 1500000)
    """
    match = re.fullmatch(r"\s*([\d.]+(?:e\d+)?)\s*([kmg]?)b?\s*", text.lower())
    if match is None:
        raise ValueError(f"a size is a number with kB, MB or GB, as 500MB, not {text!r}")
    return int(float(match[1]) * UNITS[match[2]])


def advise(
    seq_len: int, max_vc_dim: int = 4, *, heads: int = 8, key_dim: int = 64, value_dim: int = 64,
    batch: int = 1, dtype: str = "fp32", chunk_size: int = 64,
) -> list[dict[str, Any]]:  # fmt: skip
    """Work out for each d what a layer keeps and how much it works, beside linear attention.

    >>> row = advise(65536)[2]
    >>> row["vc_dim"], row["field_size"], row["window_step"], round(row["work"], 2)
    (3, 37, 8192, 1.45)

    Work counts multiplications and additions of the forward pass, relative to d = 1: chunks and
    scan for every token, a write and a read for the long range, and the tabulation, once for a
    fixed boundary and once a step for a window. A window keeps two tables of types, two of
    profiles and two running states.
    """
    sizes: dict[str, Any] = {"heads": heads, "key_dim": key_dim, "value_dim": value_dim}
    sizes |= {"batch": batch, "dtype": dtype}
    step = max(1, seq_len // STEPS)
    state = key_dim * (value_dim + 1)
    causal = seq_len * (2 * state + chunk_size * (key_dim + value_dim + 1))
    rows = []
    for vc_dim in range(1, max_vc_dim + 1):
        row = geometry_row(seq_len, vc_dim, chunk_size, **sizes)
        num_bytes = batch * heads * state * DTYPE_BYTES[dtype]
        is_plain = vc_dim == 1 or not row["num_distant"]
        write_and_read = (row["num_distant"] + row["num_recent"]) * state
        table = row["additions_factored"] * state
        window = 2 * (row["num_types"] + row["num_profiles"] + 1) * num_bytes
        rows.append({
            "vc_dim": vc_dim, "field_size": row["field_size"],
            "guarantees_vc_dim": row["guarantees_vc_dim"], "cache_bytes": row["cache_bytes"],
            "work": 1.0 if is_plain else 1 + (write_and_read + table) / causal,
            "window_step": None if is_plain else step,
            "window_bytes": None if is_plain else window,
            "window_work": None if is_plain else 1 + (write_and_read + STEPS * table) / causal,
        })  # fmt: skip
    return rows


def choose(rows: list[dict[str, Any]], memory: int, max_work: float) -> dict[str, Any]:
    """Take the largest d that is proved, fits into the memory and works no more than allowed.

    >>> choose(advise(65536), memory=3 * 10**8, max_work=2.0)["vc_dim"]
    3
    """
    fitting = [
        row for row in rows
        if row["guarantees_vc_dim"] and row["work"] <= max_work and row["cache_bytes"] <= memory
    ]  # fmt: skip
    if not fitting:
        least = format_bytes(rows[0]["cache_bytes"])
        raise ValueError(f"no d fits: already d = 1 keeps {least}; allow more memory or work")
    return fitting[-1]


def reasons(seq_len: int, chosen: dict[str, Any], softmax_bytes: int) -> list[str]:
    """Say what to take and why, a paragraph each."""
    d, paragraphs = chosen["vc_dim"], []
    if seq_len < SOFTMAX_WINS_BELOW:
        paragraphs.append(
            f"At {seq_len:,} tokens softmax attention is about as fast or faster, and it reads any "
            "token: take SoftmaxAttention unless the sequences will grow. `smat bench prefill "
            "--preset quick` tells where the two cross on your machine."
        )
    if d == 1:
        paragraphs.append(
            "d = 1: linear attention. A larger d is not proved at this length, or does not fit."
        )
        return paragraphs
    step = chosen["window_step"]
    cheaper = softmax_bytes / chosen["cache_bytes"]
    return [
        *paragraphs,
        f"d = {d}: the largest that is proved here and fits. It keeps "
        f"{format_bytes(chosen['cache_bytes'])}, where keys and values would take "
        f"{format_bytes(softmax_bytes)} ({cheaper:.2g} times as much), and works "
        f"{chosen['work']:.2f} times as much as linear attention.",
        "A prompt of known length, then questions about it: "
        f"SMatAttention(..., vc_dim={d}, horizon={seq_len}). The boundary stays in the middle, and "
        "VC = d is proved.",
        f"A language model: boundary=smat.schedules.window({step}). Just after a fixed boundary a "
        "query's neighbours are distant, and of those it sees only the keys on its hyperplane; "
        "behind a window it sees at least a step of recent keys. A window has no horizon, keeps "
        f"{format_bytes(chosen['window_bytes'])} and works {chosen['window_work']:.2f} times as "
        "much (longer steps, less); its VC dimension is not proved, and can be larger than d.",
    ]


def softmax_cache(seq_len: int, heads: int, width: int, batch: int, dtype: str) -> int:
    """Count the bytes of keys and values, `width` numbers a head and token."""
    return batch * heads * seq_len * width * DTYPE_BYTES[dtype]


def wrap(paragraph: str) -> str:
    """Break a paragraph into lines that fit beside the tables."""
    import textwrap

    return textwrap.fill(paragraph, WIDTH)
