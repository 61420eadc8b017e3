"""Any slicing in, any slicing out, bit for bit; and what is refused."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch import nn

from pretrain.errors import CheckpointError
from pretrain.train.checkpoint.find import open_checkpoint
from pretrain.train.checkpoint.folders import checkpoints_folder, step_folder
from pretrain.train.checkpoint.format import (
    MANIFEST_NAME,
    PARAMETER,
    StoredSlice,
    StoredTensor,
    TensorSlice,
    file_record,
    overlap,
    read_manifest,
    untiled,
)
from pretrain.train.checkpoint.placement import Place, Placement
from pretrain.train.checkpoint.ranks import Ranks
from tests.train.checkpoints import SHARDED, assert_holds, same_bits, save, slices, state, tensors, writer


@pytest.mark.parametrize("saved_by", [1, 2])
@pytest.mark.parametrize("max_file_bytes", [1, 300, 1 << 30])
def test_any_slicing_reads_back_bit_for_bit(tmp_path: Path, saved_by: int, max_file_bytes: int) -> None:
    writer(tmp_path, max_file_bytes=max_file_bytes).save(slices(7, saved_by), state(7))
    with open_checkpoint(tmp_path) as reader:
        assert_holds(reader, 7)
        for read_by in (1, 2):
            for offered in slices(7, read_by):
                got = reader.read(offered.name, offered.kind, offered.offset, tuple(offered.tensor.shape))
                assert same_bits(got.contiguous(), offered.tensor.contiguous())
    num_files = len(list(step_folder(checkpoints_folder(tmp_path), 7).glob("tensors_*")))
    if max_file_bytes == 1:
        assert num_files == len(list(slices(7, saved_by)))
    elif max_file_bytes == 1 << 30:
        assert num_files == 1


def test_saved_by_two_reads_as_four_and_as_any_box(tmp_path: Path) -> None:
    writer(tmp_path, max_file_bytes=100).save(slices(3, 2), state(3))
    with open_checkpoint(tmp_path) as reader:
        full = tensors(3)["core.0.up.weight", "exp_avg"]
        parts = [reader.read("core.0.up.weight", "exp_avg", (2 * r, 0), (2, 6)) for r in range(4)]
        assert same_bits(torch.cat(parts), full)
        for r0, c0 in itertools.product(range(8), range(6)):
            for rows, columns in itertools.product((0, 1, 8 - r0), (0, 1, 6 - c0)):
                got = reader.read("core.0.up.weight", "exp_avg", (r0, c0), (rows, columns)).contiguous()
                assert same_bits(got, full[r0 : r0 + rows, c0 : c0 + columns].contiguous())


def test_files_may_be_read_by_whoever_the_umask_lets(tmp_path: Path) -> None:
    save(tmp_path, 1)
    folder = step_folder(checkpoints_folder(tmp_path), 1)
    modes = {path.stat().st_mode for path in folder.iterdir()}
    assert len(modes) == 1


def test_a_tensor_may_be_reused_once_the_next_is_asked_for(tmp_path: Path) -> None:
    buffer = torch.empty(4)

    def reusing() -> object:
        for i in range(3):
            buffer.fill_(i)
            yield TensorSlice(f"t{i}", PARAMETER, (4,), (0,), buffer)

    for background in (False, True):
        one = writer(tmp_path / str(background), background=background)
        one.save(reusing(), state(1))
        buffer.fill_(-1)
        one.wait()
        with open_checkpoint(tmp_path / str(background)) as reader:
            assert [reader.read(f"t{i}").tolist() for i in range(3)] == [[i] * 4 for i in range(3)]


@pytest.mark.parametrize(
    "boxes",
    [
        [((0, 0), (2, 6))],
        [((0, 0), (4, 6)), ((3, 0), (5, 6))],
        [((0, 0), (8, 6)), ((0, 0), (8, 6))],
        [((0, 0), (4, 6)), ((5, 0), (4, 6))],
        [((0, 0), (4, 6)), ((0, 0), (4, 6))],
    ],
    ids=["gap", "overlap", "twice", "outside", "same volume"],
)
def test_slices_that_do_not_tile_are_refused(tmp_path: Path, boxes: list[tuple[tuple[int, ...], ...]]) -> None:
    pieces = [StoredSlice("f", str(i), *box) for i, box in enumerate(boxes)]
    problems = list(untiled({"w": {PARAMETER: StoredTensor("float32", (8, 6), pieces)}}))
    assert len(problems) == 1
    assert problems[0].startswith("w (parameter) of shape [8, 6] is not tiled by")


def test_a_missing_slice_fails_the_save(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"step 2 was not saved.*core\.0\.\w+\.weight \(parameter\).*not tiled"):
        writer(tmp_path).save(list(slices(2, 2))[1:], state(2))
    assert sorted(p.name for p in checkpoints_folder(tmp_path).iterdir()) == ["latest", "step_00000001"]


def rewritten(folder: Path, name: str, change: Callable[[Any], None]) -> None:
    """A stranger's checkpoint: a file changed, and the manifest made to fit it again."""
    data = json.loads((folder / name).read_text())
    change(data)
    if name == MANIFEST_NAME:
        data.pop("self")
    else:
        (folder / name).write_text(json.dumps(data))
        record = file_record(folder / name)
        data = json.loads((folder / MANIFEST_NAME).read_text())
        data.pop("self")
        data["files"][name] = {"bytes": record.bytes, "xxh3_64": record.xxh3_64}
    whole = data | {"self": xxhash.xxh3_64_hexdigest(json.dumps(data))}
    (folder / MANIFEST_NAME).write_text(json.dumps(whole, indent=1) + "\n")


