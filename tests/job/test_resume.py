"""Which checkpoint a run continues from, and what may change."""

import json
from types import SimpleNamespace

import pytest

from config import InputError, load
from data import dataset, preference_dataset, prompts, reward_dataset
from engines.model.model_files import fingerprint
from job.progress import Progress, adapter, identify, identify_adapters, identify_tokens
from job.resume import IDENTITY_OF_REFERENCE, choose_checkpoint, find_resume
from tests.support.models import make_model


@pytest.mark.parametrize(
    "pairs, run, message",
    [
        (
            ["trainer.resume_override=[model.path]"],
            {},
            "names model.path: only data.train_batch_size, trainer.seed can change",
        ),
        (["trainer.resume_override=[rollout.n]"], {}, "names rollout.n: only"),
        (
            ["trainer.resume=auto", "trainer.resume_override=[trainer.seed]"],
            {},
            "there is no checkpoint to continue from: set trainer.resume to",
        ),
        (
            ["trainer.resume_override=[trainer.seed]"],
            {"trainer.seed": 1, "data.train_batch_size": 4},
            "with data.train_batch_size=8, now it is 4: set it back, name it in "
            "trainer.resume_override, or start a new run",
        ),
        (
            ["trainer.resume_override=[trainer.seed]"],
            {"trainer.seed": 1, "the model": "qwen3 of 4 layers"},
            "with the model=qwen3 of 2 layers, now it is qwen3 of 4 layers: set it back, or "
            "start a new run",
        ),
        (
            [],
            {"model.mtp.enable_train": True},
            "with model.mtp.enable_train=False, now it is True: set it back, or start a new run",
        ),
        (
            ["trainer.resume_override=[trainer.seed]"],
            {"trainer.seed": 1},
            "was saved after step 20, but this run has only 20 steps: raise",
        ),
        (
            ["trainer.resume_override=[algorithm.adv_estimator]"],
            {"algorithm.adv_estimator": "gae", "critic": True},
            "with critic=False, now it is True: set it back, or start a new run",
        ),
        (
            [],
            {"model.freeze": ["visual"]},
            "with model.freeze=[], now it is ['visual']: set it back, or start a new run",
        ),
        (
            [],
            {"optim.state_dtype": "int8"},
            "with optim.state_dtype=16 or 32 bits, now it is int8: set it back, or start a new run",
        ),
        (
            ["model.lora.rank=4", "model.lora.adapter_path=new"],
            {},
            "adapter_path=new is only for the start of a run",
        ),
    ],
)
def test_what_a_resume_may_not_change(tmp_path, pairs, run, message):
    saved = {"trainer.seed": 0, "data.train_batch_size": 8, "the model": "qwen3 of 2 layers"}
    saved |= {key: "grpo" for key in run if key == "algorithm.adv_estimator"}
    (tmp_path / "trainer.json").write_text(json.dumps({"step": 20, "run": saved}))
    config = load(
        "sft.yaml", ["model.path=m", "data.train_files=t", f"trainer.resume={tmp_path}", *pairs]
    )
    with pytest.raises(InputError) as caught:
        find_resume(config, None, Progress(identity=saved | run), 20)
    assert message in str(caught.value)


OVERRIDABLE = [
    "data.train_batch_size",
    "data.train_files",
    "data.shuffle",
    "data.weights",
    "data.sampler",
    "trainer.seed",
    "rollout.n",
    "algorithm.adv_estimator",
]


@pytest.mark.parametrize("key", OVERRIDABLE)
def test_what_a_resume_may_change_is_reported(tmp_path, capsys, key):
    (tmp_path / "trainer.json").write_text(json.dumps({"step": 3, "run": {key: "old"}}))
    needed = ["model.path=m", "data.train_files=t", f"trainer.resume={tmp_path}"]
    config = load("sft.yaml", [*needed, f"trainer.resume_override=[{key}]"])
    assert find_resume(config, None, Progress(identity={key: "new"}), 20) == tmp_path
    message = f"{tmp_path} was written with {key}=old, now it is new, as trainer.resume_override"
    assert message in capsys.readouterr().out


