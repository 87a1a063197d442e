"""lm-evaluation-harness scores a saved model on a task of local files, without a network."""

import json
import math
from importlib import import_module

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from smat.models.hf import SMatForCausalLM
from tests.models.hf.language import MIXERS, make_model

lm_eval = pytest.importorskip("lm_eval", reason="comes with pip install smat[eval]")
pytestmark = pytest.mark.filterwarnings("ignore")
WORDS = [f"w{number}" for number in range(39)]
TASK = """
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
"""
QUESTIONS = [
    {"question": "w1 w2 w3 w4 w5 w6 w7 w8 w9", "choices": ["w3 w4", "w9"], "answer": 0},
    {"question": "w5", "choices": ["w7", "w8 w8 w2", "w1"], "answer": 2},
    {"question": "w9 w9 w30", "choices": ["w0", "w11"], "answer": 1},
    {"question": "w38 w17", "choices": ["w12 w1", "w29", "w2"], "answer": 0},
]


def make_tokenizer():
    vocabulary = {"<end>": 0} | {word: place for place, word in enumerate(WORDS, 1)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>", unk_token="<end>"
    )


@torch.no_grad()
def log_likelihood(model, tokenizer, question, choice):
    """Sum the log-probabilities of a choice behind its question."""
    ids = tokenizer(f"{question} {choice}", return_tensors="pt")["input_ids"]
    count = len(choice.split())
    scores = model(ids, use_cache=False).logits.log_softmax(-1)[0, -count - 1 : -1]
    return scores.gather(1, ids[0, -count:, None]).sum().item()


@pytest.mark.parametrize("name", MIXERS)
def test_a_saved_model_is_scored(name, tmp_path, monkeypatch):
    for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    model, tokenizer = make_model(name, dtype=torch.float32), make_tokenizer()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    lines = "\n".join(json.dumps(each) for each in QUESTIONS)
    (tmp_path / "questions.jsonl").write_text(lines)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "local.yaml").write_text(TASK.format(file=tmp_path / "questions.jsonl"))
    manager = import_module("lm_eval.tasks").TaskManager(include_path=str(tmp_path / "tasks"))
    found = lm_eval.simple_evaluate(
        "hf", model_args={"pretrained": str(tmp_path / "model"), "dtype": "float32"},
        tasks=["local_choice"], task_manager=manager, batch_size=2, device="cpu", bootstrap_iters=0,
    )  # fmt: skip
    loaded, right = SMatForCausalLM.from_pretrained(tmp_path / "model"), 0
    samples = sorted(found["samples"]["local_choice"], key=lambda each: each["doc_id"])
    for sample, asked in zip(samples, QUESTIONS, strict=True):
        expected = [
            log_likelihood(loaded, tokenizer, asked["question"], choice)
            for choice in asked["choices"]
        ]
        given = [float(response[0]) for response in sample["filtered_resps"]]
        assert all(math.isclose(*pair, rel_tol=1e-4) for pair in zip(given, expected, strict=True))
        right += max(range(len(expected)), key=expected.__getitem__) == asked["answer"]
    assert found["results"]["local_choice"]["acc,none"] == right / len(QUESTIONS)
