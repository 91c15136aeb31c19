"""Multi-token prediction on the Megatron engine against a plain loop, in fp32."""

import json
import re
import sys
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

from config import InputError, load
from engines import schedule
from engines.build import engine_class
from engines.checkpoint.export import export_checkpoint
from engines.memory import checkpoint_bytes, estimate_megatron
from engines.model import mtp
from engines.model.flops import count_flops
from engines.model.hf import build_on_meta, read_hf_config
from examples.arithmetic import make_rows, make_tokenizer
from job.models import report_unused_mtp
from tests.engines.megatron_worker import BF16, TOTAL_STEPS, keys
from tests.engines.mtp_worker import CASES, MTP, SAVED_AT, MTPCase
from tests.support.launch import launch, run
from tests.support.models import make_model
from tests.support.plain import column, tensor_bytes, worst
from tests.support.training import (
    BETAS,
    CLIP,
    SETTINGS,
    WEIGHT_DECAY,
    kept_logits,
    make_batch,
    make_loss,
)

BOUND = 1e-6
GENERATE = """
import json, sys
from vllm import LLM, SamplingParams
path, result, question = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
llm = LLM(path, dtype="float32", max_model_len=64, enforce_eager=True, kv_cache_memory_bytes=10**7, skip_tokenizer_init=True,
          trust_remote_code=True, speculative_config={"method": "mtp", "num_speculative_tokens": 1})
params = SamplingParams(max_tokens=8, temperature=0, detokenize=False, ignore_eos=True)
said = llm.generate([{"prompt_token_ids": question}], params)[0].outputs[0].token_ids
open(result, "w").write(json.dumps(list(said)))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mtp")
    make_model(folder / "mimo", "mimo")
    make_model(folder / "two", "mimo", num_hidden_layers=4, num_nextn_predict_layers=2)
    make_model(folder / "tied", "mimo", num_hidden_layers=4, tie_word_embeddings=True)
    return folder


@pytest.fixture(scope="module")
def results(folder):
    launch(2, "tests/engines/mtp_worker.py", folder, fresh=True)
    return json.loads((folder / "results.json").read_text())


def config(directory, case):
    return load(
        "sft.yaml",
        ["model_engine=megatron", f"model.path={directory}", *SETTINGS, *keys(case.engine)],
    )


def plain_layer(layer, hidden, tokens, rotary):
    """[n, h] of a sequence, from the hidden states and the embeddings of the tokens behind."""
    joined = torch.cat([layer.hidden_layernorm(hidden), layer.token_layernorm(tokens)], -1)[None]
    positions = rotary(joined, torch.arange(len(hidden))[None])
    mask = torch.full((len(hidden), len(hidden)), -torch.inf).triu(1)[None, None]
    return layer.final_layernorm(
        layer(layer.input_proj(joined), attention_mask=mask, position_embeddings=positions)[0]
    )


def plain_training(directory, case):
    """(loss, MTP losses and gradient norm of each step; the first step's gradients; final weights) of a loop around
    transformers, one sequence after another."""
    settings, model = (
        config(directory, case),
        AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        ),
    )
    optim, settings = settings.optim, settings.model.mtp
    number = mtp.num_layers(model.config)
    layers = model.model.mtp_layers = nn.ModuleList(
        mtp.LAYERS["mimo"](model.config) for _ in range(number)
    )
    layers.load_state_dict(
        {
            n.removeprefix("model.mtp_layers."): x
            for n, x in load_file(directory / "model.safetensors").items()
            if "mtp_layers" in n
        }
    )
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups = [
        {
            "params": [
                p for n, p in named.items() if ("norm" in n or n.endswith("bias")) is spared
            ],
            "weight_decay": 0.0 if spared else WEIGHT_DECAY,
        }
        for spared in (False, True)
    ]
    optimizer, steps, gradients, before_norm = (
        torch.optim.AdamW(groups, betas=BETAS, eps=optim.eps, foreach=False),
        [],
        {},
        [],
    )
    model.model.norm.register_forward_pre_hook(lambda _, inputs: before_norm.append(inputs[0][0]))
    for step in range(case.steps):
        batch = make_batch(step)
        loss_fn, result = make_loss(len(batch.input_ids)), {"loss": 0.0}
        asked = [
            (batch.fields["loss_mask"] != 0) & (batch.position_ids > k) for k in range(number + 1)
        ]
        ahead, total = [0.0] * number, 0.0
        for i in range(len(batch)):
            sequence = batch.select([i])
            ids = sequence.input_ids
            logits, targets = kept_logits(
                model(ids[None], use_cache=False).logits[0, :-1], sequence, slice(1, None)
            )
            log_p = logits.log_softmax(-1)
            mask = (sequence.fields["loss_mask"] * (sequence.position_ids > 0)).bool()
            answers = [log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)]
            loss, _ = loss_fn(*(F.pad(x, (1, 0)) * mask for x in answers), sequence.fields)
            total, result["loss"] = total + loss, result["loss"] + loss.item()
            hidden, embedding, head = (
                before_norm.pop(),
                model.model.embed_tokens,
                model.lm_head.weight.detach(),
            )
            if settings.detach_encoder:
                hidden, embedding = hidden.detach(), lambda x: model.model.embed_tokens(x).detach()
            for k, layer in enumerate(layers, 1):
                tokens = torch.zeros_like(hidden)
                tokens[1 : len(ids) - k] = embedding(ids[1 + k :])
                hidden = plain_layer(layer, hidden, tokens, model.model.rotary_emb)
                wanted = (sequence.fields["loss_mask"][k + 1 :] != 0).nonzero()[:, 0]
                losses = F.cross_entropy(
                    hidden[wanted] @ head.T, ids[wanted + k + 1], reduction="sum"
                )
                ahead[k - 1] = ahead[k - 1] + losses / asked[k].sum()
        (total + settings.mtp_loss_scaling_factor / number * sum(ahead)).backward()
        result |= {f"mtp/loss_{k}": x.item() for k, x in enumerate(ahead, 1)}
        gradients = gradients or {n: p.grad.clone() for n, p in named.items()}
        result["grad_norm"] = nn.utils.clip_grad_norm_(model.parameters(), CLIP).item()
        for group in optimizer.param_groups:
            group["lr"] = schedule.learning_rate(optim, step, TOTAL_STEPS)
        optimizer.step()
        optimizer.zero_grad()
        steps.append(result)
    return steps, gradients, {name: p.detach() for name, p in named.items()}


@cache
def reference(directory, detached):
    return plain_training(
        directory,
        next(
            case
            for case in CASES.values()
            if case.family == directory.name and ("detach" in case.engine) is detached
        ),
    )


@pytest.mark.parametrize("name", CASES)
def test_training_equals_a_plain_loop(results, folder, name):
    case, result = CASES[name], results[name]
    steps, gradients, weights = reference(folder / case.family, "detach" in case.engine)
    assert result["steps"][0].keys() - {"entropy", "lr", "skipped"} == steps[0].keys()
    for key in steps[0]:
        assert worst(column(result["steps"], key), column(steps, key)) < (
            0.05 if BF16 in case.engine else 1e-5
        ), key
    if BF16 in case.engine:
        return
    found = load_file(folder / f"{name}.safetensors")
    assert found.keys() == weights.keys() | {
        f"gradient of {n}" for n in gradients if case.gradients
    }
    for n, gradient in gradients.items() if case.gradients else ():
        assert (found[f"gradient of {n}"] - gradient).abs().max() < BOUND, n
    for n, weight in weights.items():
        assert (found[n] - weight).norm() < 1e-5 * weight.norm(), n


@pytest.mark.parametrize("name", CASES)
def test_flops_and_memory_count_the_layers(results, folder, name):
    case, result = CASES[name], results[name]
    settings = config(folder / case.family, case)
    shape = read_hf_config(folder / case.family)
    parts = count_flops(build_on_meta(shape, torch.float32), shape)
    with_mtp, number = (
        count_flops(build_on_meta(shape, torch.float32, with_mtp=True), shape),
        mtp.num_layers(shape),
    )
    inside = (
        4 * 128 * 128 - 2 * 64 * 128 + 3 * 48 * 128 + 2 * 128 * 128
    )  # attention of 4 heads and 2, gate, up, down, input
    assert [new - old for new, old in zip(with_mtp, parts)] == [
        6 * number * inside,
        number * parts[1] * 2 / 3,
        6 * number * 128,
    ]
    assert result["flops"] == 8 * with_mtp[0] + 4 * with_mtp[1] + 34 * with_mtp[2]
    for stage, estimated in enumerate(estimate_megatron(settings, 2, "cpu")):
        for parameters, gradients, _ in (sizes for at, *sizes in result["bytes"] if at == stage):
            assert (parameters, gradients) == (estimated["parameters"], estimated["gradients"])


def test_gradients_of_head_and_trunk(results, folder):
    """Without detach_encoder MTP leaves alone the output matrix, and the norm before it; with it, all that is not MTP's. (A tied
    matrix is also the embedding.)"""
    for name, plain, detached in (
        ("tp2", "left out", False),
        ("tp2 full detached", "left out", True),
        ("tied detached", "tied", True),
    ):
        got, want = (
            {
                n.removeprefix("gradient of "): x
                for n, x in load_file(folder / f"{title}.safetensors").items()
                if n.startswith("gradient of ")
            }
            for title in (name, plain)
        )
        assert len(want) > 40 and not any("mtp" in n for n in want)
        apart = {n: (got[n] - x).abs().max().item() for n, x in want.items()}
        alike = {n for n, gap in apart.items() if gap < BOUND}
        assert (
            alike == want.keys() if detached else alike == {"lm_head.weight", "model.norm.weight"}
        ), name
        assert min(x.abs().max() for n, x in got.items() if "mtp_layers" in n) > 1000 * BOUND


@pytest.mark.parametrize(
    "name, family", [("frozen", "mimo"), ("left out", "two"), ("bf16", "mimo")]
)
def test_layers_that_are_not_trained_are_exported_as_they_were(results, folder, name, family):
    """After ten steps with weight decay, in which all the rest has changed."""
    steps, weights = results["untouched"][name], load_file(folder / f"{name}.safetensors")
    files = load_file(folder / family / "model.safetensors")
    assert len(steps) == 10 and not any("mtp" in key for step in steps for key in step)
    assert {n for n in weights if not n.startswith("gradient")} == files.keys()
    for n, x in files.items():
        assert torch.equal(weights[n], x.to(weights[n].dtype)) is ("mtp_layers" in n), n


def test_export_of_a_checkpoint_takes_layers_that_were_not_trained_along(results, folder, tmp_path):
    checkpoint = folder / "checkpoints/step_00000010"
    export_checkpoint(checkpoint, tmp_path / "hf")
    exported, wanted = (
        load_file(tmp_path / "hf/model.safetensors"),
        load_file(folder / "frozen.safetensors"),
    )
    assert exported.keys() == load_file(folder / "mimo/model.safetensors").keys()
    assert all(torch.equal(wanted[n], x) for n, x in exported.items())
    (folder / "mimo").rename(folder / "gone")
    try:
        with pytest.raises(
            InputError,
            match=re.escape(f"{folder / 'mimo'}, which had the other weights, is not there"),
        ):
            export_checkpoint(checkpoint, tmp_path / "other")
    finally:
        (folder / "gone").rename(folder / "mimo")
    assert not (tmp_path / "other").exists()


def test_layers_that_are_left_out_are_told(folder, capsys):
    for settings, said in ((MTP, False), ("model.mtp.enable=true", True), ("", True)):
        report_unused_mtp(
            config(folder / "two", MTPCase("two", settings)), read_hf_config(folder / "two")
        )
        assert ("the model is built without its 2 MTP layers" in capsys.readouterr().out) is said


def test_only_training_runs_the_layers(results):
    in_step, planned, otherwise = results["passes"]
    assert in_step == planned > 1 and otherwise == 0


def test_nothing_to_predict(results):
    for name, step in results["empty"].items():
        assert step["mtp/loss_1"] == step["gradients of MTP"] == step["skipped"] == 0
        assert (step["grad_norm"] > 0.01) is (name == "second")


def test_round_trip_and_resume_on_another_layout(results, folder, tmp_path):
    result = results["resume"]
    assert result["round trip"] is True
    for key in ("loss", "mtp/loss_1", "mtp/loss_2", "grad_norm", "lr"):
        assert worst(column(result["resumed"], key), column(result["saved"], key)) < 1e-5, key
    export_checkpoint(folder / f"checkpoints/step_{SAVED_AT:08d}", tmp_path / "hf")
    by_engine, by_export = (
        load_file(path / "model.safetensors") for path in (folder / "hf", tmp_path / "hf")
    )
    assert by_engine.keys() == by_export.keys() and all(
        torch.equal(by_export[n], x) for n, x in by_engine.items()
    )
    assert by_engine.keys() == load_file(folder / "two" / "model.safetensors").keys()
    size = checkpoint_bytes(config(folder / "two", CASES["tp2"]))
    stored = FileSystemReader(
        folder / f"checkpoints/step_{SAVED_AT:08d}" / "weights"
    ).read_metadata()
    assert size == pytest.approx(tensor_bytes(stored), rel=0.01), "what a dry run tells"


@pytest.mark.parametrize(
    "family, settings, told",
    [
        ("qwen3", "enable=true", "num_nextn_predict_layers=None and mtp_num_hidden_layers=None"),
        (
            "mimo",
            "enable_train=true",
            "model.mtp.enable_train=True does nothing with model.mtp.enable=false",
        ),
        (
            "mimo",
            "enable=true detach_encoder=true",
            "model.mtp.detach_encoder=True does nothing with model.mtp.enable_train=false",
        ),
        (
            "mimo",
            "enable=true enable_train=true model_engine=fsdp",
            "needs model_engine=megatron: transformers has no MTP layers",
        ),
        (
            "mimo",
            "enable=true enable_train=true model.lora.rank=4",
            "with model.lora.rank=4 only adapters are trained",
        ),
        ("mimo", "enable=true enable_train=true engine.bridge=mbridge", "has no mimo models"),
        (
            "mimo",
            "enable=true enable_train=true detach_encoder=true model.freeze=[mtp_layers]",
            "leave the loss of the MTP layers",
        ),
        (
            "lost",
            "enable=true",
            "lack 1 of the 16 weights of its 1 MTP layers, such as model.mtp_layers.0.input_proj.weight",
        ),
        (
            "qwen3_mtp",
            "enable=true enable_train=true",
            "no MTP layers for model_type=qwen3, only for mimo",
        ),
    ],
)
def test_mistakes(folder, family, settings, told):
    if not (folder / family).exists():
        make_model(folder / family, "mimo" if family == "lost" else "qwen3")
    if family == "lost":
        file = folder / family / "model.safetensors"
        save_file(
            {n: x for n, x in load_file(file).items() if not n.endswith("input_proj.weight")},
            file,
            {"format": "pt"},
        )
    if family == "qwen3_mtp":
        path = folder / family / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"num_nextn_predict_layers": 1}))
    pairs = [s if "." in s or "model_engine" in s else f"model.mtp.{s}" for s in settings.split()]
    with pytest.raises(InputError, match=re.escape(told)):
        given = load(
            "sft.yaml",
            [
                "model_engine=megatron",
                f"model.path={folder / family}",
                "data.train_files=unused",
                *pairs,
            ],
        )
        engine_class(given.model_engine).check(given, 1)


def test_a_step_of_ppo(tmp_path):
    """vLLM takes the weights, and drafts; actor, critic and reference are trained and asked, the first alone with MTP."""
    tokenizer = make_tokenizer()
    make_model(
        tmp_path / "model", "mimo", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id
    )
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in make_rows()[0][:16])
    )
    launch(
        1,
        "train_ppo.py",
        "model_engine=megatron",
        f"model.path={tmp_path}/model",
        f"data.train_files={tmp_path}/train.jsonl",
        f"output_dir={tmp_path}/out",
        f"data.cache_dir={tmp_path}/cache",
        "engine.compute_dtype=float32",
        "data.train_batch_size=8",
        "data.max_prompt_length=40",
        "data.max_tokens_per_micro_batch=200",
        "rollout.n=2",
        "rollout.max_tokens=12",
        "validation.max_tokens=12",
        "rollout.kv_cache_gib=0.05",
        "reward.num_workers=1",
        "optim.lr=3e-3",
        *keys(MTP),
        "model.mtp.enable_rollout=true",
        "model.mtp.num_speculative_tokens=2",
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_loss=true",
        "trainer.total_steps=2",
        "algorithm.ppo_epochs=2",
    )
    steps = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    said = [step["mtp/loss_1"] for step in steps if "mtp/loss_1" in step]
    assert len(said) == 2 and all(0 < loss < 20 for loss in said)
    drafted = [
        (step["mtp/accept_rate"], step["mtp/accept_length"], step["rollout_corr/log_prob_gap"])
        for step in steps[:2]
    ]
    assert all(
        0 <= rate <= 1 and length == pytest.approx(1 + 2 * rate, rel=0.2) and gap < 1e-4
        for rate, length, gap in drafted
    )
    before, after = (
        load_file(tmp_path / where / "model.safetensors") for where in ("model", "out/hf")
    )
    assert before.keys() == after.keys() and not any(
        torch.equal(after[n], x) for n, x in before.items() if "mtp_layers" in n
    )

    # Others load it, and draft with its layer: here a vLLM that knows nothing of this repository.
    question = [*range(4, 20)]
    run(
        [
            sys.executable,
            "-c",
            GENERATE,
            tmp_path / "out/hf",
            tmp_path / "said.json",
            json.dumps(question),
        ],
        cwd=tmp_path,
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out/hf", dtype=torch.float32)
    with torch.no_grad():
        expected = model.generate(
            torch.tensor([question]), do_sample=False, max_new_tokens=8, eos_token_id=-1
        )[0, len(question) :]
    assert json.loads((tmp_path / "said.json").read_text()) == expected.tolist()
