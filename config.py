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


def names(v):
    return None if isinstance(v, list) and v and all(isinstance(name, str) for name in v) else "must be a list of names"


def interval(v):
    fits = len(v) == 2 and all(type(step) is int for step in v) and (v == [-1, -1] or 1 <= v[0] <= v[1])
    return None if fits else "must be the first and the last step, from 1, or [-1, -1] for none"


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
RULES = {key: rule for rule, keys in (
    (paths, "data.train_files"),
    (lambda v: None if v is None else paths(v), "data.val_files"),
    (at_least(0), "reward.overlong_buffer critic.warmup_steps trainer.max_skipped_steps"),
    (at_least(0.0), "trainer.save_minutes"),
    (above(0.0), "trainer.timeout_minutes"),
    (at_least(1), """data.train_batch_size data.max_prompt_length rollout.n validation.n rollout.max_tokens validation.max_tokens
        rollout.tensor_parallel_size rollout.max_num_seqs reward.num_workers algorithm.ppo_epochs algorithm.kl_ctrl.horizon
        algorithm.filter_groups.max_num_gen_batches trainer.total_epochs trainer.log_freq profiler.memory.max_entries
        engine.context_parallel_size engine.tensor_model_parallel_size engine.pipeline_model_parallel_size
        engine.virtual_pipeline_model_parallel_size engine.expert_model_parallel_size engine.log_prob_chunk_size"""),
    (at_least(2), "data.max_length data.max_tokens_per_micro_batch"),
    (at_least(0.0), """validation.temperature reward.overlong_penalty algorithm.clip_ratio_high algorithm.kl_ctrl.kl_coef
        algorithm.kl_loss_coef critic.lr critic.cliprange_value optim.lr optim.weight_decay optim.clip_grad"""),
    (at_least(1.0), "algorithm.rollout_rs_threshold"),
    (above(0.0), "rollout.temperature reward.timeout algorithm.kl_ctrl.target_kl algorithm.rollout_is_threshold optim.eps"),
    (between(0.0, 1.0), """rollout.min_p validation.min_p reward.max_failure_rate algorithm.gamma algorithm.lam
        algorithm.clip_ratio_low algorithm.rollout_rs_threshold_lower optim.lr_warmup_steps_ratio optim.lr_decay_steps_ratio
        optim.min_lr_ratio"""),
    (between(1e-9, 1.0), "rollout.top_p validation.top_p"),
    (between(0.01, 1.0), "rollout.gpu_memory_utilization"),
    (between(0, 2**40), "trainer.seed"),
    (positive_or_never, """rollout.top_k validation.top_k trainer.total_steps trainer.save_freq trainer.test_freq
        trainer.rollout_freq trainer.max_checkpoints engine.fsdp_size"""),
    (optional(int, at_least(1)), "data.num_proc algorithm.ppo_mini_batch_size"),
    (optional((int, float), above(0.0)), "rollout.kv_cache_gib"),
    (optional((int, float), at_least(0.0)), "engine.router_aux_loss_coef"),
    (optional(str), "data.cache_dir data.chat_template critic.path reference.path profiler.msprobe.config_path"),
    (optional(list, names), "profiler.torch.activities profiler.msprobe.stages"),
    (optional(str, one_of("statistics", "tensor")), "profiler.msprobe.task"),
    (optional(str, one_of("L0", "L1", "mix")), "profiler.msprobe.level"),
    (one_of("error", "left", "right", "drop"), "data.truncation"),
    (one_of("all", "last"), "data.train_on"),
    (one_of("fixed", "adaptive"), "algorithm.kl_ctrl.type"),
    (one_of("none", "token", "sequence"), "algorithm.rollout_is"),
    (one_of("none", "token", "sequence", "geometric"), "algorithm.rollout_rs"),
    (one_of("float32", "bfloat16"), "engine.param_dtype engine.compute_dtype engine.reduce_dtype"),
    (one_of("auto", "always", "never"), "engine.torch_compile"),
    (one_of("none", "selective", "full"), "engine.recompute"),
    (one_of("stage", "interval"), "profiler.torch.trace"),
    (lambda v: None if v == 0 or v > 1 else "must be above 1, or 0 for none", "algorithm.clip_ratio_c"),
    (lambda v: None if len(v) == 2 and all(isinstance(b, (int, float)) and 0 <= b < 1 for b in v)
     else "must be two numbers in [0, 1)", "optim.betas"),
    (lambda v: None if all(isinstance(s, str) and s for s in v) else "must be a list of strings", "rollout.stop validation.stop"),
    (lambda v: next((f"knows console, tensorboard and wandb, not {x!r}" for x in v
                     if x not in ("console", "tensorboard", "wandb")), None), "trainer.logger"),
    (interval, "trainer.profile_interval"),
    (lambda v: None if v is None or isinstance(v, str) else names(v), "profiler.tool"),
    (lambda v: None if v in (None, "all") or isinstance(v, list) and v and all(type(r) is int and r >= 0 for r in v)
     else "must be null, all, or a list of ranks", "profiler.ranks"),
) for key in keys.split()}


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
        if value != "???" and not _is_free(key, types):
            _check_value(key, value, types[key])
    if "???" in values.values():
        key = next(k for k, v in values.items() if v == "???")
        raise InputError(f"{key} is missing: give {key}=... or set it in a YAML file")
    OmegaConf.set_readonly(config, True)
    return config


def run(main: Callable[[DictConfig], None], defaults: str, doc: str) -> None:
    """Entry of a script: load the configuration from sys.argv, call main(config); an InputError is one line a node, exit 2."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(doc, (CONFIGS / defaults).read_text(), sep="\n")
        return
    try:
        main(load(defaults, sys.argv[1:]))
    except InputError as error:
        rank = int(os.environ.get("RANK", 0))
        if int(os.environ.get("LOCAL_RANK", rank)) == 0:            # a file may be missing on one node alone
            from tqdm import tqdm  # which ends the line of a progress bar
            tqdm.write(f"error{f' on rank {rank}' if rank else ''}: {' '.join(str(error).split())}", file=sys.stderr)
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


def _is_free(key: str, known: dict) -> bool:
    """Below a group whose default is {}: its keys belong to somebody else, who checks them."""
    return any(value == {} and key.startswith(f"{name}.") for name, value in known.items())


def _check_keys(given: dict, known: dict, model_engine: str) -> None:
    for key, value in given.items():
        if isinstance(value, dict) and key in known and known[key] != {}:
            raise InputError(f"{key} is a value, not a group of keys")
        if key in known or _is_free(key, known):
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
