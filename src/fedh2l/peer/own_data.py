"""A member's own data, checked against the schema of the seed set.

The schema describes an input: columns, units, scales and categories of tables, or size, mode and normalisation of
images. Data with another schema is rejected, and the error names the differences.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from fedh2l.data.base import Dataset, FunctionDataset, Share
from fedh2l.data.datasets.image_folder import ImageFolder
from fedh2l.data.datasets.records import Records, Schema
from fedh2l.data.datasets.table import Table
from fedh2l.data.domain import Domain, Samples
from fedh2l.data.image_cache import decoded
from fedh2l.data.images import SUFFIXES, UNSAID
from fedh2l.data.pixels import Pixels
from fedh2l.data.splits import Shares, stratified_split
from fedh2l.errors import ConfigError, DataError, did_you_mean
from fedh2l.experiment.config import dataset
from fedh2l.peer.membership.augmentation import AS_THEY_ARE, SharedViews
from fedh2l.peer.membership.bundle import Bundle
from fedh2l.section import Section

log = logging.getLogger("fedh2l.peer")

ODD, REFUSED = 3.0, 10.0
"""Distances of means that cause a warning, in larger standard deviations, and an error, in smaller ones."""


class OwnTable(Section):
    """The `[data]` section of a peer with one file of records. Columns, scales and classes come from the seed set."""

    file: str = Field(description="CSV or Parquet file with the records of this member.")
    label: str = Field(description="Column of the label.")
    values: dict[str, list[str]] = Field(
        {}, description="Values of the label column for each class. By default the class name."
    )
    header: list[str] = Field([], description="Column names, for CSV files without a header line.")
    missing: list[str] = Field(["", "?", "NA", "nan"], description="Values that mean missing.")
    zero_is_missing: list[str] = Field([], description="Numeric columns where 0 also means missing.")
    units: dict[str, str] = Field({}, description="Units of numeric columns. They must equal those of the seed set.")
    validation: Share = Field(0.10, description="Share of the samples for validation.")
    test: Share = Field(0.15, description="Share of the samples for testing.")

    def domain(self, name: str, seed: int, bundle: Bundle) -> Domain:
        """Return the records of the file on the scale of the seed set."""
        schema = Schema.of(bundle.schema)
        self._check_units(schema)
        table = Table.read(
            {
                "files": {name: self.file}, "label": self.label, "classes": list(bundle.classes),
                "values": self.values, "numeric": list(schema.scales), "categorical": list(schema.categories),
                "header": self.header, "missing": self.missing, "zero_is_missing": self.zero_is_missing,
                "indicators": schema.indicators,
            },
            "data",
        )  # fmt: skip
        records = table.read_file(name)
        _say_what_is_unknown(self.file, records, schema)
        private, validation, test = _three(records.labels, Shares(0.05, self.validation, self.test), seed, name)
        typical = schema.typical(records.take(private))
        splits = (
            Samples(schema.inputs(records.take(rows), typical), torch.tensor(records.labels)[rows])
            for rows in (private, validation, test)
        )
        return _domain(name, bundle, *splits)

    def _check_units(self, schema: Schema) -> None:
        for column, unit in self.units.items():
            agreed = schema.units.get(column)
            if unit != agreed:
                known = f"in {agreed}" if agreed else "with no unit"
                raise ConfigError(f"data.units: '{column}' is in {unit} here, and the seed set has it {known}")


class OwnImages(Section):
    """The `[data]` section of a peer with one folder of images. Size, mode and classes are those of the seed set."""

    folder: str = Field(description="Folder with the images of this member, with one folder per class.")
    validation: Share = Field(0.10, description="Share of the samples for validation.")
    test: Share = Field(0.15, description="Share of the samples for testing.")

    def domain(self, name: str, seed: int, bundle: Bundle) -> Domain:
        """Return the images of the folder, preprocessed like the seed set."""
        about, files, labels = dict(bundle.schema), list[Path](), list[int]()
        if about.get("kind") != "image":
            raise ConfigError("data.folder: the seed set holds no images")
        if not Path(self.folder).is_dir():
            raise DataError(f"data.folder: there is no folder '{self.folder}'")
        for label, each in enumerate(bundle.classes):
            found = sorted(p for p in (Path(self.folder) / each).rglob("*") if p.suffix.lower() in SUFFIXES)
            if not found:
                log.warning("'%s' has no images of the class '%s'", self.folder, each)
            files, labels = [*files, *found], [*labels, *[label] * len(found)]
        if not files:
            raise DataError(
                f"data.folder: '{self.folder}' has no images in folders that are named after the classes: "
                f"{', '.join(bundle.classes)}"
            )
        width, height = (int(side) for side in about["size"])
        images = decoded(name, files, about["mode"], (width, height), about.get("fit", UNSAID["fit"]))
        splits = (
            Samples(torch.from_numpy(images[rows]), torch.tensor(labels)[rows])
            for rows in _three(labels, Shares(0.05, self.validation, self.test), seed, name)
        )
        return _domain(name, bundle, *splits)


def own_domain(
    raw: Mapping[str, Any], name: str, domain: str | None, seed: int, bundle: Bundle, views: SharedViews = AS_THEY_ARE
) -> Domain:
    """Return the data of the member `name`: its `[data]` section, checked against the seed set."""
    values = {key: value for key, value in raw.items() if key != "name"}
    kind = raw.get("name")
    if kind == Table.name and "file" in raw:
        return _fitted(OwnTable.read(values, "data").domain(name, seed, bundle), bundle, views)
    if kind == ImageFolder.name and "folder" in raw:
        return _fitted(OwnImages.read(values, "data").domain(name, seed, bundle), bundle, views)
    data = dataset(dict(raw))
    if isinstance(data, FunctionDataset):
        data.offer("schema", dict(bundle.schema))
    return domain_of(data, domain or name, seed, bundle, views)


def domain_of(data: Dataset, name: str, seed: int, bundle: Bundle, views: SharedViews = AS_THEY_ARE) -> Domain:
    """Return one domain of a dataset, checked against the seed set."""
    domains = {domain.name: domain for domain in data.domains(seed)}
    if name not in domains:
        raise ConfigError(f"peer.domain: there is no domain '{name}' in {data.title}.{did_you_mean(name, domains)}")
    domain = domains[name]
    if domain.classes != bundle.classes:
        raise ConfigError(
            f"the classes of this node's data are {list(domain.classes)}, those of the seed set {list(bundle.classes)}"
        )
    if bundle.labelled and not (data.public_labels and domain.public_labels):
        raise ConfigError("data.public_labels: the seed set has labels; leave it at true")
    if domain.preprocessing:
        _check_schema(domain, bundle)
    return _fitted(domain, bundle, views)


def _fitted(domain: Domain, bundle: Bundle, views: SharedViews) -> Domain:
    """Return the domain with the roster's views, after checking its inputs against the seed set."""
    if not len(domain.validation):
        raise ConfigError("this node has no validation data, so its model cannot be selected; raise data.validation")
    domain = _with_views(domain, bundle, views)
    _check_inputs(domain, bundle)
    return domain


