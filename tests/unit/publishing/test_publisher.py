"""Snapshots and deltas: what they hold, how they appear, and what is refused. On a disk and on another file system."""

from __future__ import annotations

import json
from pathlib import Path

import fsspec
import pytest
import torch

from tests.serving.harness import CONFIG, MODEL, SCHEMA, change, make_batch, make_model, make_publisher
from torchrec_adaptive.artifact import ArtifactError, ArtifactStore, VersionRef, load_rows, table_weight_name
from torchrec_adaptive.publishing import Publisher, TouchedRows
from torchrec_adaptive.serving.engine import ScoringEngine


def test_a_snapshot_says_what_it_is(tmp_path: Path) -> None:
    make_publisher(tmp_path).publish_snapshot(make_model().state_dict(), step=7, trained_at_s=12.5)
    manifest = json.loads((tmp_path / MODEL / "snapshot-00000001" / "manifest.json").read_text())
    assert (manifest["kind"], manifest["version"], manifest["base_version"], manifest["step"]) == (
        "snapshot",
        1,
        None,
        7,
    )
    assert manifest["trained_at_s"] == 12.5
    assert manifest["schema"] == json.loads(json.dumps(SCHEMA.to_dict()))
    assert manifest["model_config"] == json.loads(json.dumps(CONFIG.to_dict()))
    assert {"torch", "torchrec", "torchrec-adaptive"} <= set(manifest["packages"])
    assert list(manifest["files"]) == ["weights.safetensors"]
    assert not [path for path in (tmp_path / MODEL).iterdir() if path.name.startswith(".")]


def test_a_delta_holds_the_touched_rows_and_the_dense_weights(tmp_path: Path) -> None:
    model, publisher = make_model(), make_publisher(tmp_path)
    publisher.publish_snapshot(model.state_dict(), step=0)
    touched = change(model, 1)
    publisher.publish_delta(model.state_dict(), touched, step=1)
    store, ref = ArtifactStore(tmp_path, MODEL), VersionRef(2, "delta")
    manifest = store.manifest(ref)
    rows = load_rows(store.read(ref, manifest, "rows.safetensors"), "rows")
    for table, ids in touched.items():
        assert torch.equal(rows[table].ids, ids)
        assert torch.equal(rows[table].rows, model.state_dict()[table_weight_name(table)][ids])
    assert manifest.files["rows.safetensors"].num_bytes < 10_000


def test_touched_rows_are_those_that_training_changes() -> None:
    model, batch = make_model(), make_batch((3, 2), seed=3)
    touched = TouchedRows(SCHEMA)
    touched.observe(batch)
    model(batch).sum().backward()
    taken = touched.take()
    for table in SCHEMA.tables:
        gradient = dict(model.named_parameters())[table_weight_name(table.name)].grad
        moved = gradient.abs().sum(1).nonzero().flatten().tolist()
        assert set(moved) <= set(taken.get(table.name, torch.empty(0)).tolist())
    assert touched.take() == {}


def test_another_file_system(tmp_path: Path) -> None:
    root = "memory://bucket/models"
    model, publisher, batch = make_model(), Publisher(root, MODEL, SCHEMA, CONFIG.to_dict()), make_batch()
    publisher.publish_snapshot(model.state_dict(), step=0)
    engine = ScoringEngine(ArtifactStore(root, MODEL))
    publisher.publish_delta(model.state_dict(), change(model, 1), step=1)
    engine.apply_delta(VersionRef(2, "delta"))
    assert torch.equal(engine.score(batch)[0], model(batch).sigmoid())
    files = fsspec.filesystem("memory")
    files.rm("/bucket/models/ranker/delta-00000002/manifest.json")  # as while it is being uploaded
    assert ArtifactStore(root, MODEL).versions() == [VersionRef(1, "snapshot")]


def test_a_failing_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = make_publisher(tmp_path)
    publisher.publish_snapshot(make_model().state_dict(), step=0)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torchrec_adaptive.artifact.store.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        publisher.publish_delta(make_model().state_dict(), {}, step=1)
    assert [path.name for path in (tmp_path / MODEL).iterdir()] == ["snapshot-00000001"]
    monkeypatch.undo()
    assert publisher.publish_delta(make_model().state_dict(), {}, step=1).version == 2


@pytest.mark.parametrize(
    ("act", "error", "sentence"),
    [
        (lambda p: p.publish_delta(make_model().state_dict(), {}, step=0), ValueError, "publish a snapshot first"),
        (lambda p: p.publish_snapshot({}, step=0), ValueError, "weights lack 'embeddings.embedding_bags.user.weight'"),
        (
            lambda p: p.publish_snapshot(
                make_model().state_dict() | {table_weight_name("user"): torch.zeros(3, 8)}, step=0
            ),
            ValueError,
            "the schema says",
        ),
        (
            lambda p: (
                p.publish_snapshot(make_model().state_dict(), step=0),
                p.publish_delta(make_model().state_dict(), {"usr": torch.tensor([1])}, step=1),
            ),
            ValueError,
            "did you mean 'user'",
        ),
        (lambda p: ArtifactStore("/tmp", "../other"), ValueError, "must be letters"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, act, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        act(make_publisher(tmp_path))


def test_a_version_is_never_overwritten(tmp_path: Path) -> None:
    publisher = make_publisher(tmp_path)
    manifest = publisher.publish_snapshot(make_model().state_dict(), step=0)
    with pytest.raises(ArtifactError, match="never overwritten"):
        publisher.store.write(manifest, {})
