"""Drawings: every rank stands in the box it holds, copies and terms are told apart, and big meshes stay small."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from daskmesh.draw import layout_html, layout_text, pairs_text, plan_html, visualize_sharding
from daskmesh.layout import make_layout
from daskmesh.mesh import ProcessMesh, init_mesh
from daskmesh.pen import MOST_PARTS, mesh_html, mesh_text
from daskmesh.placement import Partial, Placement, Replicate, Shard
from daskmesh.plan import make_plan

XY = init_mesh((2, 2), ("x", "y"))


def drawn(mesh: ProcessMesh, placements: list[Placement], shape: tuple[int, ...], dtype: str = "f4") -> list[str]:
    """The lines of the drawing below the title and the words on each mesh dim."""
    return layout_text(make_layout(mesh, placements, shape, dtype)).splitlines()[1 + mesh.ndim :]


@pytest.mark.parametrize(
    ("placements", "shape", "expected"),
    [
        pytest.param([Shard(0), Shard(1)], (5, 3), ["     0:2  2:3", "0:3    0    1", "3:5    2    3"], id="grid"),
        pytest.param([Shard(1), Shard(0)], (5, 3), ["     0:2  2:3", "0:3    0    2", "3:5    1    3"], id="turned"),
        pytest.param([Shard(0), Shard(0)], (5,), ["  0:2  2:3  3:4  4:5", "    0    1    2    3"], id="nested"),
        pytest.param([Shard(0), Replicate()], (2,), ["    0:1    1:2", "  0 = 1  2 = 3"], id="copies"),
        pytest.param([Partial(), Shard(0)], (2,), ["    0:1    1:2", "  0 + 2  1 + 3"], id="terms"),
        pytest.param([Partial("max"), Replicate()], (), ["  max(0, 2) = max(1, 3)"], id="0-d"),
        pytest.param([Partial(), Partial("prod")], (), ["  (0 + 2) * (1 + 3)"], id="dim-0-reduces-first"),
        pytest.param([Partial(), Partial()], (), ["  0 + 2 + 1 + 3"], id="one-sign"),
        pytest.param([Shard(0), Replicate()], (1,), ["    0:1  1:1 empty", "  0 = 1      2 = 3"], id="empty"),
    ],
)
def test_who_holds_which_box(placements: list[Placement], shape: tuple[int, ...], expected: list[str]) -> None:
    assert drawn(XY, placements, shape) == expected


def test_ranks_are_drawn_by_coordinate_not_by_number() -> None:
    assert drawn(ProcessMesh([7, 3, 5], ["x"]), [Shard(0)], (3,))[1].split() == ["7", "3", "5"]


def test_a_third_cut_dim_turns_pages() -> None:
    lines = drawn(init_mesh((2, 2, 2)), [Shard(0), Shard(1), Shard(2)], (2, 2, 3))
    assert [line for line in lines if line.startswith("dim")] == ["dim 2 0:2", "dim 2 2:3"]
    assert lines[2].split() == ["0:1", "0", "2"]
    assert lines[6].split() == ["0:1", "1", "3"]


def test_the_words_say_what_each_mesh_dim_does() -> None:
    mesh = init_mesh((2, 3, 2), ("a", "b", "c"))
    lines = layout_text(make_layout(mesh, [Shard(0), Replicate(), Partial("avg")], (5,), "f8")).splitlines()
    assert lines[0] == "float64 (5,), 40 B; 16 B to 24 B a rank"
    line = init_mesh(3, ["x"])
    text = layout_text(make_layout(line, [Shard(0)], (10**6,), "f8"))
    assert text.splitlines()[0] == "float64 (1000000,), 7.629 MiB; 2.543 MiB a rank"
    with pytest.raises(TypeError, match=r"visualize_sharding\(x\): expected a DTensor, got ProcessMesh"):
        visualize_sharding(line)  # type: ignore[arg-type]
    assert [re.split(r"  +", line.strip()) for line in lines[1:4]] == [
        ["a=2", "Shard(0)", "cuts dim 0 into 3, 2"],
        ["b=3", "Replicate()", "3 equal copies"],
        ["c=2", "Partial('avg')", "terms to reduce by avg"],
    ]


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        (init_mesh(1024, ["x"]), [Shard(0)]),
        (init_mesh(1024, ["x"]), [Replicate()]),
        (init_mesh((32, 32), ["x", "y"]), [Shard(0), Shard(1)]),
        (init_mesh((16, 16, 16)), [Shard(0), Shard(1), Shard(2)]),
    ],
)
def test_big_meshes_are_summarised(mesh: ProcessMesh, placements: list[Placement]) -> None:
    text = layout_text(make_layout(mesh, placements, (4000, 4000, 4000), "f4"))
    assert len(text.splitlines()) < 5 * MOST_PARTS
    assert max(map(len, text.splitlines())) < 160
    assert str(mesh.size - 1) in text
    assert "\N{HORIZONTAL ELLIPSIS}" in text


@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 2, 2), (2, 1, 2, 3)])
def test_a_mesh_shows_every_rank_once(shape: tuple[int, ...]) -> None:
    mesh = init_mesh(shape, [f"n{i}" for i in range(len(shape))])
    lines = mesh_text(mesh.dim_names, mesh.shape, mesh.process_ids).splitlines()[1:]
    ranks = [int(n) for line in lines for n in re.split(r"  +", line)[1:] if n.isdigit()]
    assert sorted(ranks) == sorted(mesh.process_ids)


def test_html_is_well_formed_and_says_what_the_text_says() -> None:
    layout = make_layout(XY, [Shard(0), Partial()], (5, 4), "f4")
    labels = [t.text for t in ET.fromstring(layout_html(layout)).iter("{http://www.w3.org/2000/svg}text")]
    assert labels == ["0:4", "0:3", "3:5", "0 + 1", "2 + 3"]
    titles = [t.text for t in ET.fromstring(layout_html(layout)).iter("{http://www.w3.org/2000/svg}title")]
    assert titles == ["0:3 0:4: 0 + 1", "3:5 0:4: 2 + 3"]


@pytest.mark.parametrize("name", ["<x>", "a&b", '"'])
def test_names_are_escaped_in_html(name: str) -> None:
    mesh = init_mesh(2, [name])
    assert ET.fromstring(mesh_html(mesh.dim_names, mesh.shape, mesh.process_ids)).tag == "div"
    assert ET.fromstring(layout_html(make_layout(mesh, [Shard(0)], (3,), "f4"))).tag == "div"


def test_empty_parts_are_dashed_in_html() -> None:
    html = layout_html(make_layout(init_mesh(3), [Shard(0)], (2,), "f4"))
    assert html.count("stroke-dasharray") == 1
    assert "(empty)" in html


def test_a_plan_shows_the_bytes_from_rank_to_rank() -> None:
    plan = make_plan(*(make_layout(init_mesh(2), [Shard(d)], (4, 4), "f8") for d in (0, 1)))
    assert pairs_text(plan.pairs).splitlines()[1].split() == ["from", "0", ".", "32", "B"]
    assert "32 B" in plan._repr_html_()
    assert ET.fromstring(plan_html([plan.text], plan.pairs)).tag == "div"


def test_a_plan_that_moves_nothing_has_no_table() -> None:
    assert "<svg" not in plan_html(["moves 0 B"], {})
