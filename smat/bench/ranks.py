"""What ranks that hold a sequence together need and send: memory, bytes, and the way of a scan."""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from smat.bench import measure
from smat.bench.model_configs import RanksConfig
from smat.distributed import Share, context_parallel
from smat.distributed.exchange import Carry, scan
from smat.masks import SMatMask, SMatWarning, window
from smat.ops import smat_attention

CHECK_LEN = 96


def mask_of(config: RanksConfig, seq_len: int | None = None) -> SMatMask:
    """Return the mask of all tokens."""
    step = config.window_step
    length = seq_len or config.seq_len
    chunk = 64 if seq_len is None else 8
    if step is not None and seq_len is not None:
        step = CHECK_LEN // 8
    return SMatMask(length, config.vc_dim, chunk, boundary=None if step is None else window(step))


def formula(config: RanksConfig, size: int, rank: int) -> int:
    """Return the bytes that a rank sends, forward and backward, in fp32."""
    per_state = config.heads * config.key_dim * (config.value_dim + 1) * 4
    mask, share = mask_of(config), config.seq_len // size
    profiles = mask.geometry.num_profiles

    def states(edge: int) -> int:
        if config.window_step is None:  # behind the boundary no window is open yet
            return profiles + (edge * share != mask.num_distant)
        return 2 * profiles + 1 if edge * share > config.window_step else profiles + 1

    edges = [edge for edge in (rank, rank + 1) if 0 < edge < size]
    return per_state * sum(map(states, edges))


def run_ranks(config: RanksConfig) -> dict[str, Any]:
    """Check the result, then count and measure, and return the record."""
    step = config.window_step or 1
    for size in config.ranks:
        if config.seq_len % size or config.seq_len // size % step:
            raise ValueError(f"{config.seq_len} tokens in {step}s do not divide over {size} ranks")
    checks, rows, scans = [], [], []
    for size in config.ranks:
        by_rank = start_ranks(size, _measure, config)
        checks += by_rank[0]["checks"]
        for rank, found in enumerate(by_rank):
            expected, sent = formula(config, size, rank), found["row"]["sent_bytes"]
            if sent != expected:
                wrong = f"rank {rank} of {size} sent {sent} bytes"
                raise ValueError(f"{wrong}, but the formula says {expected}")
            rows.append({"ranks": size, "rank": rank, **found["row"], "formula_bytes": expected})
        for timed in zip(*(found["scans"] for found in by_rank), strict=True):
            slowest = {key: max(each[key] for each in timed) for key in ("ring", "log_steps")}
            scans.append({**timed[0], **slowest, "ranks": size})
    record = measure.begin_record("ranks", config, torch.device("cpu"), checks)
    return {**record, "rows": rows, "scans": scans}


def _measure(config: RanksConfig) -> dict[str, Any]:
    """Do everything on one rank; the check warms the process up."""
    warnings.simplefilter("ignore", SMatWarning)  # of the short mask that is checked
    checks = _check(config)
    row, scans = _use(config), []
    if dist.get_world_size() > 1:
        scans = _time_scans(config)
    return {"checks": checks, "row": row, "scans": scans}


