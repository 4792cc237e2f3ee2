"""Weights updated in place: parity before and after each delta, no mixtures, and every bad delta refused."""

from __future__ import annotations

import copy
import json
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.serving.harness import (
    MODEL,
    SCHEMA,
    Server,
    change,
    infer,
    make_batch,
    make_model,
    make_publisher,
    probabilities,
)
from torchrec_adaptive.artifact import ArtifactError, ArtifactStore, VersionRef
from torchrec_adaptive.models import AdaptiveRankingConfig, build_model
from torchrec_adaptive.publishing import Publisher
from torchrec_adaptive.serving.engine import ScoringEngine
from torchrec_adaptive.serving.follower import Follower


def test_scores_through_http_equal_the_trainers_before_and_after_each_delta(tmp_path: Path) -> None:
    model, publisher, batch = make_model(), make_publisher(tmp_path), make_batch((3, 1, 4))
    publisher.publish_snapshot(model.state_dict(), step=0)
    with Server(tmp_path) as server:
        client = server.client()
        for version in range(1, 6):
            if version > 1:
                touched = change(model, seed=version)
                assert publisher.publish_delta(model.state_dict(), touched, step=version).version == version
                server.wait_for_version(version)
            scores, answered = infer(client, batch)
            assert answered == version
            np.testing.assert_allclose(scores, probabilities(model, batch), atol=1e-6, rtol=0)
        assert server.metric('torchrec_adaptive_updates_total{result="applied"}') == 4
        assert server.metric("torchrec_adaptive_last_update_staleness_seconds") < 5
    assert server.exit_code == 0


def test_every_answer_is_of_the_version_that_it_names(tmp_path: Path) -> None:
    """Readers in threads while deltas are taken: no answer mixes two versions."""
    model, publisher, batch = make_model(), make_publisher(tmp_path), make_batch((3, 2))
    publisher.publish_snapshot(model.state_dict(), step=0)
    engine = ScoringEngine(ArtifactStore(tmp_path, MODEL))
    wanted = {1: probabilities(model, batch)}
    answers: list[tuple[int, np.ndarray]] = []
    stopping = threading.Event()

    def read() -> None:
        while not stopping.is_set():
            scores, version = engine.score(batch)
            answers.append((version, scores.numpy()))

    readers = [threading.Thread(target=read, daemon=True) for _ in range(3)]
    for reader in readers:
        reader.start()
    for version in range(2, 30):
        touched = change(model, seed=version)
        publisher.publish_delta(model.state_dict(), touched, step=version)
        wanted[version] = probabilities(model, batch)
        engine.apply_delta(VersionRef(version, "delta"))
    stopping.set()
    for reader in readers:
        reader.join()
    assert len({version for version, _ in answers}) > 5
    for version, scores in answers:
        np.testing.assert_allclose(scores, wanted[version], atol=1e-6, rtol=0)


def test_an_update_keeps_the_tables_memory(tmp_path: Path) -> None:
    model, publisher = make_model(), make_publisher(tmp_path)
    publisher.publish_snapshot(model.state_dict(), step=0)
    engine = ScoringEngine(ArtifactStore(tmp_path, MODEL))
    before = {name: value.data_ptr() for name, value in engine.model.state_dict().items()}
    publisher.publish_delta(model.state_dict(), change(model, 1), step=1)
    engine.apply_delta(VersionRef(2, "delta"))
    publisher.publish_snapshot(model.state_dict(), step=2)
    engine.load_snapshot(VersionRef(3, "snapshot"))
    assert {name: value.data_ptr() for name, value in engine.model.state_dict().items()} == before


def flip_a_byte(folder: Path) -> None:
    path = folder / "rows.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def cut_short(folder: Path) -> None:
    path = folder / "dense.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def remove_a_file(folder: Path) -> None:
    (folder / "rows.safetensors").unlink()


def edit(folder: Path, **fields: object) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


BAD = [
    (flip_a_byte, "does not match its checksum"),
    (cut_short, "does not match its checksum"),
    (remove_a_file, "has no rows.safetensors"),
    (lambda folder: (folder / "manifest.json").write_text("{"), "is not JSON"),
    (lambda folder: (folder / "manifest.json").write_text("[" * 100000), "is not JSON"),
    (lambda folder: edit(folder, model="other"), "says model 'other'"),
    (lambda folder: edit(folder, version=7), "says version 7"),
    (lambda folder: edit(folder, base_version=9), "stands on version 9"),
    (lambda folder: edit(folder, schema_fingerprint="0"), "for another schema"),
    (lambda folder: edit(folder, model_config={}), "for another schema or model config"),
    (lambda folder: edit(folder, format=2), "format 2"),
    (lambda folder: edit(folder, step=-1), "step='-1'"),
    (lambda folder: edit(folder, files={"../../etc/passwd": {"sha256": "0" * 64, "num_bytes": 1}}), "files="),
    (lambda folder: edit(folder, extra=1), "it must have"),
]


@pytest.mark.parametrize(("spoil", "part"), BAD)
def test_a_bad_delta_changes_nothing(tmp_path: Path, spoil, part: str) -> None:
    model, publisher, batch = make_model(), make_publisher(tmp_path), make_batch()
    publisher.publish_snapshot(model.state_dict(), step=0)
    engine = ScoringEngine(ArtifactStore(tmp_path, MODEL))
    before = engine.score(batch)[0]
    publisher.publish_delta(model.state_dict(), change(model, 1), step=1)
    spoil(tmp_path / MODEL / "delta-00000002")
    with pytest.raises(ArtifactError, match=part.replace("[", r"\[")):
        engine.apply_delta(VersionRef(2, "delta"))
    after, version = engine.score(batch)
    assert version == 1
    assert torch.equal(before, after)


