"""What a language model costs: a training step on a long text, and tokens of a long answer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

import torch
from torch import Tensor

from smat.bench import measure
from smat.bench.model_configs import GenerateConfig, ModelSizes, StepConfig

CHECK_LEN, CHECK_VOCAB = 256, 64


def make_model(config: ModelSizes, **others: Any) -> Any:
    """Build the model of a configuration."""
    from smat.models.hf import SMatConfig, SMatForCausalLM  # which need an extra

    heads = {"head_dim": config.head_dim, "state_dim": config.head_dim}
    spec = {"mixer": "mamba2_smat", "vc_dim": config.vc_dim, "boundary": config.boundary, **heads}
    sizes: dict[str, Any] = {
        "vocab_size": config.vocab_size, "hidden_size": config.width, "mixers": [spec],
        "num_hidden_layers": config.layers, "context_length": config.context_length,
    }  # fmt: skip
    torch.manual_seed(0)
    return SMatForCausalLM(SMatConfig(**{**sizes, **others}))


def run_step(config: StepConfig) -> dict[str, Any]:
    """Check the loss, then take one training step, and return the record."""
    record = measure.begin_record("lm-step", config, torch.device("cpu"), _check_step(config))
    model = make_model(config).train()
    if config.checkpointing:
        model.gradient_checkpointing_enable()
    ids = torch.randint(config.vocab_size, (1, config.seq_len))
    loss, forward = _cost(lambda: model(ids, labels=ids).loss)
    _, backward = _cost(loss.backward)
    num_parameters = sum(each.numel() for each in model.parameters())
    rows = [
        {"seq_len": config.seq_len, "name": name, "parameters": num_parameters, **cost}
        for name, cost in {"forward": forward, "backward": backward}.items()
    ]
    return {**record, "rows": rows}


def run_generate(config: GenerateConfig) -> dict[str, Any]:
    """Check decoding, then answer a prompt in pieces, and return what each of them cost."""
    checks = _check_decoding(config)
    record = measure.begin_record("lm-generate", config, torch.device("cpu"), checks)
    from smat.models.hf import SMatCache

    model = make_model(config).eval()
    sequence = torch.randint(config.vocab_size, (1, config.prompt))
    cache, rows = SMatCache(model.config), []
    model.generate(sequence, past_key_values=cache, max_new_tokens=1)
    given = {"past_key_values": cache, "max_new_tokens": config.piece, "do_sample": False}
    while sequence.shape[1] < config.prompt + config.tokens:
        sequence, cost = _cost(partial(model.generate, sequence, **given))
        cost["median"] /= config.piece
        row = {"context": sequence.shape[1], "name": "a token", "cache_bytes": cache_bytes(cache)}
        rows.append({**row, **cost})
    return {**record, "rows": rows}


def cache_bytes(cache: Any) -> int:
    """Count the bytes of all states."""

    def count(state: Any) -> int:
        if isinstance(state, Tensor):
            return state.numel() * state.element_size()
        if isinstance(state, tuple):
            return sum(count(each) for each in state)
        return sum(count(each) for each in getattr(state, "tensors", {}).values())

    caches = [layer.state for layer in cache.layers if layer.state is not None]
    return sum(count(each) for held in caches for each in held.states.values())


def _cost(call: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """Call once: its result, the processor's seconds and the largest resident set in the call."""
    Path("/proc/self/clear_refs").write_text("5")
    start = process_time()
    result = call()
    seconds = process_time() - start
    return result, {
        "median": seconds,
        "peak_bytes": measure.read_bytes("/proc/self/status", "VmHWM"),
    }


def _small(config: ModelSizes) -> tuple[Any, Any, Tensor]:
    """Build a small model in fp32, the same one in fp64, and a text."""
    sizes: dict[str, Any] = {"vocab_size": CHECK_VOCAB, "num_hidden_layers": 1}
    models = [make_model(config, context_length=CHECK_LEN, **sizes).eval() for _ in range(2)]
    return models[0], models[1].double(), torch.randint(CHECK_VOCAB, (1, CHECK_LEN))


def _check_step(config: ModelSizes) -> list[dict[str, Any]]:
    """Hold the loss and the gradient of the read-out to those of plain logits in fp64."""
    model, exact, ids = _small(config)
    found = {"loss": model(ids, labels=ids).loss}
    oracle = {"loss": torch.nn.functional.cross_entropy(exact(ids).logits[0, :-1], ids[0, 1:])}
    for losses, each in ((found, model), (oracle, exact)):
        (losses["gradient"],) = torch.autograd.grad(losses["loss"], each.lm_head.weight)
    return measure.check("training step", f"T = {CHECK_LEN}", found, oracle, "fp32")


@torch.no_grad()
def _check_decoding(config: ModelSizes) -> list[dict[str, Any]]:
    """Hold the logits behind a prompt and steps to those of a whole forward pass in fp64."""
    from smat.models.hf import SMatCache

    model, exact, ids = _small(config)
    cache, half = SMatCache(model.config), CHECK_LEN // 2
    pieces = [ids[:, :half], *ids[:, half:].split(1, 1)]
    logits = [model(each, past_key_values=cache, use_cache=True).logits for each in pieces]
    oracle = {"output": exact(ids, use_cache=False).logits}
    found = {"output": torch.cat(logits, 1)}
    return measure.check("decoding", f"T = {CHECK_LEN}", found, oracle, "fp32")
