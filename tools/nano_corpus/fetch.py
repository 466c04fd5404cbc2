"""Fetches pinned distributions with each registry's own client and reads their members."""

from __future__ import annotations

import gzip
import io
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from .documents import Source


def _archive_pattern(source: Source) -> str:
    """Return a glob that matches the downloaded archive of ``source`` and nothing else."""
    if source.registry == "Debian":
        version = source.version.replace(":", "%3a")
        return f"{source.name}_{version}_*.deb"
    if source.registry == "npm":
        return f"{source.name.lstrip('@').replace('/', '-')}-{source.version}.tgz"
    stem = source.name.lower().replace("-", "_")
    return f"{stem}-{source.version}-*.whl"


def _find(folder: Path, pattern: str) -> Path | None:
    """Return the archive in ``folder`` that matches ``pattern``, or None."""
    matches = sorted(folder.glob(pattern))
    return matches[0] if matches else None


def fetch(source: Source, cache: Path) -> Path:
    """Return the local archive of ``source``, downloading it if the cache lacks it."""
    folder = cache / {"Debian": "deb", "npm": "npm", "PyPI": "pypi"}[source.registry]
    folder.mkdir(parents=True, exist_ok=True)
    pattern = _archive_pattern(source)
    found = _find(folder, pattern)
    if found is not None:
        return found
    commands = {
        "Debian": ["apt-get", "download", f"{source.name}={source.version}"],
        "npm": ["npm", "pack", "--silent", "--ignore-scripts", f"{source.name}@{source.version}"],
        "PyPI": [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
            "--dest",
            ".",
            f"{source.name}=={source.version}",
        ],
    }
    subprocess.run(commands[source.registry], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    found = _find(folder, pattern)
    if found is None:
        raise FileNotFoundError(f"{source.name} {source.version}: nothing matches {pattern}")
    return found


def _tar_members(stream: io.BufferedIOBase, source: Source) -> Iterator[tuple[str, bytes]]:
    """Yield the selected regular files of a tar stream."""
    with tarfile.open(fileobj=stream, mode="r:*") as archive:
        for member in archive:
            if member.isfile() and source.selects(member.name):
                handle = archive.extractfile(member)
                if handle is not None:
                    yield member.name, handle.read()


def _raw_members(archive: Path, source: Source) -> Iterator[tuple[str, bytes]]:
    """Yield (path, content) of the selected files of a wheel, npm or Debian archive."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for info in wheel.infolist():
                if source.selects(info.filename):
                    yield info.filename, wheel.read(info)
    elif archive.suffix == ".deb":
        payload = subprocess.run(
            ["dpkg-deb", "--fsys-tarfile", str(archive)], check=True, capture_output=True
        ).stdout
        yield from _tar_members(io.BytesIO(payload), source)
    else:
        yield from _tar_members(io.BytesIO(gzip.decompress(archive.read_bytes())), source)


def members(archive: Path, source: Source) -> list[tuple[str, bytes]]:
    """Return the selected files sorted by path, with compressed ones expanded."""
    found = []
    for path, content in _raw_members(archive, source):
        if path.endswith((".gz", ".dz")):
            content = gzip.decompress(content)
        found.append((path, content))
    return sorted(found)
