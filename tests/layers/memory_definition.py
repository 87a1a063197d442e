"""Memories to test, and what they are one token at a time, as the appendix defines them."""

import torch

from smat.layers import CallInfo, TransportedMemory
from smat.layers.call import attend_after, with_neighbours
from smat.layers.memory.transport import DeltaTokens, read_transported
from smat.masks import SMatMask
from smat.ops import smat_attention
from smat.ops.delta_rule.reference import transition_reference

BATCH, LENGTH, HIDDEN, HEADS, KEY, VALUE = 2, 24, 5, 2, 3, 2
CPU = torch.device("cpu")


def quietly(mask, **changes):
    """Change a mask without the warning that masks of few tokens give."""
    return SMatMask.from_dict(mask.to_dict() | changes)


def make(kind, mask, **options):
    """Make a memory in fp64 whose gates stand open to different degrees."""
    torch.manual_seed(0)
    memory = kind(HIDDEN, HEADS, mask, **options).double()
    for gate in (memory.read_gate, getattr(memory, "write_gate", None)):
        if gate is not None:
            torch.nn.init.normal_(gate.linear.bias)
    return memory


def tokens_for(kind, seed=0, batch=BATCH, length=LENGTH):
    """Draw what a kind of memory takes."""
    normalised = kind is TransportedMemory
    return draw_tokens(batch, length, HIDDEN, HEADS, KEY, VALUE, seed, normalised)


def call(memory, tokens, info=None, branch="long_range"):
    """Call a memory as its backbone would, and return what is read and the cache.

    What an additive memory reads is one branch of the backbone's attention, alone unless it is
    asked for "both".
    """
    info = CallInfo(*tokens["k"].shape[:2], CPU) if info is None else info
    mask = memory.mask_of(info)
    chosen, bin_position, routing = memory.route(tokens["hidden"], mask, info)
    neighbours = memory.neighbours(chosen, bin_position, mask)
    q, k, v, beta, log_decay = (tokens.get(x) for x in ("q", "k", "v", "beta", "log_decay"))
    read_mask = memory.read_mask(mask)
    if isinstance(memory, TransportedMemory):
        given = memory.tokens_of(DeltaTokens(q, k, v, beta, log_decay))
        out, state = read_transported(
            given, chosen, read_mask, info, neighbours, erases=memory.erases
        )
        return out, info.cache(memory=state, routing=routing, mask=mask)
    per_token = {"log_decay": log_decay, **chosen._asdict()}
    if info.past is not None:
        out, state = attend_after(info.past["state"], q, k, v, info, **per_token)
    else:
        given = {
            "feature_map": "identity", "normalize": False, "cu_seqlens": info.cu_seqlens,
            "decay_scope": memory.decay_scope, **per_token,
        }  # fmt: skip
        out, state = smat_attention(
            q, k, v, read_mask, branch=branch, attention_mask=info.real,
            output_final_state=info.use_cache, **given,
        )  # fmt: skip
        out = with_neighbours(out, neighbours, q, k, v, read_mask, info, **given)
    return out, info.cache(state=state, routing=routing, mask=mask)


def draw_tokens(batch, length, hidden, heads, key_dim, value_dim, seed=0, normalised=False):
    """Draw hidden states, q, k, v, log_decay and beta, in fp64."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(batch, length, *shape, generator=generator, dtype=torch.float64)

    tokens = {
        "hidden": normal(hidden), "q": normal(heads, key_dim), "k": normal(heads, key_dim),
        "v": normal(heads, value_dim), "log_decay": -0.2 * normal(heads).abs(),
        "beta": normal(heads).sigmoid(),
    }  # fmt: skip
    if normalised:
        for name in ("q", "k"):
            tokens[name] = torch.nn.functional.normalize(tokens[name], dim=-1)
    return tokens


def additive_reads(tokens, write_weight, profile, reads, mask):
    """Step F_x <- a F_x + 1{x_j = x} w_j k_j v_j' up to each boundary, then decay: (B, T, H, V)."""
    k, v, log_decay = (tokens[name] for name in ("k", "v", "log_decay"))
    geometry = mask.geometry
    incidence = geometry.incidence().to(k.dtype)
    outputs = []
    for t in range(k.shape[1]):
        boundary = mask.schedule.boundary_at(t)
        table = k.new_zeros(*k[:, 0].shape[:2], geometry.num_profiles, k.shape[3], v.shape[3])
        for j in range(t + 1):
            table = log_decay[:, j].exp()[..., None, None, None] * table
            if j < boundary:
                chosen = torch.nn.functional.one_hot(profile[:, j], geometry.num_profiles)
                write = write_weight[:, j, :, None] * k[:, j]
                table = table + torch.einsum(
                    "bhx,bhk,bhv->bhxkv", chosen.to(k.dtype), write, v[:, j]
                )
        outputs.append(read(table, incidence, tokens["q"][:, t], reads, t))
    return torch.stack(outputs, 1)


