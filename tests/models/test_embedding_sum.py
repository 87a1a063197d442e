"""A model that projects its tables equals one that projects every token, with every gradient."""

import pytest
import torch

from smat.models import ModelConfig, build_model, sequence_model
from smat.tasks import MultiKeyRecall

OPTIONS = {"num_heads": 2, "head_dim": 8, "chunk_size": 16, "vc_dim": 3, "field_size": 3}


@pytest.mark.parametrize(
    "options", [{}, {"conv_size": 3, "qk_norm": True, "decay_gate": True, "key_gate": True}]
)
@pytest.mark.parametrize("mixer", ["smat_hashed", "linear"])
def test_tables_or_tokens(monkeypatch, mixer, options):
    task = MultiKeyRecall(num_keys=2, seq_len=64, num_noise=16)
    given = {**OPTIONS, **options}
    if mixer == "linear":
        del given["vc_dim"], given["field_size"]
    config = ModelConfig(mixer, 16, options=given, learned_positions=True, mlp_ratio=2.0)
    torch.manual_seed(0)
    model = build_model(config, task).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    batch = task.train_batch(step=0, batch_size=16, seed=0)
    inputs = batch.inputs | {"payload": batch.inputs["payload"].double()}
    calls = []
    plain = sequence_model.Block.forward_sum
    monkeypatch.setattr(
        sequence_model.Block, "forward_sum", lambda *given: calls.append(1) or plain(*given)
    )
    found = model(rows=batch.rows, **inputs)
    assert calls
    monkeypatch.setattr(sequence_model, "SAVING", 10**6)
    expected = model(rows=batch.rows, **inputs)
    assert len(calls) == 1
    torch.testing.assert_close(found, expected)
    grads = [
        torch.autograd.grad(out.square().sum(), tuple(model.parameters()), allow_unused=True)
        for out in (found, expected)
    ]
    for (name, _), one, other in zip(model.named_parameters(), *grads, strict=True):
        assert one is not None, name
        torch.testing.assert_close(one, other, msg=lambda text, name=name: f"{name}: {text}")
