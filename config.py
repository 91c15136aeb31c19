"""Configuration: layered YAML, then key=value pairs, checked before anything heavy is imported.

The YAML files in configs/ are the only list of keys. A key's default fixes its type; RULES adds what a default
cannot say (choices, bounds, what may stand where the default is null).
"""

import difflib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

CONFIGS = Path(__file__).parent / "configs"


class InputError(ValueError):
    """The user's mistake. Entry scripts print it as one line on rank 0 and exit with code 2."""


def one_of(*choices):
    return lambda v: None if v in choices else f"must be one of {', '.join(map(str, choices))}"


def at_least(low):
    return lambda v: None if v >= low else f"must be at least {low}"


def above(low):
    return lambda v: None if v > low else f"must be above {low}"


def between(low, high):
    return lambda v: None if low <= v <= high else f"must lie between {low} and {high}"


def positive_or_never(v):
    return None if v > 0 or v == -1 else "must be above 0, or -1 for never"


def paths(v):
    texts = v if isinstance(v, list) else [v]
    return None if texts and all(isinstance(t, str) and t for t in texts) else "must be a path or a list of paths"


def optional(kind: type | tuple[type, ...], rule: Callable = lambda v: None):
    def check(v):
        if v is None:
            return None
        if not isinstance(v, kind) or isinstance(v, bool):
            return f"must be {TYPE_NAMES[kind]} or null"
        return rule(v)
    return check


TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", list: "a list",
              dict: "a group of keys", (int, float): "a number"}
DTYPE = one_of("float32", "bfloat16")
RULES = {
    "data.train_files": paths,
    "data.val_files": lambda v: None if v is None else paths(v),
    "data.train_batch_size": at_least(1),
    "data.max_length": at_least(2),
    "data.max_tokens_per_micro_batch": at_least(2),
    "data.truncation": one_of("error", "left", "right", "drop"),
    "data.train_on": one_of("all", "last"),
    "data.num_proc": optional(int, at_least(1)),
    "data.cache_dir": optional(str),
    "data.chat_template": optional(str),
    "data.max_prompt_length": at_least(1),
    **{f"{group}.{key}": rule for group in ("rollout", "validation") for key, rule in (
        ("n", at_least(1)), ("top_p", between(1e-9, 1.0)), ("top_k", positive_or_never), ("min_p", between(0.0, 1.0)),
        ("max_tokens", at_least(1)), ("stop", lambda v: None if all(isinstance(s, str) and s for s in v)
                                      else "must be a list of strings"))},
    "rollout.temperature": above(0.0),
    "validation.temperature": at_least(0.0),
    "rollout.tensor_parallel_size": at_least(1),
    "rollout.gpu_memory_utilization": between(0.01, 1.0),
    "rollout.kv_cache_gib": optional((int, float), above(0.0)),
    "rollout.max_num_seqs": at_least(1),
    "reward.num_workers": at_least(1),
    "reward.timeout": above(0.0),
    "reward.max_failure_rate": between(0.0, 1.0),
    "reward.overlong_buffer": at_least(0),
    "reward.overlong_penalty": at_least(0.0),
    "algorithm.adv_estimator": one_of("gae", "grpo", "dr_grpo", "rloo", "reinforce_plus_plus",
                                      "reinforce_plus_plus_baseline", "remax"),
    "algorithm.gamma": between(0.0, 1.0),
    "algorithm.lam": between(0.0, 1.0),
    "algorithm.loss_mode": one_of("ppo", "gspo", "cispo"),
    "algorithm.clip_ratio_low": between(0.0, 1.0),
    "algorithm.clip_ratio_high": at_least(0.0),
    "algorithm.clip_ratio_c": lambda v: None if v == 0 or v > 1 else "must be above 1, or 0 for none",
    "algorithm.loss_agg_mode": one_of("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"),
    "algorithm.ppo_mini_batch_size": optional(int, at_least(1)),
    "algorithm.ppo_epochs": at_least(1),
    "algorithm.kl_penalty": one_of("k1", "k2", "k3", "abs"),
    "algorithm.kl_ctrl.type": one_of("fixed", "adaptive"),
    "algorithm.kl_ctrl.kl_coef": at_least(0.0),
    "algorithm.kl_ctrl.target_kl": above(0.0),
    "algorithm.kl_ctrl.horizon": at_least(1),
    "algorithm.kl_loss_type": one_of("k1", "k2", "k3", "abs"),
    "algorithm.kl_loss_coef": at_least(0.0),
    "algorithm.rollout_is": one_of("none", "token", "sequence"),
    "algorithm.rollout_is_threshold": above(0.0),
    "algorithm.rollout_rs": one_of("none", "token", "sequence", "geometric"),
    "algorithm.rollout_rs_threshold": at_least(1.0),
    "algorithm.rollout_rs_threshold_lower": between(0.0, 1.0),
    "algorithm.filter_groups.max_num_gen_batches": at_least(1),
    "critic.path": optional(str),
    "critic.lr": at_least(0.0),
    "critic.cliprange_value": at_least(0.0),
    "critic.warmup_steps": at_least(0),
    "reference.path": optional(str),
    "trainer.rollout_freq": positive_or_never,
    "optim.lr": at_least(0.0),
    "optim.betas": lambda v: None if len(v) == 2 and all(isinstance(b, (int, float)) and 0 <= b < 1 for b in v)
    else "must be two numbers in [0, 1)",
    "optim.eps": above(0.0),
    "optim.weight_decay": at_least(0.0),
    "optim.clip_grad": at_least(0.0),
    "optim.lr_scheduler_type": one_of("constant", "linear", "cosine", "wsd"),
    "optim.lr_warmup_steps_ratio": between(0.0, 1.0),
    "optim.lr_decay_steps_ratio": between(0.0, 1.0),
    "optim.min_lr_ratio": between(0.0, 1.0),
    "trainer.total_epochs": at_least(1),
    "trainer.total_steps": positive_or_never,
    "trainer.save_freq": positive_or_never,
    "trainer.test_freq": positive_or_never,
    "trainer.max_checkpoints": positive_or_never,
    "trainer.max_skipped_steps": at_least(0),
    "trainer.seed": between(0, 2**40),
    "trainer.log_freq": at_least(1),
    "trainer.logger": lambda v: next((f"knows console, tensorboard and wandb, not {x!r}" for x in v
                                      if x not in ("console", "tensorboard", "wandb")), None),
    "engine.param_dtype": DTYPE,
    "engine.compute_dtype": DTYPE,
    "engine.reduce_dtype": DTYPE,
    "engine.torch_compile": one_of("auto", "always", "never"),
    "engine.fsdp_size": positive_or_never,
    "engine.context_parallel_size": at_least(1),
    "engine.log_prob_chunk_size": at_least(1),
}


