"""Configuration: layered YAML, then key=value pairs, checked before anything heavy is imported.

    python -m config schema         writes configs/schema/*.json: editors complete and check YAML files with them

The YAML files in configs/ are the only list of keys. A key's default fixes its type. RULES adds what a default cannot
say: choices, bounds, and what may replace a default of null. configs/names.yaml lists what other projects call our keys.
"""

import ctypes
import difflib
import json
import os
import re
import signal
import sys
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

CONFIGS = Path(__file__).resolve().parent / "configs"
REFUSED: list[Exception] = []  # what run() has printed
PARENT = os.getppid()  # torchrun, unless it is killed during the imports that follow
PR_SET_PDEATHSIG = 1  # linux/prctl.h
SCRIPTS = ("sft", "ppo")  # train_{script}.py reads configs/{script}.yaml
TYPES = {
    bool: ("true or false", "boolean"),
    int: ("a whole number", "integer"),
    float: ("a number", "number"),
    str: ("a string", "string"),
    list: ("a list", "array"),
    dict: ("a group of keys", "object"),
    (int, float): ("a number", "number"),
    (str, list): ("a path or a list of paths", ["string", "array"]),
}
PLAIN_NAMES = ("enable", "name", "path", "type")  # without their group they say nothing


# Words of a key, or of a variable of the environment, that say its value is for nobody's eyes.
SECRET = re.compile(
    r"(^|[_.])(api_?keys?|keys?|tokens?|secrets?|passwd|credentials?|auth|pat|pass|passphrase)$|_pwd$|password",
    re.IGNORECASE,
)


class InputError(ValueError):
    """The user's mistake. Entry scripts print it as one line on rank 0 and exit with code 2."""


class Rule(NamedTuple):
    """problem: value -> what is wrong with it, or None. schema: the same as JSON schema, as far as that can say it."""

    problem: Callable[[Any], str | None]
    schema: dict


def rule(text: str, holds: Callable[[Any], bool], **schema) -> Rule:
    return Rule(lambda v: None if holds(v) else text, schema)


def one_of(*choices):
    return rule(
        f"must be one of {', '.join(map(str, choices))}", lambda v: v in choices, enum=[*choices]
    )


def at_least(low):
    return rule(f"must be at least {low}", lambda v: v >= low, minimum=low)


def above(low):
    return rule(f"must be above {low}", lambda v: v > low, exclusiveMinimum=low)


def above_or(low, other, meaning):
    return rule(
        f"must be above {low}, or {other} for {meaning}",
        lambda v: v > low or v == other,
        anyOf=[{"exclusiveMinimum": low}, {"const": other}],
    )


def between(low, high):
    return rule(
        f"must lie between {low} and {high}", lambda v: low <= v <= high, minimum=low, maximum=high
    )


ANYTHING = Rule(lambda v: None, {})


def optional(kind: type | tuple[type, ...], then: Rule = ANYTHING):
    """null, or a value of this type that follows the rule `then`."""
    name, json_type = TYPES[kind]
    fits = lambda v: isinstance(v, kind) and not isinstance(v, bool)
    return Rule(
        lambda v: None if v is None else then.problem(v) if fits(v) else f"must be {name} or null",
        {"anyOf": [{"type": json_type} | then.schema, {"type": "null"}]},
    )


def is_names(v) -> bool:
    return isinstance(v, list) and len(v) > 0 and all(isinstance(name, str) and name for name in v)


