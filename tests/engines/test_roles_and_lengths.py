"""The configurations of references and teachers, their vocabularies, and limits of lengths."""

from pathlib import Path

import pytest
from omegaconf import DictConfig
from tokenizers import Tokenizer, models
from torch import nn
from transformers import Gemma3TextConfig, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from config import InputError, defaults, load
from engines.model.lengths import (
    check_rope,
    check_windows,
    frequency_limits,
    keep_short_frequencies,
    longest_sequence,
)
from engines.reference import check_same_vocabulary, reference_config
from engines.teacher_settings import (
    is_frozen,
    is_self_taught,
    teacher_paths,
    teacher_roles,
    uses_teacher,
)
from engines.teaching import check_vocabulary, teacher_config

NEEDED = ("model.path=policy", "data.train_files=x")
TRAINED = ("model.lora.rank=4", "model.freeze=[mlp]", "engine.log_prob_chunk_size=7")
SEVERAL = "{math: one, code: two}"


def make_config(script: str, *pairs: str) -> DictConfig:
    return load(f"{script}.yaml", [*NEEDED, *pairs])


# -- roles -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [None, "frozen"])
def test_a_reference_is_a_plain_model_with_the_other_settings_of_the_run(path):
    pairs = [*TRAINED, "model.mtp.enable=true"]
    config = make_config("ppo", *pairs, f"reference.path={path or 'null'}")
    reference = reference_config(config)
    assert reference.model.path == (path or "policy")
    assert reference.model.lora == defaults("model.lora")
    assert reference.model.freeze == []
    assert not reference.model.mtp.enable
    assert reference.engine == config.engine
    assert config.model.lora.rank == 4


@pytest.mark.parametrize("size", [None, 1, 2])
def test_a_teacher_is_a_plain_model_without_a_teacher(size):
    """It may be divided over another number of ranks than the student."""
    pairs = [*TRAINED, "model.mtp.enable=true", "distill.teacher=large", "engine.fsdp_size=4"]
    config = make_config("sft", *pairs, f"distill.fsdp_size={size or 'null'}")
    teacher = teacher_config(config, "large")
    assert teacher.model.path == "large"
    assert teacher.model.lora == defaults("model.lora")
    assert teacher.model.freeze == []
    assert not teacher.model.mtp.enable
    assert teacher.engine.fsdp_size == (size or 4)
    assert teacher.engine.log_prob_chunk_size == 7
    assert not uses_teacher(teacher)
    assert uses_teacher(config)


def test_one_of_several_teachers_has_no_teachers():
    config = make_config("ppo", f"algorithm.distill.teachers={SEVERAL}")
    assert uses_teacher(config)
    assert not uses_teacher(teacher_config(config, "one"))


@pytest.mark.parametrize(
    "script, pairs, paths, roles",
    [
        ("sft", [], {}, {}),
        ("sft", ["distill.teacher=large"], {"distill.teacher": "large"}, {"teacher": "large"}),
        (
            "ppo",
            ["algorithm.distill.teacher=large"],
            {"algorithm.distill.teacher": "large"},
            {"teacher": "large"},
        ),
        ("ppo", ["algorithm.distill.teacher=self"], {}, {}),
        (
            "ppo",
            [f"algorithm.distill.teachers={SEVERAL}"],
            {"algorithm.distill.teachers.math": "one", "algorithm.distill.teachers.code": "two"},
            {"teacher math": "one", "teacher code": "two"},
        ),
        ("dpo", [], {}, {}),
    ],
)
def test_teachers_are_named_by_their_keys_and_roles(script, pairs, paths, roles):
    config = make_config(script, *pairs)
    assert teacher_paths(config) == paths
    assert teacher_roles(config) == roles
    assert [*teacher_roles(config)] == [*roles], "in order"
    assert is_self_taught(config) == (pairs == ["algorithm.distill.teacher=self"])
    assert all(is_frozen(role) for role in roles)


def test_roles_that_are_never_trained():
    frozen = ["reference", "reward model", "teacher", "teacher math"]
    for role in (None, "actor", "critic", *frozen):
        assert is_frozen(role) == (role in frozen), role


def test_a_reference_has_the_vocabulary_of_the_policy():
    config = make_config("ppo", "reference.path=frozen")
    policy = LlamaConfig(vocab_size=90)
    check_same_vocabulary(config, "reference", LlamaConfig(vocab_size=90), policy)
    message = "reference.path=frozen has a vocabulary of 91 tokens, but model.path=policy has .* 90"
    with pytest.raises(InputError, match=message):
        check_same_vocabulary(config, "reference", LlamaConfig(vocab_size=91), policy)


# -- vocabularies ----------------------------------------------------------------------------------


def save_tokenizer(directory: Path, tokens: str) -> Path:
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=tokens[0]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    return directory


def check_teacher(student: Path, teacher: Path, num_tokens: int, num_teacher_tokens: int) -> None:
    config = load("sft.yaml", [f"model.path={student}", NEEDED[1], "distill.teacher=x"])
    setting = f"distill.teacher={teacher}"
    check_vocabulary(config, setting, str(teacher), num_tokens, num_teacher_tokens)


