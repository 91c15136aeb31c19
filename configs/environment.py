"""The environment variables in which torchrun or srun passes a process its rank."""

import os

# The lowest value of each variable that holds a whole number.
LOWEST = {
    "RANK": 0,
    "LOCAL_RANK": 0,
    "WORLD_SIZE": 1,
    "LOCAL_WORLD_SIZE": 1,
    "MASTER_PORT": 0,
}
HIGHEST_PORT = 65535


def rank_problems() -> list[str]:
    """Return a sentence about each variable whose value no launcher would set."""
    problems = []
    for name, lowest in LOWEST.items():
        number = parse(os.environ.get(name, str(lowest)))
        if number is None or number < lowest:
            problems.append(
                f"the environment variable {name}={os.environ[name]!r} must be a whole number, at "
                f"least {lowest}: start with torchrun or srun, which set it, or unset it"
            )
    if problems:
        return problems
    if read_number("RANK", 0) >= read_number("WORLD_SIZE", read_number("RANK", 0) + 1):
        problems.append(
            f"the environment variable RANK={os.environ['RANK']} must be below "
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}: start with torchrun or srun, which set both"
        )
    if read_number("MASTER_PORT", 0) > HIGHEST_PORT:
        problems.append(
            f"the environment variable MASTER_PORT={os.environ['MASTER_PORT']} must be at most "
            f"{HIGHEST_PORT}"
        )
    return problems


def is_rank0() -> bool:
    """Return whether this process prints for the whole run."""
    return read_number("RANK", 0) == 0


def is_first_of_node() -> bool:
    """Return whether this process prints for its node."""
    return read_number("LOCAL_RANK", read_number("RANK", 0)) == 0


def has_several_nodes() -> bool:
    """Return whether the ranks of this run are on several nodes, as far as the launcher tells."""
    num_ranks = read_number("WORLD_SIZE", 1)
    if "LOCAL_WORLD_SIZE" in os.environ:
        return read_number("LOCAL_WORLD_SIZE", num_ranks) < num_ranks
    return num_ranks > 1 and read_number("SLURM_NNODES", 1) > 1


def read_number(name: str, default: int) -> int:
    """Return a variable's value: the default if it is not set, 0 if it is not a valid number."""
    if name not in os.environ:
        return default
    return max(parse(os.environ[name]) or 0, 0)


def parse(text: str) -> int | None:
    """Return the whole number in a text, or None."""
    try:
        return int(text)
    except ValueError:
        return None
