"""How the tests of recurrent ops compare: errors, random gradients, transforms of torch.func."""

import torch


def error(found, expected):
    """Relative RMS."""
    expected = expected.double()
    size = expected.square().mean().sqrt().item()
    return (found.double() - expected).square().mean().sqrt().item() / (size or 1.0)


def grads_of(outputs, inputs):
    """Return the gradients of a random combination of outputs, by the names of inputs."""
    generator = torch.Generator().manual_seed(7)
    weighted = [(x * torch.randn(x.shape, generator=generator).to(x)).sum() for x in outputs]
    found = torch.autograd.grad(sum(weighted), list(inputs.values()), materialize_grads=True)
    return dict(zip(inputs, found, strict=True))


def assert_transforms(loss, inputs):
    """Hold torch.func's grad and vmap, in either order, to autograd."""
    inputs = {n: x.detach() for n, x in inputs.items()}
    leaves = {n: x.clone().requires_grad_() for n, x in inputs.items()}
    expected = dict(zip(leaves, torch.autograd.grad(loss(leaves), leaves.values()), strict=True))
    found = torch.func.grad(loss)(inputs)
    stacked = {n: torch.stack([x / 2, x]) for n, x in inputs.items()}
    per_sample = torch.vmap(torch.func.grad(loss))(stacked)
    of_all = torch.func.grad(lambda given: torch.vmap(loss)(given).sum())(stacked)
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad)
        torch.testing.assert_close(per_sample[name][1], grad)
        torch.testing.assert_close(of_all[name][1], grad)
    with torch.no_grad():
        torch.testing.assert_close(torch.vmap(loss)(stacked)[1], loss(inputs))
