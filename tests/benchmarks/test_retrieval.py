"""The retrieval benchmark on a toy size: answers, checkpoint format, table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import accuracy, retrieval_tasks, train_retrieval  # noqa: E402
from benchmarks.retrieval_tasks import ASK, NEEDLE, NEEDLE_TOKENS, QUESTION_TOKENS, TASKS, VALUE_TOKENS  # noqa: E402

TOY = (
    "--num-layers 2 --hidden-size 32 --intermediate-size 48 --num-heads 4 --num-kv-heads 2 --head-size 16 --device cpu"
)
TRIAL = "--max-context 256 --max-steps 2 --batch-tokens 192 --num-examples 2"


@pytest.fixture(autouse=True)
def one_thread():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def needles_of(tokens: list[int]) -> dict[tuple[int, ...], list[int]]:
    """Name -> value."""
    starts = [i for i, token in enumerate(tokens) if token == NEEDLE]
    return {tuple(tokens[i + 1 : i + 3]): tokens[i + 3 : i + NEEDLE_TOKENS] for i in starts}


@pytest.mark.parametrize("context", [96, 300, 1024])
@pytest.mark.parametrize("task", TASKS)
def test_answers_are_in_the_context(task: str, context: int) -> None:
    for example in retrieval_tasks.examples(task, context, 5, seed=3):
        needles, turns = needles_of(example.prompt), example.prompt[-QUESTION_TOKENS:] + example.answer
        assert len(example.prompt) + len(example.answer) == context
        asks = [i for i, token in enumerate(turns) if token == ASK]
        for i in asks:
            assert turns[i + 3 : i + 3 + VALUE_TOKENS] == needles[tuple(turns[i + 1 : i + 3])]
        assert len(asks) == (retrieval_tasks.NUM_NEEDLES if task == "multi_needle" else 1)
        assert len(turns) == len(asks) * (QUESTION_TOKENS + VALUE_TOKENS)


def test_names_are_told_apart() -> None:
    """Every needle has a name of its own: no question has two answers."""
    for task in TASKS:
        example = retrieval_tasks.examples(task, 4096, 1, seed=0)[0]
        assert len(needles_of(example.prompt)) == example.prompt.count(NEEDLE)


def test_examples_repeat_with_their_seed_alone() -> None:
    assert retrieval_tasks.examples("passkey", 200, 2, 1) == retrieval_tasks.examples("passkey", 200, 2, 1)
    assert retrieval_tasks.examples("passkey", 200, 2, 1) != retrieval_tasks.examples("passkey", 200, 2, 2)


@pytest.mark.parametrize("num_tokens", [96, 256, 1000])
def test_training_asks_for_what_the_context_holds(num_tokens: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        tokens, mask = retrieval_tasks.training_sequence(rng, num_tokens)
        assert len(tokens) == len(mask) == num_tokens and mask.any()
        needles, tokens = needles_of(tokens.tolist()), tokens.tolist()
        for i in [i for i, token in enumerate(tokens) if token == ASK]:
            answer = slice(i + QUESTION_TOKENS, i + QUESTION_TOKENS + VALUE_TOKENS)
            assert tokens[answer] == needles[tuple(tokens[i + 1 : i + 3])] and mask[answer].all()


@pytest.mark.long
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_trains_and_writes_hugging_faces_format(tmp_path: Path, architecture: str) -> None:
    from transformers import AutoModelForCausalLM

    options = f"{TOY} {TRIAL} --architecture {architecture} --output {tmp_path}".split()
    CliRunner().invoke(train_retrieval.app, options, catch_exceptions=False)
    record = json.loads((tmp_path / "training.json").read_text())
    assert [stage["num_tokens"] for stage in record["stages"]] == [96, 256]
    assert {row["task"] for row in record["accuracy"]} == set(TASKS)
    assert record["weight_bytes"] <= train_retrieval.MAX_WEIGHT_BYTES and str(tmp_path) not in json.dumps(record)

    shape = train_retrieval.Shape(architecture, 2, 32, 48, 4, 2, 16, 1e6)
    ours = train_retrieval.Model(shape)
    ours.load_state_dict(load_file(tmp_path / "model.safetensors"))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.randint(256, (2, 70))
    with torch.no_grad():
        torch.testing.assert_close(ours.lm_head(ours(tokens)), theirs(tokens).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.long
def test_a_model_learns_when_it_is_trained() -> None:
    torch.manual_seed(0)
    model = train_retrieval.Model(train_retrieval.Shape("llama", 2, 32, 48, 4, 2, 16, 1e6))
    optimizer = torch.optim.AdamW(model.parameters())
    stage = train_retrieval.Stage(96, 16, 60, 3e-3)
    before = train_retrieval.loss_and_accuracy(model, *train_retrieval.Batches(stage, seed=1)[0])[0].item()
    assert (
        train_retrieval.train_stage(model, optimizer, stage, train_retrieval.Batches(stage, 0), 0)["loss"]
        < before - 0.5
    )


def test_rehearsal_brings_shorter_sequences_of_as_many_tokens() -> None:
    stage = train_retrieval.Stage(1024, 4, 40, 1e-3)
    shapes = {tuple(train_retrieval.Batches(stage, 0, 0.5)[step][0].shape) for step in range(40)}
    assert shapes == {(4, 1024), (16, 256), (42, 96)}
    assert {tuple(train_retrieval.Batches(stage, 0)[step][0].shape) for step in range(5)} == {(4, 1024)}


@pytest.mark.long
def test_training_goes_on_from_a_stage(tmp_path: Path) -> None:
    first = f"{TOY} --max-context 96 --max-steps 2 --batch-tokens 192 --num-examples 2 --output {tmp_path / 'first'}"
    CliRunner().invoke(train_retrieval.app, first.split(), catch_exceptions=False)
    record = json.loads((tmp_path / "first" / "training.json").read_text())
    (tmp_path / "first" / train_retrieval.STAGES_FILE).write_text(json.dumps(record["stages"]))
    second = f"{TOY} {TRIAL} --resume {tmp_path / 'first'} --output {tmp_path / 'second'}"
    CliRunner().invoke(train_retrieval.app, second.split(), catch_exceptions=False)
    stages = json.loads((tmp_path / "second" / "training.json").read_text())["stages"]
    assert stages[0] == record["stages"][0] and stages[1]["num_tokens"] == 256


def test_too_large_weights_are_refused(tmp_path: Path) -> None:
    model = train_retrieval.Model(train_retrieval.Shape("llama", 4, 512, 1024, 8, 2, 64, 1e6))
    with pytest.raises(ValueError, match="expected at most"):
        train_retrieval.save(model, tmp_path)


@pytest.mark.parametrize("budget", accuracy.BUDGETS)
@pytest.mark.parametrize("algorithm", accuracy.ALGORITHMS)
def test_every_budget_of_the_table_is_accepted(algorithm: str, budget: int) -> None:
    from vllm_hisparse.config import HiSparseConfig

    connector = accuracy.connector_of(algorithm, budget, [0], 1.0)
    config = HiSparseConfig.from_extra_config(connector["kv_connector_extra_config"])
    assert config.algorithm_class.min_budget(config.parsed_options) <= budget and budget % config.tokens_per_unit == 0


@pytest.mark.parametrize(("correct", "low", "high"), [(0, 0.0, 0.037), (50, 0.4038, 0.5962), (100, 0.963, 1.0)])
def test_wilson_intervals(correct: int, low: float, high: float) -> None:
    """Intervals for 100 trials are those of the usual tables."""
    assert accuracy.wilson(correct, 100) == pytest.approx((low, high), abs=1e-3)


@pytest.mark.slow
def test_table_and_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine per algorithm and budget, and the full-KV one; the engines themselves are stood in for."""
    jobs = []

    def run(job: accuracy.Job) -> list[dict]:
        jobs.append(job)
        return [{"task": t, "context": c, "correct": 7, "total": 10} for c in job.contexts for t in job.tasks]

    monkeypatch.setattr(accuracy, "run_jobs", lambda jobs, num_processes: map(run, jobs))
    options = ["--model", "some/m", "--context", "128", "--context", "256", "--budget", "64"]
    options += ["--algorithm", "quest", "--algorithm", "pq_cache"]
    output = tmp_path / "accuracy.json"
    CliRunner().invoke(accuracy.app, [*options, "--output", str(output)], catch_exceptions=False)
    rows = json.loads(output.read_text())["rows"]
    assert len(jobs) == 5 and "kv_transfer_config" not in jobs[0].engine
    assert len(rows) == 5 * 2 * len(TASKS)
    assert {(row["algorithm"], row["budget"]) for row in rows} == {
        ("full", None),
        *((name, size) for name in ("quest", "pq_cache") for size in (64, 256)),
    }
    assert set(rows[0]) == {"model", "task", "context", "budget", "algorithm", "correct", "total", "low", "high"}
    assert (tmp_path / "accuracy_m.png").stat().st_size > 1000


