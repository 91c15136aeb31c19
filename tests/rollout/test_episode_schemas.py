"""What a class tells the model: the schemas of its tools, and its observations."""

from pathlib import Path
from typing import Any, Literal

import pytest
from transformers.utils import get_json_schema

from rollout.episodes.environments import append_observation
from rollout.episodes.schemas import SchemaError, tool_schema


class Tools:
    def plain(self, a: int, b: float, c: str, d: bool) -> str:
        """Do something plain.

        Over several lines.

        Args:
            a: The first.
            b: The second,
                which goes on: here.

            c: The third (choices: ["tea ", "coffee"])
            d: The fourth
        Returns:
            A text.
        """

    def defaults(self, a: int = 3, b: str | None = None) -> None:
        """Do it.

        Args:
            Numbers and texts

            a: One.
            b: Two.

        Raises:
            ValueError: never.
        """

    async def nested(
        self,
        a: list[int],
        b: dict[str, list[float]],
        c: tuple[int, str],
        d: int | str | float,
        e: list[int] | int,
    ) -> list[str]:
        """Nested.

        Args:
            a: 1
            b: 2
            c: 3
            d: 4
            e: 5
        """

    def others(
        self,
        f: Literal["x", "y", 3],
        g: Any,
        h: list,
        i: list[dict[str, Any]] | None = None,
        j: Path = Path(),
    ):
        """Others.

        Args:
            f: 6
            g: 7
            h: 8
            i: 9
            j: 10
        """

    def nothing(self):
        """Take nothing."""

    def no_docstring(self, a: int):
        pass

    def no_hint(self, a):
        """Do.

        Args:
            a: A.
        """

    def no_description(self, a: int, b: int):
        """Do.

        Args:
            a: A.
        """

    def no_arguments(self, a: int):
        """Do."""

    def single(self, a: tuple[int]):
        """Do.

        Args:
            a: A.
        """

    def ellipsis(self, a: tuple[int, ...]):
        """Do.

        Args:
            a: A.
        """


@pytest.mark.parametrize("name", ["plain", "defaults", "nested", "others", "nothing"])
def test_schemas_of_tools_are_those_of_transformers(name):
    method = getattr(Tools(), name)
    expected = get_json_schema(method)
    assert tool_schema(getattr(Tools, name)) == expected
    assert tool_schema(method) == expected
    assert expected["function"]["description"]


@pytest.mark.parametrize(
    "name, message",
    [
        ("no_docstring", "the tool no_docstring has no docstring"),
        ("no_hint", "the parameter a of the tool no_hint has no type hint"),
        ("no_description", "the tool no_description does not describe the parameter b: add it"),
        ("no_arguments", "does not describe the parameter a"),
        ("single", "the type hint tuple[int] has no equivalent in JSON: use list"),
        ("ellipsis", "the type hint tuple[int, ...] has no equivalent in JSON: use list"),
    ],
)
def test_tools_that_transformers_rejects_have_no_schema(name, message):
    method = getattr(Tools, name)
    messages = "annot|Couldn't|missing|not supported|do not automatically convert"
    with pytest.raises(Exception, match=messages):
        get_json_schema(method)
    with pytest.raises(SchemaError) as raised:
        tool_schema(method)
    assert message in str(raised.value)


SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "no"}
IMAGES = [{"type": "image"}, {"type": "image"}]


def as_parts(content: str | list) -> list[dict]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


@pytest.mark.parametrize("content", ["question", [{"type": "text", "text": "question"}]])
@pytest.mark.parametrize("observation", [" and more", IMAGES])
def test_an_observation_continues_the_last_message_of_the_user(content, observation):
    """Two texts become one; otherwise both become lists of parts."""
    first = {"role": "user", "content": "the first"}
    last = {"role": "user", "content": content, "name": "me"}
    messages = [SYSTEM, first, last, ANSWER]
    extended = append_observation(messages, observation)
    are_texts = isinstance(content, str) and isinstance(observation, str)
    expected = content + observation if are_texts else as_parts(content) + as_parts(observation)
    assert extended == [SYSTEM, first, {**last, "content": expected}, ANSWER]
    assert messages == [SYSTEM, first, {**last, "content": content}, ANSWER], "unchanged"


@pytest.mark.parametrize("observation", ["seen", IMAGES])
def test_an_observation_without_a_message_of_the_user_is_one(observation):
    expected = [SYSTEM, {"role": "user", "content": observation}]
    assert append_observation([SYSTEM], observation) == expected


def test_without_an_observation_messages_stay_as_they_are():
    messages = [SYSTEM, {"role": "user", "content": "question"}]
    result = append_observation(messages, None)
    assert result == messages
    assert result is not messages
