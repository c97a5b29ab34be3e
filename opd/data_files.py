"""Columns of the training data, read before anything starts, so that what is wrong with them is said in seconds.

Only parquet files on this machine are looked at. For anything else (another format or file system, a data set class
of the user's own) the same mistakes are found later, at the row.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from opd.errors import ConfigError

logger = logging.getLogger(__name__)


def read_columns(data: DictConfig, names: Sequence[str]) -> dict[str, list[Any]] | None:
    """The values of columns in all files of `data.train_files`; None where they cannot be known yet.

    Args:
        data: verl's `data` block.

    Raises:
        ConfigError: a file without one of the columns; names those that it has.
    """
    files = [data.train_files] if isinstance(data.train_files, str) else list(data.train_files)
    own_class = (data.get("custom_cls") or {}).get("path") is not None
    if own_class or not all(str(file).endswith(".parquet") and Path(file).is_file() for file in files):
        logger.info("data.train_files are no parquet files on this machine: their rows are checked when they come")
        return None
    import pyarrow.parquet

    columns: dict[str, list[Any]] = {name: [] for name in names}
    for file in files:
        # ParquetFile, not read_table: that one would take folders called a=b for columns
        parquet = pyarrow.parquet.ParquetFile(file)
        missing = [name for name in columns if name not in parquet.schema_arrow.names]
        if missing:
            raise ConfigError(f"{file} has no column {missing[0]!r}; it has {', '.join(parquet.schema_arrow.names)}")
        table = parquet.read(columns=list(columns))
        for name, values in columns.items():
            values.extend(table.column(name).to_pylist())
    return columns