@pytest.mark.slow
def test_an_interrupted_table_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(job: accuracy.Job) -> list[dict]:
        jobs.append(job)
        return [{"task": task, "context": 128, "correct": len(jobs), "total": 10} for task in job.tasks]

    jobs: list[accuracy.Job] = []
    monkeypatch.setattr(accuracy, "run_jobs", lambda jobs, num_processes: map(run, jobs))
    output = tmp_path / "accuracy.json"
    options = ["--model", "some/m", "--context", "128", "--budget", "64", "--algorithm", "quest"]

    def rows(*more: str) -> list[dict]:
        CliRunner().invoke(accuracy.app, [*options, *more, "--output", str(output)], catch_exceptions=False)
        return json.loads(output.read_text())["rows"]

    whole = rows()
    assert len(jobs) == 3
    output.write_text(json.dumps({"rows": [row for row in whole if row["budget"] != 64]}))
    again = rows("--resume")
    assert len(jobs) == 4 and "kv_transfer_config" in jobs[3].engine
    assert [{**row, "correct": 0, "low": 0, "high": 0} for row in again] == [
        {**row, "correct": 0, "low": 0, "high": 0} for row in whole
    ]
    assert "--resume" not in json.loads(output.read_text())["command"]
    options[-1] = "oracle"
    result = CliRunner().invoke(accuracy.app, [*options, "--resume", "--output", str(output)])
    assert result.exit_code == 2 and "rows of other options" in result.output
