"""What `generate` promises: every way of decoding equals a loop over whole forward passes.

Of the checks that transformers runs on its generative models some do not apply to a state:
docs/language-models.md lists them.
"""

import copy

import pytest
import torch
from transformers import TextIteratorStreamer
from transformers.cache_utils import DynamicCache

from smat.models.hf import SMatCache
from tests.models.hf.language import (
    EVERY,
    MIXERS,
    VOCAB,
    make_model,
    make_prompt,
    next_logits,
)

pytestmark = pytest.mark.filterwarnings("ignore::smat.SMatWarning")
four_mixers = pytest.mark.parametrize("name", MIXERS)
LENGTH = 12  # past every boundary and the context


def continue_by_loop(model, prompt, count, choose):
    sequences, mask = prompt["input_ids"], prompt["attention_mask"]
    for _ in range(count):
        token = choose(next_logits(model, sequences, mask))
        sequences = torch.cat([sequences, token], 1)
    return sequences


@pytest.mark.parametrize("name", EVERY)
def test_greedy_decoding_of_padded_prompts_equals_whole_forwards(name):
    model, prompt = make_model(name), make_prompt()
    found = model.generate(**prompt, max_new_tokens=LENGTH, do_sample=False, pad_token_id=0)
    expected = continue_by_loop(model, prompt, LENGTH, lambda x: x.argmax(-1, keepdim=True))
    assert torch.equal(found, expected)
    assert len(found.unique()) > 5  # it does not say the same all the time
    alone = model.generate(prompt["input_ids"][:1, 4:], max_new_tokens=LENGTH, do_sample=False)
    assert torch.equal(alone[0], found[0, 4:])


def test_hybrids_decode_as_whole_forwards_do():
    model = make_model("mamba2_smat", "softmax", "smat_hashed", num_hidden_layers=4)
    names = [type(layer.mixer).__name__ for layer in model.model.layers]
    assert names == ["Mamba2", "SoftmaxAttention", "SMatAttention", "Mamba2"]
    prompt = make_prompt()
    found = model.generate(**prompt, max_new_tokens=LENGTH, do_sample=False, pad_token_id=0)
    expected = continue_by_loop(model, prompt, LENGTH, lambda x: x.argmax(-1, keepdim=True))
    assert torch.equal(found, expected)


@four_mixers
def test_sampling_equals_whole_forwards(name):
    model, prompt = make_model(name), make_prompt()
    options = {"do_sample": True, "top_k": 0, "temperature": 0.7, "pad_token_id": 0}
    torch.manual_seed(3)
    found = model.generate(**prompt, max_new_tokens=LENGTH, **options)
    torch.manual_seed(3)

    def draw(logits):
        return torch.multinomial((logits.float() / 0.7).softmax(-1), 1)

    assert torch.equal(found, continue_by_loop(model, prompt, LENGTH, draw))


@four_mixers
def test_several_samples_of_a_prompt(name):
    model, prompt = make_model(name), make_prompt()
    torch.manual_seed(0)
    found = model.generate(
        **prompt, max_new_tokens=8, do_sample=True, num_return_sequences=3, pad_token_id=0
    )
    assert found.shape == (6, 17)
    assert not torch.equal(found[0], found[1])


def beams_by_loop(model, prompt, count, width):
    """Search with whole forward passes, one prompt at a time."""
    best = []
    for ids, mask in zip(prompt["input_ids"], prompt["attention_mask"], strict=True):
        beams, scores = ids[None], torch.zeros(1)
        for _ in range(count):
            logits = next_logits(model, beams, mask[None].expand(len(beams), -1))
            total = scores[:, None] + logits.float().log_softmax(-1)
            scores, place = total.flatten().topk(width)
            row, token = place // VOCAB, place % VOCAB
            beams = torch.cat([beams[row], token[:, None]], 1)
        best.append(beams[0])
    return torch.stack(best)


@four_mixers
def test_beam_search_equals_whole_forwards(name):
    model, prompt = make_model(name), make_prompt()
    found = model.generate(
        **prompt, max_new_tokens=LENGTH, num_beams=3, do_sample=False, pad_token_id=0
    )
    assert torch.equal(found, beams_by_loop(model, prompt, LENGTH, 3))


