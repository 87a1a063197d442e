"""Decoding with memories: prefill, pieces and single tokens all give what one forward gives."""

import itertools

import pytest
import torch

from smat.layers import CallInfo, MemorySettings, ProfileMemory, TransportedMemory
from smat.layers.routing.selector_names import SELECTORS
from smat.masks import SMatMask, kept, window
from tests.layers.memory_definition import CPU, call, make, quietly
from tests.layers.memory_definition import tokens_for as draw

pytestmark = pytest.mark.filterwarnings("ignore::smat.SMatWarning")  # masks of few tokens
LENGTH = 22  # short of the masks' horizon


MASKS = {
    "kept": quietly(SMatMask(24, 1, 4, boundary=kept(9)), vc_dim=3, field_size=3),
    "rebuilt": quietly(SMatMask(24, 1, 4), vc_dim=2, field_size=5),
    "line": quietly(SMatMask(24, 1, 4, boundary=kept(12)), vc_dim=2, field_size=5),
    "one point": SMatMask(24, 1, 4, boundary=kept(9)),
    "window": SMatMask(16, 3, chunk_size=4, field_size=3, boundary=window(4)),
}
CASES = [
    pytest.param(kind, MASKS[name], id=f"{kind.__name__}-{name}")
    for kind in (ProfileMemory, TransportedMemory)
    for name in MASKS
    if kind is ProfileMemory or name not in ("window", "rebuilt")
]


def tokens_for(kind, batch=2, length=LENGTH):
    return draw(kind, batch=batch, length=length)


def cut(tokens, start, stop):
    return {name: x[:, start:stop] for name, x in tokens.items()}


def go_on(memory, tokens, cache=None, real=None, inplace=False):
    """Take in further tokens, as a backbone would after the tokens of a cache."""
    batch, length = tokens["k"].shape[:2]
    info = CallInfo(batch, length, CPU, real, past=cache, use_cache=True, inplace=inplace)
    return call(memory, tokens, info, branch="both")


def step(memory, tokens, t, cache, inplace):
    out, cache = go_on(memory, cut(tokens, t, t + 1), cache, inplace=inplace)
    return out[:, 0].detach(), cache


def read_all(memory, tokens):
    """Return what one call gives, the local branch of an additive memory included."""
    return call(memory, tokens, branch="both")[0].detach()


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("kind", "mask"), CASES)
@pytest.mark.parametrize(
    "settings",
    [MemorySettings(selector_conv=6), MemorySettings(memory_decay="erase"), "paper"],
    ids=["own", "erase", "paper"],
)
def test_prefill_then_steps_give_the_whole_at_every_split(kind, mask, settings):
    memory, tokens = make(kind, mask, settings=settings), tokens_for(kind)
    whole = read_all(memory, tokens)
    for split in range(LENGTH):
        inplace = split % 2 == 0
        if split:
            out, state = go_on(memory, cut(tokens, 0, split), None)
            assert_same(out.detach(), whole[:, :split])
        else:
            state = None
        for t in range(split, LENGTH):
            out, state = step(memory, tokens, t, state, inplace)
            assert_same(out, whole[:, t])
            if not whole[:, t].any():  # of a transported memory
                assert not out.any()  # exactly 0 where nothing is distant


@pytest.mark.parametrize(("kind", "mask"), CASES)
def test_pieces_of_any_length_give_the_whole(kind, mask):
    memory, tokens = make(kind, mask), tokens_for(kind)
    whole = read_all(memory, tokens)
    for edges in ([0, 4, 15, 22], [0, 9, 10, 22], [0, 1, 2, 12, 22]):
        state, outs = None, []
        for begin, end in itertools.pairwise(edges):
            out, state = go_on(memory, cut(tokens, begin, end), state)
            outs.append(out)
        assert_same(torch.cat(outs, 1).detach(), whole)


@pytest.mark.parametrize("kind", [ProfileMemory, TransportedMemory])
@pytest.mark.parametrize("selector", list(SELECTORS)[1:])
def test_every_selector_decodes(kind, selector):
    memory, tokens = make(kind, MASKS["kept"], selector=selector), tokens_for(kind)
    whole = read_all(memory, tokens)
    state = None
    for t in range(LENGTH):
        out, state = step(memory, tokens, t, state, inplace=True)
        assert_same(out, whole[:, t])


@pytest.mark.parametrize(("kind", "mask"), CASES)
def test_rows_of_different_lengths_go_on_each_from_its_end(kind, mask):
    memory, tokens = make(kind, mask), tokens_for(kind, batch=3)
    whole = read_all(memory, tokens)
    lengths = [13, 3, 9]
    front = cut(tokens, 0, 13)
    real = torch.arange(13) < torch.tensor(lengths)[:, None]
    out, state = go_on(memory, front, None, real)
    assert_same(out[real].detach(), whole[:, :13][real])
    order = [2, 0, 1, 0]
    state = state.select(order)
    row = torch.tensor(order)
    at = torch.tensor(lengths)[row]
    for offset in range(9):
        token = {name: x[row, at + offset].unsqueeze(1) for name, x in tokens.items()}
        out, state = step(memory, token, 0, state, inplace=offset % 2 == 1)
        assert_same(out, whole[row, at + offset])


@pytest.mark.parametrize(("kind", "mask"), CASES)
def test_pieces_with_padding_behind_them_give_the_whole(kind, mask):
    memory, tokens = make(kind, mask), tokens_for(kind)
    whole = read_all(memory, tokens)
    state, at = None, torch.tensor([0, 0])
    for lengths in ([5, 8], [1, 6], [9, 2], [7, 6]):
        length = torch.tensor(lengths)
        offset = torch.arange(max(lengths))
        real = offset < length[:, None]
        index = (at[:, None] + offset).clamp(max=LENGTH - 1)
        piece = {name: x[torch.arange(2)[:, None], index] for name, x in tokens.items()}
        out, state = go_on(memory, piece, state, real)
        for row in range(2):
            assert_same(out[row, : lengths[row]].detach(), whole[row, at[row] :][: lengths[row]])
        assert not out[~real].any()
        at = at + length


@pytest.mark.parametrize("kind", [ProfileMemory, TransportedMemory])
def test_an_old_state_stays_valid_unless_it_was_given_away(kind):
    memory, tokens = make(kind, MASKS["kept"]), tokens_for(kind)
    for split in (4, 8, 9, 15):
        _, state = go_on(memory, cut(tokens, 0, split), None)
        first, after = step(memory, tokens, split, state, inplace=False)
        second, _ = step(memory, tokens, split + 1, after, inplace=False)
        again, after = step(memory, tokens, split, state, inplace=False)
        assert torch.equal(first, again)
        assert torch.equal(second, step(memory, tokens, split + 1, after, inplace=True)[0])


def test_a_window_decodes_past_its_horizon():
    memory = make(ProfileMemory, MASKS["window"])
    tokens = tokens_for(ProfileMemory, length=3 * 16)
    whole = read_all(memory, tokens)
    state = None
    for t in range(48):
        out, state = step(memory, tokens, t, state, inplace=True)
        assert_same(out, whole[:, t])


def test_single_precision_keeps_its_digits():
    memory = make(ProfileMemory, MASKS["kept"])
    tokens = {name: x.float().double() for name, x in tokens_for(ProfileMemory).items()}
    whole = read_all(memory, tokens)
    memory = memory.float()
    tokens = {name: x.float() for name, x in tokens.items()}
    state = None
    for t in range(LENGTH):
        out, state = step(memory, tokens, t, state, inplace=True)
        torch.testing.assert_close(out.double(), whole[:, t], rtol=1e-4, atol=1e-6)
