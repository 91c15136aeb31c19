"""Gives the build of a container the settings of this machine's pip: for tests/container.sh.

    python3 tests/container_pip.py FOLDER

writes FOLDER/pip.conf and prints the options of `buildah build` that mount it, and whatever files
and folders it names. Some machines reach a package index only with these settings: with a
certificate, say, or through a mirror.
"""

import ast
import subprocess
import sys
from configparser import RawConfigParser
from pathlib import Path

FOLDER = "/host"  # where the container sees this machine's files
FILE_URL = "file://"


def read_settings(lines: list[str]) -> RawConfigParser:
    """Return the settings that `pip config list` has printed, such as global.cert='/a/b.crt'.

    Environment variables, printed as :env:.cert, win over files.
    """
    settings = RawConfigParser(delimiters=("=",))
    for line in sorted(lines, key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        section = "global" if section == ":env:" else section
        if not settings.has_section(section):
            settings.add_section(section)
        settings.set(section, key, ast.literal_eval(value))
    return settings


def move_paths(settings: RawConfigParser) -> set[Path]:
    """Put FOLDER in front of every path that exists here. Returns what has to be mounted."""
    mounted = set()
    for section in settings.sections():
        for key, value in settings.items(section):
            words = []
            for word in value.split():
                moved, needed = move_path(word)
                words.append(moved)
                mounted |= needed
            settings.set(section, key, " ".join(words))
    return mounted


def move_path(word: str) -> tuple[str, set[Path]]:
    """Return a path or a file URL with FOLDER in front, and what has to be mounted for it.

    A word that names nothing on this machine stays as it is.
    """
    path = Path(word.removeprefix(FILE_URL))
    if not path.is_absolute() or not path.exists():
        return word, set()
    if word.startswith(FILE_URL):
        # The pages of an index may link to files beside it.
        return f"{FILE_URL}{FOLDER}{path}", {path.parent}
    return f"{FOLDER}{path}", {path}


def main(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "config", "list"]
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode != 0:
        sys.exit(
            f"make container needs pip: apt-get install python3-pip ({finished.stderr.strip()})"
        )
    settings = read_settings(finished.stdout.splitlines())
    mounted = move_paths(settings)
    file = folder.resolve() / "pip.conf"
    with file.open("w") as stream:
        settings.write(stream)
    print(f"--volume={file}:/etc/pip.conf:ro")
    for path in sorted(mounted):
        print(f"--volume={path}:{FOLDER}{path}:ro")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
