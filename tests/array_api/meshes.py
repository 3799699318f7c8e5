"""What data-apis' array-api-tests import: the namespace of a mesh named by DASKMESH_TEST_MESH, without a cluster's hops.

Every array that the suite makes is sharded, see `daskmesh.array_api.spread`.
"""

from __future__ import annotations

import os

import dask
import numpy as np

import daskmesh as dm
from daskmesh.array_api import namespace

# The suite meets every value of every dtype; what NumPy warns about on its own arrays is no news.
np.seterr(all="ignore")

MESHES = {"3": dm.init_mesh(3, ["x"]), "2x2": dm.init_mesh((2, 2), ("x", "y"))}
dm.init_parallel_env()
dask.config.set(scheduler="sync")  # from here on tasks run in this thread, one after the other: thousands of small programs
xp = namespace(MESHES[os.environ.get("DASKMESH_TEST_MESH", "3")])
