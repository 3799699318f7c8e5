"""local_map: a function written for plain arrays, run by every rank on its own local arrays."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dask.base import is_dask_collection
from dask.delayed import Delayed
from dask.utils import funcname

from daskmesh.dtensor import DTensor
from daskmesh.graph import Node, block_key, graph_of
from daskmesh.inference import Spec, agree, declared_layouts, declared_tree, inferred, measured_layout, parse_shapes
from daskmesh.layout import Layout, make_layout, normalise_placements
from daskmesh.mesh import ProcessMesh
from daskmesh.moves import moved
from daskmesh.placement import Partial, Placement, PlacementError, Shard
from daskmesh.protocol import overriding, own
from daskmesh.regions import Out, Region
from daskmesh.running import Call, Declared, Input
from daskmesh.tracing import Untraceable
from daskmesh.trees import Entry, Tree, build, count, entries_for, entry_tree, flatten, leaf_names
from daskmesh.world import world_for

__all__ = ["Mapped", "held_by", "local_map"]

logger = logging.getLogger("daskmesh")


def local_map(
    func: Callable[..., Any] | None = None,
    out_placements: Any = None,
    in_placements: Any = None,
    process_mesh: ProcessMesh | None = None,
    reshard_inputs: bool = False,
    *,
    in_grad_placements: Any = None,
    out_shapes: Any = None,
    writeable: bool = False,
    check_replicas: bool = False,
) -> Any:
    """Make a function of plain arrays one of DTensors: every rank calls it on its own local arrays.

    Also a decorator: ``@local_map(out_placements=[[Shard(0)]])``.

    Parameters
    ----------
    func : callable
        Gets this rank's local array in place of each DTensor among its arguments, nested in lists, tuples and dicts or not;
        `get_rank` and `get_coordinate` answer inside. The arrays cannot be written to, and what it returns belongs to the
        result: it must not write to it later.
    out_placements : list of placements
        One entry per output: a sequence of placements, a mapping by mesh-dim name, or None for an output that is no array
        (an array under None counts as replicated). Outputs are counted flat, dict values in sorted key order; containers that
        mirror the outputs' are fine too. A flat sequence of placements is the entry of one output.
    in_placements : list of placements, optional
        The same for the positional arguments. None, for all or for one, takes a DTensor as it is placed; entries of other
        arguments are ignored.
    process_mesh : ProcessMesh, optional
        Needed only if no argument is a DTensor.
    reshard_inputs : bool
        Reshard arguments that are placed otherwise than `in_placements` says, instead of raising.
    in_grad_placements : list of placements, optional
        How the gradients of the arguments that the ranks work out are placed, one entry per positional argument. None, for all or
        for one: Shard where the argument is Shard, and the terms of all ranks summed where it is Replicate. Partial() leaves
        that sum to be done later, Partial("avg") takes the mean.
    out_shapes : list, optional
        Per output its global shape, or (global shape, dtype); without a dtype that of the first DTensor argument. A Shard dim as
        long as that of an argument over the same mesh dims is cut as that one is, any other by the split rule.
    writeable : bool
        Give the function copies that it may write to.
    check_replicas : bool
        Compare outputs that are declared replicated, bit by bit, on the ranks that hold replicas.

    Returns
    -------
    callable
        Returns DTensors in the containers in which `func` returns arrays. An output that is no array becomes a list, in mesh
        order, of one `Delayed` per rank.

    Notes
    -----
    Nothing runs until a result is asked for, if the shapes of the outputs can be known: from `out_shapes`, or by *tracing*:
    `func` is called here, once for each distinct tuple of local shapes, on arrays that have a shape and no values, as the first
    rank that has these shapes. Its side effects (prints) happen then, too. If it needs values, all ranks run at once, and
    outputs that are no arrays are plain values.

    **Communication**: none but that of collectives inside `func`, and of reshard for `reshard_inputs`.

    Raises
    ------
    ValueError
        An argument is placed otherwise than `in_placements` says; meshes differ; the number of entries is not that of the
        outputs; a rank returns another shape or dtype than inferred.
    TypeError
        Placements and None at one level, or a DTensor returned.

    Examples
    --------
    >>> import numpy as np
    >>> import daskmesh as dm
    >>> mesh = dm.init_mesh(2, ["x"])
    >>> x = dm.shard_tensor(np.arange(4.0), mesh, [dm.Shard(0)])
    >>> total = dm.local_map(lambda a: np.sum(a * a), out_placements=[[dm.Partial()]])
    >>> [float(total(x).local_value(r)) for r in mesh.process_ids], total(x).item()
    ([1.0, 13.0], 14.0)
    """
    if func is None:
        return functools.partial(
            local_map, out_placements=out_placements, in_placements=in_placements, process_mesh=process_mesh,
            reshard_inputs=reshard_inputs, in_grad_placements=in_grad_placements, out_shapes=out_shapes,
            writeable=writeable, check_replicas=check_replicas,
        )  # fmt: skip
    if not callable(func):
        raise TypeError(f"local_map(func): expected a function, got {func!r}; write local_map(f, out_placements=[[Shard(0)]])")
    title = f"local_map({funcname(func)})"
    if out_placements is None:
        raise TypeError(f"{title}: out_placements is required: one entry per output, as in out_placements=[[Shard(0)], None]")
    entries, tree = entry_tree(out_placements, f"{title}: out_placements")
    declared = Declared(tuple(entries), tree)
    mapped = Mapped(
        func=func,
        title=title,
        declared=declared,
        ins=None if in_placements is None else entry_tree(in_placements, f"{title}: in_placements"),
        grads=None if in_grad_placements is None else entry_tree(in_grad_placements, f"{title}: in_grad_placements"),
        process_mesh=process_mesh,
        reshard_inputs=reshard_inputs,
        out_shapes=None if out_shapes is None else parse_shapes(out_shapes, declared, title),
        writeable=writeable,
        check_replicas=check_replicas,
    )

    @functools.wraps(func, updated=())
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return mapped(args, kwargs)

    return wrapper


@dataclass(frozen=True)
class Mapped:
    """A function under `local_map`, and how it was declared.

    Attributes
    ----------
    outs, communicates
        The layouts of the outputs, and whether the ranks talk to each other, from who knows it; the rest is as for `local_map`.
    """

    func: Callable[..., Any]
    title: str
    declared: Declared
    ins: tuple[list[Entry], Tree] | None
    grads: tuple[list[Entry], Tree] | None
    process_mesh: ProcessMesh | None
    reshard_inputs: bool
    out_shapes: list[Spec] | None
    writeable: bool
    check_replicas: bool
    outs: tuple[Layout, ...] | None = None
    communicates: bool | None = None

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, tree = flatten((args, kwargs))
        answer = overriding(leaves)
        if answer is not None:
            return answer(self, args, kwargs)
        if overriding(held_by(self.func)) is not None:
            raise TypeError(
                f"{self.title}: the function holds an array that is being differentiated, so its gradient would be lost; pass "
                "it as an argument"
            )
        mesh = self._mesh(leaves, args, kwargs)
        entries = self._for_arguments("in_placements", self.ins, args, leaves)
        nodes: list[Node] = []
        flat: list[Any] = []
        for i, (leaf, entry) in enumerate(zip(leaves, entries, strict=True)):
            if isinstance(leaf, DTensor):
                flat.append(Input(len(nodes)))
                nodes.append(self._input(leaf, entry, i, args, kwargs))
            elif is_dask_collection(leaf):
                name = argument_names(self.func, args, kwargs)[i]
                raise TypeError(f"{self.title}: argument {name} is a {type(leaf).__name__}; place it with shard_tensor first")
            else:
                flat.append(own(leaf))
        world = _world(nodes, mesh, self.title)
        call = Call(
            self.title, self.func, mesh, tuple(flat), tree, tuple(n.layout for n in nodes), self.declared,
            writeable=self.writeable, check_replicas=self.check_replicas,
        )  # fmt: skip
        grads = None
        if self.grads is not None:
            given = self._for_arguments("in_grad_placements", self.grads, args, leaves)
            grads = tuple(
                None if entry is None else self._grad_placed(x, entry, i, args, kwargs)
                for i, (x, entry) in enumerate(zip(leaves, given, strict=True))
                if isinstance(x, DTensor)
            )
        return self._outputs(call, nodes, world, grads)

    # -- arguments ----------------------------------------------------------------------------------------------------

    def _mesh(self, leaves: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ProcessMesh:
        mesh, whose = self.process_mesh, "process_mesh"
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, DTensor):
                continue
            if mesh is None:
                mesh, whose = leaf.process_mesh, f"argument {argument_names(self.func, args, kwargs)[i]}"
            elif leaf.process_mesh != mesh:
                name = argument_names(self.func, args, kwargs)[i]
                raise ValueError(
                    f"{self.title}: argument {name} is on {leaf.process_mesh!r}, {whose} on {mesh!r}; all must be on one mesh: "
                    f"call {name}.reshard(placements, mesh) first"
                )
        if mesh is None:
            raise ValueError(f"{self.title}: no argument is a DTensor, so the ranks are not known; give process_mesh=")
        return mesh

    def _for_arguments(
        self, what: str, given: tuple[list[Entry], Tree] | None, args: tuple[Any, ...], leaves: Sequence[Any]
    ) -> list[Entry]:
        """One entry per flat argument, those of keywords None."""
        if given is None:
            return [None] * len(leaves)
        tree = flatten(args)[1]
        entries = entries_for(*given, tree)
        if entries is None:
            raise ValueError(
                f"{self.title}: {what} has {len(given[0])} entries for {count(tree)} positional arguments (flattened from "
                f"{tree}); give one entry each, None for one that is no DTensor"
            )
        return entries + [None] * (len(leaves) - len(entries))

    def _input(self, x: DTensor, entry: Entry, i: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        node = x._node
        if entry is None:
            return node
        wanted = self._placed("in_placements", x, entry, i, args, kwargs)
        if wanted == x.placements:
            return node
        if not self.reshard_inputs:
            name = argument_names(self.func, args, kwargs)[i]
            raise ValueError(
                f"{self.title}: argument {name} of shape {x.shape} is placed {list(x.placements)} over mesh dims "
                f"{list(x.process_mesh.dim_names)}, in_placements wants {list(wanted)}; pass reshard_inputs=True, or call "
                f"{name}.reshard({list(wanted)}) first"
            )
        return moved(node, make_layout(x.process_mesh, wanted, x.shape, x.dtype))

    def _placed(
        self, what: str, x: DTensor, entry: Entry, i: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Placement, ...]:
        try:
            return normalise_placements(entry, x.process_mesh, x.ndim)
        except PlacementError as error:
            name = argument_names(self.func, args, kwargs)[i]
            raise PlacementError(f"{self.title}: {what} of argument {name}: {error}") from None

    def _grad_placed(
        self, x: DTensor, entry: Entry, i: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Placement, ...]:
        """How the gradient of `x` is placed; a local gradient has the shape of the local argument."""
        placed = self._placed("in_grad_placements", x, entry, i, args, kwargs)
        wanted = x.placements if self.ins is None else self._input_placements(x, i, args, kwargs)
        for name, q, p in zip(x.process_mesh.dim_names, placed, wanted, strict=True):
            if (isinstance(p, Shard) or isinstance(q, Shard)) and p != q:
                who = argument_names(self.func, args, kwargs)[i]
                raise PlacementError(
                    f"{self.title}: in_grad_placements of argument {who} has {q!r} on mesh dim {name!r}, where the argument is "
                    f"{p!r}; a local gradient has the shape of the local argument, so write "
                    + (f"{p!r} or None" if isinstance(p, Shard) else "Replicate(), Partial() or None, and reshard it afterwards")
                )
            if isinstance(q, Partial) and q.op not in ("sum", "avg"):
                raise PlacementError(f"{self.title}: gradients are summed or averaged, in_grad_placements has {q!r}")
        return placed

    def _input_placements(self, x: DTensor, i: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Placement, ...]:
        leaves = flatten((args, kwargs))[0]
        entry = self._for_arguments("in_placements", self.ins, args, leaves)[i]
        return x.placements if entry is None else self._placed("in_placements", x, entry, i, args, kwargs)

    # -- outputs ------------------------------------------------------------------------------------------------------

    def _outputs(self, call: Call, nodes: list[Node], world: str, grads: Any) -> Any:
        unique = True
        if self.outs is not None:
            unique = self.communicates is None
            tree = declared_tree(self.declared)
            call = replace(call, out_tree=tree, outs=self.outs, how="is known", communicates=self.communicates)
        elif self.out_shapes is not None:
            tree = declared_tree(self.declared)
            outs = declared_layouts(self.out_shapes, call)
            call = replace(call, out_tree=tree, outs=outs, how="out_shapes and out_placements say")
        else:
            try:
                call, unique = inferred(call)
            except Untraceable as reason:
                logger.debug("%s runs at once, its output shapes could not be inferred: %s", call.title, reason)
        region = Region(call, nodes, world, unique=unique, in_grad_placements=grads)
        if call.outs is not None and call.out_tree is not None:
            found = [_recorded(Out(region, i, layout)) for i, layout in enumerate(call.outs)]
            if not found:  # nothing that could be asked for later
                region.run_now(world_for(call.mesh).client)
            return build(call.out_tree, found)
        return self._measured(region, region.run_now(world_for(call.mesh).client))

    def _measured(self, region: Region, parts: list[tuple[Any, ...]]) -> Any:
        """The outputs of a region that has run."""
        call, mesh = region.call, region.call.mesh
        _, tree, entries, _ = parts[0]
        for rank, part in zip(mesh.process_ids, parts, strict=True):
            agree(call.title, (mesh.process_ids[0], tree, parts[0][0]), (rank, part[1], part[0]))
        values = [[part[0][i] for part in parts] for i in range(len(entries))]
        outs = tuple(measured_layout(call, i, entry, values[i]) for i, entry in enumerate(entries))
        region.call = replace(call, out_tree=tree, outs=outs)
        found = [v if lay is None else DTensor(Out(region, i, lay)) for i, (v, lay) in enumerate(zip(values, outs, strict=True))]
        return build(tree, found)


def held_by(func: Callable[..., Any]) -> Iterator[Any]:
    """What a function holds besides its arguments: closure cells, defaults, and what `functools.partial` bound.

    Examples
    --------
    >>> scale = 3
    >>> list(held_by(functools.partial(lambda x, by=2: x * by, 4)))
    [4, 2]
    """
    while isinstance(func, functools.partial):
        yield from (*func.args, *func.keywords.values())
        func = func.func
    yield from getattr(func, "__defaults__", None) or ()
    for cell in getattr(func, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a name that has no value yet
            continue


def argument_names(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """How the flat arguments of a call are called in the function's own signature.

    Examples
    --------
    >>> argument_names(lambda x, *rest: x, (1, [2, 3]), {"scale": 4})
    ['x', 'rest[0][0]', 'rest[0][1]', 'scale']
    """
    names = [f"argument {i}" for i in range(len(args))]
    try:
        parameters = list(inspect.signature(func).parameters.values())
    except (TypeError, ValueError):  # built in
        parameters = []
    for i, p in enumerate(parameters[: len(args)]):
        if p.kind is p.VAR_POSITIONAL:
            names[i:] = [f"{p.name}[{j}]" for j in range(len(args) - i)]
            break
        if p.kind is not p.KEYWORD_ONLY and p.kind is not p.VAR_KEYWORD:
            names[i] = p.name
    found = [n for name, value in zip(names, args, strict=True) for n in leaf_names(flatten(value)[1], name)]
    return found + [n for key in sorted(kwargs) for n in leaf_names(flatten(kwargs[key])[1], key)]


def _world(nodes: Sequence[Node], mesh: ProcessMesh, title: str) -> str:
    worlds = {n.world for n in nodes}
    if len(worlds) > 1:
        raise ValueError(f"{title}: the arguments belong to {len(worlds)} worlds; make them in one, or publish their results")
    return worlds.pop() if worlds else world_for(mesh).id


def _recorded(out: Out) -> DTensor | list[Delayed]:
    if not out.valued:
        return DTensor(out)
    graph = graph_of(out)
    keys = [block_key(out, coord) for coord in out.layout.coords()]
    return [Delayed(key, graph, layer=out.name) for key in keys]
