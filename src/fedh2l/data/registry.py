"""The built-in datasets by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedh2l.registry import Builtin, Registry

if TYPE_CHECKING:
    from fedh2l.data.base import Dataset

DATASETS: Registry[type[Dataset]] = Registry(
    {
        "rotated-mnist": Builtin(
            "fedh2l.data.datasets.rotated_mnist:RotatedMNIST",
            "MNIST digits rotated clockwise, one domain per angle: M0, M20, M40, M60 by default.",
        ),
        "pacs": Builtin(
            "fedh2l.data.datasets.pacs:PACS",
            "PACS: photographs, art paintings, cartoons and sketches of the same seven classes.",
        ),
        "office-home": Builtin(
            "fedh2l.data.datasets.image_folder:OfficeHome",
            "Office-Home (Venkateswara et al., 2017): 65 classes as art, clip art, products and photographs.",
        ),
        "office-caltech10": Builtin(
            "fedh2l.data.datasets.image_folder:OfficeCaltech10",
            "Office-Caltech10 (Gong et al., 2012): 10 classes from four cameras. Some have only 8 images.",
        ),
        "image-folder": Builtin(
            "fedh2l.data.datasets.image_folder:ImageFolder",
            "Your own images: one folder per domain, with one folder per class in it.",
        ),
        "table": Builtin(
            "fedh2l.data.datasets.table:Table",
            "Records of several organisations: one CSV or Parquet file per organisation, with a label column.",
        ),
    }
)
