"""`fedh2l seedset`: the public data that all members of a federation hold."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fedh2l.cli.console import err
from fedh2l.errors import ConfigError
from fedh2l.peer.bundle import Bundle, Part, merge
from fedh2l.peer.public import from_folder, from_list, from_table, image_schema, table_schema

app = typer.Typer(no_args_is_help=True, help="Public data: give a part, merge all parts, verify the whole.")


@app.command()
def part(
    name: Annotated[str, typer.Option(help="The node that gives this part.")],
    classes: Annotated[str, typer.Option(help="Names of all classes, in the agreed order: a,b,c.")],
    folder: Annotated[Path | None, typer.Option(help="Images, in one folder a class if they have labels.")] = None,
    listed: Annotated[Path | None, typer.Option("--list", help="A CSV file of images: path,label.")] = None,
    table: Annotated[Path | None, typer.Option(help="A CSV file of numbers.")] = None,
    image: Annotated[
        str | None,
        typer.Option(metavar="MODE:WIDTHxHEIGHT", help="How images are read: L:28x28, or RGB:224x224:imagenet."),
    ] = None,
    columns: Annotated[str | None, typer.Option(help="Columns of the table, in the agreed order: x,y.")] = None,
    label: Annotated[str, typer.Option(help="The table's column with the class.")] = "label",
    unlabelled: Annotated[bool, typer.Option("--unlabelled", help="Nobody knows what the samples are.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to write it; NAME.part.safetensors.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="These samples are public: do not ask.")] = False,
) -> None:
    """Give a part of the seed set: samples that you say are public."""
    if sum(source is not None for source in (folder, listed, table)) != 1:
        raise ConfigError("name one source of public samples: --folder, --list or --table")
    names = tuple(name.strip() for name in classes.split(","))
    if table is not None:
        if columns is None or image is not None:
            raise ConfigError("--table needs --columns, and no --image")
        schema = table_schema([column.strip() for column in columns.split(",")])
        source, samples = table, from_table(table, None if unlabelled else label, names, schema)
    else:
        if image is None or columns is not None:
            raise ConfigError("images need --image, as --image L:28x28, and no --columns")
        schema = image_schema(image)
        if folder is not None:
            source, samples = folder, from_folder(folder, names, schema, not unlabelled)
        else:
            assert listed is not None
            source, samples = listed, from_list(listed, names, schema, not unlabelled)
    made = Part(name, names, schema, samples)
    bundle = Bundle("", names, schema, {name: (0, len(samples))}, samples)
    err.print(_table(f"{source}: {len(samples):,} samples", bundle))
    question = f"Every member of the federation will hold these {len(samples):,} samples. Are they public?"
    if not yes and not typer.confirm(question, err=True):
        raise ConfigError("nothing was written")
    target = out or Path(f"{name}.part.safetensors")
    made.save(target)
    err.print(f"Wrote {target}; send it to the founder.", soft_wrap=True)


@app.command("merge")
def merge_parts(
    parts: Annotated[list[Path], typer.Argument(metavar="PART…")],
    federation: Annotated[str, typer.Option(help="The name of the federation.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write it.")] = Path("seedset.safetensors"),
) -> None:
    """Merge the parts of all members into the seed set, in the order given."""
    bundle = merge(federation, [Part.load(path) for path in parts])
    bundle.save(out)
    _show(bundle)
    err.print(f"Wrote {out}; give it to every member.", soft_wrap=True)


@app.command()
def verify(path: Annotated[Path, typer.Argument(metavar="SEEDSET")]) -> None:
    """Check that a seed set is whole, and show what is in it; its digest must be the same everywhere."""
    _show(Bundle.load(path))


def _show(bundle: Bundle) -> None:
    err.print(_table(f"seed set of '{bundle.federation}'", bundle))
    typer.echo(f"sha256: {bundle.digest}")


def _table(title: str, bundle: Bundle) -> Table:
    table = Table(title=title if bundle.labelled else f"{title}, without labels")
    table.add_column("node")
    for name in bundle.classes if bundle.labelled else ():
        table.add_column(name, justify="right")
    table.add_column("all", justify="right")
    for node, row in bundle.counts().items():
        each = [f"{count:,}" for count in row] if bundle.labelled else []
        table.add_row(node, *each, f"{sum(row):,}")
    return table
