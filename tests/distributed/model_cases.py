"""Whole models with heads over ranks beside themselves in one process."""

import warnings

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import smat
from smat.models import ModelConfig
from smat.tasks import MultiKeyRecall
from smat.training.sharding import shard
from tests.distributed.tensor_cases import compare_gradients
from tests.layers.mixers import relative_rms

TASK = MultiKeyRecall(num_keys=1, seq_len=128)
WIDTH = 16
OTHERS = {
    "gated_deltanet_smat": {"vc_dim": 2, "num_heads": 2, "head_dim": 8},
    "mamba2_log_linear": {"num_groups": 1, "head_dim": 8, "state_dim": 4},
    "mixture_of_memories": {"vc_dim": 2, "count_types": False},
}


def build(mixer="mamba2_smat", **options):
    """Make a model of the skeleton, in fp64."""
    warnings.simplefilter("ignore", smat.SMatWarning)
    torch.manual_seed(0)
    if mixer == "mamba2_smat":
        options = {"vc_dim": 2, "head_dim": 8, "state_dim": 4, **options}
    config = ModelConfig(
        mixer, WIDTH, num_layers=2, options=options, learned_positions=True, mlp_ratio=2.0
    )
    return config.build(TASK).double()


def take_step(model, optimizer, rows=slice(None), balance_share=1.0):
    """Train on a batch, and return loss and gradient norm."""
    batch = TASK.train_batch(step=0, batch_size=4, seed=0).select(rows)
    inputs = {name: x.double() if x.is_floating_point() else x for name, x in batch.inputs.items()}
    loss = TASK.loss(model(rows=batch.rows, **inputs), batch)
    balance = model.balance_loss()
    optimizer.zero_grad()
    (loss if balance is None else loss + 0.1 * balance).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return loss.detach(), norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def compare_training(mixer="mamba2_smat", **options):
    """Take steps with heads over ranks and without: losses, gradients, norms, weights."""
    alone = build(mixer, **options)
    begun = {name: x.clone() for name, x in alone.state_dict().items()}
    dealt = build(mixer, **options)
    for parameter in dealt.parameters():
        nn.init.normal_(parameter)
    dealt = smat.tensor_parallel(dealt)
    dealt.load_state_dict(begun)  # of one process
    saved = dealt.state_dict()
    assert list(saved) == list(begun)
    errors = {f"saved {name}": relative_rms(saved[name], x) for name, x in begun.items()}
    optimizers = optimizer_of(alone), optimizer_of(dealt)
    for step in range(3):
        expected, found = (
            take_step(*each) for each in zip((alone, dealt), optimizers, strict=True)
        )
        errors[f"loss {step}"] = relative_rms(found[0], expected[0])
        errors[f"norm {step}"] = relative_rms(found[1], expected[1])
        errors |= {f"{name} {step}": x for name, x in compare_gradients(dealt, alone).items()}
    own = sum(x.to_local().numel() for x in dealt.blocks.parameters())
    return errors, own / sum(x.numel() for x in alone.blocks.parameters())


def compare_sharded():
    """Shard parameters by FSDP2 over two pairs of ranks, with heads over each pair."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    alone = build("gated_deltanet", num_heads=2, head_dim=8)
    begun = {name: x.clone() for name, x in alone.state_dict().items()}
    model = build("gated_deltanet", num_heads=2, head_dim=8)
    model = shard(smat.tensor_parallel(model, mesh["tp"]), mesh["dp"])
    optimizers = optimizer_of(alone), optimizer_of(model)
    errors = {}
    for step in range(2):
        _, norm = take_step(alone, optimizers[0])
        rows = slice(mesh.get_local_rank("dp"), None, 2)
        _, found_norm = take_step(model, optimizers[1], rows)
        errors[f"norm {step}"] = relative_rms(found_norm, norm)
    saved = model.state_dict()
    for name, x in alone.state_dict().items():
        errors[f"saved {name}"] = relative_rms(saved[name], x)
    model.load_state_dict(begun)
    loaded = model.state_dict()
    assert list(loaded) == list(begun)
    return errors | {f"loaded {name}": relative_rms(loaded[name], x) for name, x in begun.items()}


def compare_transformers():
    """Learn from a text, go on with it, and save, with heads over ranks and without."""
    from smat.models.hf import SMatConfig, SMatForCausalLM

    warnings.simplefilter("ignore", smat.SMatWarning)
    config = SMatConfig(
        vocab_size=32, hidden_size=WIDTH, num_hidden_layers=2, context_length=32, mlp_ratio=2.0,
        mixers=[
            {"mixer": "smat", "num_heads": 2},
            {"mixer": "mamba2_smat", "head_dim": 8, "state_dim": 4},
        ],
    )  # fmt: skip

    def make():
        torch.manual_seed(0)
        return SMatForCausalLM(config).double().train()

    alone, dealt = make(), smat.tensor_parallel(make())
    ids = torch.randint(32, (2, 40), generator=torch.Generator().manual_seed(1))
    losses = [model(ids, labels=ids).loss for model in (alone, dealt)]
    for loss in losses:
        loss.backward()
    errors = {"loss": relative_rms(losses[1].detach(), losses[0].detach())}
    errors |= compare_gradients(dealt, alone)
    written = [
        model.eval().generate(ids[:, :20], max_new_tokens=12, do_sample=False)
        for model in (alone, dealt)
    ]
    assert torch.equal(*written)
    fresh = make()
    fresh.load_state_dict(dealt.state_dict())
    return errors
