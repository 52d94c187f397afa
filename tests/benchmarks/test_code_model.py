"""The model in benchmarks/models/code-dsa: complete, small, of permissive text, and it has learned Python."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path

import pytest
import starlette.responses
import torch
from torch.nn import functional as F
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.code_corpus import END_OF_FILE, is_permissive  # noqa: E402
from benchmarks.dsa_model import AttentionMode  # noqa: E402
from benchmarks.selections import load_model  # noqa: E402
from benchmarks.train_dsa import tokenizer_config  # noqa: E402

MODEL = ROOT / "benchmarks" / "models" / "code-dsa"
MAX_BYTES = 40 << 20


@pytest.fixture(scope="module")
def record() -> dict:
    return json.loads((MODEL / "training.json").read_text())


def test_it_is_small_enough_for_a_repository() -> None:
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= MAX_BYTES


def test_it_learned_from_permissive_packages_alone(record: dict) -> None:
    readme = (MODEL / "README.md").read_text()
    for package in record["packages"]:
        assert is_permissive(package["licence"]), package
        assert package["package"] in readme


def test_transformers_loads_its_tokenizer() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    text = "def f(x):\n    return x  # é\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == (END_OF_FILE, 1)
    assert tokenizer.eos_token_id == json.loads((MODEL / "config.json").read_text())["eos_token_id"]
    assert json.loads((MODEL / "tokenizer_config.json").read_text()) == tokenizer_config()


@pytest.mark.slow
def test_it_predicts_python_that_it_has_not_seen(record: dict) -> None:
    assert "starlette" not in {package["package"] for package in record["packages"]}
    ids = AutoTokenizer.from_pretrained(MODEL).encode(inspect.getsource(starlette.responses))[:1200]
    tokens, model = torch.tensor([ids]), load_model(MODEL, torch.device("cpu"))
    with torch.no_grad():
        hidden, _ = model(tokens[:, :-1], AttentionMode.SPARSE)
        losses = F.cross_entropy(model.lm_head(hidden)[0], tokens[0, 1:], reduction="none")
    assert losses[:600].mean().exp() < 10  # a random model: 2048
    assert losses[600:].mean() < losses[:600].mean()  # it reads what came before