@pytest.mark.parametrize("file", ["../../secret", "/etc/passwd", "..", "a\\..\\b", "C:x", "a\nb", 3])
def test_checkpoints_read_their_own_files(tmp_path: Path, file: Any) -> None:
    save(tmp_path, 1)
    folder = step_folder(checkpoints_folder(tmp_path), 1)
    (tmp_path / "secret").write_text("secret")
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    if isinstance(file, str):
        rewritten(folder, MANIFEST_NAME, lambda data: data["files"].update({file: {"bytes": 6, "xxh3_64": "0"}}))
        with pytest.raises(CheckpointError, match=r"manifest\.json: a file is .*expected a relative path below"):
            open_checkpoint(folder)

    def change(index: Any) -> None:
        kinds = next(iter(index["tensors"].values()))
        next(iter(kinds.values()))["slices"][0]["file"] = file

    rewritten(copy, "index.json", change)
    with pytest.raises(CheckpointError, match=r"index\.json: file is .*expected a relative path below"):
        open_checkpoint(copy)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (MANIFEST_NAME, lambda data: data.update(step="1")),
        (MANIFEST_NAME, lambda data: data.update(step=-1)),
        (MANIFEST_NAME, lambda data: data["files"]["index.json"].update(bytes="9")),
        ("index.json", lambda data: _first(data).update(dtype="load")),
        ("index.json", lambda data: _first(data).update(dtype=3)),
        ("index.json", lambda data: _first(data).update(shape="ab")),
        ("index.json", lambda data: _first(data)["slices"][0].update(offset=[-1, 0])),
        ("index.json", lambda data: _first(data)["slices"][0].update(shape=[1.5, 2])),
        ("index.json", lambda data: _first(data).update(slices=None)),
    ],
)
def test_checkpoints_of_other_types_are_refused(tmp_path: Path, name: str, change: Callable[[Any], None]) -> None:
    save(tmp_path, 1)
    folder = step_folder(checkpoints_folder(tmp_path), 1)
    rewritten(folder, name, change)
    with pytest.raises(CheckpointError, match=rf"{name}: (not a manifest|not an index)"):
        open_checkpoint(folder)


def _first(index: Any) -> Any:
    return next(iter(next(iter(index["tensors"].values())).values()))


def test_overlap() -> None:
    assert overlap(((0, 0), (4, 4)), ((2, 3), (4, 4))) == ((2, 3), (2, 1))
    assert overlap(((0, 0), (4, 4)), ((4, 0), (4, 4))) is None
    assert overlap(((), ()), ((), ())) == ((), ())


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with open_checkpoint(tmp_path) as reader:
        with pytest.raises(CheckpointError, match=r"no momentum of scale.*holds exp_avg, exp_avg_sq, parameter"):
            reader.read("scale", "momentum")
        with pytest.raises(CheckpointError, match=r"no parameter of core\.9.*holds nothing"):
            reader.read("core.9")
        with pytest.raises(CheckpointError, match=r"shape \[8, 6\], which does not hold \[4, 6\] at \[5, 0\]"):
            reader.read("core.0.up.weight", PARAMETER, (5, 0), (4, 6))