@pytest.mark.parametrize(
    "old, new, message",
    [
        (("float32", None), ("bfloat16", None), "engine.compute_dtype=float32, now it is bfloat16"),
        (("float32", "float32"), ("float32", "bfloat16"), "model.lora.dtype=float32, now it is bf"),
        (("float32", "float32"), ("float32", "float32"), None),
    ],
)
def test_with_megatron_the_dtypes_of_weights_may_not_change(tmp_path, old, new, message):
    def progress(dtypes) -> Progress:
        lora = {"dtype": dtypes[1]} if dtypes[1] else None
        return Progress(identity={}, export_dtype=dtypes[0], lora=lora, step=3)

    (tmp_path / "trainer.json").write_text(json.dumps(progress(old).to_json()))
    needed = ["model.path=m", "data.train_files=t", f"trainer.resume={tmp_path}"]
    assert find_resume(load("sft.yaml", needed), None, progress(new), 20) == tmp_path
    config = load("sft.yaml", [*needed, "model_engine=megatron"])
    if message is None:
        assert find_resume(config, None, progress(new), 20) == tmp_path
        return
    with pytest.raises(InputError) as caught:
        find_resume(config, None, progress(new), 20)
    assert message in str(caught.value)


def test_a_run_that_shall_never_resume_keeps_its_checkpoints(tmp_path):
    config = config_with("never")
    assert find_resume(config, None, Progress(identity={}), 20) is None
    with pytest.raises(InputError, match=f"trainer.resume=never, but {tmp_path} exists"):
        find_resume(config, tmp_path, Progress(identity={}), 20)


