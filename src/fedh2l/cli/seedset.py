"""`fedh2l seedset`: the public data of a federation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from fedh2l.cli.console import err, say
from fedh2l.data.domain import Samples
from fedh2l.errors import ConfigError
from fedh2l.experiment.values import parse_value
from fedh2l.extras import needs
from fedh2l.peer.membership.bundle import Bundle, Part, merge
from fedh2l.peer.membership.public_samples import from_folder, from_list, from_table, image_schema
from fedh2l.peer.membership.records import in_words
from fedh2l.peer.membership.shares import commitment_to, draw_share

app = typer.Typer(
    no_args_is_help=True, help="The seed set: prepare a part, merge all parts, verify the result, reveal a share."
)


Folder = Annotated[Path | None, typer.Option(help="Folder of images, with one folder per class if they have labels.")]
Listed = Annotated[Path | None, typer.Option("--list", help="CSV file of images with the columns path and label.")]
TableFile = Annotated[Path | None, typer.Option(help="CSV or Parquet file of records.")]
Image = Annotated[
    str | None,
    typer.Option(
        metavar="MODE:WIDTHxHEIGHT",
        help="Mode and size of images, such as L:28x28. For models trained on ImageNet, RGB:224x224:imagenet.",
    ),
]
Out = Annotated[Path | None, typer.Option(metavar="FILE", help="File to write. By default NAME.part.safetensors.")]
Yes = Annotated[bool, typer.Option("--yes", help="Confirm that the samples are public, without a question.")]
Columns = Annotated[str | None, typer.Option(help="Numeric columns in the agreed order: age,pulse.")]
Categories = Annotated[str | None, typer.Option(help="Categorical columns in the agreed order: sex,ward.")]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Set another key of a table dataset, for example header. Repeatable."
    ),
]


@app.command()
def part(
    name: Annotated[str, typer.Option(help="Member that contributes this part.")],
    classes: Annotated[str, typer.Option(help="Names of all classes in the agreed order: a,b,c.")],
    folder: Folder = None,
    listed: Listed = None,
    table: TableFile = None,
    image: Image = None,
    columns: Columns = None,
    categories: Categories = None,
    label: Annotated[str, typer.Option(help="Label column of the table.")] = "label",
    units: Annotated[str | None, typer.Option(help="Units of columns: age=years,pulse=1/min.")] = None,
    changes: Changes = None,
    unlabelled: Annotated[bool, typer.Option("--unlabelled", help="The samples have no labels.")] = False,
    out: Out = None,
    yes: Yes = False,
) -> None:
    """Prepare a member's part of the seed set from public samples."""
    names = tuple(_split(classes))
    if sum(source is not None for source in (folder, listed, table)) != 1:
        raise ConfigError("name one source of public samples: --folder, --list or --table")
    if table is not None:
        if (columns is None and categories is None) or image is not None:
            raise ConfigError("--table needs --columns or --categories, and no --image")
        keys = {"numeric": _split(columns), "categorical": _split(categories), "classes": list(names), "label": label}
        keys |= dict(_change(text, parse_value) for text in changes or ())
        schema, samples = from_table(table, keys, not unlabelled, dict(_change(text, str) for text in _split(units)))
    else:
        if image is None or any((columns, categories, units, changes)):
            raise ConfigError("images need --image, as --image L:28x28, and no option of tables")
        schema = image_schema(image)
        read, source = (from_folder, folder) if folder is not None else (from_list, listed)
        assert source is not None
        samples = read(source, names, schema, not unlabelled)
    _give(name, names, schema, samples, out or Path(f"{name}.part.safetensors"), yes)


def _give(
    name: str, classes: tuple[str, ...], schema: dict[str, Any], samples: Samples, target: Path, yes: bool
) -> None:
    """Show the samples of a part, ask whether they are public, and write it."""
    made = Part(name, classes, schema, samples)
    _show_samples(f"The part of '{name}'", Bundle("", classes, schema, {name: (0, len(samples))}, samples))
    question = f"Every member of the federation will hold these {len(samples):,} samples. Are they public?"
    if not yes and not typer.confirm(question, err=True):
        raise ConfigError("nothing was written")
    share = Path(f"{name}.share")
    replace(made, commitment=commitment_to(draw_share(share))).save(target)
    err.print(f"Wrote {target}; send it to the founder.", soft_wrap=True)
    err.print(
        f"Keep {share} to yourself. When you hold the merged seed set, `fedh2l seedset reveal` signs the share for it.",
        soft_wrap=True,
    )


def _split(text: str | None) -> list[str]:
    return [each.strip() for each in text.split(",")] if text else []


def _change(text: str, read: Callable[[str], Any]) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"'{text}': it should be KEY=VALUE")
    return key.strip(), read(value.strip())


@app.command("merge")
def merge_parts(
    parts: Annotated[list[Path], typer.Argument(metavar="PART…", help="Parts of all members.")],
    federation: Annotated[str, typer.Option(help="Name of the federation.")],
    like: Annotated[
        Path | None, typer.Option(metavar="SEEDSET", help="Earlier seed set. Its scale of records is kept.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="File to write.")] = Path("seedset.safetensors"),
) -> None:
    """Merge the parts of all members into the seed set, in the given order."""
    bundle = merge(federation, [Part.load(path) for path in parts], Bundle.load(like).schema if like else None)
    bundle.save(out)
    _show(bundle)
    err.print(f"Wrote {out}; give it to every member.", soft_wrap=True)


@app.command()
def reveal(
    share: Annotated[Path, typer.Option(metavar="NAME.share", help="Share of the seed. It stays here.")],
    path: Annotated[Path, typer.Argument(metavar="SEEDSET", help="Merged seed set.")] = Path("seedset.safetensors"),
    key: Annotated[Path, typer.Option(metavar="FILE", help="Private key of this member.")] = Path("keys/node.key"),
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="File to write. By default NAME.reveal.")] = None,
) -> None:
    """Sign this member's share of the seed for one seed set. It cannot be revealed for another one after that."""
    needs("peer", "cryptography")
    from fedh2l.peer.membership.reveals import reveal as signed
    from fedh2l.peer.pki.certificates import read_key

    out = out or share.with_suffix(".reveal")
    bundle = Bundle.load(path)
    found = signed(share, bundle, read_key(key))
    found.save(out)
    err.print(f"Signed the share of '{found.name}' for this seed set, and for no other:", soft_wrap=True)
    say(f"sha256: {bundle.digest}")
    err.print(f"Wrote {out}; send it to the founder. Keep {share} to yourself.", soft_wrap=True)


@app.command()
def verify(path: Annotated[Path, typer.Argument(metavar="SEEDSET", help="Seed set to verify.")]) -> None:
    """Verify a seed set, and show its samples, schema and digest. All members must have the same digest."""
    _show(Bundle.load(path))


def _show(bundle: Bundle) -> None:
    _show_samples(f"The seed set of '{bundle.federation}'", bundle)
    err.print(f"An input: {in_words(bundle.schema)}", soft_wrap=True)
    say(f"sha256: {bundle.digest}")


def _show_samples(title: str, bundle: Bundle) -> None:
    err.print(title if bundle.labelled else f"{title}, without labels", soft_wrap=True)
    table = Table()
    table.add_column("node")
    for name in bundle.classes if bundle.labelled else ():
        table.add_column(name, justify="right")
    table.add_column("all", justify="right")
    for node, row in bundle.counts().items():
        each = [f"{count:,}" for count in row] if bundle.labelled else []
        table.add_row(node, *each, f"{sum(row):,}")
    err.print(table)