def test_every_byte_of_the_manifest_counts(tmp_path: Path) -> None:
    save(tmp_path, 1)
    path = step_folder(checkpoints_folder(tmp_path), 1) / "manifest.json"
    good = path.read_bytes()
    for i in range(len(good)):
        path.write_bytes(good[:i] + bytes([good[i] ^ 1]) + good[i + 1 :])
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            read_manifest(path.parent)
    path.write_bytes(good)
    assert read_manifest(path.parent).step == 1
    path.write_text(json.dumps(json.loads(good) | {"format_version": 2}))
    with pytest.raises(CheckpointError, match="format_version is 2, this version reads 1"):
        read_manifest(path.parent)


class _Toy(nn.Module):
    def __init__(self, tensor_size: int) -> None:
        super().__init__()
        for name, tensor in ((n, t) for (n, kind), t in tensors(1).items() if kind == PARAMETER):
            dim = SHARDED.get(name)
            shape = [n // tensor_size if i == dim else n for i, n in enumerate(tensor.shape)]
            parameter = nn.Parameter(torch.zeros(shape))
            parameter.tensor_partition_dim = dim if tensor_size > 1 else None
            self.register_parameter(name.replace(".", "_"), parameter)

    def named_parameters(self, *args: object, **kwargs: object) -> object:
        for name, parameter in super().named_parameters():
            yield name.replace("_", "."), parameter


class _Held(Ranks):
    """Rank `rank` of a world whose ranks hold these places."""

    def __init__(self, rank: int, places: list[dict[str, Place]]) -> None:
        super().__init__(rank, len(places))
        self.places = places

    def gather(self, value: object) -> list:
        return self.places


def test_replicated_and_tied_parameters_are_written_by_the_first_that_holds_them() -> None:
    half = [Place((8, 6), ((0, 0), (4, 6))), Place((8, 6), ((4, 0), (4, 6)))]
    norm = Place((6,), ((0,), (6,)))
    # tensor 2 x pipeline 2; the table is tied between the two stages.
    stages = [{"table": half[t], "up.0": half[t], "norm.0": norm} for t in (0, 1)]
    stages += [{"table": half[t], "up.1": half[t], "norm.1": norm} for t in (0, 1)]
    written = []
    for rank, places in enumerate(stages):
        placement = Placement(places, _Held(rank, stages))
        offered = placement.slices((name, PARAMETER, torch.zeros(place.box[1])) for name, place in places.items())
        written.append({(x.name, x.offset[0]) for x in offered})
    assert written == [
        {("table", 0), ("up.0", 0), ("norm.0", 0)},
        {("table", 4), ("up.0", 4)},
        {("up.1", 0), ("norm.1", 0)},
        {("up.1", 4)},
    ]


@pytest.mark.parametrize("tensor_size", [1, 2])
def test_a_placement_reads_its_rank_of_any_layout(tmp_path: Path, tensor_size: int) -> None:
    writer(tmp_path).save(slices(1, 2), state(1))
    with open_checkpoint(tmp_path) as reader:
        for rank in range(tensor_size):
            placement = Placement.of_model(
                _Toy(tensor_size), tensor_rank=rank, tensor_size=tensor_size, model_ranks=Ranks()
            )
            placement.check(reader)
            read = placement.read_from(reader)
            for (name, kind), tensor in tensors(1).items():
                dim = SHARDED.get(name)
                expected = tensor if dim is None else tensor.chunk(tensor_size, dim)[rank]
                assert same_bits(read(name, kind).contiguous(), expected.contiguous())


def test_another_architecture_is_refused_with_the_difference(tmp_path: Path) -> None:
    save(tmp_path, 1)
    model = nn.Linear(3, 5)
    placement = Placement.of_model(model, tensor_rank=0, tensor_size=1, model_ranks=Ranks())
    with open_checkpoint(tmp_path) as reader, pytest.raises(CheckpointError) as error:
        placement.check(reader)
    assert "weight: absent -> [5, 3]" in str(error.value)
    assert "core.0.up.weight: [8, 6] -> absent" in str(error.value)