@four_mixers
def test_beams_are_sampled(name):
    model, prompt = make_model(name), make_prompt()
    options = {"max_new_tokens": 6, "num_beams": 3, "do_sample": True, "pad_token_id": 0}
    torch.manual_seed(2)
    found = model.generate(**prompt, **options)
    torch.manual_seed(2)
    assert torch.equal(found, model.generate(**prompt, **options, use_cache=False))


@four_mixers
def test_a_second_turn_goes_on_from_the_same_cache(name):
    model, prompt = make_model(name), make_prompt()
    greedy = {"do_sample": False, "pad_token_id": 0}
    first = model.generate(**prompt, max_new_tokens=7, return_dict_in_generate=True, **greedy)
    kept = copy.deepcopy(first.past_key_values)
    more = make_prompt(length=5, padded=0, seed=4)["input_ids"]
    sequences = torch.cat([first.sequences, more], 1)
    mask = torch.nn.functional.pad(prompt["attention_mask"], (0, 12), value=1)
    expected = model.generate(sequences, attention_mask=mask, max_new_tokens=9, **greedy)
    for cache in (first.past_key_values, kept):
        assert cache.get_seq_length() == 15  # the last token was not taken in yet
        found = model.generate(
            sequences, attention_mask=mask, past_key_values=cache, max_new_tokens=9, **greedy
        )
        assert torch.equal(found, expected)
        assert cache.get_seq_length() == 29


@four_mixers
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("beams", [1, 2])
def test_all_outputs_have_their_shapes(name, beams, cached):
    model, prompt = make_model(name), make_prompt(padded=0)
    prompt["attention_mask"][0, 5:] = 0  # on the right: a gap before what is generated
    wanted = dict.fromkeys(("output_scores", "output_logits", "output_hidden_states"), True)
    out = model.generate(
        **prompt, max_new_tokens=3, return_dict_in_generate=True, do_sample=False, pad_token_id=0,
        num_beams=beams, use_cache=cached, **wanted,
    )  # fmt: skip
    rows = 2 * beams
    assert [x.shape for x in out.scores] == [x.shape for x in out.logits] == 3 * [(rows, VOCAB)]
    lengths = [9, 1, 1] if cached else [9, 10, 11]
    shapes = [[x.shape for x in step] for step in out.hidden_states]
    assert shapes == [3 * [(rows, length, 16)] for length in lengths]
    with torch.no_grad():
        whole = model(**prompt, output_hidden_states=True, use_cache=False)
    torch.testing.assert_close(out.logits[0][::beams], whole.logits[:, -1].float())
    for found, expected in zip(out.hidden_states[0], whole.hidden_states, strict=True):
        torch.testing.assert_close(found[::beams], expected)
    if cached:
        sizes = [(each.batch_size, each.get_seq_length()) for each in out.past_key_values.layers]
        assert sizes == [(rows, 11), (rows, 11)]  # the last token was not taken in yet
    else:
        assert out.past_key_values is None
    indices = out.beam_indices if beams > 1 else None
    scores = model.compute_transition_scores(
        out.sequences, out.scores, indices, normalize_logits=beams == 1
    )
    assert scores.shape == (2, 3)


