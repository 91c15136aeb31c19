"""The user's own sampler: a function that chooses the rows of each batch (data.sampler)."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from common import imports, plugins
from config import InputError

# The inputs that a sampler may name; docs/order.md explains them.
INPUTS = (
    "seed",
    "batch_index",
    "batch_size",
    "num_rows",
    "total_steps",
    "lengths",
    "sources",
    "rows",
)
NUM_PROBES = 16  # the number of batches that check() computes


def find_sampler(options) -> Callable:
    """Return the function that data.sampler names, with its own parameters bound.

    Args:
        options: the section `data` of the configuration.
    """
    return plugins.find(
        "data.sampler", options.sampler, {}, INPUTS, "data.sampler_kwargs", options.sampler_kwargs
    )


@dataclass(frozen=True)
class UserSampler:
    """A user's function, with its inputs and the checks of its results.

    The result must follow from the arguments alone, so that a run can be resumed, and so that all
    ranks agree.

    Attributes:
        name: the value of data.sampler, for error messages.
        function: the function; it is called with `inputs` and the number of the batch.
        inputs: all of INPUTS but batch_index.
    """

    name: str
    function: Callable
    inputs: Mapping[str, Any]

    def rows_of_batch(self, batch_index: int) -> np.ndarray:
        """Return the rows of a batch, counted from 0: [batch_size] int64.

        Calls the function twice. Raises InputError if it fails, if the results differ, or if they
        are not the rows of a batch.
        """
        rows = self.call(batch_index)
        if not np.array_equal(rows, self.call(batch_index)):
            raise InputError(
                f"{self.setting}: two calls for batch {batch_index} returned different rows: the "
                "rows must follow from the arguments alone; draw random numbers from a generator "
                "with a seed of its own, numpy.random.default_rng([seed, batch_index])"
            )
        return rows

    def call(self, batch_index: int) -> np.ndarray:
        """Return the rows of one call: [batch_size] int64."""
        try:
            result = self.function(batch_index=batch_index, **self.inputs)
        except InputError:
            raise
        except Exception as error:
            place = imports.location(error, imports.path_of(self.name))
            raise InputError(
                f"{self.setting}: {place} failed for batch {batch_index}: "
                f"{type(error).__name__}: {error}"
            ) from error
        return self.checked(result, batch_index)

    def checked(self, result, batch_index: int) -> np.ndarray:
        """Return the result of a call as an array, or raise InputError."""
        size = self.inputs["batch_size"]
        num_rows = self.inputs["num_rows"]
        returned = f"{self.setting}: batch {batch_index}"
        rows = to_array(result)
        if rows is None:
            raise InputError(
                f"{returned} has the type {type_of(result)}: return "
                f"data.train_batch_size={size} row numbers, as a list or an array of whole "
                "numbers"
            )
        if len(rows) != size:
            raise InputError(
                f"{returned} has {len(rows)} rows: return data.train_batch_size={size} of them; "
                "rows may be repeated"
            )
        wrong = rows[(rows < 0) | (rows >= num_rows)]
        if len(wrong):
            raise InputError(
                f"{returned} has row {wrong[0]}: the rows are numbered from 0 to {num_rows - 1}"
            )
        return rows

    def check(self, num_batches: int) -> dict[int, str]:
        """Compute some of the first num_batches batches, first and last included.

        Computes them once more in reverse order, to find a function whose results depend on earlier
        calls. Raises InputError if it finds one, or if rows_of_batch() fails.

        Returns:
            The number of each of these batches -> a fingerprint of its rows.
        """
        numbers = np.linspace(0, num_batches - 1, NUM_PROBES).round().astype(int)
        indices = list(dict.fromkeys(numbers.tolist()))
        rows = {i: self.rows_of_batch(i) for i in indices}
        for i in reversed(indices):
            if not np.array_equal(rows[i], self.rows_of_batch(i)):
                raise InputError(
                    f"{self.setting}: batch {i} has other rows after other batches have been "
                    "drawn: the rows must follow from the arguments alone, because a resumed run "
                    "does not draw the earlier batches again"
                )
        return {i: digest(rows[i]) for i in indices}

    @property
    def setting(self) -> str:
        return f"data.sampler={self.name}"


def to_array(result) -> np.ndarray | None:
    """Return a list or array of whole numbers as an array [n] int64; None for anything else."""
    try:
        rows = np.asarray(result)
    except (TypeError, ValueError):
        return None
    if rows.ndim != 1 or (len(rows) and rows.dtype.kind not in "iu"):
        return None
    return rows.astype(np.int64)


def type_of(result) -> str:
    """Describe a result that is not an array of whole numbers, for an error message."""
    try:
        array = np.asarray(result)
    except (TypeError, ValueError):
        array = np.empty(())
    kind = type(result).__name__
    if array.ndim == 1 and array.dtype != object:
        return f"{kind} of {array.dtype}"
    if array.ndim > 1:
        return f"{kind} of shape {list(array.shape)}"
    return kind


def digest(rows: np.ndarray) -> str:
    """Return a short fingerprint of the rows of a batch."""
    return hashlib.sha256(rows.astype(np.int64).tobytes()).hexdigest()[:12]
