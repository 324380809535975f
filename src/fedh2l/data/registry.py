"""The datasets that can be named in a configuration."""

from __future__ import annotations

from fedh2l.data.base import Dataset
from fedh2l.data.image_folder import ImageFolder, OfficeCaltech10, OfficeHome
from fedh2l.data.pacs import PACS
from fedh2l.data.rotated_mnist import RotatedMNIST
from fedh2l.data.table import Table

DATASETS: dict[str, type[Dataset]] = {
    dataset.name: dataset for dataset in (RotatedMNIST, PACS, OfficeHome, OfficeCaltech10, ImageFolder, Table)
}