STRING = {"type": "string", "minLength": 1}
PATHS = rule(
    "must be a path or a list of paths",
    lambda v: (
        all(isinstance(t, str) and t for t in v)
        if isinstance(v, list) and v
        else isinstance(v, str) and v
    ),
    type=["string", "array"],
    items=STRING,
    minLength=1,
    minItems=1,
)
TARGETS = rule(
    "must be all-linear, a regular expression or a list of names",
    lambda v: is_names(v) or isinstance(v, str) and v,
    type=["string", "array"],
    items=STRING,
    minLength=1,
    minItems=1,
)
STRINGS = rule(
    "must be a list of strings", lambda v: all(isinstance(s, str) and s for s in v), items=STRING
)
NAMES = rule("must be a list of names", is_names, items=STRING, minItems=1)
BETAS = rule(
    "must be two numbers in [0, 1)",
    lambda v: len(v) == 2 and all(isinstance(b, (int, float)) and 0 <= b < 1 for b in v),
    items={"type": "number", "minimum": 0, "exclusiveMaximum": 1},
    minItems=2,
    maxItems=2,
)
INTERVAL = rule(
    "must be the first and the last step, from 1, or [-1, -1] for none",
    lambda v: (
        len(v) == 2 and all(type(x) is int for x in v) and (v == [-1, -1] or 1 <= v[0] <= v[1])
    ),
    items={"type": "integer"},
    minItems=2,
    maxItems=2,
)
LOGGERS = Rule(
    lambda v: next(
        (
            f"knows console, tensorboard and wandb, not {x!r}"
            for x in v
            if x not in ("console", "tensorboard", "wandb")
        ),
        None,
    ),
    {"items": {"enum": ["console", "tensorboard", "wandb"]}},
)
TOOL = rule(
    "must be a name or a list of names",
    lambda v: v is None or isinstance(v, str) or is_names(v),
    type=["string", "array", "null"],
    items=STRING,
    minItems=1,
)
RANKS = rule(
    "must be null, all, or a list of ranks",
    lambda v: (
        v in (None, "all")
        or isinstance(v, list)
        and v
        and all(type(r) is int and r >= 0 for r in v)
    ),
    anyOf=[
        {"enum": [None, "all"]},
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
    ],
)
RULES = {
    key: rule
    for rule, keys in (
        (PATHS, "data.train_files"),
        (optional((str, list), PATHS), "data.val_files"),
        (
            at_least(0),
            "model.lora.rank reward.overlong_buffer critic.warmup_steps trainer.max_skipped_steps",
        ),
        (at_least(0.0), "trainer.save_minutes"),
        (above(0.0), "trainer.timeout_minutes"),
        (
            at_least(1),
            """model.lora.alpha data.train_batch_size data.max_prompt_length rollout.n validation.n
        rollout.max_tokens validation.max_tokens rollout.num_speculative_tokens model.mtp.num_speculative_tokens
        rollout.tensor_parallel_size reward.num_workers reward.concurrency algorithm.ppo_epochs
        algorithm.kl_ctrl.horizon algorithm.filter_groups.max_num_gen_batches trainer.total_epochs trainer.log_freq
        profiler.memory.max_entries engine.tensor_model_parallel_size
        engine.pipeline_model_parallel_size engine.virtual_pipeline_model_parallel_size engine.expert_model_parallel_size
        engine.log_prob_chunk_size""",
        ),
        (
            rule(
                "must be auto, or at least 1",
                lambda v: v == "auto" or type(v) is int and v >= 1,
                type=["integer", "string"],
                anyOf=[{"const": "auto"}, {"type": "integer", "minimum": 1}],
            ),
            "engine.context_parallel_size",
        ),
        (at_least(2), "data.max_length data.max_tokens_per_micro_batch"),
        (
            at_least(0.01),
            "rollout.temperature",
        ),  # vLLM samples with 0.01 where less is asked for, in silence
        (
            rule(
                "must be 0 (greedy) or at least 0.01",
                lambda v: v == 0 or v >= 0.01,
                anyOf=[{"const": 0}, {"minimum": 0.01}],
            ),
            "validation.temperature",
        ),
        (
            at_least(0.0),
            """reward.overlong_penalty algorithm.clip_ratio_high algorithm.kl_ctrl.kl_coef
        algorithm.kl_loss_coef critic.lr critic.cliprange_value optim.lr optim.weight_decay optim.clip_grad""",
        ),
        (at_least(1.0), "algorithm.rollout_rs_threshold"),
        (
            above(0.0),
            """reward.timeout reward.memory_gib algorithm.kl_ctrl.target_kl
        algorithm.rollout_is_threshold optim.eps model.mtp.mtp_loss_scaling_factor""",
        ),
        (
            between(0.0, 1.0),
            """rollout.min_p validation.min_p reward.max_failure_rate algorithm.gamma algorithm.lam
        algorithm.clip_ratio_low algorithm.rollout_rs_threshold_lower optim.lr_warmup_steps_ratio optim.lr_decay_steps_ratio
        optim.min_lr_ratio""",
        ),
        (
            rule(
                "must be at least 0 and less than 1",
                lambda v: 0 <= v < 1,
                minimum=0,
                exclusiveMaximum=1,
            ),
            "model.lora.dropout",
        ),
        (between(1e-9, 1.0), "rollout.top_p validation.top_p"),
        (between(0.01, 1.0), "rollout.gpu_memory_utilization"),
        (between(0, 2**40), "trainer.seed"),
        (
            rule(
                "must lie between 1 and 1024, or be -1 for all words",
                lambda v: v == -1 or 1 <= v <= 1024,
                anyOf=[{"minimum": 1, "maximum": 1024}, {"const": -1}],
            ),
            "rollout.top_k validation.top_k",
        ),
        (
            above_or(0, -1, "never"),
            """trainer.total_steps trainer.save_freq trainer.test_freq
        trainer.rollout_freq trainer.max_checkpoints engine.fsdp_size""",
        ),
        (
            optional(int, at_least(1)),
            "data.num_proc rollout.max_num_seqs algorithm.ppo_mini_batch_size",
        ),
        (optional((int, float), above(0.0)), "rollout.kv_cache_gib"),
        (optional((int, float), at_least(0.0)), "engine.router_aux_loss_coef"),
        (
            optional(str),
            """model.lora.adapter_path data.cache_dir data.chat_template critic.path reference.path
        profiler.msprobe.config_path""",
        ),
        (optional(list, NAMES), "profiler.torch.activities profiler.msprobe.stages"),
        (optional(str, one_of("statistics", "tensor")), "profiler.msprobe.task"),
        (optional(str, one_of("L0", "L1", "mix")), "profiler.msprobe.level"),
        (one_of("error", "left", "right", "drop"), "data.truncation"),
        (optional(str, one_of("keep", "escape", "error")), "data.special_tokens_in_text"),
        (optional(str, one_of("ngram", "suffix")), "rollout.speculative"),
        (one_of("all", "last"), "data.train_on"),
        (one_of("fixed", "adaptive"), "algorithm.kl_ctrl.type"),
        (one_of("none", "token", "sequence"), "algorithm.rollout_is"),
        (one_of("none", "token", "sequence", "geometric"), "algorithm.rollout_rs"),
        (
            one_of("float32", "bfloat16"),
            "model.lora.dtype engine.param_dtype engine.compute_dtype engine.reduce_dtype",
        ),
        (one_of("auto", "always", "never"), "engine.torch_compile rollout.share_base"),
        (one_of("none", "selective", "full"), "engine.recompute"),
        (one_of("own", "mbridge"), "engine.bridge"),
        (one_of("stage", "interval"), "profiler.torch.trace"),
        (above_or(1, 0, "none"), "algorithm.clip_ratio_c"),
        (BETAS, "optim.betas"),
        (TARGETS, "model.lora.target_modules"),
        (
            STRINGS,
            "model.freeze model.lora.exclude_modules rollout.stop validation.stop reward.env trainer.resume_override",
        ),
        (LOGGERS, "trainer.logger"),
        (INTERVAL, "trainer.profile_interval"),
        (TOOL, "profiler.tool"),
        (RANKS, "profiler.ranks"),
    )
    for key in keys.split()
}


