"""Make one dry run after another in this process, since the imports take longer than the runs.

    python tests/repository/dry_runs_worker.py REQUESTS RESULTS

REQUESTS is a JSON file: {name: [script, argument, ...]}. RESULTS becomes one: {name: output}. In an
output, a mistake in the settings is a line that begins with "error: ".
"""

import importlib
import io
import json
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from config import InputError, load
from engines.parallel import device


def dry_run(script: str, arguments: list[str]) -> str:
    """Run train_sft.py or train_ppo.py, and return what it prints."""
    os.environ.pop("RANK", None)  # so that the run gets a process group of its own
    module = importlib.import_module(script.removesuffix(".py"))
    defaults = script.removeprefix("train_").replace(".py", ".yaml")
    with redirect_stdout(io.StringIO()) as printed:
        try:
            module.main(load(defaults, [*arguments, "dry_run=true"]))
        except InputError as error:
            print(f"error: {error}")
    device.shutdown()
    return printed.getvalue()


if __name__ == "__main__":
    requests = json.loads(Path(sys.argv[1]).read_text())
    results = {name: dry_run(script, arguments) for name, (script, *arguments) in requests.items()}
    Path(sys.argv[2]).write_text(json.dumps(results))