def load(defaults: str, arguments: list[str]) -> DictConfig:
    """Resolve configs/{defaults}, configs/model_engine/{model_engine}.yaml, the files, then the key=value pairs.

    Returns a read-only, fully resolved DictConfig. Raises InputError for the first thing wrong: an unknown key (with
    the nearest one), a wrong type, a value outside its rule, a missing value, an unreadable file.
    """
    try:
        base = _read(CONFIGS / defaults)
        files = [_read(Path(a)) for a in arguments if "=" not in a]
        pairs = [_pair(a) for a in arguments if "=" in a]
        engines = sorted(p.stem for p in (CONFIGS / "model_engine").glob("*.yaml"))
        model_engine = next(layer.model_engine for layer in (*pairs[::-1], *files[::-1], base) if "model_engine" in layer)
        if model_engine not in engines:
            raise InputError(f"model_engine={model_engine} must be one of {', '.join(engines)}")
        known = OmegaConf.merge(base, _read(CONFIGS / "model_engine" / f"{model_engine}.yaml"))
        types = _flat(OmegaConf.to_container(known, resolve=False))
        for layer in (*files, *pairs):
            _check_keys(_flat(OmegaConf.to_container(layer, resolve=False)), types, model_engine)
        config = OmegaConf.merge(known, *files, *pairs)
        OmegaConf.resolve(config)
    except OmegaConfBaseException as error:
        raise InputError(str(error)) from None
    values = _flat(OmegaConf.to_container(config))
    for key, value in values.items():
        if value != "???":
            _check_value(key, value, types[key])
    if "???" in values.values():
        key = next(k for k, v in values.items() if v == "???")
        raise InputError(f"{key} is missing: give {key}=... or set it in a YAML file")
    OmegaConf.set_readonly(config, True)
    return config


def run(main: Callable[[DictConfig], None], defaults: str, doc: str) -> None:
    """Entry of a script: load the configuration from sys.argv, call main(config); an InputError is one line, exit 2."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(doc, (CONFIGS / defaults).read_text(), sep="\n")
        return
    try:
        main(load(defaults, sys.argv[1:]))
    except InputError as error:
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        sys.exit(2)


def _read(path: Path) -> DictConfig:
    try:
        layer = OmegaConf.load(path)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; arguments are YAML files or key=value pairs") from None
    except (YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not YAML: {error}") from None
    if not isinstance(layer, DictConfig):
        raise InputError(f"{path} must hold keys and values")
    return layer


def _pair(argument: str) -> DictConfig:
    try:
        return OmegaConf.from_dotlist([argument])
    except YAMLError:
        raise InputError(f"{argument}: the value is not YAML; quote it") from None


def _flat(tree: dict, prefix: str = "") -> dict:
    """{'a': {'b': 1}} -> {'a.b': 1}; an empty group stays as a leaf."""
    leaves = {}
    for key, value in tree.items():
        leaves |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return leaves


def _check_keys(given: dict, known: dict, model_engine: str) -> None:
    for key, value in given.items():
        if isinstance(value, dict) and key in known:
            raise InputError(f"{key} is a value, not a group of keys")
        if key in known:
            continue
        if any(k.startswith(f"{key}.") for k in known):
            raise InputError(f"{key} is a group of keys, not a value; did you mean "
                             f"{next(k for k in known if k.startswith(f'{key}.'))}?")
        last = {k.rpartition(".")[2]: k for k in known}
        close = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
        close = [last[key.rpartition(".")[2]]] if key.rpartition(".")[2] in last else close
        where = f" (model_engine={model_engine})" if key.startswith("engine.") else ""
        raise InputError(f"unknown key {key}{where}; the nearest is {close[0]}")


def _check_value(key: str, value, default) -> None:
    rule = RULES.get(key)
    if default is not None and default != "???":
        kind = type(default)
        fits = isinstance(value, (int, float) if kind is float else kind) and isinstance(value, bool) == (kind is bool)
        if not fits:
            raise InputError(f"{key}={value!r} must be {TYPE_NAMES[kind]}, as its default {default!r} is")
    elif rule is None and not isinstance(value, str):
        raise InputError(f"{key}={value!r} must be a string")
    problem = rule and rule(value)
    if problem:
        raise InputError(f"{key}={value!r} {problem}")