def load(defaults: str, arguments: list[str]) -> DictConfig:
    """Merge configs/{defaults}, configs/model_engine/{model_engine}.yaml, the YAML files and the key=value pairs of
    `arguments`; later ones win.

    Returns a read-only, fully resolved DictConfig. Raises InputError for the first mistake: an unknown key (with the
    name it has here, if there is one), a wrong type, a value that breaks its rule, a missing value, an unreadable file.
    """
    try:
        base, engines = _shipped(CONFIGS / defaults), {path.stem: path for path in _engines()}
        _check_forms(arguments, _flat(base) | _flat(_shipped(engines[base.model_engine])))
        files = [_read(Path(a)) for a in arguments if "=" not in a]
        pairs = [_pair(a) for a in arguments if "=" in a]
        model_engine = next(
            layer.model_engine
            for layer in (*pairs[::-1], *files[::-1], base)
            if "model_engine" in layer
        )
        if model_engine not in engines:
            raise InputError(f"model_engine={model_engine} must be one of {', '.join(engines)}")
        known = OmegaConf.merge(base, _shipped(engines[model_engine]))
        types = _flat(known)
        for layer in (*files, *pairs):
            _check_keys(_flat(layer), types)
        config = OmegaConf.merge(known, *files, *pairs)
        OmegaConf.resolve(config)
    except OmegaConfBaseException as error:
        raise InputError(str(error)) from None
    values = _flat(config)
    for key, value in values.items():
        if value != "???" and not _is_free(key, types):
            _check_value(key, value, types[key])
    if "???" in values.values():
        key = next(k for k, v in values.items() if v == "???")
        raise InputError(f"{key} is missing: give {key}=... or set it in a YAML file")
    OmegaConf.set_readonly(config, True)
    return config


