"""Chat messages to text and media, through the checkpoint's own template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]
KINDS = {"image": "images", "video": "videos", "audio": "audio"}  # types of parts, and our keywords
PLACES = (
    "url",
    "path",
    "base64",
)  # where a part may name its medium, beside the key of its own type


def is_chat(value: Any) -> bool:
    """One conversation, a list of messages with roles, or several in a list."""
    if not isinstance(value, (list, tuple)) or not value:
        return False
    return all(isinstance(one, Mapping) and "role" in one for one in value) or all(
        isinstance(one, (list, tuple)) and is_chat(one) and isinstance(one[0], Mapping)
        for one in value
    )


def rendered(
    messages: Any, tokenizer: Any, processor: Any = None
) -> tuple[list[str], dict[str, list[Any]]]:
    """Each conversation as text with placeholders, and the media that its parts carry, in order, by our keywords.

    What the model would say next is left open, unless the last message is the assistant's.

    Args:
        messages: `[{"role": "user", "content": "What is this?"}]`, or several such lists. A content is a text or parts:
            `{"type": "text", "text": ...}`, `{"type": "image", "image": ...}` (or "url", "path", "base64"; or none, when
            the picture is given by `images=`), likewise "video" and "audio".
    Raises:
        ValueError: the checkpoint has no chat template, which shows the plain form; a content that is neither; a part of
            another type; some parts of a type carry their medium and others do not.
    """
    conversations = [messages] if isinstance(messages[0], Mapping) else list(messages)
    # A checkpoint with a processor keeps the template that knows media there.
    template = getattr(processor, "chat_template", None) or getattr(
        tokenizer, "chat_template", None
    )
    media = _media(conversations)
    if template is None:
        raise ValueError(
            "this checkpoint has no chat template: it was trained on text, not on turns. Give the text itself: "
            f"{_plain(conversations[0], processor)}"
        )
    texts = [
        tokenizer.apply_chat_template(
            [dict(message) for message in conversation],
            chat_template=template,
            tokenize=False,
            add_generation_prompt=conversation[-1]["role"] != "assistant",
        )
        for conversation in conversations
    ]
    return texts, media


def _parts(conversations: Sequence[Messages]) -> Iterator[Mapping[str, Any]]:
    for conversation in conversations:
        for message in conversation:
            content = message.get("content")
            if isinstance(content, str) or content is None:
                continue
            parts = [content] if isinstance(content, Mapping) else content
            if isinstance(content, Mapping) or not all(isinstance(p, Mapping) for p in parts):
                wrong = next((p for p in parts if not isinstance(p, Mapping)), content)
                raise ValueError(
                    f"a content is a text or a list of parts, {{'type': 'text', 'text': ...}}, got {str(wrong)[:60]!r} "
                    f"({type(wrong).__name__})"
                )
            yield from parts


def _media(conversations: Sequence[Messages]) -> dict[str, list[Any]]:
    """What parts carry, by our keywords; nothing for a type whose parts only hold a place."""
    found: dict[str, list[Any]] = {}
    for part in _parts(conversations):
        kind = part.get("type")
        if kind == "text":
            continue
        if kind not in KINDS:
            raise ValueError(
                f"a part of type {kind!r}; known are 'text', {', '.join(map(repr, KINDS))}"
            )
        carried = [
            f"data:;base64,{part[key]}" if key == "base64" else part[key]
            for key in (kind, *PLACES)
            if part.get(key) is not None
        ]
        found.setdefault(KINDS[kind], []).append(carried[0] if carried else None)
    for keyword, items in found.items():
        given = [item for item in items if item is not None]
        if 0 < len(given) < len(items):
            raise ValueError(
                f"of {len(items)} parts for {keyword}, {len(given)} carry theirs: put all into the messages, or none and "
                f"all into {keyword}="
            )
    return {keyword: items for keyword, items in found.items() if items[0] is not None}


def _plain(conversation: Messages, processor: Any) -> str:
    """The first message as a call with plain text."""
    content = conversation[0].get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    words = [
        str(part.get("text", ""))
        if part.get("type") == "text"
        else getattr(processor, f"{part['type']}_token", f"<|{part['type']}|>")
        for part in parts
    ]
    kinds = dict.fromkeys(KINDS[part["type"]] for part in parts if part.get("type") in KINDS)
    return f"model({' '.join(words)[:200]!r}{''.join(f', {kind}=[...]' for kind in kinds)})"
