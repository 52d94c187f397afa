"""The small DSA model in torch, its training text and its training."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import traces, train_dsa  # noqa: E402
from benchmarks.code_corpus import Package, encode, is_permissive, make_tokenizer, unseen  # noqa: E402
from benchmarks.dsa_model import AttentionMode, Model, Shape, index_scores, rotation  # noqa: E402
from benchmarks.selections import load_model, load_shape, ranked_positions  # noqa: E402
from vllm_hisparse.trace import Trace  # noqa: E402

SMALL = Shape(
    vocab_size=300,
    num_hidden_layers=2,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=2,
    q_lora_rank=24,
    kv_lora_rank=32,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    index_n_heads=2,
    index_head_dim=16,
    index_topk=8,
)
CPU = torch.device("cpu")


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model(SMALL)


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(SMALL.vocab_size, (2, 40), generator=torch.Generator().manual_seed(1))


def corpus(tmp_path: Path) -> tuple[train_dsa.Corpus, np.ndarray]:
    source = tmp_path / "module.py"
    source.write_text("".join(f"def function_{i}(x):\n    return x * {i} + {i * 7919 % 1013}\n\n" for i in range(400)))
    package = Package("example", "MIT", (source,))
    tokenizer = make_tokenizer([package], SMALL.vocab_size)
    stream = encode([package], tokenizer, 1 << 20)
    return train_dsa.Corpus(stream, train_dsa.definition_ids(tokenizer), CPU, seed=0), stream


def test_sparse_attention_over_short_sequences_is_dense(model: Model, tokens: torch.Tensor) -> None:
    dense, _ = model(tokens[:, :8], AttentionMode.DENSE)
    sparse, _ = model(tokens[:, :8], AttentionMode.SPARSE)
    torch.testing.assert_close(sparse, dense, rtol=1e-4, atol=1e-5)
    longer = (model(tokens, mode)[0] for mode in (AttentionMode.DENSE, AttentionMode.SPARSE))
    assert not torch.allclose(*longer, atol=1e-3)


def test_sparse_attention_reads_the_selection_alone(model: Model, tokens: torch.Tensor) -> None:
    """The output of the last position changes with a selected token's value, and not with another one's."""
    attention, x = model.model.layers[0].self_attn, torch.randn(1, 40, SMALL.hidden_size)
    turn = rotation(40, SMALL, CPU)
    state = attention.indexer(x, attention.q_a_layernorm(attention.q_a_proj(x)), turn)
    selected = index_scores(state, slice(39, 40))[0, 0].topk(SMALL.index_topk).indices.tolist()
    query, key, value = attention._heads(x, attention.q_a_layernorm(attention.q_a_proj(x)), turn)
    for position in range(40):
        poisoned = value.clone()
        poisoned[:, position] += 1.0
        outs = [attention._attend_chunk(query, key, v, state, slice(39, 40), True)[0] for v in (value, poisoned)]
        assert torch.equal(*outs) == (position not in selected)


def test_the_indexer_learns_from_attention_alone(model: Model, tokens: torch.Tensor) -> None:
    hidden, index_loss = model(tokens, AttentionMode.SPARSE)
    model.lm_head(hidden).sum().backward(retain_graph=True)
    assert all(parameter.grad is None for parameter in model.indexer_parameters())
    model.zero_grad()
    index_loss.backward()
    of_backbone = [p for name, p in model.named_parameters() if ".indexer." in name and ".layers.2." not in name]
    assert all(parameter.grad is not None for parameter in of_backbone)
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.trunk_parameters())


def test_layers_share_an_indexer(tokens: torch.Tensor) -> None:
    shape = Shape(**{**SMALL.__dict__, "num_hidden_layers": 6, "index_topk_freq": 4})
    model = Model(shape)
    has_indexer = [layer.self_attn.indexer is not None for layer in model.model.layers]
    assert has_indexer == [True, True, False, False, False, True, True]  # the last is the draft layer
    hidden, index_loss = model(tokens, AttentionMode.SPARSE)
    assert hidden.isfinite().all() and index_loss.isfinite()


def test_windows_end_with_a_definition_from_further_up(tmp_path: Path) -> None:
    windows, repeats = corpus(tmp_path)[0].windows(16, 1200, repeated=1.0)
    assert (repeats < 1200).any()
    for window, repeat in zip(windows.tolist(), repeats.tolist(), strict=True):
        ending = window[repeat:]
        if ending:
            assert any(window[i : i + len(ending)] == ending for i in range(repeat - len(ending) + 1))


@pytest.mark.parametrize(
    ("licence", "expected"),
    [
        ("MIT", True),
        ("Apache-2.0; Apache Software License", True),
        ("BSD License", True),
        ("GNU General Public License v3 (GPLv3)", False),
        ("MIT AND GPL-2.0", False),
        ("Mozilla Public License 2.0 (MPL 2.0)", False),
        ("", False),
    ],
)
def test_only_permissive_licences_are_read(licence: str, expected: bool) -> None:
    assert is_permissive(licence) == expected


def test_what_a_model_was_trained_on_is_seen(tmp_path: Path) -> None:
    """training.json names the packages, so a machine with other packages reports the same."""
    listed = [{"package": "a", "held_out": False}, {"package": "b", "held_out": True}]
    (tmp_path / "training.json").write_text(json.dumps({"packages": listed}))
    packages = [Package(name, "MIT", ()) for name in ("a", "b", "c")]
    assert [package.name for package in unseen(packages, tmp_path)] == ["b", "c"]


@pytest.mark.slow
def test_stages_lower_their_losses_and_leave_a_model(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count()
    monkeypatch.setattr(train_dsa, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))  # a step a second
    text, _ = corpus(tmp_path)
    dense = train_dsa.Stage("dense", AttentionMode.DENSE, 64, 8, 3e-3, 1.0)
    distill = train_dsa.Stage("distill", AttentionMode.DISTILL, 64, 8, 3e-3, 1.0)
    torch.manual_seed(0)
    records = [train_dsa.train_stage(model, stage, text, 30.0, False) for stage in (dense, distill)]
    assert records[0]["curve"][0][1] > records[0]["loss"] + 0.5
    assert records[1]["curve"][0][3] > records[1]["index_loss"]
    train_dsa.export(model, tmp_path)
    (tmp_path / train_dsa.STAGES_FILE).write_text(json.dumps(records))
    again = Model(SMALL)
    assert [record["stage"] for record in train_dsa.load(again, tmp_path)] == ["dense", "distill"]
    for name, parameter in model.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], parameter, rtol=1e-2, atol=1e-3)
    train_dsa.plot(records, tmp_path / "training.png")
    assert (tmp_path / "training.png").stat().st_size > 0


@pytest.mark.long
def test_every_evaluation_is_of_the_same_windows(model: Model, tmp_path: Path) -> None:
    text, _ = corpus(tmp_path)
    first, second = (train_dsa.evaluate(model, text, 2, 600) for _ in range(2))
    assert first == second
    assert set(train_dsa.perplexities(first)) == {"perplexity_dense", "perplexity_sparse"}
    text.windows(1, 600, 1.0)
    assert train_dsa.evaluate(model, text, 2, 600) == first


def test_traces_name_the_layers_that_select(tmp_path: Path) -> None:
    """Traces name the right layers if four layers share an indexer, from the second layer on."""
    shape = Shape(num_hidden_layers=6, index_topk_freq=4)
    (tmp_path / "config.json").write_text(json.dumps(shape.hf_config(4096)))
    assert load_shape(tmp_path) == shape
    positions = np.random.default_rng(0).permuted(np.tile(np.arange(600), (1, 4, 8, 1)), axis=-1).astype(np.uint16)
    recorded = {"positions": positions[..., : 2 * shape.index_topk], "tokens": np.zeros((1, 701)), "top_k": 256}
    np.savez(tmp_path / "selections.npz", **recorded)
    traces.main(tmp_path / "selections.npz", tmp_path, tmp_path / "some.trace", num_steps=8)
    assert Trace.read(tmp_path / "some.trace").layers == ("0", "1", "5", "draft")


def test_ranked_positions_are_those_of_the_indexer(model: Model, tokens: torch.Tensor) -> None:
    found = ranked_positions(model, tokens[:1], num_steps=5, num_ranks=12)
    assert found.shape == (3, 5, 12)
    for step, newest in enumerate(range(34, 39)):
        assert (found[:, step] <= newest).all()
        assert all(len(set(ranks.tolist())) == 12 for ranks in found[:, step])


@pytest.mark.long
def test_a_written_model_is_read_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model(Shape(num_hidden_layers=2))
    train_dsa.export(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DeepseekV32ForCausalLM"] and config["kv_lora_rank"] == 512
    assert load_model(tmp_path, CPU).state_dict().keys() == model.state_dict().keys()
