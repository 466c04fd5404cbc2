"""The folder of a checkpoint: which files belong to it, and which tensors they hold."""

from pathlib import Path

from hipjax.model.tensorfile import (
    CheckpointError,
    StoredTensor,
    parse_json,
    printable,
    read_header,
)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_MAX_LISTED = 20


class Problems:
    """Collects what is wrong, by kind, so that one message can tell all of it."""

    def __init__(self) -> None:
        self._found: dict[str, list[str]] = {}

    def add(self, kind: str, text: str) -> None:
        """Notes one more problem of a kind, such as ``"missing"``."""
        self._found.setdefault(kind, []).append(text)

    def raise_if_any(self, subject: str, *, hint: str = "") -> None:
        """Raises one `CheckpointError` about ``subject`` that lists everything noted."""
        if not self._found:
            return
        lines = [subject + ":"]
        for kind, texts in self._found.items():
            more = len(texts) - _MAX_LISTED
            listed = texts[:_MAX_LISTED] + ([f"and {more} more"] if more > 0 else [])
            lines.append(f"  {len(texts)} {kind}: " + "; ".join(listed))
        raise CheckpointError("\n".join(lines + ([hint] if hint else [])))


def find_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint in ``folder``, by its name in the file.

    Files other than ``model.safetensors``, or those named by the index, are left alone.
    A weights file has to lie in the folder, links followed; the one exception is the
    ``blobs`` folder that Hugging Face's download cache keeps beside ``snapshots``.

    Raises:
      CheckpointError: no weights, or both a single file and an index of other files; a
        bad header or index; a file outside of the folder, truncated or too long; a
        tensor that is in two files, in none, or not in the index.
    """
    single, index = folder / SINGLE, folder / INDEX
    if not index.is_file():
        if not single.is_file():
            raise CheckpointError(
                f"{folder}: there is no {SINGLE} and no {INDEX}; weights in other files or "
                "formats (pickled .bin or .pt among them) are not read"
            )
        return read_header(_inside(folder, SINGLE))
    weight_map = _read_index(index)
    names = sorted(set(weight_map.values()))
    if single.exists() and SINGLE not in names:
        raise CheckpointError(
            f"{folder}: there is {SINGLE}, and {INDEX} names other files; remove one of the two"
        )
    headers = {name: read_header(_inside(folder, name)) for name in names}
    problems = Problems()
    for name, file in weight_map.items():
        if name not in headers[file]:
            where = f"{printable(name)} in {printable(file)}"
            problems.add("tensor(s) that the index names but the file does not hold", where)
    found: dict[str, StoredTensor] = {}
    for file, tensors in headers.items():
        for name, tensor in tensors.items():
            where = f"{printable(name)} in {printable(file)}"
            if name in found:
                problems.add("duplicate tensor(s)", f"{where} and in {found[name].file.name}")
            elif name not in weight_map:
                problems.add("tensor(s) that are not in the index", where)
            found.setdefault(name, tensor)
    problems.raise_if_any(f"{index} and the files it names disagree")
    return found


def _read_index(file: Path) -> dict[str, str]:
    index = parse_json(file.read_bytes(), file)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{file}: weight_map is missing or empty, or not an object")
    for name, target in weight_map.items():
        if not isinstance(target, str) or not target.endswith(".safetensors"):
            raise CheckpointError(
                f"{file}: weight_map sends {printable(name)} to {target!r}; allowed: the name of "
                "a .safetensors file"
            )
    return weight_map


def _inside(folder: Path, name: str) -> Path:
    """The file called ``name``, which has to exist and to lie inside of ``folder``."""
    try:
        root, target = folder.resolve(strict=True), (folder / name).resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:
        # Before 3.13 a circle of links is a RuntimeError; a zero byte is a ValueError.
        raise CheckpointError(f"{folder}: cannot open {name!r}: {error}") from error
    roots = [root]
    if root.parent.name == "snapshots":
        roots.append(root.parent.parent / "blobs")
    if not any(target.is_relative_to(allowed) for allowed in roots):
        raise CheckpointError(
            f"{folder}: {name!r} leads to {target}, outside of the folder; weights are read "
            "from the folder itself only"
        )
    if not target.is_file():
        raise CheckpointError(f"{folder}: {name!r} is not a regular file")
    return target
