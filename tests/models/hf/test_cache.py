"""The cache: copies, files, rows, and layers that share one."""

import copy
import io
import pickle

import pytest
import torch
from transformers.cache_utils import DynamicCache

from smat.layers import LayerCaches
from smat.models.hf import SMatCache
from tests.models.hf.language import EVERY, MIXERS, make_model, make_prompt

pytestmark = pytest.mark.filterwarnings("ignore::smat.SMatWarning")


def filled(model, prompt):
    cache = SMatCache(model.config)
    with torch.no_grad():
        model(**prompt, past_key_values=cache, use_cache=True)
    return cache


@torch.no_grad()
def go_on(model, cache, ids):
    return model(ids, past_key_values=cache, use_cache=True).logits


def saved_and_loaded(cache):
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("name", EVERY)
def test_copies_go_on_alike_and_alone(name):
    model, prompt = make_model(name), make_prompt(length=12)
    more = make_prompt(length=7, padded=0, seed=3)["input_ids"]
    cache = filled(model, prompt)
    copies = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), saved_and_loaded(cache)]
    expected = go_on(model, cache, more)
    for each in copies:
        assert each.get_seq_length() == 12  # the first one has gone on alone
        torch.testing.assert_close(go_on(model, each, more), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", MIXERS)
def test_rows_are_reordered_repeated_and_selected(name):
    model, prompt = make_model(name), make_prompt(batch=3, length=12)
    more = make_prompt(batch=6, length=3, padded=0, seed=3)["input_ids"]
    for change, rows in (
        (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    ):
        cache = filled(model, prompt)
        assert cache.batch_size == 3
        change(cache)
        assert cache.batch_size == len(rows)
        expected = filled(model, {key: x[rows] for key, x in prompt.items()})
        ids = more[: len(rows)]
        torch.testing.assert_close(go_on(model, cache, ids), go_on(model, expected, ids))


def test_a_cache_that_was_reset_begins_anew():
    model, prompt = make_model("mamba2_smat"), make_prompt()
    cache = filled(model, prompt)
    cache.reset()
    assert (cache.get_seq_length(), cache.batch_size) == (0, -1)
    with torch.no_grad():
        found = model(**prompt, past_key_values=cache, use_cache=True).logits
        assert torch.equal(found, model(**prompt).logits)


def test_layers_share_a_cache_by_their_place():
    model = make_model("mamba2", "deltanet")
    first, second = (layer.mixer for layer in model.model.layers)
    x, caches = torch.randn(2, 6, 16, dtype=torch.float64), LayerCaches()
    with torch.no_grad():
        for mixer in (first, second):
            whole = mixer(x)[0]
            one, none, same = mixer(x[:, :4], None, caches, True, False)
            assert none is None
            assert same is caches
            two, _, _ = mixer(x[:, 4:], past_key_values=caches, use_cache=True)
            torch.testing.assert_close(torch.cat([one, two], 1), whole)
    assert caches.get(0).num_tokens.tolist() == caches.get(1).num_tokens.tolist() == [6, 6]


def test_foreign_caches_and_layers_without_a_place_are_refused():
    mixer = make_model("deltanet").model.layers[0].mixer
    x = torch.randn(1, 3, 16, dtype=torch.float64)
    with pytest.raises(TypeError, match="DynamicCache"):
        mixer(x, past_key_values=DynamicCache(), use_cache=True)
    with pytest.raises(ValueError, match="no attention weights"):
        mixer(x, output_attentions=True)
    mixer.layer_idx = None
    with pytest.raises(ValueError, match="layer_idx"):
        mixer(x, past_key_values=LayerCaches(), use_cache=True)
    with pytest.raises(TypeError, match="keys and values"):
        SMatCache(make_model("smat").config).update(x, x, 0)