def _check_schema(domain: Domain, bundle: Bundle) -> None:
    """Raise `ConfigError` if the inputs were not preprocessed like the seed set."""
    mine, theirs = dict(domain.preprocessing), dict(bundle.schema)
    different = sorted(key for key in {*mine, *theirs} if {**UNSAID, **mine}.get(key) != {**UNSAID, **theirs}.get(key))
    if not different:
        return
    named = "; ".join(f"{key}: {_short(mine.get(key))} here, {_short(theirs.get(key))} there" for key in different)
    hint = ". A table takes the scale of the seed set if data.file names its one file" * (mine.get("kind") == "table")
    raise ConfigError(f"this node's inputs are not made as those of the seed set are ({named}){hint}")


def _with_views(domain: Domain, bundle: Bundle, views: SharedViews) -> Domain:
    """Return the domain with the augmentation of the roster."""
    if domain.augmentation is not None and domain.augmentation.public:
        if SharedViews.like(domain.augmentation.public) != views.model_copy(update={"local": False}):
            raise ConfigError(
                "data.augment: this node augments public images in another way than the [views] of the roster. "
                "Use 'local' or 'none'"
            )
        domain = replace(domain, augmentation=replace(domain.augmentation, public=None))
    if domain.private.inputs.dtype == torch.uint8 and bundle.samples.inputs.dtype != torch.uint8:
        if domain.augmentation is not None:
            raise ConfigError("data.augment: the seed set holds images as numbers, which are not augmented; use 'none'")
        domain = domain.as_numbers()
    if domain.augmentation is None and views.local:
        domain = replace(domain, augmentation=views.own(bundle))
    return domain


