"""Teachers: the order of their work, and how the outputs of several are put together."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from config import InputError, load
from data.batching.batch import Batch, make_cu_seqlens
from engines.divergence import Divergence
from engines.heads import LogProbHead
from engines.logprobs import LogitTransform
from engines.teacher import HiddenHead, TeacherRows, TopKHead
from engines.teaching import (
    Teachers,
    check_teacher_layout,
    check_top_k,
    check_vocabulary,
    merge,
    move_outputs,
    taught_by,
    vocabulary,
)
from tests.data.chat_templates import make_tokenizer
from tests.engines.test_divergence import VOCAB_SIZE, make_case, own_rows, softmax_log
from tests.support.ranks import group_beside_rank0, on_ranks

NUM_TOKENS = 4


class StubTeacher:
    """Records what it is asked for; its outputs are its width, for every token."""

    def __init__(self, vocab_size: int, width: int = 3, scale: float = 0.5, softcap: float = 2.0):
        self.head = LogProbHead(1.0, 7, False, vocab_size, scale=scale, softcap=softcap)
        self.width = width
        self.calls = []

    def token_outputs(self, batch: Batch, head, micro_batches) -> tuple[Tensor]:
        self.calls.append(type(head))
        return (torch.full((len(batch.input_ids), self.width), float(self.width)),)

    def output_matrix(self) -> Tensor:
        self.calls.append("matrix")
        return torch.full((self.head.vocab_size, self.width), float(self.width))

    def offload(self, *parts: str) -> None:
        self.calls.append(parts)


def configure(*pairs: str):
    return load("sft.yaml", ["model.path=m", "data.train_files=t", "distill.teacher=n", *pairs])


def configure_two_teachers(*pairs: str):
    needed = ["model.path=m", "data.train_files=t", "algorithm.distill.teachers={a: n, b: o}"]
    return load("ppo.yaml", [*needed, *pairs])


def make_parts() -> list:
    """Return two batches of two tokens each."""
    batch = Batch(torch.arange(2), make_cu_seqlens(torch.tensor([2])))
    return [(batch, [(1, [0])])] * 2


def make_parts_of_two_teachers() -> list:
    """Return two batches of two tokens each, one per teacher."""
    parts = []
    for number in range(2):
        fields = {"teacher_number": torch.full((2,), number)}
        batch = Batch(torch.arange(2), make_cu_seqlens(torch.tensor([2])), fields)
        parts.append((batch, [(1, [0])]))
    return parts


def test_a_teachers_memory_is_freed_after_its_output_matrix_is_copied():
    student = StubTeacher(10, scale=3.0, softcap=4.0)
    teacher = StubTeacher(12)
    settings = ["distill.temperature=1.5", "distill.mode=jsd"]
    teachers = Teachers(configure(*settings), [teacher], student, ["parameters"])
    outputs = teachers.compute(make_parts())
    assert teacher.calls == [HiddenHead, HiddenHead, "matrix", ("parameters",)]
    assert student.calls == []
    assert outputs.keys() == {"teacher_hidden"}
    assert outputs["teacher_hidden"].shape == (NUM_TOKENS, 3)
    with teachers.teaching(student):
        distillation = student.head.distillation
    assert distillation.divergence == Divergence("jsd")
    assert distillation.temperature == 1.5
    assert distillation.num_tokens == 10
    (head,) = distillation.teachers
    assert torch.equal(head.weight, teacher.output_matrix())
    assert head.transform == LogitTransform(1.5, scale=0.5, softcap=2.0)
    assert student.head.distillation is None
    assert teachers.matrices == []


def test_a_divergence_covers_the_tokens_that_the_student_and_all_teachers_have():
    """A token that one teacher lacks would get that teacher's logit of some other row, or none."""
    for student_size, *teacher_sizes in ((8, 12, 10), (12, 8, 10), (12, 10, 8)):
        engines = [StubTeacher(size) for size in teacher_sizes]
        teachers = Teachers(configure_two_teachers(), engines, StubTeacher(student_size), [])
        assert teachers.num_tokens == 8


