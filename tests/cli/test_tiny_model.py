import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from typer.testing import CliRunner

from vllm_hisparse.cli import tiny_model
from vllm_hisparse.cli.main import app
from vllm_hisparse.cli.tiny_model import (
    BOS,
    DENSE_VARIANTS,
    MANIFEST,
    VARIANTS,
    VOCAB_SIZE,
    checkpoint_weights,
    make_model,
)

DSA_VARIANTS = sorted(set(VARIANTS) - {*DENSE_VARIANTS, "minimax_m3"})

FILES = {"config.json", "manifest.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module", params=sorted(VARIANTS))
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(request.param, tmp_path_factory.mktemp(request.param), num_layers=3)


@pytest.fixture(scope="module")
def config(model_dir: Path) -> dict:
    return json.loads((model_dir / "config.json").read_text())


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


def read_weights(model_dir: Path) -> dict[str, torch.Tensor]:
    with safe_open(model_dir / "model.safetensors", framework="pt") as weights:
        return {name: weights.get_tensor(name) for name in weights.keys()}  # noqa: SIM118


def test_writes_a_complete_model_directory(model_dir: Path) -> None:
    assert {path.name for path in model_dir.iterdir()} == FILES


@pytest.mark.parametrize("model_dir", DSA_VARIANTS, indirect=True)
def test_keeps_the_kv_row_of_the_real_models(config: dict) -> None:
    assert config["kv_lora_rank"] + config["qk_rope_head_dim"] == 576
    assert config["index_head_dim"] == 128
    assert config["num_hidden_layers"] == 3
    assert config["index_topk"] == 256


def test_weights_have_the_declared_names_and_shapes(model_dir: Path, config: dict) -> None:
    declared = {name: weight.shape for name, weight in checkpoint_weights(config)}
    assert {name: tuple(tensor.shape) for name, tensor in read_weights(model_dir).items()} == declared


@pytest.mark.parametrize("model_dir", DENSE_VARIANTS, indirect=True)
def test_dense_models_share_kv_heads(config: dict) -> None:
    names = {name: weight.shape for name, weight in checkpoint_weights(config)}
    assert config["num_attention_heads"] == 4 * config["num_key_value_heads"] > 4
    assert names["model.layers.2.self_attn.k_proj.weight"] == (2 * config["head_dim"], 256)
    has_norm = config["model_type"].startswith("qwen3") or config["model_type"] == "glm4_moe"
    assert ("model.layers.2.self_attn.q_norm.weight" in names) == has_norm
    down = {"llama": "mlp.down_proj", "qwen3": "mlp.down_proj", "mixtral": "block_sparse_moe.experts.3.w2"}
    assert f"model.layers.2.{down.get(config['model_type'], 'mlp.experts.7.down_proj')}.weight" in names
    assert "index_topk" not in config


@pytest.mark.parametrize("model_dir", DSA_VARIANTS, indirect=True)
def test_layers_hold_the_names_that_vllm_loads(config: dict) -> None:
    names = {name for name, _ in checkpoint_weights(config)}
    for layer in range(config["num_hidden_layers"]):
        indexer = f"model.layers.{layer}.self_attn.indexer"
        is_shared = layer == 2 and bool({"index_topk_freq", "index_topk_pattern", "indexer_types"} & set(config))
        parts = {f"{indexer}.{part}.weight" for part in ("wq_b", "wk", "k_norm", "weights_proj")}
        assert parts.isdisjoint(names) if is_shared else parts <= names
    assert "model.layers.0.mlp.gate_proj.weight" in names
    experts = "experts.down_proj" if config["model_type"] == "hy_v4" else "experts.7.down_proj.weight"
    assert f"model.layers.1.mlp.{experts}" in names
    assert "model.layers.2.mlp.shared_experts.up_proj.weight" in names