def test_a_teacher_may_have_further_tokens_and_rows_that_pad_the_vocabulary(tmp_path):
    student = save_tokenizer(tmp_path / "student", "?abc")
    for name, tokens in (("same", "?abc"), ("more", "?abcde"), ("fewer", "?ab")):
        teacher = save_tokenizer(tmp_path / name, tokens)
        check_teacher(student, teacher, num_tokens=8, num_teacher_tokens=6)
        # The student's last token is number 3.
        check_teacher(student, teacher, num_tokens=8, num_teacher_tokens=4)
        message = r"has an embedding of 3 tokens and lacks the token 'c' \(3\) of model.path="
        with pytest.raises(InputError, match=f"distill.teacher={teacher} {message}"):
            check_teacher(student, teacher, num_tokens=8, num_teacher_tokens=3)


def test_the_first_token_that_differs_is_named(tmp_path):
    student = save_tokenizer(tmp_path / "student", "?abcd")
    teacher = save_tokenizer(tmp_path / "teacher", "?adcb")
    message = "another vocabulary than .*: token 2 is 'd' in the teacher and 'b' in the student"
    with pytest.raises(InputError, match=message):
        check_teacher(student, teacher, num_tokens=5, num_teacher_tokens=5)


@pytest.mark.parametrize("lacking", ["student", "teacher"])
def test_without_a_tokenizer_the_embeddings_must_be_equally_large(tmp_path, lacking):
    paths = {}
    for role in ("student", "teacher"):
        paths[role] = tmp_path / role
        if role != lacking:
            save_tokenizer(paths[role], "?abc")
    check_teacher(paths["student"], paths["teacher"], num_tokens=4, num_teacher_tokens=4)
    setting = "distill.teacher" if lacking == "teacher" else "model.path"
    message = f"has 5 tokens and model.path=.* has 4, and {setting}={paths[lacking]} has no tokeni"
    with pytest.raises(InputError, match=message):
        check_teacher(paths["student"], paths["teacher"], num_tokens=4, num_teacher_tokens=5)


# -- lengths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "script, pairs, longest, key",
    [
        ("sft", ["data.max_length=65"], 65, "data.max_length"),
        (
            "ppo",
            ["data.max_prompt_length=40", "rollout.max_tokens=25"],
            65,
            "data.max_prompt_length + rollout.max_tokens",
        ),
        (
            "ppo",
            ["data.max_prompt_length=4", "rollout.max_tokens=5", "rollout.max_episode_tokens=65"],
            65,
            "rollout.max_episode_tokens",
        ),
    ],
)
def test_rotary_frequencies_must_not_change_within_the_lengths_of_a_run(
    script, pairs, longest, key
):
    config = make_config(script, *pairs)
    assert longest_sequence(config) == (longest, key)
    check_rope(dynamic_rope(max_position_embeddings=longest), config)
    with pytest.raises(InputError) as caught:
        check_rope(dynamic_rope(max_position_embeddings=longest - 1), config)
    reason = f"changes the frequencies beyond {longest - 1} tokens: lower {key}={longest}"
    assert str(caught.value).endswith(reason)


def dynamic_rope(**options) -> LlamaConfig:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    return LlamaConfig(rope_parameters=rope, **options)


def test_frequencies_change_beyond_the_original_length_if_there_is_one():
    assert [*frequency_limits(dynamic_rope(max_position_embeddings=64))] == [("dynamic", 64)]
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 32,
    }
    shape = LlamaConfig(hidden_size=32, num_attention_heads=4, max_position_embeddings=64)
    shape.rope_parameters = rope
    assert [*frequency_limits(shape)] == [("longrope", 32)]
    assert [*frequency_limits(LlamaConfig(max_position_embeddings=64))] == []


def test_each_type_of_layer_may_have_frequencies_of_its_own():
    shape = Gemma3TextConfig(max_position_embeddings=64)
    assert [*frequency_limits(shape)] == []
    shape.rope_parameters["full_attention"]["rope_type"] = "dynamic"
    assert [*frequency_limits(shape)] == [("dynamic", 64)]


def test_modules_keep_the_frequencies_of_short_sequences():
    """Those of other types, and of other layers, stay as they are."""
    dynamic = LlamaRotaryEmbedding(dynamic_rope(max_position_embeddings=64))
    plain = LlamaRotaryEmbedding(LlamaConfig(max_position_embeddings=64))
    plain.rope_type = "linear"
    by_layer = Gemma3RotaryEmbedding(Gemma3TextConfig(max_position_embeddings=64))
    by_layer.rope_type = {"full_attention": "longrope", "sliding_attention": "linear"}
    assert dynamic.rope_type == "dynamic"
    keep_short_frequencies(nn.ModuleList([dynamic, plain, by_layer]))
    assert dynamic.rope_type == "default"
    assert plain.rope_type == "linear"
    assert by_layer.rope_type == {"full_attention": "default", "sliding_attention": "linear"}


def test_layers_with_a_sliding_window_need_its_length():
    types = ["full_attention", "sliding_attention"]
    shape = Qwen2Config(num_hidden_layers=2, layer_types=types)
    shape.sliding_window = None
    message = "model.path=m: layer_types in config.json has sliding_attention, but there is no wind"
    with pytest.raises(InputError, match=message):
        check_windows(shape, "m")
    shape.sliding_window = 7
    check_windows(shape, "m")
    without = Qwen2Config(num_hidden_layers=2, layer_types=["full_attention"] * 2)
    without.sliding_window = None
    check_windows(without, "m")
