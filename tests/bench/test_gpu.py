"""What runs on a user's GPU, with the GPU faked: its clock, its peers, its presets."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("pydantic")
pytest.importorskip("rich")

from smat.bench import attention, measure, peers
from smat.bench.config import PrefillConfig, TrainConfig
from smat.ops.delta_rule.reference import delta_rule_reference

SMALL = {
    "seq_lens": (64,), "vc_dims": (2,), "heads": 2, "key_dim": 4, "value_dim": 4, "chunk_size": 8,
    "repeats": 2, "gemm_size": 16, "memory": False,
}  # fmt: skip


class FakeEvent:
    """An event whose clock the calls move."""

    now = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = FakeEvent.now

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return other.at - self.at


def test_a_gpu_is_timed_by_its_own_clock(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: waited.append(FakeEvent.now))

    def call():
        FakeEvent.now += 25.0  # milliseconds

    reading = measure.read_once(call, torch.device("cuda"))
    assert reading.seconds == pytest.approx(0.025)
    assert waited == [0.0]  # before the clock starts, so that nothing earlier counts


class FakeLibrary:
    """The peers' functions, by the oracle, with the signatures that the libraries have."""

    @staticmethod
    def chunk_simple_gla(q, k, v, g=None, scale=None):
        return delta_rule_reference(q, k, v, None, g, scale=scale)

    @staticmethod
    def chunk_delta_rule(q, k, v, beta, scale=None):
        assert q.dtype != torch.float32, "fp32 is not supported"
        return delta_rule_reference(q, k, v, beta, scale=scale)

    @staticmethod
    def chunk_gated_delta_rule(q, k, v, g, beta, scale=None):
        return delta_rule_reference(q, k, v, beta, g, scale=scale)

    @staticmethod
    def mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size):
        weighed = x * dt.unsqueeze(-1)
        return delta_rule_reference(C, B, weighed, None, dt * A, scale=1.0)[0]


@pytest.fixture
def fake_peers(monkeypatch):
    monkeypatch.setattr(peers, "import_module", lambda _: FakeLibrary)
    monkeypatch.setattr(peers, "installed_peers", lambda _: list(peers.PEERS))


@pytest.mark.parametrize("config", [PrefillConfig, TrainConfig])
def test_peers_are_checked_and_timed_and_say_what_they_refuse(config, fake_peers):
    record = attention.run_attention(config(**SMALL))
    timed = {row["name"]: row for row in record["rows"]}
    names = {peer.name for peer in peers.PEERS}
    assert names - set(timed) == {"DeltaNet (fla)"}
    assert record["refused"] == [{"name": "DeltaNet (fla)", "why": "fp32 is not supported"}]
    assert {each["name"] for each in record["checks"]} >= names - {"DeltaNet (fla)"}
    for name in names & set(timed):
        assert timed[name]["timing"]["num_runs"] == 2
        assert timed[name]["ratio_to_d1"] > 0


def test_a_wrong_peer_is_not_timed(fake_peers, monkeypatch):
    wrong = lambda *args, **options: (2 * FakeLibrary.right(*args, **options)[0],)  # noqa: E731
    monkeypatch.setattr(FakeLibrary, "right", FakeLibrary.chunk_simple_gla, raising=False)
    monkeypatch.setattr(FakeLibrary, "chunk_simple_gla", staticmethod(wrong))
    with pytest.raises(ValueError, match=r"linear attention \(fla\).*nothing was timed"):
        attention.run_attention(PrefillConfig(**SMALL))


def test_a_cpu_has_no_peers_and_a_gpu_those_that_are_installed(monkeypatch):
    assert peers.installed_peers(torch.device("cpu")) == []
    there = SimpleNamespace(name="fla")
    monkeypatch.setattr(peers, "find_spec", lambda name: there if name == "fla" else None)
    found = peers.installed_peers(torch.device("cuda"))
    assert [peer.name for peer in found] == [each.name for each in peers.PEERS[:4]]


def test_the_signatures_are_those_of_the_library():
    """Of those libraries that are here: a name or an argument that has changed shows."""
    import inspect

    pytest.importorskip("fla")
    for module, name, given in (
        ("fla.ops.simple_gla", "chunk_simple_gla", ("q", "k", "v", "g", "scale")),
        ("fla.ops.delta_rule", "chunk_delta_rule", ("q", "k", "v", "beta", "scale")),
        ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", ("q", "k", "v", "g", "beta")),
    ):
        function = getattr(peers.import_module(module), name)
        parameters = list(inspect.signature(inspect.unwrap(function)).parameters)
        assert parameters[:3] == ["q", "k", "v"]
        assert set(given) <= set(parameters)


def test_presets_have_the_sizes_of_the_paper():
    figure = PrefillConfig(preset="paper-gpu", device="cuda")
    assert (figure.heads, figure.dtype, figure.chunk_size, figure.repeats) == (8, "bf16", 128, 15)
    assert PrefillConfig(preset="paper-table").seq_lens == (65536, 262144)
    assert TrainConfig(preset="paper-table").seq_lens == (16384, 65536)
    assert PrefillConfig(preset="paper-table", batch=2).batch == 2