@pytest.mark.parametrize(
    "pairs, key, value",
    [
        ([], "model.lora", "none"),
        ([], "optim.state_dtype", "16 or 32 bits"),
        (["optim.state_dtype=bfloat16"], "optim.state_dtype", "16 or 32 bits"),
        (["optim.state_dtype=int8"], "optim.state_dtype", "int8"),
        (["optim.name=muon"], "optim.name", "muon"),
        (["model.freeze=[visual]"], "model.freeze", ["visual"]),
        (["model_engine=megatron"], "model_engine", "megatron"),
        (["data.train_batch_size=6"], "data.train_batch_size", 6),
        (["trainer.seed=5"], "trainer.seed", 5),
        (["model.mtp.enable=true"], "model.mtp.enable_train", False),
        (
            ["model_engine=megatron", "model.mtp.enable=true", "model.mtp.enable_train=true"],
            "model.mtp.enable_train",
            True,
        ),
        ([], "the model", "qwen3 of 2 layers of 8"),
    ],
)
def test_what_identifies_a_run(pairs, key, value):
    config = load("sft.yaml", ["model.path=m", "data.train_files=t", *pairs])
    shape = {"model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 8}
    identity = identify(config, SimpleNamespace(**shape), SimpleNamespace(name="0123"))
    assert identity[key] == value


def test_adapters_belong_to_the_weights_of_the_actor_and_of_the_critic(tmp_path):
    actor = make_model(tmp_path / "actor", "qwen3")
    critic = make_model(tmp_path / "critic", "qwen3", num_hidden_layers=1)
    pairs = [f"model.path={actor}", f"critic.path={critic}", "model.lora.rank=2"]
    pairs += ["data.train_files=t", "reward.function=exact_match"]
    identity = identify_adapters(load("ppo.yaml", pairs))
    assert identity["frozen weights"] == fingerprint(actor)
    assert identity["frozen weights of the critic"] == fingerprint(critic)
    without_critic = load("sft.yaml", [f"model.path={actor}", "data.train_files=t"])
    assert identify_adapters(without_critic).keys() == {"model.lora", "frozen weights"}


def test_adapters_are_identified_by_their_settings_and_exported_with_their_base(
    tmp_path, monkeypatch
):
    make_model(tmp_path / "model", "qwen3", num_hidden_layers=1)
    (tmp_path / "model" / "model.safetensors").unlink()
    monkeypatch.chdir(tmp_path)
    needed = ["model.path=model", "data.train_files=t", "dry_run=true", "model.lora.rank=2"]
    changes = ["rank=3", "alpha=5", "target_modules=[q_proj]", "exclude_modules=[k_proj]"]
    identities = set()
    for pairs in ([], *([f"model.lora.{change}"] for change in changes)):
        config = load("sft.yaml", [*needed, *pairs])
        assert identify_adapters(config).keys() == {"model.lora"}, "there are no weights"
        identities.add(identify_adapters(config)["model.lora"])
    assert len(identities) == 5
    exported = adapter(config, "org/model")
    assert (exported["base"], exported["base_name"]) == (str(tmp_path / "model"), "org/model")
    assert exported["rank"] == 2


@pytest.mark.parametrize("old, new", [("a", "a"), ("a", None), (None, "b")])
def test_a_run_may_start_and_stop_using_a_reference(tmp_path, old, new):
    identity = {"trainer.seed": 0}
    with_reference = [identity | {IDENTITY_OF_REFERENCE: x} if x else identity for x in (old, new)]
    saved, fresh = with_reference
    (tmp_path / "trainer.json").write_text(json.dumps({"step": 3, "run": saved}))
    assert find_resume(config_with(tmp_path), None, Progress(identity=fresh), 20) == tmp_path


def test_the_weights_of_the_reference_may_not_change(tmp_path):
    saved = {"trainer.seed": 0, IDENTITY_OF_REFERENCE: "a"}
    (tmp_path / "trainer.json").write_text(json.dumps({"step": 3, "run": saved}))
    fresh = Progress(identity=saved | {IDENTITY_OF_REFERENCE: "b"})
    with pytest.raises(InputError, match="is the reference, and its weights have changed"):
        find_resume(config_with(tmp_path), None, fresh, 20)


TOKENIZATION = {"data.train_files": "a.jsonl", "data.max_length": 4096, "data.truncation": "drop"}


@pytest.mark.parametrize(
    "now, message",
    [
        (
            TOKENIZATION | {"data.max_length": 2048},
            "was written with data.max_length=4096, now it is 2048: set it back, name "
            "data.train_files in trainer.resume_override, or start a new run",
        ),
        (
            TOKENIZATION | {"data.max_length": 2048, "data.truncation": "left"},
            "with data.max_length=4096, now it is 2048, and data.truncation=drop, now it is left:",
        ),
        (TOKENIZATION, "with data.train_files=old, now it is new: set it back, name it in"),
    ],
)
def test_other_tokens_are_explained_by_the_settings_that_changed(tmp_path, now, message):
    fresh = Progress(identity={"data.train_files": "old"}, tokenization=TOKENIZATION, step=3)
    (tmp_path / "trainer.json").write_text(json.dumps(fresh.to_json()))
    resumed = Progress(identity={"data.train_files": "new"}, tokenization=now)
    with pytest.raises(InputError) as caught:
        find_resume(config_with(tmp_path), None, resumed, 20)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "script, module",
    [
        ("sft", dataset),
        ("ppo", prompts),
        ("dpo", preference_dataset),
        ("rm", reward_dataset),
    ],
)
def test_every_setting_that_changes_tokens_can_explain_a_difference(script, module):
    config = load(f"{script}.yaml", ["model.path=m", "data.train_files=t", "data.val_size=0.1"])
    identified = identify_tokens(config, module.OPTIONS)
    assert {f"data.{name}" for name in module.OPTIONS} < identified.keys()
    assert identified["data.val_size"] == 0.1
    assert identified["data.train_max_samples"] == -1
    assert identified["data.chat_template"] is None
    assert json.loads(json.dumps(identified)) == identified


def test_counters_continue_and_the_identity_is_the_new_runs():
    saved = {"step": 7, "run": {"trainer.seed": 1}, "export_dtype": "float32"}
    saved |= {"lora": {"base": "/before"}, "tokenization": {"data.train_files": ["before"]}}
    own = {"export_dtype": "bfloat16", "lora": {"base": "/now"}}
    own["tokenization"] = {"data.train_files": ["now"]}
    progress = Progress(identity={"trainer.seed": 2}, **own)
    progress.take_counters(saved | {"an unknown counter": 3})
    assert progress == Progress(identity={"trainer.seed": 2}, step=7, **own)