def _check_inputs(domain: Domain, bundle: Bundle) -> None:
    """Raise `ConfigError` for inputs of another shape, type or scale."""
    mine, theirs = domain.private.inputs, bundle.samples.inputs
    alike = mine.dtype == theirs.dtype or (mine.dtype == torch.float32 and theirs.dtype == torch.uint8)
    if mine.shape[1:] != theirs.shape[1:] or not alike:
        raise ConfigError(
            f"this node's inputs are {mine.dtype} of shape {tuple(mine.shape[1:])}, those of the seed set "
            f"{theirs.dtype} of shape {tuple(theirs.shape[1:])}"
        )
    if mine.is_floating_point():
        public = Samples(theirs, bundle.samples.labels).as_numbers(_pixels(bundle)).inputs
        _check_scale(mine, public.float())


def _check_scale(private: Tensor, public: Tensor) -> None:
    """Compare the means of private and public inputs, per column or channel.

    Values from 0 to 1 on both sides have the same scale, whatever their means are. Constant columns are ignored.
    """
    values = [_by_column(inputs) for inputs in (private.float(), public)]
    (mine, spread), (theirs, theirs_spread) = [(each.mean(1), each.std(1, unbiased=False)) for each in values]
    less, more = torch.minimum(spread, theirs_spread), torch.maximum(spread, theirs_spread)
    shares = torch.stack([(each.amin(1) >= 0) & (each.amax(1) <= 1) for each in values]).all(0)
    odd = ((mine - theirs).abs() > ODD * more) & (less > 0) & ~shares
    if not bool(odd.any()):
        return
    apart = (mine - theirs).abs() / less.clamp(min=1e-12) * odd
    worst = int(apart.argmax())
    text = (
        f"input {worst} has mean {float(mine[worst]):.3g} and standard deviation {float(spread[worst]):.3g} in this "
        f"node's private data, but {float(theirs[worst]):.3g} and {float(theirs_spread[worst]):.3g} in the seed set"
    )
    if float(apart[worst]) > REFUSED:
        raise ConfigError(
            f"{text}. Scale private data as the seed set is scaled: `fedh2l seedset verify` shows its schema, and a "
            "data function with an argument `schema` gets it"
        )
    log.warning("%s. Are both on the same scale?", text)


def _by_column(inputs: Tensor) -> Tensor:
    """Return all values of each column or channel, `(columns, values)`."""
    return inputs.transpose(0, 1).flatten(1)


def _pixels(bundle: Bundle) -> Pixels | None:
    return Pixels.of(bundle.schema) if bundle.samples.inputs.dtype == torch.uint8 else None


def _domain(name: str, bundle: Bundle, private: Samples, validation: Samples, test: Samples) -> Domain:
    public = bundle.part(next(iter(bundle.ranges)))  # the caller sets this member's part
    splits = (private, public, validation, test)
    return Domain(name, bundle.classes, *splits, dict(bundle.schema), public_labels=bundle.labelled)


def _three(labels: list[int], shares: Shares, seed: int, name: str) -> tuple[list[int], list[int], list[int]]:
    """Return the rows of private, validation and test samples. Public samples are already in the seed set."""
    private, public, validation, test = stratified_split(labels, shares, seed, name)
    return sorted([*private, *public]), validation, test


def _say_what_is_unknown(file: str, records: Records, schema: Schema) -> None:
    absent = [c for c in (*schema.scales, *schema.categories) if c not in records.columns]
    if absent:
        log.warning("'%s' has no column %s; its values count as missing", file, ", ".join(f"'{c}'" for c in absent))
    for column, known in schema.categories.items():
        strange = sorted({cell for cell in records.categories.get(column, ()) if cell is not None} - set(known))
        if strange:
            log.warning(
                "'%s': no public record has %s = %s, so they count as missing", file, column, ", ".join(strange)
            )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 160 else f"{text[:157]}…"
