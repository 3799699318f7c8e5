"""Named-mesh sharded arrays on any Dask cluster."""

from __future__ import annotations

__version__ = "0.1.0"  # before the imports: the plugins carry it in their names

from daskmesh import array_api as _array_api  # noqa: F401  makes the namespace known to DTensors
from daskmesh import ops as _ops  # noqa: F401  fills the operator table
from daskmesh.conversion import dtensor_from_fn, dtensor_from_local, dtensor_to_local, reshard, shard_tensor, unshard_dtensor
from daskmesh.creation import arange, empty, eye, from_callback, full, linspace, ones, zeros
from daskmesh.draw import visualize_sharding
from daskmesh.dtensor import DTensor
from daskmesh.io import load, save
from daskmesh.mapping import local_map
from daskmesh.mesh import ProcessMesh, init_mesh
from daskmesh.placement import Partial, PlacementError, ReduceType, Replicate, Shard
from daskmesh.region import get_coordinate, get_rank
from daskmesh.world import get_world_size, init_parallel_env, shutdown

__all__ = [
    "DTensor",
    "Partial",
    "PlacementError",
    "ProcessMesh",
    "ReduceType",
    "Replicate",
    "Shard",
    "arange",
    "dtensor_from_fn",
    "dtensor_from_local",
    "dtensor_to_local",
    "empty",
    "eye",
    "from_callback",
    "full",
    "get_coordinate",
    "get_rank",
    "get_world_size",
    "init_mesh",
    "init_parallel_env",
    "linspace",
    "load",
    "local_map",
    "ones",
    "reshard",
    "save",
    "shard_tensor",
    "shutdown",
    "unshard_dtensor",
    "visualize_sharding",
    "zeros",
]