def test_progress_is_read_back_as_it_was_written(tmp_path):
    lora = {"rank": 4, "dtype": "float32"}
    progress = Progress(identity={"optim.name": "muon"}, export_dtype="bfloat16", lora=lora, step=3)
    (tmp_path / "trainer.json").write_text(json.dumps(progress.to_json()))
    loaded = Progress.load(tmp_path)
    assert loaded.step == 3
    assert loaded.export_dtype == "bfloat16"
    assert loaded.lora == lora
    assert loaded.identity["optim.name"] == "muon"


def test_older_checkpoints_lack_settings_that_had_one_value(tmp_path):
    saved = {"step": 3, "run": {"algorithm.adv_estimator": "gae"}}
    (tmp_path / "trainer.json").write_text(json.dumps(saved))
    assert Progress.load(tmp_path).identity == {
        "algorithm.adv_estimator": "gae",
        "critic": True,
        "optim.name": "adamw",
        "optim.state_dtype": "16 or 32 bits",
        "model.lora": "none",
        "model.mtp.enable_train": False,
        "model.freeze": [],
        "data.shuffle": True,
        "data.weights": "none",
        "data.sampler": "none",
        "rollout.partial.enable": False,
    }


def test_a_run_named_in_place_of_its_checkpoint_is_answered_with_the_newest(tmp_path):
    newest = tmp_path / "run" / "checkpoints" / "step_00000010"
    newest.mkdir(parents=True)
    resume = f"trainer.resume={tmp_path / 'run'}"
    config = load("sft.yaml", ["model.path=m", "data.train_files=t", resume])
    message = f"nor a checkpoint directory; did you mean {newest}\\?"
    with pytest.raises(InputError, match=message):
        find_resume(config, None, Progress(identity={}), 20)


@pytest.mark.parametrize(
    "name, message",
    [
        ("disable", "trainer.resume=disable is neither auto, never, nor a checkpoint directory"),
        ("{run}/step_1", "newer checkpoint, {run}/step_2: set trainer.resume=auto"),
        ("{run}/../run/step_1", "newer checkpoint, {run}/step_2"),
    ],
)
def test_a_checkpoint_that_is_named_is_not_replaced_by_the_newest(tmp_path, name, message):
    run = tmp_path / "run"
    for step in (1, 2):
        folder = run / f"step_{step}"
        folder.mkdir(parents=True)
        (folder / "trainer.json").write_text(json.dumps({"step": step, "run": {}}))
    config = config_with(name.format(run=run))
    with pytest.raises(InputError) as caught:
        choose_checkpoint(config, run / "step_2")
    assert message.format(run=run) in str(caught.value)


def test_a_run_that_started_from_another_continues_from_its_own_newest(tmp_path):
    for name in ("other", "run"):
        folder = tmp_path / name / "step_2"
        folder.mkdir(parents=True)
        (folder / "trainer.json").write_text("{}")
    latest = tmp_path / "run" / "step_2"
    config = config_with(f"{tmp_path}/other/step_2")
    assert choose_checkpoint(config, latest) == latest
    assert choose_checkpoint(config_with(latest), latest) == latest


@pytest.mark.parametrize("step, is_refused", [(19, False), (20, False), (21, True)])
def test_a_checkpoint_beyond_the_last_step_is_not_this_runs_result(tmp_path, step, is_refused):
    (tmp_path / "trainer.json").write_text(json.dumps({"step": step, "run": {}}))
    fresh = Progress.load(tmp_path)
    if not is_refused:
        assert find_resume(config_with(tmp_path), None, fresh, 20) == tmp_path
        return
    with pytest.raises(InputError, match=f"after step {step}, but this run has only 20 steps"):
        find_resume(config_with(tmp_path), None, fresh, 20)


def test_the_adapter_that_a_run_started_from_may_stay_in_its_configuration(tmp_path):
    config = load(
        "sft.yaml",
        [
            "model.path=m",
            "data.train_files=t",
            "model.lora.rank=4",
            "model.lora.adapter_path=first",
            f"trainer.resume={tmp_path}",
        ],
    )
    fresh = Progress(identity={}, lora={"adapter_path": "first"})
    (tmp_path / "trainer.json").write_text(json.dumps(fresh.to_json() | {"step": 2}))
    assert find_resume(config, None, fresh, 20) == tmp_path


