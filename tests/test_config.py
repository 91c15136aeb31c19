import pytest

from config import InputError, load, run

NEEDED = ["model.path=m", "data.train_files=t.jsonl"]


def test_later_layers_win(tmp_path):
    (tmp_path / "a.yaml").write_text("optim: {lr: 1e-3, weight_decay: 0.5}\n")
    (tmp_path / "b.yaml").write_text("optim: {lr: 2e-3}\n")
    config = load("sft.yaml", [*NEEDED, "optim.betas=[0.8,0.9]", str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml")])
    assert (config.optim.lr, config.optim.weight_decay, config.optim.eps) == (2e-3, 0.5, 1e-8)
    assert list(config.optim.betas) == [0.8, 0.9]
    assert load("sft.yaml", [str(tmp_path / "b.yaml"), *NEEDED, "optim.lr=7"]).optim.lr == 7
    assert config.engine.param_dtype == "float32", "the engine's own file fills the group engine"


def test_the_configuration_is_read_only():
    with pytest.raises(Exception, match="read-only"):
        load("sft.yaml", NEEDED).optim.lr = 1.0


@pytest.mark.parametrize("argument, message", [
    ("optm.lr=1", "unknown key optm.lr; the nearest is optim.lr"),
    ("lr=1", "unknown key lr; the nearest is optim.lr"),
    ("data.train_file=x", "the nearest is data.train_files"),
    ("engine.tensor_model_parallel_size=2", "engine.tensor_model_parallel_size (model_engine=fsdp)"),
    ("optim=1", "optim is a group of keys"),
    ("optim.lr.x=1", "unknown key optim.lr.x"),
    ("optim.lr=fast", "optim.lr='fast' must be a number"),
    ("optim.lr=-1", "optim.lr=-1 must be at least 0"),
    ("optim.betas=[0.9]", "two numbers in [0, 1)"),
    ("optim.betas={}", "optim.betas is a value, not a group of keys"),
    ("optim.betas.0=0.5", "unknown key optim.betas.0"),
    ("optim=[1]", "optim is a group of keys"),
    ("data.train_batch_size=1.5", "data.train_batch_size=1.5 must be a whole number"),
    ("data.train_batch_size=0", "must be at least 1"),
    ("data.train_batch_size=true", "must be a whole number"),
    ("dry_run=1", "dry_run=1 must be true or false"),
    ("data.truncation=none", "must be one of error, left, right, drop"),
    ("data.num_proc=x", "must be a whole number or null"),
    ("trainer.save_freq=0", "must be above 0, or -1 for never"),
    ("trainer.logger=[console,neptune]", "not 'neptune'"),
    ("trainer.logger=console", "must be a list"),
    ("model_engine=ray", "model_engine=ray must be one of fsdp"),
    ("model.path=7", "must be a string"),
    ("a={", "is not YAML"),
    ("absent.yaml", "absent.yaml: No such file"),
    ("output_dir=${nowhere}", "nowhere"),
])
def test_a_mistake_names_the_key_and_what_to_change(argument, message):
    with pytest.raises(InputError) as caught:
        load("sft.yaml", [*NEEDED, argument])
    assert message in str(caught.value)


def test_a_missing_value_and_a_broken_file(tmp_path):
    with pytest.raises(InputError, match="data.train_files is missing"):
        load("sft.yaml", NEEDED[:1])
    (tmp_path / "bad.yaml").write_text("optim: [1\n")
    with pytest.raises(InputError, match="bad.yaml is not YAML"):
        load("sft.yaml", [*NEEDED, str(tmp_path / "bad.yaml")])
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(InputError, match="must hold keys and values"):
        load("sft.yaml", [*NEEDED, str(tmp_path / "list.yaml")])


@pytest.mark.parametrize("rank, local_rank, said", [
    (None, None, "error: broken\n"), ("0", "0", "error: broken\n"), ("1", "1", ""), ("1", None, ""),
    ("8", "0", "error on rank 8: broken\n")])
def test_an_error_is_one_line_a_node_and_exit_code_2(monkeypatch, capsys, rank, local_rank, said):
    monkeypatch.setattr("sys.argv", ["train_sft.py", *NEEDED])
    for name, value in (("RANK", rank), ("LOCAL_RANK", local_rank)):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)

    def main(config):
        raise InputError("broken")
    with pytest.raises(SystemExit) as left:
        run(main, "sft.yaml", "")
    assert left.value.code == 2 and capsys.readouterr().err == said
