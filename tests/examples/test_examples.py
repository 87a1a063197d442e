"""The examples run as their first lines say, in small."""

from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["--length", "64", "--batch", "2", "--width", "32", "--write", "20", "--prompt", "def "]


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.fixture
def text_file(tmp_path, books_folder):
    path = tmp_path / "text.txt"
    path.write_bytes(b"".join(each.read_bytes() for each in sorted(books_folder.rglob("*.txt"))))
    return str(path)


def test_a_byte_model_learns_and_writes(text_file, capsys):
    import byte_model

    byte_model.main([text_file, *SMALL, "--steps", "30"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step   30: ")
    assert float(lines[0].split()[2]) < 6  # a byte has 8 bits, and training has begun
    assert lines[1].startswith("held out, at four times the length: ")
    assert "\n".join(lines[3:]).startswith("def ")
    short = Path(text_file).with_name("short.txt")
    short.write_text("too short")
    with pytest.raises(SystemExit, match="has 9 bytes"):
        byte_model.main([str(short)])


def test_writing_is_what_whole_forwards_choose():
    import byte_model

    torch.manual_seed(0)
    model = byte_model.ByteModel(32, window=16).eval()
    written = model.write(b"abcde", 60, temperature=1e-6)
    for end in range(5, 65):
        logits, _ = model(torch.tensor([list(written[:end])]))
        assert logits[0, -1].argmax() == written[end]


def test_without_a_file_it_reads_this_library():
    import byte_model

    assert b"class SMatMask" in bytes(byte_model.read_text(None).tolist())


@pytest.mark.filterwarnings("ignore")  # Lightning has advice for everybody
def test_lightning_goes_on_from_its_checkpoint(text_file, tmp_path, capsys):
    pytest.importorskip("lightning")
    import byte_model_lightning

    words = [text_file, *SMALL, "--out", str(tmp_path / "out")]
    first = byte_model_lightning.main([*words, "--steps", "2"])
    second = byte_model_lightning.main([*words, "--steps", "3"])
    assert (first.global_step, second.global_step) == (2, 3)
    moments = list(second.optimizers[0].state.values())
    assert {int(each["step"]) for each in moments} == {3}  # those of the first run were taken up
    assert "def " in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")  # transformers has advice, too
def test_transformers_goes_on_from_its_checkpoint_and_loads(text_file, tmp_path, capsys):
    pytest.importorskip("accelerate")
    import byte_model_transformers
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out"
    words = [text_file, *SMALL, "--out", str(out)]
    byte_model_transformers.main([*words, "--steps", "2"])
    trainer = byte_model_transformers.main([*words, "--steps", "3"])
    assert trainer.state.global_step == 3
    moments = list(trainer.optimizer.state.values())
    assert {int(each["step"]) for each in moments} == {3}  # those of the first run were taken up
    assert "def " in capsys.readouterr().out
    loaded = AutoModelForCausalLM.from_pretrained(out)
    for name, weight in trainer.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name