def test_a_run_that_only_validates_may_read_a_checkpoint_beyond_its_last_step(tmp_path):
    (tmp_path / "trainer.json").write_text(json.dumps({"step": 21, "run": {}}))
    pairs = ["model.path=m", "data.train_files=t", "data.val_files=v", "trainer.val_only=true"]
    config = load("ppo.yaml", [*pairs, f"trainer.resume={tmp_path}"])
    assert find_resume(config, None, Progress.load(tmp_path), 20) == tmp_path


def config_with(resume):
    return load("sft.yaml", ["model.path=m", "data.train_files=t", f"trainer.resume={resume}"])


def test_several_changes_are_reported_line_by_line(tmp_path, capsys):
    old = {"trainer.seed": 1, "rollout.n": 4, "data.shuffle": True}
    new = {"trainer.seed": 2, "rollout.n": 8, "data.shuffle": True}
    (tmp_path / "trainer.json").write_text(json.dumps({"step": 3, "run": old}))
    override = "trainer.resume_override=[rollout.n,trainer.seed,data.shuffle]"
    needed = ["model.path=m", "data.train_files=t", f"trainer.resume={tmp_path}"]
    config = load("sft.yaml", [*needed, override])
    assert find_resume(config, None, Progress(identity=new), 20) == tmp_path
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path} was written with trainer.seed=1, now it is 2, as trainer.resume_override "
        "allows",
        f"{tmp_path} was written with rollout.n=4, now it is 8, as trainer.resume_override allows",
    ]


def test_a_checkpoint_of_the_last_step_may_not_change_its_settings(tmp_path):
    """Nothing would be trained with them. One step more, and they are used."""
    (tmp_path / "trainer.json").write_text(json.dumps({"step": 20, "run": {"trainer.seed": 1}}))
    needed = ["model.path=m", "data.train_files=t", f"trainer.resume={tmp_path}"]
    config = load("sft.yaml", [*needed, "trainer.resume_override=[trainer.seed]"])
    fresh = Progress(identity={"trainer.seed": 2})
    with pytest.raises(InputError) as caught:
        find_resume(config, None, fresh, 20)
    assert str(caught.value) == (
        f"{tmp_path} was saved after step 20, but this run has only 20 steps: raise "
        "trainer.total_epochs or set trainer.total_steps"
    )
    with pytest.raises(InputError, match="after step 20, but this run has only 15 steps: raise"):
        find_resume(config, None, fresh, 15)
    assert find_resume(config, None, fresh, 21) == tmp_path


def test_a_change_that_shapes_the_weights_has_no_override_in_its_message(tmp_path):
    (tmp_path / "trainer.json").write_text(json.dumps({"step": 3, "run": {"optim.name": "muon"}}))
    with pytest.raises(InputError) as caught:
        find_resume(config_with(tmp_path), None, Progress(identity={"optim.name": "adamw"}), 20)
    assert str(caught.value) == (
        f"{tmp_path} was written with optim.name=muon, now it is adamw: set it back, or start a "
        "new run in another output_dir"
    )


def test_a_checkpoint_with_other_adapters_than_it_started_from_is_refused(tmp_path):
    saved = Progress(identity={}, lora={"adapter_path": "first"}, step=2)
    (tmp_path / "trainer.json").write_text(json.dumps(saved.to_json()))
    pairs = ["model.path=m", "data.train_files=t", "model.lora.rank=4"]
    config = load("sft.yaml", [*pairs, "model.lora.adapter_path=x", f"trainer.resume={tmp_path}"])
    with pytest.raises(InputError) as caught:
        find_resume(config, None, Progress(identity={}), 20)
    assert str(caught.value) == (
        f"model.lora.adapter_path=x is only for the start of a run, but {tmp_path} already has "
        "adapters: leave it out, or start a new run in another output_dir"
    )


def test_the_progress_in_a_checkpoint_has_the_name_that_older_versions_gave_it():
    progress = Progress(identity={"trainer.seed": 3}, step=2)
    written = progress.to_json()
    assert written["run"] == {"trainer.seed": 3}
    assert written["step"] == 2
    assert "identity" not in written
    assert progress.identity == {"trainer.seed": 3}