def defaults(group: str) -> DictConfig:
    """What configs/ppo.yaml has for a group of keys."""
    return OmegaConf.select(_read(CONFIGS / "ppo.yaml"), group)


def without_secrets(config: DictConfig) -> DictConfig:
    """A copy to show and to keep, with the secrets of its values hidden, whether an interpolation or the shell has put them
    there."""
    shown = OmegaConf.create(OmegaConf.to_container(config))
    for key, value in _flat(shown).items():
        if (
            isinstance(value, str)
            and (hidden := hide_secrets(value, key not in _places() and SECRET.search(key)))
            != value
        ):
            OmegaConf.update(shown, key, hidden)
    return shown


def hide_secrets(text: str, is_secret: bool = False) -> str:
    """The text with ${oc.env:NAME} in the place of what the environment holds under a NAME that looks secret; if the text itself
    is a secret, under any name."""
    for name, value in sorted(os.environ.items(), key=lambda item: -len(item[1])):
        if len(value) >= 6 and (is_secret or SECRET.search(name)):
            text = text.replace(value, f"${{oc.env:{name}}}")
    return text


def _leave_process_group() -> None:
    """After an InputError, which all ranks raise: a thread of gloo's could abort the ending process, whose code were not 2."""
    if REFUSED and (dist := sys.modules.get("torch.distributed")) and dist.is_initialized():
        dist.destroy_process_group()


weakref.finalize(
    InputError, _leave_process_group
)  # at the end of Python, where the latest comes first: vLLM's before this one


def die_with(parent: int) -> None:
    """Let this process be killed when the one that started it ends, however it does."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        sys.exit(f"process {parent}, which started this one, has ended")


def run(main: Callable[[DictConfig], None], defaults: str, doc: str) -> None:
    """Entry of a script: load the configuration from sys.argv, call main(config); an InputError is one line per node, exit 2."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(doc, *(path.read_text() for path in (CONFIGS / defaults, *_engines())), sep="\n")
        return
    try:
        main(load(defaults, sys.argv[1:]))
    except InputError as error:
        rank = int(os.environ.get("RANK", 0))
        if int(os.environ.get("LOCAL_RANK", rank)) == 0:  # a file may be missing on one node alone
            from tqdm import tqdm  # which ends the line of a progress bar

            said = hide_secrets(" ".join(str(error).split()))
            tqdm.write(f"error{f' on rank {rank}' if rank else ''}: {said}", file=sys.stderr)
        REFUSED.append(error)
        sys.exit(2)
    except KeyboardInterrupt:  # before job.Agreement, which knows what to do
        os._exit(130)


def _engines() -> list[Path]:
    return sorted((CONFIGS / "model_engine").glob("*.yaml"))