@pytest.mark.parametrize(
    ("spoil", "part"),
    [
        (lambda weights, touched: weights["logits.bias"].fill_(float("nan")), "NaN or infinity in 'logits.bias'"),
        (lambda weights, touched: weights.pop("logits.bias"), "'logits.bias' is on one side only"),
        (lambda weights, touched: touched.update(user=torch.tensor([3, 1])), "do not ascend"),
        (lambda weights, touched: touched.update(user=torch.tensor([3, 3])), "do not ascend"),
    ],
)
def test_a_delta_of_wrong_weights_changes_nothing(tmp_path: Path, spoil, part: str) -> None:
    model, publisher = make_model(), make_publisher(tmp_path)
    publisher.publish_snapshot(model.state_dict(), step=0)
    engine = ScoringEngine(ArtifactStore(tmp_path, MODEL))
    before = copy.deepcopy(engine.model.state_dict())
    touched = change(model, 1)
    weights = dict(model.state_dict())
    spoil(weights, touched)
    publisher.publish_delta(weights, touched, step=1)
    with pytest.raises(ArtifactError, match=part):
        engine.apply_delta(VersionRef(2, "delta"))
    assert all(torch.equal(value, before[name]) for name, value in engine.model.state_dict().items())


def test_a_follower_refuses_once_serves_on_and_recovers_by_a_snapshot(tmp_path: Path) -> None:
    model, publisher, batch = make_model(), make_publisher(tmp_path), make_batch()
    publisher.publish_snapshot(model.state_dict(), step=0)
    engine = ScoringEngine(ArtifactStore(tmp_path, MODEL))
    refused: list[tuple[int, str]] = []
    follower = Follower(engine, on_refusal=lambda ref, sentence: refused.append((ref.version, sentence)))
    publisher.publish_delta(model.state_dict(), change(model, 1), step=1)
    flip_a_byte(tmp_path / MODEL / "delta-00000002")
    publisher.publish_delta(model.state_dict(), change(model, 2), step=2)
    for _ in range(3):
        follower.catch_up()
    assert [version for version, _ in refused] == [2, 3]
    assert "stands on version 2, but version 1" in refused[1][1]
    assert engine.live.version == 1
    publisher.publish_snapshot(model.state_dict(), step=3)
    publisher.publish_delta(model.state_dict(), change(model, 3), step=4)
    follower.catch_up()
    assert engine.live.version == 5
    np.testing.assert_allclose(engine.score(batch)[0].numpy(), probabilities(model, batch), atol=1e-6)


def test_a_server_goes_on_past_a_corrupt_delta(tmp_path: Path) -> None:
    model, publisher, batch = make_model(), make_publisher(tmp_path), make_batch()
    publisher.publish_snapshot(model.state_dict(), step=0)
    served = probabilities(model, batch)
    with Server(tmp_path) as server:
        staged = tmp_path / "elsewhere"
        other = make_publisher(staged)
        other.publish_snapshot(model.state_dict(), step=0)
        other.publish_delta(model.state_dict(), change(model, 1), step=1)
        flip_a_byte(staged / MODEL / "delta-00000002")
        (staged / MODEL / "delta-00000002").rename(tmp_path / MODEL / "delta-00000002")
        while not any("refused" in line for line in server.lines):
            assert server.process.poll() is None
        assert server.metric('torchrec_adaptive_updates_total{result="refused"}') == 1
        scores, version = infer(server.client(), batch)
        assert version == 1
        np.testing.assert_allclose(scores, served, atol=1e-6)


def test_an_engine_starts_from_the_newest_sound_snapshot(tmp_path: Path) -> None:
    model, publisher, batch = make_model(), make_publisher(tmp_path), make_batch()
    publisher.publish_snapshot(model.state_dict(), step=0)
    wanted = probabilities(model, batch)
    change(model, 1)
    publisher.publish_snapshot(model.state_dict(), step=1)
    newest = tmp_path / MODEL / "snapshot-00000002" / "weights.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    engine = ScoringEngine(ArtifactStore(tmp_path, MODEL))
    assert engine.live.version == 1
    np.testing.assert_allclose(engine.score(batch)[0].numpy(), wanted, atol=1e-6)


def test_an_engine_with_nothing_to_serve_says_so(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="there is no snapshot of 'ranker'"):
        ScoringEngine(ArtifactStore(tmp_path, MODEL))


def test_a_delta_for_another_model_of_the_same_name_is_refused(tmp_path: Path) -> None:
    make_publisher(tmp_path).publish_snapshot(make_model().state_dict(), step=0)
    engine = ScoringEngine(ArtifactStore(tmp_path, MODEL))
    config = AdaptiveRankingConfig(token_dim=16)
    other = build_model(SCHEMA, config)
    Publisher(tmp_path, MODEL, SCHEMA, config.to_dict()).publish_delta(other.state_dict(), {}, step=1)
    with pytest.raises(ArtifactError, match="another schema or model config"):
        engine.apply_delta(VersionRef(2, "delta"))
