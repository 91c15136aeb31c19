"""Export a checkpoint to Hugging Face format.

    python -m engines.checkpoint export CHECKPOINT OUT
    python -m engines.checkpoint export CHECKPOINT OUT --merge

CHECKPOINT is a directory such as output_dir/checkpoints/step_00000010. For the newest checkpoint,
it can be output_dir, or the file `latest` in checkpoints/. OUT becomes a model directory or, for a
run with adapters, a PEFT adapter. With --merge, the adapters are added to the frozen model, and OUT
becomes a model directory.
"""

import sys
import warnings
from pathlib import Path

from config import InputError
from configs.usage import exit_with_usage
from engines.checkpoint.checkpointer import find_checkpoint
from engines.checkpoint.export import export_checkpoint


def main(arguments: list[str]) -> None:
    """Export the checkpoint that the arguments name."""
    is_export = len(arguments) >= 3 and arguments[0] == "export"
    options = arguments[3:]
    if not is_export or options not in ([], ["--merge"]):
        exit_with_usage(__doc__, arguments)
    out = Path(arguments[2])
    # One process reads the checkpoint, as intended.
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    try:
        checkpoint = find_checkpoint(Path(arguments[1]))
        export_checkpoint(checkpoint, out, merge=bool(options))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    is_adapter = (out / "adapter_config.json").is_file()
    print(f"{'adapter' if is_adapter else 'model'}: {out}")


if __name__ == "__main__":
    main(sys.argv[1:])