def start_ranks(size: int, function: Callable[..., Any], *given: Any) -> list[Any]:
    """Call a function on so many fresh processes, and return what each returned."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(size):
            here, there = context.Pipe(duplex=False)
            where = (str(Path(folder) / "store"), rank, size)
            process = context.Process(target=_be_rank, args=(there, where, function, given))
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        try:
            return [pipe.recv() for pipe in pipes]
        except EOFError:
            raise ValueError(f"one of {size} ranks ended before it said anything") from None
        finally:
            for process in processes:
                process.join()


def _be_rank(
    pipe: Any, where: tuple[str, int, int], function: Callable[..., Any], given: tuple[Any, ...]
) -> None:
    store, rank, size = where
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    found = function(*given)
    dist.barrier()
    dist.destroy_process_group()
    pipe.send(found)


def _inputs(config: RanksConfig, length: int, seed: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    widths = (config.key_dim, config.key_dim, config.value_dim)
    return [torch.randn(1, length, config.heads, width, generator=generator, dtype=dtype)
            for width in widths]  # fmt: skip


def _attend(tokens: list[Tensor], mask: SMatMask) -> Tensor:
    q, k, v = tokens
    return smat_attention(q, k, v, mask)[0]


def _check(config: RanksConfig) -> list[dict[str, Any]]:
    """Compare output and gradients of a short sequence with those of one process."""
    mask, whole = mask_of(config, CHECK_LEN), _inputs(config, CHECK_LEN, 0, torch.float64)
    whole = [x.requires_grad_() for x in whole]
    out = _attend(whole, mask)
    expected = [out, *torch.autograd.grad(out.square().sum(), whole)]
    with context_parallel() as ranks:
        size, rank = ranks.size, ranks.rank
        own = [x.detach().chunk(size, 1)[rank].clone().requires_grad_() for x in whole]
        mine = _attend(own, mask)
    found = [mine, *torch.autograd.grad(mine.square().sum(), own)]
    checks = []
    for name, one, other in zip(("out", "q", "k", "v"), found, expected, strict=True):
        difference = one - other.detach().chunk(size, 1)[rank]
        sums = torch.stack([difference.square().sum(), other.square().sum() / size]).detach()
        dist.all_reduce(sums)
        error = (sums[0] / sums[1]).sqrt().item()
        checks.append({"name": f"{size} ranks", "quantity": name, "size": CHECK_LEN,
                       "error": error, "tolerance": 1e-10})  # fmt: skip
    return checks


def _use(config: RanksConfig) -> dict[str, Any]:
    """Take one forward and backward pass, and count what it needed."""
    before = measure.read_bytes("/proc/self/status", "VmRSS")
    length = config.seq_len // dist.get_world_size()
    own = [x.requires_grad_() for x in _inputs(config, length, dist.get_rank(), torch.float32)]
    with context_parallel() as ranks:
        _attend(own, mask_of(config)).sum().backward()
    peak = measure.read_bytes("/proc/self/status", "VmHWM")
    return {"peak_extra_bytes": peak - before, "sent_bytes": sum(ranks.sent.values())}


def _time_scans(config: RanksConfig) -> list[dict[str, Any]]:
    """Time scans of one state a head, and of a table, from rank to rank and in log steps."""
    size, rank = dist.get_world_size(), dist.get_rank()
    share, found = Share(None, rank, tuple(range(size + 1))), []
    for name, states in {"a state": 1, "a table": mask_of(config).geometry.num_profiles}.items():
        written = torch.randn(1, config.heads, states, config.key_dim, config.value_dim + 1)
        step = torch.rand(config.heads, 1, 1, 1)
        kinds = [Carry(written, step, [(0, 0)], tuple(written.shape))]
        ways: dict[str, Callable[[], Tensor]] = {
            "ring": lambda kinds=kinds: scan(kinds, share, kinds[0].written)[0][0],  # type: ignore[misc]
            "log_steps": partial(_log_scan, written, step),
        }
        one, other = (way() for way in ways.values())
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-4), "two scans differ"
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(config.repeats):
            for way, run in ways.items():
                dist.barrier()
                start = time.perf_counter()
                run()
                times[way].append(1e3 * (time.perf_counter() - start))
        medians = {way: statistics.median(each) for way, each in times.items()}
        found.append({"name": name, "bytes": written.numel() * written.element_size(), **medians})
    return found


def _log_scan(written: Tensor, step: Tensor) -> Tensor:
    """Scan in log steps: what came from one rank before, then two, then four."""
    size, rank = dist.get_world_size(), dist.get_rank()
    state, left = _from_before(1, torch.zeros_like(written), written, step)
    distance = 1
    while distance < size:
        came, further = _from_before(distance, torch.zeros_like(state), state, left)
        state, left = state + left * came, left * further
        distance *= 2
    return state if rank else torch.zeros_like(state)


def _from_before(
    distance: int, empty: Tensor, state: Tensor, step: Tensor
) -> tuple[Tensor, Tensor]:
    """Receive the states and steps of the rank so far before, and send the own ones as far."""
    size, rank = dist.get_world_size(), dist.get_rank()
    flat, works = torch.cat([state.flatten(), step.flatten()]), []
    came = torch.cat([empty.flatten(), torch.ones_like(step).flatten()])
    if rank + distance < size:
        works.append(dist.isend(flat, rank + distance))
    if rank >= distance:
        works.append(dist.irecv(came, rank - distance))
    for work in works:
        assert work is not None
        work.wait()
    sizes = [state.numel(), step.numel()]
    one, other = came.split(sizes)
    return one.view_as(state), other.view_as(step)