@four_mixers
def test_prompts_may_be_embedded_in_chunks_or_streamed(name):
    model, prompt = make_model(name), make_prompt()
    greedy = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(**prompt, **greedy)
    chunked = model.generate(**prompt, prefill_chunk_size=2, **greedy)
    assert torch.equal(chunked, expected)
    embedded = model.get_input_embeddings()(prompt["input_ids"])
    new = model.generate(inputs_embeds=embedded, attention_mask=prompt["attention_mask"], **greedy)
    assert torch.equal(new, expected[:, 9:])
    cache = SMatCache(model.config)
    given = {"attention_mask": prompt["attention_mask"], "past_key_values": cache}
    first = model.generate(inputs_embeds=embedded, **given, **{**greedy, "max_new_tokens": 4})
    embedded = torch.cat([embedded, model.get_input_embeddings()(first)], 1)
    given["attention_mask"] = torch.nn.functional.pad(prompt["attention_mask"], (0, 4), value=1)
    rest = model.generate(inputs_embeds=embedded, **given, **{**greedy, "max_new_tokens": 2})
    assert torch.equal(torch.cat([first, rest], 1), new)

    class Words:
        def decode(self, ids, **options):
            return "".join(f"{each} " for each in ids)

    streamer = TextIteratorStreamer(Words(), skip_prompt=True)
    model.generate(prompt["input_ids"][1:], streamer=streamer, max_new_tokens=6, do_sample=False)
    words = "".join(streamer).split()
    assert [int(word) for word in words] == expected[1, 9:].tolist()


@four_mixers
def test_logits_are_made_where_they_are_wanted(name):
    model, prompt = make_model(name), make_prompt()
    with torch.no_grad():
        whole = model(**prompt).logits
        last = model(**prompt, logits_to_keep=2).logits
        some = model(**prompt, logits_to_keep=torch.tensor([1, 5])).logits
    torch.testing.assert_close(whole[:, -2:], last)
    torch.testing.assert_close(whole[:, [1, 5]], some)


def test_decoding_stops_at_the_end_of_a_sequence():
    model, prompt = make_model("smat"), make_prompt()
    plain = model.generate(**prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)
    stop = int(plain[0, 11])
    found = model.generate(
        **prompt, max_new_tokens=8, do_sample=False, eos_token_id=stop, pad_token_id=39
    )
    first = (plain[0, 9:] == stop).nonzero()[0].item()
    assert torch.equal(found[0, : 10 + first], plain[0, : 10 + first])
    assert bool((found[0, 10 + first :] == 39).all())


def test_what_a_state_cannot_do_is_refused_with_a_reason():
    model, prompt = make_model("smat"), make_prompt()
    for kind in ("static", "quantized", "offloaded"):
        with pytest.raises(ValueError, match=f"'{kind}'"):
            model.generate(**prompt, cache_implementation=kind, max_new_tokens=2, pad_token_id=0)
    with pytest.raises(ValueError, match="stateful"):
        model.generate(**prompt, prompt_lookup_num_tokens=2, max_new_tokens=2, pad_token_id=0)
    with pytest.raises(TypeError, match="DynamicCache"):
        model(**prompt, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match=r"\(2, 1, 9, 9\)"):
        model(prompt["input_ids"], attention_mask=torch.ones(2, 1, 9, 9))
    with pytest.raises(ValueError, match="position"):
        model(prompt["input_ids"], position_ids=torch.zeros(2, 9, dtype=torch.long))
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model()
    with pytest.raises(ValueError, match=r"hashed routing needs token_ids .* \(2, 9\)"):
        make_model("smat_hashed")(inputs_embeds=torch.zeros(2, 9, 16).double())
    cache = SMatCache(model.config)
    with torch.no_grad():
        model(**prompt, past_key_values=cache)
    with pytest.raises(NotImplementedError, match="remove 2 of 9 tokens"):
        cache.crop(-2)
    cache.crop(0)
    # what transformers' own checks ask before they try any of these
    assert model._is_stateful
    assert not model._can_compile_fullgraph
    assert not model._supports_default_dynamic_cache()
    assert not cache.is_compileable
    assert not cache.is_croppable


def test_half_of_every_length_leaves_nothing_to_decode_after():
    model, prompt = make_model("smat_rebuilt"), make_prompt(padded=0)
    assert model.config.use_cache is False
    assert model(**prompt).past_key_values is None
    with pytest.raises(ValueError, match="nothing to decode after"):
        model.generate(**prompt, max_new_tokens=2, use_cache=True)
    found = model.generate(**prompt, max_new_tokens=LENGTH, use_cache=False, do_sample=False)
    expected = continue_by_loop(model, prompt, LENGTH, lambda x: x.argmax(-1, keepdim=True))
    assert torch.equal(found, expected)
