"""The directory of one run: configuration, metrics, checkpoints, models and the result."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedh2l.checkpoints import CheckpointFolder, write_atomically, write_exclusively
from fedh2l.errors import RunError

if sys.platform == "win32":
    fcntl = None
else:
    import fcntl

CONFIG, METRICS, RESULT, MODELS = "config.toml", "metrics.jsonl", "result.json", "models"


class RunDirectory:
    """Paths of a run and what is written there."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = CheckpointFolder(self.path / "checkpoints")

    @staticmethod
    def claim(path: str | Path, config: str) -> RunDirectory:
        """A new run at `path`, with its configuration in it; refuses a directory that is not empty."""
        directory = RunDirectory(path)
        folder = directory.path
        try:
            if folder.exists() and not folder.is_dir():
                raise RunError(f"'{folder}' is a file; name a directory for the run")
            if (folder / CONFIG).exists():
                raise RunError(f"'{folder}' belongs to another run; resume that one, or name another directory")
            if folder.is_dir() and any(folder.iterdir()):
                raise RunError(f"'{folder}' is not empty; name a new directory for the run")
            folder.mkdir(parents=True, exist_ok=True)
            write_exclusively(folder / CONFIG, config.encode())
        except FileExistsError:
            raise RunError(f"another run has just claimed '{folder}'; name another directory") from None
        except OSError as error:
            raise RunError(f"cannot write to '{folder}': {error.strerror}; name another directory") from error
        return directory

    @staticmethod
    def default_path(dataset: str, method: str, seed: int) -> Path:
        """The next free `runs/<dataset>-<method>-s<seed>-<n>`."""
        stem = f"{dataset}-{method}-s{seed}".replace(":", ".").replace("/", "-")
        number = 1
        while (path := Path("runs") / f"{stem}-{number}").exists():
            number += 1
        return path

    @staticmethod
    def open(path: str | Path) -> RunDirectory:
        """An existing run."""
        directory = RunDirectory(path)
        if not directory.config_path.is_file():
            raise RunError(f"'{path}' is not a run: it has no {CONFIG}")
        if not directory.config_path.read_text(encoding="utf-8", errors="replace").strip():
            raise RunError(f"'{path}' cannot be used: its {CONFIG} is empty")
        return directory

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps another process from running the same run meanwhile; a process that dies lets go."""
        with open(self.config_path, "rb") as file:
            if fcntl is not None:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    raise RunError(f"another process is running '{self.path}'") from None
            yield

    @property
    def config_path(self) -> Path:
        """The resolved configuration."""
        return self.path / CONFIG

    def result(self) -> dict[str, Any] | None:
        """The result, if the run has ended."""
        file = self.path / RESULT
        if not file.exists():
            return None
        try:
            content: dict[str, Any] = json.loads(file.read_bytes())
        except ValueError as error:
            raise RunError(f"'{file}' is damaged ({error}); remove it to run the end again") from error
        return content

    def write_result(self, result: dict[str, Any]) -> None:
        """The end of a run."""
        write_atomically(self.path / RESULT, (json.dumps(result, indent=2) + "\n").encode())

    def append_metrics(self, entry: dict[str, Any]) -> None:
        """One line of metrics.jsonl."""
        with open(self.path / METRICS, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def cut_metrics(self, round: int) -> None:
        """Drops the lines of later rounds, and a line that a crash left torn."""
        file = self.path / METRICS
        if not file.exists():
            return
        kept = []
        for line in file.read_bytes().splitlines():
            try:
                if json.loads(line)["round"] > round:
                    break
            except (ValueError, KeyError, TypeError):
                break
            kept.append(line + b"\n")
        write_atomically(file, b"".join(kept))

    def model_path(self, node: str, which: str) -> Path:
        """Where a node's best or last model is."""
        return self.path / MODELS / f"{node}-{which}.safetensors"

    def write_model(self, node: str, which: str, data: bytes) -> None:
        """One model file."""
        path = self.model_path(node, which)
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, data)

    def nodes(self) -> list[str]:
        """Names of the nodes whose models are here."""
        return sorted(p.name.removesuffix("-best.safetensors") for p in (self.path / MODELS).glob("*-best.safetensors"))
