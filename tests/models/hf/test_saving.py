"""Files, configurations, and weights that are drawn only where none were loaded."""

import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from smat.models.hf import SMatConfig, SMatForCausalLM, SMatModel
from tests.models.hf.language import EVERY, make_config, make_model, make_prompt

pytestmark = pytest.mark.filterwarnings("ignore::smat.SMatWarning")


@pytest.mark.parametrize("name", EVERY)
def test_a_saved_model_is_the_same_when_loaded(name, tmp_path):
    model, prompt = make_model(name, dtype=torch.float32), make_prompt()
    with torch.no_grad():
        expected = model(**prompt).logits
    model.save_pretrained(tmp_path)
    torch.manual_seed(99)  # hashes must not follow the seed of the process
    loaded, info = SMatForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        assert torch.equal(loaded(**prompt).logits, expected)
    assert loaded.config.mixers == model.config.mixers


def test_auto_classes_know_the_model(tmp_path):
    model = make_model("mamba2_smat", "softmax", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
    assert isinstance(AutoConfig.from_pretrained(tmp_path), SMatConfig)
    assert isinstance(AutoModel.from_pretrained(tmp_path), SMatModel)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert isinstance(loaded, SMatForCausalLM)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    prompt = make_prompt()
    with torch.no_grad():
        assert torch.equal(loaded(**prompt).logits, model(**prompt).logits)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["mixers"][0]["settings"] == "default"  # what a new default would not change


@pytest.mark.parametrize("name", EVERY)
def test_weights_are_drawn_on_the_meta_device_and_after_it(name):
    config = make_config(name)
    with torch.device("meta"):
        empty = SMatForCausalLM(config)
    assert {x.device.type for x in empty.parameters()} == {"meta"}
    empty.to_empty(device="cpu")
    for module in empty.modules():
        module._is_hf_initialized = False
    for x in empty.parameters():
        x.data.fill_(torch.nan)
    empty.initialize_weights()
    assert all(bool(x.isfinite().all()) for x in empty.parameters())
    mixer = empty.model.layers[0].mixer
    if "mamba2" in name:
        assert bool((mixer.A_log.exp() >= 0.99).all())
        assert torch.equal(mixer.D, torch.ones_like(mixer.D))
        assert mixer.A_log._no_weight_decay


def test_only_what_a_file_lacks_is_drawn(tmp_path):
    plain = make_model("mamba2", dtype=torch.float32)
    plain.save_pretrained(tmp_path)
    config = make_config("mamba2_smat")
    loaded, info = SMatForCausalLM.from_pretrained(
        tmp_path, config=config, output_loading_info=True
    )
    assert info["missing_keys"]
    assert all(".memory." in key for key in info["missing_keys"])
    weights = loaded.state_dict()
    for key, x in plain.state_dict().items():
        assert torch.equal(weights[key], x), key
    assert all(bool(x.isfinite().all()) for x in weights.values())
    gate = loaded.model.layers[1].mixer.memory.read_gate.linear.bias
    assert torch.equal(gate, torch.zeros_like(gate))  # the sigmoid of 0 is where it begins


def test_resized_embeddings_keep_their_rows():
    model = make_model("smat", tie_word_embeddings=True)
    before = model.model.embed_tokens.weight.detach().clone()
    model.resize_token_embeddings(50)
    assert model(**make_prompt()).logits.shape[-1] == 50
    assert torch.equal(model.lm_head.weight[:40], before)


def test_configurations_are_written_out_and_checked():
    config = SMatConfig(mixers="mamba2_smat", num_hidden_layers=3)
    assert config.mixers[0] == {
        "mixer": "mamba2_smat", "vc_dim": 3, "boundary": "window_8", "settings": "default"
    }  # fmt: skip
    assert SMatConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()
    with pytest.raises(ValueError, match="'mamba3'"):
        SMatConfig(mixers=["mamba3"])
    with pytest.raises(ValueError, match="none"):
        SMatConfig(mixers=[])
    with pytest.raises(ValueError, match="'batch'"):
        SMatConfig(norm="batch")
    with pytest.raises(ValueError, match="hidden_size must be 1 or more, got 0"):
        SMatConfig(hidden_size=0)
    with pytest.raises(ValueError, match="recall tasks"):
        SMatConfig(mixers=["smat_hashed"])
    with pytest.raises(ValueError, match="'window_9'"):
        SMatConfig(mixers=[{"mixer": "smat", "boundary": "window_9"}])
    with pytest.raises(TypeError, match="heads"):
        SMatForCausalLM(SMatConfig(mixers=[{"mixer": "softmax", "heads": 3}]))
