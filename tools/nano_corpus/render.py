"""Writes JSON values in the several layouts that configuration and API payloads come in."""

from __future__ import annotations

import json
import re
import zlib
from typing import Any

_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./ -]*")
_WORDS = {"true", "false", "null", "yes", "no", "on", "off"}


def _strip_markup(value: Any) -> Any:
    """Remove HTML tags from the descriptions and shorten very long strings."""
    if isinstance(value, dict):
        return {key: _strip_markup(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_strip_markup(child) for child in value]
    if isinstance(value, str):
        text = re.sub(r"</?[a-zA-Z][^<>]*>", "", value)
        return text if len(text) < 600 else text[:600].rsplit(" ", 1)[0]
    return value


def _scalar(value: Any) -> str:
    """Write one YAML scalar, quoted only where needed."""
    if isinstance(value, str):
        if _PLAIN.fullmatch(value) and value.lower() not in _WORDS and not value.endswith(" "):
            return value
        return json.dumps(value, ensure_ascii=False)
    return json.dumps(value)


def to_yaml(value: Any, indent: int = 0) -> str:
    """Write a JSON value as block-style YAML."""
    pad = " " * indent
    lines = []
    if isinstance(value, dict) and value:
        for key, child in value.items():
            if isinstance(child, (dict, list)) and child:
                lines.append(f"{pad}{_scalar(key)}:")
                lines.append(to_yaml(child, indent + 2))
            else:
                lines.append(f"{pad}{_scalar(key)}: {_scalar(child)}")
        return "\n".join(lines)
    if isinstance(value, list) and value:
        for child in value:
            if isinstance(child, (dict, list)) and child:
                nested = to_yaml(child, indent + 2)
                lines.append(f"{pad}- {nested[indent + 2 :]}")
            else:
                lines.append(f"{pad}- {_scalar(child)}")
        return "\n".join(lines)
    return pad + _scalar(value)


def render_json(path: str, value: Any) -> str:
    """Write ``value`` in a layout that depends only on ``path``."""
    value = _strip_markup(value)
    choice = zlib.crc32(path.encode()) % 10
    if choice < 5:
        return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    if choice < 7:
        return to_yaml(value) + "\n"
    if choice == 7:
        return json.dumps(value, indent=4, ensure_ascii=False) + "\n"
    if choice == 8:
        return json.dumps(value, ensure_ascii=False) + "\n"
    rows = (
        value
        if isinstance(value, list)
        else [{key: child} for key, child in value.items()]
        if isinstance(value, dict)
        else [value]
    )
    return "".join(
        json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in rows
    )
