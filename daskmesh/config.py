"""Settings: Dask's own configuration under the key ``daskmesh``, with the defaults of ``daskmesh.yaml``.

Set them as any Dask setting: ``dask.config.set({"daskmesh.grace": "30s"})``, a file in ``~/.config/dask``, or
``DASK_DASKMESH__GRACE=30s``. A setting is read where it is used, so each process goes by its own configuration.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import dask.config
import yaml  # type: ignore[import-untyped]
from dask.utils import parse_bytes, parse_timedelta

__all__ = ["get", "nbytes", "seconds"]

_DEFAULTS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("daskmesh.yaml").read_text(encoding="utf-8"))
dask.config.update_defaults(_DEFAULTS)


def get(name: str) -> Any:
    """The value of ``daskmesh.<name>`` as it stands in the configuration.

    Examples
    --------
    >>> get("transport")
    'auto'
    """
    return dask.config.get(f"daskmesh.{name}")


def seconds(name: str) -> float:
    """The setting ``daskmesh.<name>`` as seconds.

    Examples
    --------
    >>> seconds("grace")
    10
    """
    return parse_timedelta(get(name))  # type: ignore[no-any-return]


def nbytes(name: str) -> int:
    """The setting ``daskmesh.<name>`` as bytes.

    Examples
    --------
    >>> nbytes("two-stage-bytes")
    1048576
    """
    return _parsed(get(name))


@lru_cache(256)
def _parsed(size: str | float) -> int:
    # Read for every recorded move; parsing costs as much as the rest of it.
    return int(parse_bytes(size))
