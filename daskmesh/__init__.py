"""Named-mesh sharded arrays on any Dask cluster."""

__version__ = "0.1.0"
