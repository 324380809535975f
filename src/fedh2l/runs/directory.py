"""The directory of one run: configuration, metrics, checkpoints, models and the result."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedh2l.errors import ConfigError, FedH2LError, RunError, shown
from fedh2l.files import (
    UnreadableError,
    is_leftover,
    json_object,
    private_folder,
    read_text,
    read_toml,
    write_atomically,
    write_exclusively,
)
from fedh2l.runs.checkpoints import CheckpointFolder
from fedh2l.training.fingerprint import Fingerprint, difference

if sys.platform == "win32":
    fcntl = None
else:
    import fcntl

CONFIG, METRICS, RESULT, MODELS = "config.toml", "metrics.jsonl", "result.json", "models"
CHECKPOINTS, FINGERPRINT = "checkpoints", "fingerprint.json"
PRIVATE_FOLDERS = (MODELS, CHECKPOINTS)
"""Folders of a run that only their owner may read, because models contain traces of their training data."""

FILES = (
    CONFIG, METRICS, RESULT, FINGERPRINT, ".*.partial", MODELS, f"{MODELS}/*.safetensors", f"{MODELS}/.*.partial",
    CHECKPOINTS, f"{CHECKPOINTS}/round-*.ckpt", f"{CHECKPOINTS}/.*.partial",
)  # fmt: skip
"""All files that a run writes."""


class RunDirectory:
    """Reads and writes the files of a run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = CheckpointFolder(self.path / CHECKPOINTS)

    @staticmethod
    def claim(path: str | Path, config: str, overwrite: bool = False) -> RunDirectory:
        """Create a new run at `path`, with its configuration.

        Refuse a directory that is not empty, unless it holds a run and `overwrite` allows its removal.
        """
        directory = RunDirectory(path)
        folder = directory.path
        try:
            if folder.exists() and not folder.is_dir():
                raise RunError(f"'{folder}' is a file; name a directory for the run")
            if overwrite and not directory._is_free():
                directory.remove_run()
            if (folder / CONFIG).exists():
                state = "has" if (folder / RESULT).exists() else "has not"
                raise RunError(
                    f"'{folder}' belongs to another run, which {state} ended. Continue that one (--resume, or "
                    "resume=True in Python), replace it (--overwrite, or overwrite=True), or name another directory"
                )
            if not directory._is_free():
                raise RunError(f"'{folder}' is not empty; name a new directory for the run")
            folder.mkdir(parents=True, exist_ok=True)
            write_exclusively(folder / CONFIG, config.encode())
        except FileExistsError:
            raise RunError(f"another run has just claimed '{folder}'; name another directory") from None
        except OSError as error:
            raise RunError(f"cannot write to '{folder}': {error.strerror}; name another directory") from error
        return directory

    def _is_free(self) -> bool:
        """Return whether a run can start here: there is nothing, or only the rest of a start that was killed."""
        return not self.path.is_dir() or all(is_leftover(path, CONFIG) for path in self.path.iterdir())

    @staticmethod
    def default_path(dataset: str, method: str, seed: int) -> Path:
        """Return the next free `runs/<dataset>-<method>-s<seed>-<n>`."""
        stem = f"{dataset}-{method}-s{seed}".replace(":", ".").replace("/", "-")
        number = 1
        while (path := Path("runs") / f"{stem}-{number}").exists():
            number += 1
        return path

    @staticmethod
    def open(path: str | Path) -> RunDirectory:
        """Open an existing run. The directory may be a symbolic link, but may not contain one."""
        directory = RunDirectory(path)
        if not directory.config_path.is_file():
            raise RunError(f"'{path}' is not a run: it has no {CONFIG}")
        if not directory.config_text().strip():
            raise RunError(f"'{path}' cannot be used: its {CONFIG} is empty")
        refuse_links(directory.path)
        return directory

    def remove_run(self) -> None:
        """Empty the directory, if it holds a run and nothing else."""
        RunDirectory.open(self.path).rounds()
        found = sorted(self.path.rglob("*"), reverse=True)  # the content of a folder before the folder
        foreign = [path for path in found if path.is_symlink() or not _is_of_run(path.relative_to(self.path))]
        if foreign or self.path.is_symlink():
            what = foreign[-1] if foreign else self.path
            raise RunError(f"'{self.path}' is not overwritten: '{what}' is not part of a run; remove it yourself")
        with self.locked():
            for path in found:
                path.rmdir() if path.is_dir() else path.unlink()

    @contextmanager
    def says_what_is_left(self) -> Iterator[None]:
        """Add a note to errors of a new run: its directory holds this run now, and --overwrite starts again."""
        left = f"'{self.path}' keeps this run: start again there with --overwrite, or overwrite=True in Python"
        try:
            yield
        except FedH2LError as error:
            error.args = (f"{str(error).rstrip('.')}. {left}",)
            raise
        except Exception as error:
            error.add_note(left)
            raise

    def config_text(self) -> str:
        """Return the text of the configuration."""
        try:
            return read_text(self.config_path)
        except (OSError, UnreadableError) as error:
            raise RunError(f"cannot read '{self.config_path}': {error}") from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the run against other processes. The lock ends with the process."""
        with open(self.config_path, "rb") as file:
            if fcntl is not None:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    raise RunError(f"another process is running '{self.path}'") from None
            yield

    @property
    def config_path(self) -> Path:
        """Path of the resolved configuration."""
        return self.path / CONFIG

    def sign(self, fingerprint: Mapping[str, Fingerprint]) -> None:
        """Save the fingerprints of the run's data and models, or compare them with the saved ones."""
        if self.signed:
            self.check(fingerprint)
        else:
            write_atomically(self.path / FINGERPRINT, (json.dumps(fingerprint) + "\n").encode(), private=True)

    @property
    def signed(self) -> bool:
        """Whether fingerprints of data and models are saved."""
        return (self.path / FINGERPRINT).exists()

    def check(self, fingerprint: Mapping[str, Fingerprint]) -> None:
        """Refuse data or models that differ from those of the run."""
        file = self.path / FINGERPRINT
        try:
            different = difference(json_object(file.read_bytes()), fingerprint)
        except (OSError, UnreadableError, ValueError, TypeError, AttributeError) as error:
            raise RunError(
                f"'{self.path}' cannot be resumed: {FINGERPRINT}, the record of its data and models, cannot be read "
                f"({shown(error)}). Name another directory"
            ) from error
        if different:
            raise ConfigError(
                f"{different} than when '{self.path}' was started; give what it was started with, or name another "
                "directory"
            )

    def result(self) -> dict[str, Any] | None:
        """Return the result, or None if the run has not ended."""
        file = self.path / RESULT
        if not file.exists():
            return None
        try:
            return json_object(file.read_bytes())
        except UnreadableError as error:
            raise RunError(f"'{file}' is damaged: {shown(error)}. Remove it to run the end again") from error

    def write_result(self, result: dict[str, Any]) -> None:
        write_atomically(self.path / RESULT, (json.dumps(result, indent=2) + "\n").encode())

    def rounds(self) -> int:
        """Return the number of rounds in the configuration."""
        try:
            return int(read_toml(self.config_path)["run"]["rounds"])
        except (UnreadableError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise RunError(f"'{self.config_path}' cannot be read: {shown(error)}") from error

    def extend(self, config: str) -> None:
        """Save a configuration with more rounds, and remove the result and the models of an earlier end."""
        with self.locked():
            write_atomically(self.config_path, config.encode())
            (self.path / RESULT).unlink(missing_ok=True)
            shutil.rmtree(self.path / MODELS, ignore_errors=True)

    def append_metrics(self, entry: dict[str, Any]) -> None:
        """Append one line to metrics.jsonl."""
        with open(self.path / METRICS, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def cut_metrics(self, round: int) -> None:
        """Remove the lines of later rounds, and a line that a crash left incomplete."""
        file = self.path / METRICS
        if not file.exists():
            return
        kept = []
        for line in file.read_bytes().splitlines():
            try:
                if json_object(line)["round"] > round:
                    break
            except (UnreadableError, KeyError, TypeError):
                break
            kept.append(line + b"\n")
        write_atomically(file, b"".join(kept))

    def model_path(self, node: str, which: str) -> Path:
        """Return the path of a node's best or last model."""
        return self.path / MODELS / f"{node}-{which}.safetensors"

    def write_model(self, node: str, which: str, data: bytes) -> None:
        path = self.model_path(node, which)
        private_folder(path.parent)
        write_atomically(path, data, private=True)

    def nodes(self) -> list[str]:
        """Return the names of the nodes whose models are saved."""
        return sorted(p.name.removesuffix("-best.safetensors") for p in (self.path / MODELS).glob("*-best.safetensors"))


def refuse_links(folder: Path) -> None:
    """Refuse symbolic links in a directory that others may have made. They could lead to files outside.

    Refuse named pipes and devices, too. Reading them may never end.
    """
    link = next((path for path in folder.rglob("*") if path.is_symlink()), None)
    if link is not None:
        raise RunError(
            f"'{link}' is a symbolic link, and a run could change files outside its directory through it. Remove the "
            "link, or put a copy in its place"
        )
    odd = next((path for path in folder.rglob("*") if not path.is_file() and not path.is_dir()), None)
    if odd is not None:
        raise RunError(f"'{odd}' is neither a file nor a folder; remove it")


def _is_of_run(path: Path) -> bool:
    return any(len(path.parts) == pattern.count("/") + 1 and path.match(pattern) for pattern in FILES)