def transported_reads(tokens, ste_weight, profile, reads, mask, decay):
    """Step every profile by A_j, up to the query; only distant tokens write: (B, T, H, V)."""
    k, v, beta = (tokens[name] for name in ("k", "v", "beta"))
    geometry = mask.geometry
    incidence = geometry.incidence().to(k.dtype)
    table = k.new_zeros(*k[:, 0].shape[:2], geometry.num_profiles, k.shape[3], v.shape[3])
    outputs = []
    for t in range(k.shape[1]):
        if decay != "none":
            table = transition_reference(k, beta, tokens.get("log_decay"), t).unsqueeze(2) @ table
        if t < mask.schedule.anchor:
            chosen = torch.nn.functional.one_hot(profile[:, t], geometry.num_profiles)
            write = (ste_weight * beta)[:, t, :, None] * k[:, t]
            table = table + torch.einsum("bhx,bhk,bhv->bhxkv", chosen.to(k.dtype), write, v[:, t])
            outputs.append(torch.zeros_like(v[:, t]))
        else:
            query = k.shape[3] ** -0.5 * tokens["q"][:, t]
            outputs.append(read(table, incidence, query, reads, t))
    return torch.stack(outputs, 1)


def read(table, incidence, query, reads, t):
    """Answer q' sum_h R_h U_h, U = C F written out."""
    types = torch.einsum("nx,bhxkv->bhnkv", incidence, table)
    out = 0
    for choice in range(reads.query_type.shape[-1]):
        index = reads.query_type[:, t, :, choice]
        own = types.gather(2, index[..., None, None, None].expand(-1, -1, 1, *types.shape[3:]))
        weight = reads.read_weight[:, t, :, choice, None]
        out = out + weight * torch.einsum("bhk,bhkv->bhv", query, own[:, :, 0])
    return out


def define(memory, tokens, mask):
    """Compute what a memory should give from its own routing decisions."""
    reads, position = memory.learned(tokens["hidden"], mask.geometry)
    gate = memory.read_gate(tokens["hidden"]).unsqueeze(-1)
    reads = reads._replace(read_weight=reads.read_weight * gate)
    decay = memory.settings.memory_decay
    if decay != "backbone" and tokens.get("log_decay") is not None:
        tokens = tokens | {"log_decay": torch.zeros_like(tokens["log_decay"])}
    writes = [(reads.write_weight, reads.profile)]
    if memory.settings.straight_through == "neighbour":
        writes += neighbour_writes(position, mask.geometry)
    mask, total = memory.read_mask(mask), 0
    for weight, profile in writes:
        if isinstance(memory, TransportedMemory):
            total = total + transported_reads(tokens, weight, profile, reads, mask, decay)
        else:
            weight = weight * memory.write_gate(tokens["hidden"])
            total = total + additive_reads(tokens, weight, profile, reads, mask)
    return total


def neighbour_writes(position, geometry):
    """Return what interpolation writes to the next bin of each coordinate, its weight rounded to 0.

    A profile is the number whose digits in base q are the bins, the first coordinate in front.
    """
    q, dim, writes = geometry.field_size, geometry.ambient_dim, []
    for axis in range(dim):
        profile = 0
        for k in range(dim):
            own = position[..., k].detach().floor().long()
            profile = profile * q + torch.where(own + (k == axis) > q - 1, q - 1, own + (k == axis))
        writes.append((position[..., axis] - position[..., axis].detach(), profile))
    return writes


def differentiate(out, memory, tokens):
    """Return the gradients of a random weighting, by name."""
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    named = {**tokens, **dict(memory.named_parameters())}
    found = torch.autograd.grad(out, list(named.values()), weight, allow_unused=True)
    return {
        name: torch.zeros_like(x) if grad is None else grad
        for (name, x), grad in zip(named.items(), found, strict=True)
    }


def assert_equals_definition(memory, tokens, mask, info=None):
    """Compare values and all gradients, and return the gradients by name."""
    tokens = {name: x.clone().requires_grad_() for name, x in tokens.items()}
    found, expected = call(memory, tokens, info)[0], define(memory, tokens, mask)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    found, expected = (differentiate(out, memory, tokens) for out in (found, expected))
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-10, atol=1e-10, msg=name)
    return found