@cache
def _shipped(path: Path) -> DictConfig:
    """A file of configs/, for callers who do not change it."""
    return _read(path)


def _read(path: Path) -> DictConfig:
    try:
        layer = OmegaConf.load(path)
    except OSError as error:
        raise InputError(
            f"{path}: {error.strerror}; arguments are YAML files or key=value pairs"
        ) from None
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


def _flat(tree: DictConfig | dict, prefix: str = "") -> dict:
    """{'a': {'b': 1}} -> {'a.b': 1}; an empty group stays as a leaf. Interpolations stay as they are written."""
    if isinstance(tree, DictConfig):
        tree = OmegaConf.to_container(tree, resolve=False)
    leaves = {}
    for key, value in tree.items():
        if "." in str(key):  # OmegaConf would keep it beside the group, and nobody would read it
            raise InputError(
                f"{prefix}{key}: a YAML file has no dots in its keys; write a group, "
                f"{str(key).replace('.', ': {')}: ...{'}' * str(key).count('.')}"
            )
        leaves |= (
            _flat(value, f"{prefix}{key}.")
            if isinstance(value, dict) and value
            else {f"{prefix}{key}": value}
        )
    return leaves


def _is_free(key: str, known: dict) -> bool:
    """Whether the key is in a group whose default is {}: another package defines such keys and checks them."""
    return any(value == {} and key.startswith(f"{name}.") for name, value in known.items())


def _check_forms(arguments: list[str], known: dict) -> None:
    """Raise InputError for what argparse and Hydra take: --key value, --key=value, +key=value, ++key=value, ~key."""
    for argument, following in zip(arguments, [*arguments[1:], ""]):
        if not argument.startswith(("-", "+", "~")):
            continue
        key, equals, value = argument.lstrip("-+~").partition("=")
        if argument.startswith("-") and not equals and not re.search(r"^-|=|\.ya?ml$", following):
            value = following
        target = key if key in known else _suggest(key, known)
        advice = (
            f"write {target}={value or '...'}{_where(target, known)}"
            if target in _places()
            else target
        )
        raise InputError(
            f"{argument}: {advice or '--help lists the keys'}; arguments are YAML files and key=value pairs"
        )


def _check_keys(given: dict, known: dict) -> None:
    for key, value in given.items():
        if isinstance(value, dict) and key in known and known[key] != {}:
            raise InputError(f"{key} is a value, not a group of keys")
        if known.get(key) == {} and not isinstance(value, dict):
            raise InputError(f"{key} is a group of keys, not a value: write {key}.NAME=...")
        if key in known or _is_free(key, known):
            continue
        if any(k.startswith(f"{key}.") for k in known):
            raise InputError(
                f"{key} is a group of keys, not a value; did you mean "
                f"{next(k for k in known if k.startswith(f'{key}.'))}?"
            )
        target, places = _suggest(key, known), _places()
        if key in places:
            raise InputError(f"unknown key {key}; it is a key of {places[key]} alone")
        advice = f"the nearest is {target}{_where(target, known)}" if target in places else target
        raise InputError(f"unknown key {key}; {advice or '--help lists the keys'}")


@cache
def _places() -> dict[str, str]:
    """{'rollout.n': 'train_ppo.py', 'engine.fsdp_size': 'model_engine=fsdp', ...}: where each of our keys is read."""
    files = {CONFIGS / f"{script}.yaml": f"train_{script}.py" for script in SCRIPTS}
    files |= {path: f"model_engine={path.stem}" for path in _engines()}
    return {key: place for path, place in files.items() for key in _flat(_read(path))}


def _where(key: str, known: dict) -> str:
    return "" if key in known else f" (a key of {_places()[key]})"