def test_each_of_several_teachers_has_its_own_matrix_and_logits():
    """Models may scale and cap their logits differently."""
    student = StubTeacher(10, scale=9.0, softcap=9.0)
    narrow = StubTeacher(12, width=2, scale=0.5, softcap=2.0)
    wide = StubTeacher(11, width=3, scale=1.5, softcap=5.0)
    teachers = Teachers(configure_two_teachers(), [narrow, wide], student, ["parameters"])
    outputs = teachers.compute(make_parts_of_two_teachers())
    assert outputs["teacher_hidden"].tolist() == [[2.0, 2.0, 0.0]] * 2 + [[3.0, 3.0, 3.0]] * 2
    for teacher in (narrow, wide):
        assert teacher.calls == [HiddenHead, HiddenHead, "matrix", ("parameters",)]
    with teachers.teaching(student):
        heads = student.head.distillation.teachers
    assert [head.weight.shape for head in heads] == [(12, 2), (11, 3)]
    assert [head.transform for head in heads] == [
        LogitTransform(1.0, scale=0.5, softcap=2.0),
        LogitTransform(1.0, scale=1.5, softcap=5.0),
    ]


def test_a_teacher_computes_only_its_own_sequences():
    """A micro-batch may be empty, because all ranks compute the same number of them together."""
    fields = {"teacher_number": torch.tensor([1, 1, 0, 1, 1])}
    batch = Batch(torch.arange(5), make_cu_seqlens(torch.tensor([2, 1, 2])), fields)
    plan = [(2, [0, 1]), (1, [2])]
    assert taught_by(0, batch, plan) == [(2, [1]), (1, [])]
    assert taught_by(1, batch, plan) == [(2, [0]), (1, [2])]


