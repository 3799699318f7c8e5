"""What the array API standard asks of an array object, beyond NumPy's own methods.

A device of the standard is where an array lives: the mesh. ``xp.zeros(n, device=x.device)`` makes an array on the mesh of `x`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from daskmesh.asking import refuse_unasked
from daskmesh.mesh import ProcessMesh

__all__ = ["NAMESPACES", "VERSIONS", "StandardArray"]

VERSIONS = ("2021.12", "2022.12", "2023.12", "2024.12", "2025.12")

# One entry: mesh -> the namespace for arrays on it. The module that defines the namespace enters it.
NAMESPACES: list[Callable[[ProcessMesh], Any]] = []


class StandardArray:
    """Namespace and device of an array on a mesh, and its value by NumPy's and DLPack's protocols."""

    __slots__ = ()

    def __array_namespace__(self: Any, *, api_version: str | None = None) -> Any:
        if api_version is not None and api_version not in VERSIONS:
            raise ValueError(f"__array_namespace__(api_version={api_version!r}): daskmesh knows the versions {list(VERSIONS)}")
        return NAMESPACES[0](self.process_mesh)

    @property
    def device(self: Any) -> ProcessMesh:
        """Where the array lives, as the array API standard calls it: the mesh."""
        return self.process_mesh  # type: ignore[no-any-return]

    def to_device(self: Any, device: ProcessMesh, /, *, stream: Any = None) -> Any:
        """The same value, placed likewise on another mesh of as many dims; see `reshard` for any other.

        **Communication**: what the redistribution moves; none on the same mesh.
        """
        if stream is not None:
            raise ValueError(f"to_device(stream={stream!r}): a mesh has no streams")
        if not isinstance(device, ProcessMesh):
            raise ValueError(
                f"to_device({device!r}): the device of a DTensor is its mesh, {self.process_mesh!r}; give a ProcessMesh, or "
                f"gather with np.asarray(x)"
            )
        if device.ndim != self.process_mesh.ndim:
            raise ValueError(
                f"to_device({device!r}): placements over {self.process_mesh.ndim} mesh dim(s) do not fit one of {device.ndim}; "
                f"call x.reshard(placements, mesh)"
            )
        return self.reshard(self.placements, device)

    def __array__(self: Any, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        refuse_unasked(self)
        if copy is False:
            raise ValueError("np.asarray(x, copy=False): a DTensor lives on workers; its value is always a copy")
        value: np.ndarray[Any, Any] = self.compute()
        return value if dtype is None else value.astype(dtype, copy=False)

    def __dlpack__(
        self: Any,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[Any, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        if copy is False:
            raise BufferError("__dlpack__(copy=False): a DTensor lives on workers; its value is always a copy")
        if stream is not None:
            raise BufferError(f"__dlpack__(stream={stream!r}): the gathered value lies in host memory, which has no streams")
        return self.compute().__dlpack__(max_version=max_version, dl_device=dl_device)

    def __dlpack_device__(self) -> tuple[int, int]:
        return np.empty(0).__dlpack_device__()