@pytest.mark.parametrize("model_dir", ["minimax_m3"], indirect=True)
def test_minimax_m3_has_the_sizes_and_names_that_vllm_loads(model_dir: Path, config: dict) -> None:
    """Two layers of full attention, then layers whose blocks are selected for each KV head."""
    from vllm.transformers_utils.config import get_config

    loaded = get_config(str(model_dir), trust_remote_code=False)
    indexer = loaded.sparse_attention_config
    assert loaded.architectures == ["MiniMaxM3SparseForCausalLM"] and loaded.hidden_act == "swigluoai"
    assert indexer["sparse_attention_freq"] == [0, 0, 1] and indexer["sparse_topk_blocks"] == 2
    assert loaded.moe_layer_freq == [0, 0, 0] and loaded.num_hidden_layers == 3
    names = {name: weight.shape for name, weight in checkpoint_weights(config)}
    parts = {f"index_{name}_{kind}" for name in "qk" for kind in ("proj", "norm")}
    for layer in range(3):
        prefix = f"model.layers.{layer}.self_attn"
        assert {part for part in parts if f"{prefix}.{part}.weight" in names} == (parts if layer == 2 else set())
        assert names[f"{prefix}.k_norm.weight"] == (128,)
    assert names["model.layers.2.self_attn.index_k_proj.weight"] == (128, 256)
    assert names["model.layers.2.mlp.down_proj.weight"] == (256, 512)


def test_weights_are_finite_and_of_the_declared_scale(model_dir: Path, config: dict) -> None:
    tensors = read_weights(model_dir)
    for name, weight in checkpoint_weights(config):
        tensor = tensors[name].float()
        assert tensor.isfinite().all(), name
        if weight.constant is not None:
            assert (tensor == weight.constant).all(), name
        elif name != "lm_head.weight":
            rel = 0.1 if tensor.numel() >= 256 else 0.5  # a head has one sink
            assert tensor.std().item() == pytest.approx(weight.std(), rel=rel), name
            assert tensor.mean().item() == pytest.approx(weight.mean, abs=4 * weight.std() / tensor.numel() ** 0.5), (
                name
            )


