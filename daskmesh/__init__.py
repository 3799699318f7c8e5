"""Named-mesh sharded arrays on any Dask cluster."""

from __future__ import annotations

__version__ = "0.1.0"  # before the imports: the plugins carry it in their names

from daskmesh import array_api as _array_api  # noqa: F401  makes the namespace known to DTensors
from daskmesh import ops as _ops  # noqa: F401  fills the operator table
from daskmesh import random as random  # dm.random; not in __all__, for a star import would hide the standard module
from daskmesh.allocation import create_shmem_signal, create_shmem_tensor, shmem_view, symm_from_dtensor
from daskmesh.atomics import (
    my_pe,
    n_pes,
    shmem_atomic_add,
    shmem_atomic_compare_swap,
    shmem_atomic_fetch,
    shmem_atomic_fetch_add,
    shmem_atomic_set,
    shmem_atomic_swap,
)
from daskmesh.autograd import grad, jacobian, value_and_grad, vjp
from daskmesh.buffers import PELostError
from daskmesh.conversion import dtensor_from_fn, dtensor_from_local, dtensor_to_local, reshard, shard_tensor, unshard_dtensor
from daskmesh.creation import arange, empty, eye, from_callback, full, linspace, ones, zeros
from daskmesh.draw import visualize_sharding
from daskmesh.dtensor import DTensor
from daskmesh.io import load, save
from daskmesh.layer import LocalLayer
from daskmesh.mapping import local_map
from daskmesh.mesh import ProcessMesh, init_mesh
from daskmesh.onesided import shmem_clear_data, shmem_get, shmem_load, shmem_put, shmem_store
from daskmesh.placement import Partial, PlacementError, ReduceType, Replicate, Shard
from daskmesh.recorded import Token
from daskmesh.region import get_coordinate, get_rank
from daskmesh.shmem import AtomicType, CmpType, ShmemSignal, ShmemTensor, ShmemView
from daskmesh.signals import shmem_clear_signal, shmem_put_signal, shmem_quiet, shmem_signal, shmem_signal_fetch, sync
from daskmesh.waits import shmem_barrier_all, shmem_wait_all, shmem_wait_any, shmem_wait_until
from daskmesh.world import get_world_size, init_parallel_env, shutdown

__all__ = [
    "AtomicType",
    "CmpType",
    "DTensor",
    "LocalLayer",
    "PELostError",
    "Partial",
    "PlacementError",
    "ProcessMesh",
    "ReduceType",
    "Replicate",
    "Shard",
    "ShmemSignal",
    "ShmemTensor",
    "ShmemView",
    "Token",
    "arange",
    "create_shmem_signal",
    "create_shmem_tensor",
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
    "grad",
    "init_mesh",
    "init_parallel_env",
    "jacobian",
    "linspace",
    "load",
    "local_map",
    "my_pe",
    "n_pes",
    "ones",
    "reshard",
    "save",
    "shard_tensor",
    "shmem_atomic_add",
    "shmem_atomic_compare_swap",
    "shmem_atomic_fetch",
    "shmem_atomic_fetch_add",
    "shmem_atomic_set",
    "shmem_atomic_swap",
    "shmem_barrier_all",
    "shmem_clear_data",
    "shmem_clear_signal",
    "shmem_get",
    "shmem_load",
    "shmem_put",
    "shmem_put_signal",
    "shmem_quiet",
    "shmem_signal",
    "shmem_signal_fetch",
    "shmem_store",
    "shmem_view",
    "shmem_wait_all",
    "shmem_wait_any",
    "shmem_wait_until",
    "shutdown",
    "symm_from_dtensor",
    "sync",
    "unshard_dtensor",
    "value_and_grad",
    "visualize_sharding",
    "vjp",
    "zeros",
]