def _suggest(key: str, known: dict) -> str:
    """What to write for a key that is not known here: one of our keys, advice in words, or '' if nothing is near."""
    names, key = OmegaConf.load(CONFIGS / "names.yaml"), key.replace("-", "_")
    parts = key.split(".")
    # Parts of actor_rollout_ref.rollout.val_kwargs.n: the longest first, and of those the last.
    for part in (
        ".".join(parts[i : i + n])
        for n in range(len(parts), 0, -1)
        for i in range(len(parts) - n, -1, -1)
    ):
        if part in names:
            return names[part]
    for start in range(1, len(parts)):
        if ".".join(parts[start:]) in known:
            return ".".join(parts[start:])
    if close := difflib.get_close_matches(key, known, n=1, cutoff=0.85):
        return close[0]
    by_name = {
        k.rpartition(".")[2]: k for k in reversed([*known, *_places()])
    }  # the first group wins
    by_name = dict(names) | {name: k for name, k in by_name.items() if name not in PLAIN_NAMES}
    close = difflib.get_close_matches(parts[-1], by_name, n=1, cutoff=0.9)
    return by_name[close[0]] if close else ""


def _check_value(key: str, value, default) -> None:
    rule = RULES.get(key)
    if default is not None and default != "???" and (rule is None or "type" not in rule.schema):
        kind = type(default)
        fits = isinstance(value, (int, float) if kind is float else kind) and isinstance(
            value, bool
        ) == (kind is bool)
        if not fits:
            raise InputError(
                f"{key}={value!r} must be {TYPES[kind][0]}, as its default {default!r} is"
            )
    elif rule is None and not isinstance(value, str):
        raise InputError(f"{key}={value!r} must be a string")
    problem = rule and rule.problem(value)
    if problem:
        raise InputError(f"{key}={value!r} {problem}")


def schema(script: str) -> dict:
    """JSON schema of the YAML files that train_{script}.py reads. A file may hold any part of the keys."""
    root, *engines = (
        _group(OmegaConf.to_container(_read(path), resolve=False), _comments(path))
        for path in (CONFIGS / f"{script}.yaml", *_engines())
    )
    engines = {
        path.stem: engine["properties"]["engine"] for path, engine in zip(_engines(), engines)
    }
    root["properties"]["model_engine"]["enum"] = [*engines]
    root["properties"]["engine"] = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in engines]}
    return (
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": f"configuration of train_{script}.py",
        }
        | root
        | {
            "allOf": [
                {
                    "if": {
                        "properties": {"model_engine": {"const": name}},
                        "required": ["model_engine"],
                    },
                    "then": {"properties": {"engine": {"$ref": f"#/$defs/{name}"}}},
                }
                for name in engines
            ],
            "$defs": engines | {"interpolation": {"type": "string", "pattern": r"\$\{"}},
        }
    )


def _group(tree: dict, comments: dict[str, str], prefix: str = "") -> dict:
    properties = {}
    for name, default in tree.items():
        key = f"{prefix}{name}"
        if isinstance(default, dict) and default:
            value = _group(default, comments, f"{key}.")
        else:
            value = ({} if default is None else {"type": TYPES[type(default)][1]}) | RULES.get(
                key, ANYTHING
            ).schema
            value = (
                value
                if value == {"type": "string"}
                else {"anyOf": [value, {"$ref": "#/$defs/interpolation"}]}
            )
            value = value if default == "???" else {"default": default} | value
        properties[name] = ({"description": comments[key]} if comments[key] else {}) | value
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _comments(path: Path) -> dict[str, str]:
    """{'optim.lr': 'peak learning rate of AdamW', ...}: what stands beside each key, and on lines of its own below it."""
    found, parts, key = {}, [], None
    for line in path.read_text().splitlines():
        code, _, comment = line.partition("# ")
        if match := re.match(r"( *)(\w+):", code):
            parts[len(match[1]) // 2 :] = [match[2]]
            key = ".".join(parts)
            found[key] = comment
        elif key and code and not code.strip():
            found[key] += f" {comment}"
        else:
            key = None
    return found


def write_schemas() -> None:
    for script in SCRIPTS:
        path = CONFIGS / "schema" / f"{script}.json"
        path.write_text(json.dumps(schema(script), indent=1) + "\n")
        print(path)


if __name__ == "__main__":
    if sys.argv[1:] != ["schema"]:
        sys.exit(__doc__)
    write_schemas()
