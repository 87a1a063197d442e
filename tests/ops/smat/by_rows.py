"""Dense attention in blocks of rows, in fp64 by autograd: the oracle of long sequences.

It says what `reference_attention` says, and holds T rows of a block at a time instead of T^2 pairs.
"""

import torch
from torch.utils.checkpoint import checkpoint

BLOCK = 128
MAPS = {"elu": lambda x: torch.nn.functional.elu(x) + 1, "identity": lambda x: x}


def attend_by_rows(
    q,
    k,
    v,
    mask,
    *,
    feature_map="elu",
    normalize=True,
    branch="both",
    decay_scope="all",
    attention_mask=None,
    cu_seqlens=None,
    output_final_state=False,
    **per_token,
):
    """Attend under a mask, a batch of 1: the arguments and answers of `smat_attention`."""
    assert len(q) == 1
    assert attention_mask is None
    assert cu_seqlens is None
    assert not output_final_state
    num_heads, length = max(q.shape[2], v.shape[2]), k.shape[1]

    def heads(x):
        return (
            None if x is None else x[0].repeat_interleave(num_heads // x.shape[2], 1).movedim(1, 0)
        )

    given = {name: heads(x) for name, x in per_token.items()}
    phi, psi = (heads(MAPS[feature_map](x)) for x in (q, k))
    if given.get("key_gate") is not None:
        psi = psi * given["key_gate"].unsqueeze(-1)
    v_aug = torch.nn.functional.pad(heads(v), (0, 1), value=1.0)

    def rows(start, phi, psi, v_aug, log_decay, write_weight, read_weight):
        """Write some rows out: who sees whom, times gates and weights, times features."""
        stop = start + phi.shape[1]
        query, key = torch.arange(start, stop)[:, None], torch.arange(stop)
        distant = key < mask.boundaries(length)[start:stop, None]
        weights = torch.where(distant, _seen(mask, given, read_weight, start, stop), 1.0)
        if branch != "both":
            weights = weights * (distant if branch == "long_range" else ~distant)
        if write_weight is not None:
            weights = torch.where(distant, weights * write_weight[:, None, :stop], weights)
        if log_decay is not None:
            total = log_decay.cumsum(-1)
            between = total[:, start:stop, None] - total[:, None, :stop]
            forgets = (key < query) & ~(distant & (decay_scope == "recurrent"))
            weights = weights * torch.where(forgets, between, 0.0).exp()
        scores = phi @ psi[:, :stop].mT * weights * (key <= query)
        y = scores @ v_aug[:, :stop]
        return y[..., :-1] / y[..., -1:] if normalize else y[..., :-1]

    gates = (given.get(name) for name in ("log_decay", "write_weight", "read_weight"))
    arguments = psi, v_aug, *gates
    out = [
        checkpoint(rows, start, phi[:, start : start + BLOCK], *arguments, use_reentrant=False)
        for start in range(0, length, BLOCK)
    ]
    return torch.cat(out, 1).movedim(0, 1).unsqueeze(0), None


def _seen(mask, given, read_weight, start, stop):
    """Weigh the keys before `stop` that rows would see if all were distant: (..., rows, keys)."""
    profile, query_type = given.get("profile"), given.get("query_type")
    profile = mask.profile(torch.arange(stop)) if profile is None else profile[:, :stop]
    if query_type is None:
        query_type = mask.query_type(torch.arange(start, stop)).view(1, -1, 1)
        weight = torch.ones(query_type.shape, dtype=torch.float64)
    else:
        query_type = query_type[:, start:stop]
        weight = read_weight[:, start:stop]
    incidence = mask.geometry.incidence().double()
    read = (incidence[query_type] * weight.unsqueeze(-1)).sum(-2)  # (H, rows, profiles)
    if profile.ndim == 1:
        return read[..., profile]
    return read.gather(-1, profile[:, None].expand(-1, read.shape[1], -1))