@pytest.mark.parametrize("model_dir", DSA_VARIANTS, indirect=True)
def test_router_bias_stays_fp32(model_dir: Path) -> None:
    tensors = read_weights(model_dir)
    assert tensors["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    assert tensors["model.layers.1.mlp.gate.weight"].dtype == torch.bfloat16


def test_same_parameters_leave_the_files_alone(model_dir: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in model_dir.iterdir()}
    variant = json.loads((model_dir / MANIFEST).read_text())["variant"]
    make_model(variant, model_dir, num_layers=3)
    assert {path.name: path.stat().st_mtime_ns for path in model_dir.iterdir()} == before


def test_interrupted_write_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command does it, too: the manifest of an interrupted write has the variant."""
    expected = (make_model("dsv32", tmp_path / "whole", num_layers=2) / "model.safetensors").read_bytes()

    def interrupt(path: Path, *_: object) -> None:
        path.write_bytes(expected[:1000])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tiny_model, "write_weights", interrupt)
        make_model("dsv32", tmp_path / "m", num_layers=2)
    result = CliRunner().invoke(app, ["make-model", "dsv32", "--out", str(tmp_path / "m"), "--layers", "2"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == expected


@pytest.mark.long
@pytest.mark.parametrize("change", [{"seed": 1}, {"dtype": "float32"}, {"index_topk": 64}])
def test_other_parameters_replace_the_model(tmp_path: Path, change: dict) -> None:
    make_model("glm", tmp_path, num_layers=2)
    before = {name: (tmp_path / name).read_bytes() for name in FILES}
    make_model("glm", tmp_path, num_layers=2, **change)
    assert (tmp_path / MANIFEST).read_bytes() != before[MANIFEST]
    assert any((tmp_path / name).read_bytes() != before[name] for name in ("config.json", "model.safetensors"))


@pytest.mark.parametrize("wrong", [{"variant": "gpt2"}, {"variant": "glm", "dtype": "int8"}])
def test_unknown_choices_are_refused_before_anything_is_written(tmp_path: Path, wrong: dict) -> None:
    with pytest.raises(ValueError, match=r"expected one of"):
        make_model(**wrong, out_dir=tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("text", ["The house keeps the rest.", "tabs\tand\nlines  ", "naïve – 東京 🚲", ""])
def test_tokenizer_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert ids[0] == tokenizer.token_to_id(BOS)
    assert max(ids) < VOCAB_SIZE
    assert tokenizer.decode(ids) == text


def test_tokenizer_fills_the_vocabulary(tokenizer: Tokenizer, config: dict) -> None:
    assert tokenizer.get_vocab_size() == config["vocab_size"] == VOCAB_SIZE
    assert tokenizer.token_to_id(BOS) == config["bos_token_id"]


def test_chat_template_ends_with_the_turn_of_the_assistant(model_dir: Path) -> None:
    from transformers import AutoTokenizer

    messages = [{"role": "user", "content": "Where are the letters?"}]
    text = AutoTokenizer.from_pretrained(model_dir).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert text.startswith(BOS)
    assert text.endswith("Where are the letters?<｜Assistant｜>")


def test_greedy_output_stays_printable(model_dir: Path, tokenizer: Tokenizer) -> None:
    lm_head = read_weights(model_dir)["lm_head.weight"]
    live = lm_head.abs().sum(-1).nonzero().flatten().tolist()
    assert len(live) > VOCAB_SIZE // 2
    texts = [tokenizer.decode([token_id]) for token_id in live]
    assert all(text.isascii() and text.isprintable() for text in texts)


def test_command_makes_a_model(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["make-model", "dsv32", "--out", str(tmp_path / "m"), "--layers", "2"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "m" / MANIFEST).is_file()


@pytest.mark.parametrize("variant", ["llama", "minimax_m3"])
def test_command_refuses_draft_layers_of_other_models(tmp_path: Path, variant: str) -> None:
    arguments = ["make-model", variant, "--out", str(tmp_path / "m"), "--draft-layers", "1"]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "Invalid value for --draft-layers" in result.output
    assert f"got 1, expected 0 with the variant {variant}" in result.output


@pytest.mark.parametrize("out", ["file", "file/model"])
def test_command_refuses_a_file(tmp_path: Path, out: str) -> None:
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, ["make-model", "dsv32", "--out", str(tmp_path / out)], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "Invalid value for --out" in result.output and "expected a directory to write to" in result.output


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "{}"),
        ("model-00001-of-00009.safetensors", "weights"),
        ("tokenizer.json", "{}"),
        (MANIFEST, '{"variant": "glm", "key": "of another recipe"}'),
        (MANIFEST, "[1]"),
        (MANIFEST, "no JSON"),
    ],
)
def test_command_refuses_to_replace_another_model(tmp_path: Path, name: str, content: str) -> None:
    out = tmp_path / "m"
    out.mkdir()
    (out / name).write_text(content)
    result = CliRunner().invoke(app, ["make-model", "dsv32", "--out", str(out)], env={"COLUMNS": "400"})
    assert result.exit_code == 2, result.output
    assert "Invalid value for --out" in result.output
    assert f"got {out}, which holds another model, expected a new directory or one that holds" in result.output
    assert [path.name for path in out.iterdir()] == [name] and (out / name).read_text() == content


@pytest.mark.parametrize("manifest", [{"variant": "llama", "key": "of an older recipe"}, None])
def test_command_replaces_a_model_of_the_same_variant(tmp_path: Path, manifest: dict | None) -> None:
    """A model of an older recipe, and one of other sizes; files that are no model stay."""
    if manifest is None:
        make_model("llama", tmp_path, num_layers=3)
    else:
        for name, content in {"config.json": {}, MANIFEST: manifest}.items():
            (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "README.md").write_text("Mine.")
    result = CliRunner().invoke(app, ["make-model", "llama", "--out", str(tmp_path), "--layers", "2"])
    assert result.exit_code == 0, result.output
    assert {path.name for path in tmp_path.iterdir()} == FILES | {"README.md"}
    assert json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == 2


@pytest.mark.long
@torch.no_grad()
def test_answers_without_attention_sinks_are_other_ones(tmp_path: Path) -> None:
    """A test that compares tokens sees the loss of the sinks: it passes over logprobs that differ by 0.06."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(make_model("hyv4", tmp_path), dtype=torch.float32)
    tokens = torch.randint(3, 500, (1, 600), generator=torch.Generator().manual_seed(0))
    found = []
    for _ in range(2):
        found.append(model(tokens, use_cache=False).logits[0, -64:].log_softmax(-1))
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(-1e4)
    best = found[0].argmax(-1, keepdim=True)
    assert (found[0] - found[1]).gather(-1, best).abs().mean() > 0.15