def test_a_teacher_needs_an_embedding_of_the_students_last_token(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    config = load("sft.yaml", [f"model.path={tmp_path}", "data.train_files=t"])
    last = max(vocabulary(str(tmp_path)))
    check_vocabulary(config, "distill.teacher=n", str(tmp_path), last + 1, last + 1)
    with pytest.raises(
        InputError, match=f"embedding of {last} tokens and lacks the token .*{last}"
    ):
        check_vocabulary(config, "distill.teacher=n", str(tmp_path), last + 1, last)


def test_the_most_likely_tokens_come_from_the_head_of_each_teacher():
    """They are among the common tokens, at the temperature of the divergence."""
    student = StubTeacher(10)
    engines = [StubTeacher(12), StubTeacher(11, scale=1.5)]
    settings = ["algorithm.distill.top_k=2", "algorithm.distill.temperature=1.5"]
    teachers = Teachers(configure_two_teachers(*settings), engines, student, [])
    for engine in engines:
        head = teachers._head(engine)
        assert head.own_part == engine.head.own_part
        assert (head.top_k, head.temperature, head.num_tokens) == (2, 1.5, 10)


def test_a_teacher_of_the_most_likely_tokens_gives_no_matrix():
    teacher = StubTeacher(12)
    teachers = Teachers(configure("distill.top_k=2"), [teacher], StubTeacher(10), ["parameters"])
    teachers.compute(make_parts())
    assert teacher.calls == [TopKHead, TopKHead, ("parameters",)]
    assert teachers.matrices == []


def test_a_student_that_teaches_itself_stays_on_the_device():
    student = StubTeacher(10)
    teachers = Teachers(configure("distill.teacher=self"), [], student, ["parameters"])
    teachers.compute(make_parts())
    assert teachers.engine is student
    assert student.calls[-1] == ()


def test_an_error_in_the_update_ends_the_distillation():
    student = StubTeacher(10)
    teachers = Teachers(configure(), [StubTeacher(10)], student, [])
    teachers.compute(make_parts())
    with pytest.raises(RuntimeError, match="no memory"), teachers.teaching(student):
        raise RuntimeError("no memory")
    assert student.head.distillation is None
    assert teachers.matrices == []


def test_the_most_likely_tokens_are_among_those_that_both_models_have():
    case = make_case()
    head = LogProbHead(1.0, 7, False, len(case.teacher_weight), scale=1.3)
    targets = torch.zeros(len(case.teacher_hidden), dtype=torch.int64)
    top_head = TopKHead(head, top_k=3, num_tokens=20, temperature=0.8)
    token_ids, log_probs = top_head(
        case.teacher_hidden, case.teacher_weight, targets, targets[:, None][:, :0]
    )
    transform = LogitTransform(0.8, scale=1.3)
    log_q = softmax_log(case.teacher_hidden, case.teacher_weight[:20], transform)
    values, expected = log_q.topk(3)
    assert torch.equal(token_ids.long(), expected)
    torch.testing.assert_close(log_probs[:, :3], values.float())


def top_tokens_of_rank(num_tokens: int) -> list[Tensor]:
    """Return what a rank with its share of the teacher's vocabulary computes."""
    case = make_case()
    weight = case.teacher_weight
    group = group_beside_rank0()
    head = LogProbHead(1.0, 7, False, len(weight), group)
    top_head = TopKHead(head, top_k=3, num_tokens=num_tokens, temperature=0.8)
    own_weight, _ = own_rows(F.pad(weight, (0, 0, 0, -len(weight) % group.size())), group)
    targets = torch.zeros(len(case.teacher_hidden), dtype=torch.int64)
    return [*top_head(case.teacher_hidden, own_weight, targets, targets[:, None][:, :0])]


@pytest.mark.parametrize("num_tokens", [VOCAB_SIZE, VOCAB_SIZE * 3 // 4, VOCAB_SIZE // 3])
def test_ranks_that_divide_the_vocabulary_leave_out_the_same_tokens(tmp_path, num_tokens):
    """Of the second rank's tokens, the student has all, half, or none."""
    case = make_case()
    transform = LogitTransform(0.8)
    log_q = softmax_log(case.teacher_hidden, case.teacher_weight[:num_tokens], transform)
    values, expected = log_q.topk(3)
    for token_ids, log_probs in on_ranks(3, tmp_path, top_tokens_of_rank, num_tokens):
        assert torch.equal(token_ids.long(), expected)
        torch.testing.assert_close(log_probs[:, :3], values.float())


@pytest.mark.parametrize("widths", [(2, 3), (3, 2)])
def test_outputs_of_two_teachers_are_as_wide_as_the_wider_one(widths):
    first, second = (torch.full((NUM_TOKENS, width), float(width)) for width in widths)
    is_second = torch.tensor([False, True, True, False])
    merged = merge([], [first], ~is_second)
    (merged,) = merge(merged, [second], is_second)
    assert merged.shape == (NUM_TOKENS, 3)
    for is_own, width in ((~is_second, widths[0]), (is_second, widths[1])):
        expected = [float(width)] * width + [0.0] * (3 - width)
        assert merged[is_own].tolist() == [expected] * 2


def test_outputs_move_to_the_same_responses_behind_another_prompt():
    outputs = {"a": torch.arange(5), "b": torch.arange(10.0).view(5, 2)}
    is_from = torch.tensor([False, True, True, False, True])
    is_to = torch.tensor([True, False, False, False, True, True])
    moved = move_outputs(outputs, is_from, is_to)
    assert moved["a"].tolist() == [1, 0, 0, 0, 2, 4]
    assert moved["b"].tolist() == [[2, 3], [0, 0], [0, 0], [0, 0], [4, 5], [8, 9]]


def test_rows_of_a_teacher_are_those_of_the_targets():
    fields = {"teacher_hidden": torch.arange(5.0)[:, None], "loss_mask": torch.ones(5)}
    fields["teacher_number"] = torch.tensor([0, 0, 1, 1, 1])
    rows = TeacherRows.of(fields, torch.tensor([1, 4]))
    assert rows.teacher_hidden.tolist() == [[1], [4]]
    assert rows.teacher_number.tolist() == [0, 1]
    assert rows.teacher_ids is None
    assert rows.teacher_log_probs is None
    assert TeacherRows.of({"loss_mask": torch.ones(5)}, torch.tensor([1])) is None


@pytest.mark.parametrize(
    "pairs, message",
    [
        (["distill.fsdp_size=3"], "distill.fsdp_size=3 does not divide the number of ranks, 4: "),
        (["distill.fsdp_size=2", "model_engine=megatron"], "does nothing with model_engine=megat"),
        (["distill.fsdp_size=2"], None),
        (["distill.fsdp_size=-1"], None),
        (["distill.fsdp_size=4"], None),
    ],
)
def test_a_teacher_can_be_divided_over_its_ranks(pairs, message):
    config = configure(*pairs)
    if message is None:
        check_teacher_layout(config, 4)
        return
    with pytest.raises(InputError, match=message):
        check_teacher_layout(config, 4)


def test_the_teachers_tokens_are_at_most_those_of_the_vocabulary():
    config = configure("distill.top_k=8")
    check_top_k(config, 8)
    with pytest.raises(InputError, match="distill.top_k=8 is more than the 7 tokens"):
        check_top_k(config, 7)
