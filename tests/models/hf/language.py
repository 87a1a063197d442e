"""Small language models of every mixer, whose logits tell tokens apart."""

import warnings

import torch

from smat.models.hf import SMatConfig, SMatForCausalLM

VOCAB, CONTEXT = 40, 16  # a boundary that is kept lies at 8
WINDOW = {"boundary": {"kind": "window", "step": 4}}

DELTA = {"num_heads": 2, "head_dim": 6}
MAMBA = {"head_dim": 8, "state_dim": 4}
MIXERS = {
    "softmax": {"mixer": "softmax", "num_heads": 2},
    "smat": {"mixer": "smat", "num_heads": 2, "vc_dim": 2, **WINDOW},
    "mamba2_smat": {"mixer": "mamba2_smat", "vc_dim": 2, **MAMBA, **WINDOW},
    "gated_deltanet": {"mixer": "gated_deltanet", **DELTA},
}
OTHERS = {
    "smat_kept": {"mixer": "smat", "num_heads": 2, "boundary": "kept"},
    "smat_doubling": {"mixer": "smat", "num_heads": 2, "boundary": {"kind": "doubling"}},
    "smat_hashed": {"mixer": "smat", "num_heads": 2, "vc_dim": 2, "routing": "hashed", **WINDOW},
    "smat_content": {"mixer": "smat", "num_heads": 2, "vc_dim": 2, "routing": "content", **WINDOW},
    "linear": {"mixer": "linear", "num_heads": 2},
    "mamba2": {"mixer": "mamba2", **MAMBA},
    "mamba2_kept": {"mixer": "mamba2_smat", "vc_dim": 2, "boundary": "kept", **MAMBA},
    "mamba2_log_linear": {"mixer": "mamba2_log_linear", **MAMBA},
    "deltanet": {"mixer": "deltanet", **DELTA},
    "gated_deltanet_smat": {"mixer": "gated_deltanet_smat", "vc_dim": 2, **DELTA},
    "gated_deltanet_log_linear": {"mixer": "gated_deltanet_log_linear", **DELTA},
}
EVERY = {**MIXERS, **OTHERS}
REBUILT = {"mixer": "smat", "num_heads": 2, "vc_dim": 2, "boundary": "rebuilt", "chunk_size": 4}


def make_config(*names, **options):
    """Configure a model with these mixers in turn."""
    made = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "mlp_ratio": 1.0}
    made |= {"context_length": CONTEXT, "initializer_range": 0.5}
    made |= {"tie_word_embeddings": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return SMatConfig(
            mixers=[{**EVERY, "smat_rebuilt": REBUILT}[name] for name in names],
            **{**made, **options},
        )


def make_model(*names, dtype=torch.float64, **options):
    """Build a model in evaluation mode, the same each time."""
    torch.manual_seed(0)
    return SMatForCausalLM(make_config(*names, **options)).to(dtype).eval()


def make_prompt(batch=2, length=9, padded=4, seed=1):
    """Draw a prompt whose first row has some padding on the left, and its mask."""
    ids = torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[0, :padded] = 0
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def next_logits(model, sequences, mask):
    """Return the logits of the next token, by a whole forward pass without any cache."""
    mask = torch.nn.functional.pad(mask, (0, sequences.shape[1] - mask.shape[1]), value=1)
    return model(sequences, attention_mask=mask, use_cache=False).logits[:, -1]
