"""`fedh2l cache`: decoded images on this machine."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import typer
from rich.table import Table

from fedh2l.cli.console import err
from fedh2l.data import image_cache
from fedh2l.errors import DataError
from fedh2l.report.tables import human_bytes

app = typer.Typer(no_args_is_help=True, help="List or remove the decoded images on this machine.")


@app.command("list")
def list_entries() -> None:
    """List the cached images with size, last use, dataset and folder of the originals."""
    folder = image_cache.cache_folder()
    found = image_cache.entries(folder)
    table = Table(title=f"{folder}: {human_bytes(sum(entry.size for entry in found))}")
    for column in ("images", "size", "last use"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("data", "folder of the originals"):
        table.add_column(column, overflow="fold")
    for entry in found:
        images = "damaged" if entry.images is None else f"{entry.images:,}"
        used = f"{datetime.fromtimestamp(entry.used):%Y-%m-%d %H:%M}"
        table.add_row(images, human_bytes(entry.size), used, entry.data or "unknown", entry.folder or "unknown")
    err.print(table)


@app.command("clear")
def clear_entries(
    older_than: Annotated[
        float | None, typer.Option(metavar="DAYS", min=0, help="Keep images that were used in the last DAYS days.")
    ] = None,
) -> None:
    """Remove the cached images of this user. Training decodes them again when needed."""
    folder = image_cache.cache_folder()
    try:
        count, freed = image_cache.clear(folder, older_than)
    except OSError as error:
        raise DataError(f"cannot clear '{folder}': {error}") from error
    entries = "1 entry" if count == 1 else f"{count} entries"
    err.print(f"Removed {entries} from {folder}. {human_bytes(freed)} were freed.", soft_wrap=True)
