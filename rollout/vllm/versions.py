"""The supported vLLM releases, and how their interfaces differ.

To support another release, add it to `SUPPORTED` and run the tests in tests/rollout on a CPU and on
a GPU. Nothing outside this file depends on a version number.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Release:
    """The interfaces of one vLLM release that differ between releases.

    Attributes:
        running_limits: Attributes of vLLM's scheduler that limit the number of running requests.
        counts_tokens_in_flight: Whether `Request.num_in_flight_tokens` exists: the number of tokens
            that the request's steps in flight compute, including prompt tokens.
        gumbel_sample_options: Keyword arguments of the V2 model runner's `gumbel_sample` for
            sampling a token that is not a draft.
        has_optional_v2_runner_for_experts: Whether vLLM can run some families of mixtures of
            experts in the faster V2 model runner, but does so only on request.
    """

    running_limits: tuple[str, ...]
    counts_tokens_in_flight: bool
    gumbel_sample_options: dict[str, bool]
    has_optional_v2_runner_for_experts: bool


SUPPORTED = {
    # Tested on CUDA. There, requests run asynchronously in the V2 model runner, or in the V1 model
    # runner with the drafters ngram and suffix.
    "0.25.1": Release(
        running_limits=("max_num_running_reqs",),
        counts_tokens_in_flight=False,
        gumbel_sample_options={},
        has_optional_v2_runner_for_experts=True,
    ),
    # Tested on a CPU, in the V1 model runner.
    "0.32.0": Release(
        running_limits=("max_num_running_reqs", "max_num_active_reqs"),
        counts_tokens_in_flight=True,
        gumbel_sample_options={"is_drafting": False},
        has_optional_v2_runner_for_experts=False,
    ),
}
SUPPORTED_NAMES = " and ".join(SUPPORTED)


def installed_version() -> str:
    """Return the installed vLLM's version without its local part, e.g. "0.32.0". Imports vLLM."""
    from vllm import __version__

    return __version__.partition("+")[0]


def keep_pixels_normalized() -> dict[str, bool]:
    """Return engine arguments that let the image processor normalize pixels.

    By default, releases from 0.32 on normalize pixels on the device. But they skip this if
    preprocessor_config.json has no mean, even if the processor's class has a default. The vision
    tower would then read raw bytes. Earlier releases have no such argument.
    """
    from vllm import EngineArgs

    if "mm_device_do_normalize" in vars(EngineArgs):
        return {"mm_device_do_normalize": False}
    return {}
